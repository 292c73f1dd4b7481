"""The run's state machine: the way through, every fault, every deadline, and random events in random order."""

from __future__ import annotations

import dataclasses
import gc
import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.events import (
    EvaluationEvent,
    FinishedEvent,
    PausedEvent,
    PeerEvent,
    ResumedEvent,
    StepEvent,
    StoppedEvent,
    VoidEvent,
)
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.run.events import (
    ExportAsked,
    FaultKind,
    FaultReported,
    GraphReady,
    PeerGone,
    PeerJoined,
    PeerProgressed,
    PeerReady,
    PeersCompared,
    PeerStored,
    PeerVoided,
    PlanMade,
    PlanningProgressed,
    ReplanAsked,
    StageReported,
    StateMoved,
    StopAsked,
    StorePurpose,
    WorkFailed,
)
from atoll.coordinator.run.instructions import (
    AskStore,
    EndRun,
    ExpelPeer,
    SendBatches,
    SendCommit,
    SendVoid,
    StartStep,
    WriteCommit,
)
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.coordinator.run.states import Phase, RunSettings, RunState
from atoll.protocol.ids import Generation, PeerId, StepNumber
from support.simulated_peers import PARAMETERS, SimulatedSwarm, make_offer

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def make_swarm(
    steps: int = 3,
    *,
    min_peers: int = 2,
    evaluate_every: int | None = None,
    memory_needed: int = 0,
    largest_norm: float | None = None,
) -> SimulatedSwarm:
    run = RunSettings(
        steps=steps,
        schedule=LearningRateSchedule(highest=0.1, steps=steps),
        min_peers=min_peers,
        evaluate_every=evaluate_every,
        largest_norm=largest_norm,
        deadlines=Deadlines(),
    )
    return SimulatedSwarm(run, memory_needed=memory_needed)


def fault(swarm: SimulatedSwarm, peer: PeerId, kind: FaultKind, accused: PeerId | None = None) -> None:
    context = swarm.machine.context
    step = StepNumber(context.committed + 1)
    swarm.give(
        FaultReported(peer=peer, generation=context.generation, step=step, fault=kind, reason="it saw a NaN", accused=accused)
    )


def state(swarm: SimulatedSwarm) -> RunState:
    return swarm.machine.context.state


def told(swarm: SimulatedSwarm, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in swarm.told if isinstance(event, kind)]


def finish(swarm: SimulatedSwarm) -> None:
    swarm.answer_all()
    assert swarm.ended is not None


def test_a_run_from_waiting_to_finished() -> None:
    swarm = make_swarm(steps=3, evaluate_every=2)
    swarm.start("a", "b")
    assert state(swarm) is RunState.TRAINING
    finish(swarm)
    assert state(swarm) is RunState.FINISHED
    assert [commit.step for commit in swarm.commits] == [1, 2, 3]
    assert [event.step for event in told(swarm, StepEvent)] == [1, 2, 3]
    assert [event.step for event in told(swarm, EvaluationEvent)] == [2, 3]
    assert swarm.commits[0].loss == (1.0 * 2.0 + 3.0 * 3.0) / 4.0
    assert swarm.commits[0].grad_norm == math.sqrt(12.0)
    assert told(swarm, StepEvent)[0].metrics == {"accuracy": 0.5}
    assert told(swarm, FinishedEvent)[0].weights == "weights.safetensors"


def test_the_journal_has_the_commit_before_the_peers_and_the_next_step_starts_at_once() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    before = len(swarm.done)
    swarm.answer_all(lambda event: not isinstance(event, StageReported) or event.step == 1)
    kinds = [type(instruction) for instruction in swarm.done[before:] if not hasattr(instruction, "event")]
    assert kinds == [WriteCommit, SendCommit, StartStep, SendBatches]
    assert [item.step for item in swarm.done if isinstance(item, SendBatches)] == [1, 2, 3]


def test_gradients_are_clipped_by_the_norm_over_all_stages() -> None:
    swarm = make_swarm(steps=1, largest_norm=1.0)
    swarm.start("a", "b")
    finish(swarm)
    assert swarm.commits[0].clip_factor == 1.0 / (math.sqrt(12.0) + 1e-6)


