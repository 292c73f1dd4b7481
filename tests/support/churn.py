"""Swarms to which a fault plan happens, and what they must come to all the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.outcomes import RunOutcome, outcome_of, watched_snapshots
from support.swarm import started_swarm

RUN_SECONDS = 200.0
PHASES_OF_STEPS = ("forward", "backward", "waiting for commit", "committing")
PHASES_OF_CHANGES = ("loading", "transferring")


def kill(phase: str, *, after: float | None = 0.2, **where: Any) -> dict[str, Any]:
    """A kill whose victim starts again a moment later; never with ``after`` None."""
    return {"fault": "kill", "phase": phase, **where, **({} if after is None else {"restart_after": after})}


def written(folder: Path, faults: Sequence[dict[str, Any]]) -> Path:
    """A fault plan in a new folder."""
    folder.mkdir()
    plan = folder / "chaos.yaml"
    plan.write_text(yaml.safe_dump({"faults": list(faults)}))
    return plan


def swarm_log(folder: Path) -> str:
    """What the swarm of ``folder`` said."""
    return (folder / "swarm.log").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A swarm that came to its end: its events, what it said, what the run came to, and what its snapshots had."""

    events: list[dict[str, Any]]
    log: str
    outcome: RunOutcome
    snapshots: dict[int, dict[str, set[str]]]


async def run_swarm(
    folder: Path, job: Path, faults: Sequence[dict[str, Any]], *words: str, within_seconds: float = RUN_SECONDS
) -> Ran:
    """Runs a swarm through a plan, or undisturbed, to its end."""
    plan = written(folder, faults)
    chaos: tuple[str | Path, ...] = ("--chaos", plan) if faults else ()
    state = folder / "state"
    async with started_swarm(job, *words, *chaos, state=state) as swarm, watched_snapshots(state) as watch:
        status = await swarm.ended(within_seconds=within_seconds)
    log = swarm_log(folder)
    assert status == 0, log
    return Ran(events=swarm.events, log=log, outcome=outcome_of(state), snapshots=watch.found)


def random_kills(seed: int, count: int, *, stages: int, steps: int) -> list[dict[str, Any]]:
    """``count`` kills of stages and of the coordinator, spread over the steps of a run, at any phase of a step or of a change
    of plan."""
    draws = random.Random(seed)
    found = []
    for number in range(count):
        step = 1 + number * (steps - 1) // count
        phase = draws.choice((*PHASES_OF_STEPS, *PHASES_OF_STEPS, *PHASES_OF_CHANGES))
        victim = draws.randrange(stages + 1)
        where: dict[str, Any] = {"stage": victim} if victim < stages else {"peer": "coordinator"}
        found.append(kill(phase, after=draws.choice((0.0, 0.5, 2.0)), step=step, **where))
    return found
