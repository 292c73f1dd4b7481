"""A run that is taken up after its coordinator was killed: whom it waits for, and of what use is what peers bring."""

from __future__ import annotations

import pytest

from atoll.coordinator.events import EvaluationEvent
from atoll.coordinator.run.events import GraphReady, PeerGone, PeerJoined, PeerReady, PlanMade, PlanRefused
from atoll.coordinator.run.instructions import Assign, MakePlan, ReleaseState, SendCommit, StartStep
from atoll.coordinator.run.resuming import Committed, Held, Resumption, Use, use_of
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import RunSettings, RunState
from atoll.protocol.ids import Generation, PeerId, StepNumber
from support.simulated_peers import PARAMETERS, SimulatedSwarm, make_offer, make_plan

SETTINGS = RunSettings(steps=6, schedule=LearningRateSchedule(highest=1e-3, steps=6))
RETURNING = SETTINGS.deadlines.returning_seconds
OLD, RESERVED = Generation(7), Generation(1001)
A, B = PeerId("a"), PeerId("b")
OF_A, OF_B = frozenset(PARAMETERS[:1]), frozenset(PARAMETERS[1:])


def last(step: int = 4) -> Committed:
    return Committed(
        step=StepNumber(step),
        generation=OLD,
        loss=2.0,
        grad_norm=1.0,
        clip_factor=0.5,
        learning_rate=1e-3,
        seconds=0.1,
        num_tokens=64,
        samples="s",
    )


def held(names: frozenset[str], step: int = 4, reported: int = 0, generation: Generation = OLD) -> Held:
    return Held(step=StepNumber(step), generation=generation, reported_step=StepNumber(reported), names=names)


@pytest.mark.parametrize(
    ("found", "use"),
    [
        (held(OF_A), Use.KEEP),
        (held(OF_A, reported=5), Use.KEEP),
        (held(OF_A, step=3, reported=4), Use.COMMIT),
        (held(OF_A, step=3, reported=4, generation=Generation(6)), Use.NONE),
        (held(OF_A, step=3), Use.NONE),
        (held(OF_A, step=5), Use.NONE),
        (held(frozenset()), Use.NONE),
    ],
)
def test_of_what_use_is_what_a_peer_brings(found: Held, use: Use) -> None:
    assert use_of(found, StepNumber(4), last()) is use


def test_before_the_first_commit_nothing_is_of_use() -> None:
    assert use_of(held(OF_A, step=0), StepNumber(0), None) is Use.NONE


def resumed(*peers: PeerId, committed: int = 4, owed: bool = False, settings: RunSettings = SETTINGS) -> SimulatedSwarm:
    swarm = SimulatedSwarm(settings)
    known = last(committed) if committed else None
    plan = make_plan(peers, 2)
    swarm.machine.resume(Resumption(generation=RESERVED, last=known, plan=plan, owed_evaluation=owed))
    return swarm


def come_back(swarm: SimulatedSwarm, name: PeerId, found: Held | None) -> None:
    if found is not None:
        swarm.live[name] = found.step
    swarm.give(PeerJoined(offer=make_offer(name), held=found))


def settle(swarm: SimulatedSwarm) -> None:
    swarm.pass_time(SETTINGS.deadlines.settle_seconds)
    swarm.answer_all(lambda event: isinstance(event, PlanMade | PlanRefused))
    swarm.answer_all(lambda event: isinstance(event, PeerReady))


def traced(swarm: SimulatedSwarm) -> SimulatedSwarm:
    swarm.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
    return swarm


def test_peers_that_kept_their_stages_go_on_with_the_next_step() -> None:
    swarm = traced(resumed(A, B))
    come_back(swarm, A, held(OF_A))
    come_back(swarm, B, held(OF_B))
    settle(swarm)
    (assign,) = [item for item in swarm.done if isinstance(item, Assign)]
    assert assign.committed == 4
    assert assign.generation > RESERVED
    assert assign.holders == {"embedding": (A,), "middle": (B,), "head": (B,)}
    swarm.answer_all()
    assert swarm.ended is not None
    assert swarm.ended.finished
    assert [commit.step for commit in swarm.commits] == [5, 6]


def test_the_last_plan_is_asked_for_as_soon_as_its_peers_are_back_and_a_better_one_later() -> None:
    swarm = traced(resumed(A, B))
    come_back(swarm, A, held(OF_A))
    come_back(swarm, B, held(OF_B))
    (wanted,) = [item for item in swarm.done if isinstance(item, MakePlan)]
    assert (wanted.at_once, wanted.previous) == (True, make_plan((A, B), 2))
    settle(swarm)
    swarm.give(PeerGone(peer=B, reason="its connection broke"))
    come_back(swarm, B, held(OF_B, generation=RESERVED))
    swarm.pass_time(SETTINGS.deadlines.settle_seconds)
    plans = [item.at_once for item in swarm.done if isinstance(item, MakePlan)]
    assert all(plans), "after a loss as well"


def test_a_run_that_committed_nothing_has_its_first_plan_searched_for() -> None:
    swarm = traced(resumed(A, B, committed=0))
    come_back(swarm, A, None)
    come_back(swarm, B, None)
    settle(swarm)
    (wanted,) = [item for item in swarm.done if isinstance(item, MakePlan)]
    assert (wanted.at_once, wanted.previous) == (False, None)