def test_peers_that_come_together_are_planned_together() -> None:
    swarm = make_swarm(min_peers=1)
    swarm.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
    swarm.give(PeerJoined(offer=make_offer("b")))
    assert state(swarm) is RunState.WAITING
    swarm.now += 0.5
    swarm.give(PeerJoined(offer=make_offer("a")))
    swarm.pass_time(0.9)
    assert state(swarm) is RunState.WAITING
    swarm.pass_time(0.2)
    assert state(swarm) is RunState.PLANNING
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    assert swarm.machine.context.plan is not None
    assert swarm.machine.context.plan.peers == ("a", "b")


def test_a_peer_that_comes_late_is_a_spare_and_its_loss_is_only_noted() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    swarm.give(PeerJoined(offer=make_offer("c")))
    assert [event.state for event in told(swarm, PeerEvent) if event.name == "c"] == ["joined", "spare"]
    swarm.give(PeerGone(peer=C, reason="its connection ended"))
    finish(swarm)
    assert state(swarm) is RunState.FINISHED


@pytest.mark.parametrize(
    "kind", [FaultKind.NOT_FINITE, FaultKind.LINK, FaultKind.CORRUPT, FaultKind.INTERNAL, FaultKind.OUTLIER]
)
def test_a_fault_voids_the_step_everywhere_and_it_runs_again(kind: FaultKind) -> None:
    swarm = make_swarm(steps=2)
    swarm.start("a", "b")
    fault(swarm, B, kind)
    void = next(item for item in swarm.done if isinstance(item, SendVoid))
    assert (void.generation, void.next_generation, void.peers) == (1, 2, (A, B))
    assert told(swarm, VoidEvent) == [VoidEvent(step=1, reason="it saw a NaN", peer="b", stage=1)]
    assert "waits for a (stage 0) and b (stage 1) to drop step 1" in str(swarm.machine.waiting())
    finish(swarm)
    assert [(commit.step, commit.generation) for commit in swarm.commits] == [(1, 2), (2, 2)]
    again = [(item.generation, item.step) for item in swarm.done if isinstance(item, SendBatches)]
    assert again == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_the_accused_is_named() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    fault(swarm, A, FaultKind.CORRUPT, accused=B)
    assert told(swarm, VoidEvent)[0].peer == "b"


def test_a_loss_that_is_not_finite_voids_the_step() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    report = next(event for event in swarm.answers if isinstance(event, StageReported) and event.peer == B)
    swarm.answers.remove(report)
    bad = dataclasses.replace(report, losses=(dataclasses.replace(report.losses[0], loss=math.nan), report.losses[1]))
    swarm.answer_all()
    swarm.give(bad)
    assert told(swarm, VoidEvent)[0].reason == "the loss of microbatch 0 is not finite"
    assert not swarm.commits


def test_a_step_that_is_void_three_times_in_a_row_ends_the_run() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    for _ in range(3):
        swarm.answer_all(lambda event: isinstance(event, PeerVoided))
        fault(swarm, B, FaultKind.NOT_FINITE)
    assert swarm.ended is not None
    assert "step 1 was void 3 times in a row, seen first by b (stage 1): it saw a NaN" in swarm.ended.reason
    assert "learning_rate" in swarm.ended.reason


def test_faults_of_an_older_generation_are_nothing() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    fault(swarm, B, FaultKind.LINK)
    swarm.give(FaultReported(peer=A, generation=Generation(1), step=StepNumber(1), fault=FaultKind.LINK, reason="late"))
    assert len(told(swarm, VoidEvent)) == 1


def test_a_fault_that_would_come_again_ends_the_run() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    fault(swarm, B, FaultKind.REFUSED_GRAPH)
    assert swarm.ended is not None
    assert swarm.ended.reason == "b (stage 1) cannot run its stage: it saw a NaN"


def test_a_loss_while_many_are_waited_for_leads_to_no_plan() -> None:
    swarm = make_swarm(min_peers=3)
    swarm.start("a", "b")
    swarm.give(PeerGone(peer=B, reason="its connection ended"))
    swarm.pass_time(100.0)
    assert state(swarm) is RunState.WAITING
    assert str(swarm.machine.waiting()) == "waits for 2 more peers to join (1 of 3 are here)"


