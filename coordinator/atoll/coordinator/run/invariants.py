"""What must hold of a run's state after every event. Tests check it; a violation tells the story that led to it."""

from __future__ import annotations

import math

from atoll.coordinator.run.machine import RunMachine
from atoll.coordinator.run.roster import PeerState
from atoll.coordinator.run.states import PHASES, Phase, RunState


def validate(machine: RunMachine) -> None:
    """Raise AssertionError when an invariant is broken."""
    context = machine.context
    for holds, what in (
        *_about_time(machine),
        *_about_the_plan(machine),
        *_about_the_state(machine),
        *_about_the_step(machine),
    ):
        if not holds:
            raise AssertionError(context.tell(what))


def _about_time(machine: RunMachine) -> list[tuple[bool, str]]:
    context = machine.context
    final = context.state.final
    return [
        (final or math.isfinite(context.deadline), f"{context.state} has no deadline"),
        (final or context.deadline >= context.entered, "the deadline lies before the state began"),
        (
            context.state not in (RunState.STOPPED, RunState.FAILED) or bool(context.reason),
            "the run ended early without a reason",
        ),
        (bool(str(machine.waiting())), "the run cannot say what it waits for"),
    ]


def _about_the_plan(machine: RunMachine) -> list[tuple[bool, str]]:
    context, roster = machine.context, machine.context.roster
    planned = context.state in (RunState.LOADING, RunState.TRAINING)
    early = context.state in (RunState.WAITING, RunState.PLANNING)
    checks = [
        (not planned or context.plan is not None, f"{context.state} without a plan"),
        (not early or context.plan is None, f"{context.state} with a plan"),
        (len(context.names) == (len(context.plan.stages) if context.plan is not None else 0), "names of another plan's stages"),
        (context.phase in PHASES.get(context.state, {Phase.IDLE}), f"{context.phase} while {context.state}"),
    ]
    if context.plan is not None and not context.state.final:
        holders = context.plan.peers
        checks.append((context.pending <= set(holders), "a peer without a stage is waited for"))
        checks.append((len(set(holders)) == len(holders), "a peer holds two stages"))
        if planned:
            checks.append((all(roster.is_present(peer) for peer in holders), "a stage's peer is gone"))
        if context.state is RunState.TRAINING:
            checks.append((all(roster[peer].state is PeerState.READY for peer in holders), "a stage's peer is not ready"))
    return checks


def _about_the_state(machine: RunMachine) -> list[tuple[bool, str]]:
    """What was learned has a holder who is here, and whoever trains holds what it trains."""
    context, holdings = machine.context, machine.context.holdings
    checks = [
        (
            context.state in (RunState.WAITING, RunState.FINISHING) or context.state.final or not context.uncovered(),
            "a parameter's state has no holder",
        ),
        (all(context.roster.is_present(peer) for peer in holdings.peers), "somebody who is gone holds state"),
        (context.committed > 0 or not holdings.peers, "somebody holds what nobody has learned"),
    ]
    if context.state is RunState.TRAINING and context.committed > 0 and context.plan is not None:
        held = zip(context.plan.peers, context.plan.spread(context.names), strict=True)
        checks.append((all(names <= holdings.names_of(peer) for peer, names in held), "a stage's peer lacks its state"))
    return checks


def _about_the_step(machine: RunMachine) -> list[tuple[bool, str]]:
    context, cycle = machine.context, machine.cycle
    running = context.phase.open or context.phase is Phase.VOIDING
    checks = [
        (not running or cycle.open is not None, f"{context.phase} without a step"),
        (0 <= context.committed <= context.journal_step <= context.settings.steps, "steps that nobody has committed"),
        (cycle.voids_in_a_row <= context.settings.max_voids, "the step was void too often"),
        (context.phase is not Phase.VOIDING or bool(context.pending), "void, and everybody has answered"),
        (context.phase is not Phase.STORING or machine.storing.purpose is not None, "weights are stored for no purpose"),
    ]
    if running and cycle.open is not None:
        expected = context.committed + (0 if cycle.open.evaluation else 1)
        checks.append((cycle.open.step == expected, f"step {cycle.open.step} runs after commit {context.committed}"))
    if context.phase.open and cycle.open is not None:
        checks.append((cycle.open.generation == context.generation, "the step is of another generation"))
    return checks