def test_a_commit_that_peers_missed_is_sent_to_them_alone() -> None:
    swarm = traced(resumed(A, B))
    come_back(swarm, A, held(OF_A))
    come_back(swarm, B, held(OF_B, step=3, reported=4))
    (sent,) = [item for item in swarm.done if isinstance(item, SendCommit)]
    assert sent == SendCommit(peers=(B,), generation=OLD, step=StepNumber(4), clip_factor=0.5, learning_rate=1e-3)
    settle(swarm)
    assert swarm.machine.context.state is RunState.TRAINING


def test_what_is_of_no_use_is_dropped() -> None:
    swarm = traced(resumed(A, B))
    come_back(swarm, A, held(OF_A, step=2))
    assert swarm.done[-1] == ReleaseState(generation=OLD, peers=(A,))
    assert not swarm.machine.context.holdings.peers


def test_the_run_waits_for_the_peers_of_its_last_plan_and_says_so() -> None:
    swarm = traced(resumed(A, B))
    assert "waits for a and b to come back" in str(swarm.machine.waiting())
    come_back(swarm, A, held(OF_A))
    swarm.pass_time(RETURNING - 1.0)
    assert not [item for item in swarm.done if isinstance(item, MakePlan)]
    assert "waits for b to come back" in str(swarm.machine.waiting())
    come_back(swarm, B, held(OF_B))
    settle(swarm)
    assert swarm.machine.context.state is RunState.TRAINING


def test_a_peer_that_is_lost_again_meanwhile_is_waited_for() -> None:
    swarm = traced(resumed(A, B))
    come_back(swarm, A, held(OF_A))
    swarm.give(PeerGone(peer=A, reason="its connection broke"))
    assert "waits for a and b to come back" in str(swarm.machine.waiting())
    come_back(swarm, A, held(OF_A))
    come_back(swarm, B, held(OF_B))
    settle(swarm)
    assert swarm.machine.context.state is RunState.TRAINING


def test_the_run_goes_on_with_others_when_all_state_is_here() -> None:
    swarm = traced(resumed(A, B))
    come_back(swarm, A, held(OF_A | OF_B))
    come_back(swarm, PeerId("c"), None)
    swarm.pass_time(RETURNING)
    settle(swarm)
    assert swarm.machine.context.state is RunState.TRAINING
    assert swarm.machine.context.plan is not None
    assert swarm.machine.context.plan.peers == (A, PeerId("c"))


def test_a_run_that_committed_nothing_begins_again() -> None:
    swarm = traced(resumed(A, B, committed=0))
    come_back(swarm, A, held(OF_A, step=0))
    come_back(swarm, B, None)
    settle(swarm)
    swarm.answer_all()
    assert [commit.step for commit in swarm.commits] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_that_is_owed_comes_first() -> None:
    settings = RunSettings(steps=6, schedule=SETTINGS.schedule, evaluate_every=2)
    swarm = traced(resumed(A, B, owed=True, settings=settings))
    come_back(swarm, A, held(OF_A))
    come_back(swarm, B, held(OF_B))
    settle(swarm)
    started = next(item for item in swarm.done if isinstance(item, StartStep))
    assert (started.step, started.evaluation) == (4, True)
    swarm.answer_all()
    assert [event.step for event in swarm.told if isinstance(event, EvaluationEvent)] == [4, 6]


def test_a_run_whose_steps_are_all_done_has_its_weights_stored() -> None:
    swarm = traced(resumed(A, B, committed=6))
    come_back(swarm, A, held(OF_A, step=6))
    come_back(swarm, B, held(OF_B, step=6))
    settle(swarm)
    swarm.answer_all()
    assert swarm.ended is not None
    assert swarm.ended.finished
    assert swarm.commits == []


def test_a_peer_that_comes_back_while_others_train_is_released_with_the_next_commit() -> None:
    """It was cut off before a plan that has other holders of what it has."""
    swarm = SimulatedSwarm(SETTINGS)
    swarm.start("a", "b")
    while not swarm.commits:
        swarm.answer(0)
    generation = swarm.machine.context.generation
    come_back(swarm, PeerId("c"), held(OF_A, step=1, generation=generation))
    assert PeerId("c") in swarm.machine.context.holdings.peers
    while len(swarm.commits) < 2:
        swarm.answer(0)
    assert ReleaseState(generation=swarm.machine.context.generation, peers=(PeerId("c"),)) in swarm.done


def test_the_run_goes_on_from_what_peers_wrote_down_that_were_alone_for_long() -> None:
    """They ended after that, and are new processes now; nobody had ordered a snapshot of that step."""
    swarm = traced(resumed(A, B))
    for name, names in ((A, OF_A), (B, OF_B)):
        swarm.disks[name] = {StepNumber(4): names}
        swarm.give(PeerJoined(offer=make_offer(name), snapshots=swarm.held_by(name)))
    settle(swarm)
    (assign,) = [item for item in swarm.done if isinstance(item, Assign)]
    assert (assign.committed, assign.holders) == (4, {})
    assert assign.on_disks == {"embedding": (A,), "middle": (B,), "head": (B,)}
    swarm.answer_all()
    assert [commit.step for commit in swarm.commits] == [5, 6]
    assert not swarm.replays