@pytest.mark.parametrize("loading", [True, False])
def test_a_loss_before_the_first_commit_is_gone_around_with_whoever_is_here(loading: bool) -> None:
    """There were as many as the run was to begin with; who is gone may never come back."""
    swarm = make_swarm(min_peers=3)
    swarm.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
    for name in "abc":
        swarm.give(PeerJoined(offer=make_offer(name)))
    swarm.pass_time(1.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    if not loading:
        swarm.answer_all(lambda event: isinstance(event, PeerReady))
    assert state(swarm) is (RunState.LOADING if loading else RunState.TRAINING)
    swarm.give(PeerGone(peer=B, reason="its connection ended"))
    swarm.forget(B)
    finish(swarm)
    assert state(swarm) is RunState.FINISHED
    assert swarm.machine.context.last_plan is not None
    assert swarm.machine.context.last_plan.peers == (A, PeerId("c"))


def test_a_model_that_does_not_fit_pauses_and_goes_on_when_someone_joins() -> None:
    swarm = make_swarm(min_peers=1, memory_needed=2 * 10**9)
    swarm.start("a")
    assert told(swarm, PausedEvent) == [PausedEvent(reason="1.0 GiB more memory needed")]
    assert str(swarm.machine.waiting()) == "is paused: 1.0 GiB more memory needed; it gives up in 24.0 h"
    swarm.give(PeerJoined(offer=make_offer("b")))
    swarm.pass_time(1.0)
    finish(swarm)
    assert told(swarm, ResumedEvent)
    assert state(swarm) is RunState.FINISHED


def test_a_model_that_does_not_fit_in_time_fails_with_what_is_missing() -> None:
    swarm = make_swarm(min_peers=1, memory_needed=2 * 10**9)
    swarm.start("a")
    swarm.pass_time(24 * 3600.0)
    assert swarm.ended is not None
    assert swarm.ended.reason == "1.0 GiB more memory needed"


def test_waiting_names_the_last_in_the_chain() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    swarm.give(PeerProgressed(peer=A, phase="backward", waiting_for=B))
    swarm.give(PeerProgressed(peer=B, phase="forward"))
    assert str(swarm.machine.waiting()) == "waits for b (stage 1, forward) in step 1"
    assert swarm.machine.waiting().peers == (B,)


def test_a_step_over_its_deadline_is_void_and_names_whom_it_waited_for() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    swarm.give(PeerProgressed(peer=A, phase="backward", waiting_for=B))
    swarm.pass_time(60.0)
    assert told(swarm, VoidEvent)[0].peer == "b"
    assert "did not do its part of the step in 60 s" in told(swarm, VoidEvent)[0].reason


def test_a_peer_that_does_not_drop_a_void_step_is_expelled() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    fault(swarm, B, FaultKind.LINK)
    swarm.answer_all(lambda event: isinstance(event, PeerVoided) and event.peer == A)
    swarm.pass_time(60.0)
    assert [item.peer for item in swarm.done if isinstance(item, ExpelPeer)] == [B]
    assert state(swarm) is RunState.WAITING


def test_a_peer_that_does_not_load_is_expelled() -> None:
    swarm = make_swarm()
    swarm.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
    swarm.give(PeerJoined(offer=make_offer("a")))
    swarm.give(PeerJoined(offer=make_offer("b")))
    swarm.pass_time(1.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    assert str(swarm.machine.waiting()) == "waits for a (stage 0) and b (stage 1) to load"
    swarm.pass_time(600.0)
    assert {item.peer for item in swarm.done if isinstance(item, ExpelPeer)} == {A, B}
    assert state(swarm) is RunState.WAITING


def test_loading_may_take_long_as_long_as_state_moves() -> None:
    swarm = make_swarm()
    swarm.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
    swarm.give(PeerJoined(offer=make_offer("a")))
    swarm.give(PeerJoined(offer=make_offer("b")))
    swarm.pass_time(1.0)
    swarm.answer_all(lambda event: isinstance(event, PlanMade))
    for _ in range(5):
        swarm.pass_time(500.0)
        swarm.give(StateMoved(peer=A))
    assert state(swarm) is RunState.LOADING
    swarm.pass_time(600.0)
    assert state(swarm) is RunState.WAITING


def test_loading_that_fails_again_and_again_ends_the_run() -> None:
    swarm = make_swarm()
    swarm.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
    swarm.give(PeerJoined(offer=make_offer("a")))
    swarm.give(PeerJoined(offer=make_offer("b")))
    for _ in range(3):
        swarm.pass_time(1.0)
        swarm.answer_all(lambda event: isinstance(event, PlanMade))
        fault(swarm, B, FaultKind.INTERNAL)
    assert swarm.ended is not None
    assert swarm.ended.reason == "b (stage 1) could not be loaded: it saw a NaN (tried 3 times)"


def test_nobody_joins() -> None:
    swarm = make_swarm()
    swarm.give(GraphReady(trainable=PARAMETERS, changing=frozenset(PARAMETERS)))
    swarm.pass_time(86400.0)
    assert swarm.ended is not None
    assert swarm.ended.reason == ("gave up after 86400 s: the run waits for 2 more peers to join (0 of 2 are here)")


def test_an_export_happens_between_two_steps() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    swarm.give(ExportAsked())
    finish(swarm)
    asked = [(item.step, item.purpose) for item in swarm.done if isinstance(item, AskStore)]
    assert asked == [(1, StorePurpose.EXPORT), (3, StorePurpose.FINISH)]
    assert [commit.step for commit in swarm.commits] == [1, 2, 3]


def test_a_stop_that_keeps_the_weights_ends_after_the_step() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    swarm.answer_all(lambda event: getattr(event, "step", 1) == 1)
    swarm.give(StopAsked(reason="stopped by the operator", keep_weights=True))
    finish(swarm)
    assert swarm.ended is not None
    assert (swarm.ended.finished, swarm.ended.stopped) == (False, True)
    assert swarm.told[-1] == StoppedEvent(reason=swarm.ended.reason)
    assert swarm.ended.reason == "stopped by the operator, after step 2 of 3; the weights are in weights.safetensors"


def test_an_interrupt_ends_the_run_now() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    swarm.give(StopAsked(reason="interrupted"))
    assert swarm.ended == EndRun(finished=False, reason="interrupted")


def test_a_run_that_has_no_weights_yet_stops_at_once() -> None:
    swarm = make_swarm(min_peers=2)
    swarm.give(StopAsked(reason="enough", keep_weights=True))
    assert swarm.ended == EndRun(finished=False, stopped=True, reason="enough")


def test_a_peer_may_go_once_it_has_sent_its_weights() -> None:
    swarm = make_swarm(steps=1)
    swarm.start("a", "b")
    swarm.answer_all(lambda event: not isinstance(event, PeerStored) or event.peer == A)
    swarm.give(PeerGone(peer=A, reason="its connection ended"))
    finish(swarm)
    assert state(swarm) is RunState.FINISHED


def test_every_norm_is_counted_once_and_is_of_a_trained_parameter() -> None:
    swarm = make_swarm()
    swarm.start("a", "b")
    report = next(event for event in swarm.answers if isinstance(event, StageReported) and event.peer == A)
    swarm.answers.remove(report)
    swarm.answer_all()
    swarm.give(dataclasses.replace(report, squared_norms=(("nonsense", 1.0),)))
    assert told(swarm, VoidEvent)[0].reason == "it reported the gradient norm of nonsense, which is not trained"


ACTIONS = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 50)),
    st.tuples(st.just("answer"), st.integers(0, 50)),
    st.tuples(st.just("answer"), st.integers(0, 50)),
    st.tuples(st.just("repeat"), st.integers(0, 50)),
    st.tuples(st.just("join"), st.sampled_from("abcd")),
    st.tuples(st.just("lose"), st.sampled_from("abcd")),
    st.tuples(st.just("fault"), st.tuples(st.sampled_from("abcd"), st.sampled_from(sorted(FaultKind)))),
    st.tuples(st.just("time"), st.sampled_from([0.3, 1.0, 20.0, 70.0])),
    st.tuples(st.just("compare"), st.sampled_from("abcd")),
    st.tuples(st.just("replan"), st.booleans()),
    st.tuples(st.just("export"), st.none()),
    st.tuples(st.just("stop"), st.booleans()),
)


def act(swarm: SimulatedSwarm, kind: str, value: object) -> None:
    roster = swarm.machine.context.roster
    if kind in ("answer", "repeat") and swarm.answers:
        assert isinstance(value, int)
        index = value % len(swarm.answers)
        if kind == "repeat":
            swarm.answers.append(swarm.answers[index])
        swarm.answer(index)
    elif kind == "join" and not roster.is_present(PeerId(str(value))):
        swarm.give(PeerJoined(offer=make_offer(str(value)), snapshots=swarm.held_by(PeerId(str(value)))))
    elif kind == "lose":
        swarm.give(PeerGone(peer=PeerId(str(value)), reason="its connection ended"))
        swarm.forget(PeerId(str(value)))
    elif kind == "fault" and isinstance(value, tuple):
        fault(swarm, PeerId(value[0]), value[1])
    elif kind == "time" and isinstance(value, float):
        swarm.pass_time(value)
    elif kind == "compare":
        swarm.give(PeersCompared(slowdowns={PeerId(str(value)): 5.0}))
    elif kind == "replan":
        swarm.moves_pay = bool(value)
        swarm.give(ReplanAsked())
    elif kind == "export":
        swarm.give(ExportAsked())
    elif kind == "stop":
        swarm.give(StopAsked(reason="stopped", keep_weights=bool(value)))


@settings(max_examples=150)
@given(actions=st.lists(ACTIONS, max_size=60))
def test_random_events_break_no_invariant_and_the_run_ends(actions: list[tuple[str, object]]) -> None:
    swarm = make_swarm(steps=3, min_peers=2, evaluate_every=2)
    swarm.start("a", "b", "c")
    for kind, value in actions:
        act(swarm, kind, value)
    assert [commit.step for commit in swarm.commits] == list(range(1, len(swarm.commits) + 1))
    generations = [commit.generation for commit in swarm.commits]
    assert generations == sorted(generations)
    ids = [one for commit in swarm.commits for microbatch in commit.sample_ids for one in microbatch]
    assert len(set(ids)) == len(ids)
    # Whatever has happened, silence from now on ends the run: every state has a deadline.
    for _ in range(30):
        swarm.now = max(swarm.now, min(swarm.machine.context.deadline, 1e9))
        swarm.pass_time(0.0)
    assert swarm.ended is not None
    assert swarm.ended.reason


@settings(max_examples=60)
@given(order=st.lists(st.integers(0, 100), max_size=80))
def test_the_order_of_honest_answers_does_not_matter(order: list[int]) -> None:
    swarm = make_swarm(steps=3, evaluate_every=1)
    swarm.start("b", "a", "c")
    for number in order:
        if swarm.answers:
            swarm.answer(number % len(swarm.answers))
    finish(swarm)
    assert [(commit.step, commit.loss) for commit in swarm.commits] == [(1, 2.75), (2, 2.75), (3, 2.75)]


@settings(max_examples=30)
@given(void_at=st.lists(st.integers(0, 40), max_size=4, unique=True))
def test_void_steps_change_nothing_in_what_is_committed(void_at: list[int]) -> None:
    swarm = make_swarm(steps=4)
    swarm.start("a", "b")
    count = 0
    while swarm.answers and count < 500:
        if count in void_at and swarm.machine.context.phase is Phase.STEP and swarm.machine.cycle.voids_in_a_row < 2:
            fault(swarm, A, FaultKind.LINK)
        swarm.answer(0)
        count += 1
    assert state(swarm) is RunState.FINISHED
    assert [commit.samples for commit in swarm.commits] == ["hash-1", "hash-2", "hash-3", "hash-4"]


def test_while_peers_are_measured_for_a_plan_the_run_says_so() -> None:
    swarm = make_swarm(min_peers=1)
    swarm.give(GraphReady(trainable=PARAMETERS))
    swarm.give(PeerJoined(offer=make_offer("a")))
    swarm.pass_time(swarm.machine.context.settings.deadlines.settle_seconds)
    generation = swarm.machine.context.generation
    assert str(swarm.machine.waiting()) == "places the model on 1 peer"
    swarm.give(PlanningProgressed(generation=generation, doing="measures the layers on a"))
    assert str(swarm.machine.waiting()) == "measures the layers on a"
    swarm.give(PlanningProgressed(generation=Generation(generation - 1), doing="is late"))
    assert str(swarm.machine.waiting()) == "measures the layers on a"
    swarm.give(PlanningProgressed(generation=generation, doing=""))
    assert str(swarm.machine.waiting()) == "places the model on 1 peer"


def test_work_of_the_coordinator_that_fails_ends_the_run() -> None:
    swarm = make_swarm()
    swarm.give(WorkFailed(reason="the disk is full"))
    assert swarm.ended is not None
    assert swarm.ended.reason == "the disk is full"


def test_the_machine_does_not_grow_with_the_steps() -> None:
    swarm = make_swarm(steps=2000)
    swarm.start("a", "b")

    def train_until(step: int) -> int:
        while swarm.machine.context.committed < step:
            swarm.answer(0)
            swarm.done.clear()
            swarm.told.clear()
            swarm.commits.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = train_until(300)
        assert train_until(1300) - early < 20_000
    finally:
        tracemalloc.stop()
