"""The life of a session: what a peer does at each word of its coordinator, and when words come out of turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import pytest

from atoll.peer.faults import Fault, FaultKind
from atoll.peer.session.session import Session
from atoll.peer.session.values import (
    Advance,
    AssignmentArrived,
    Compute,
    Connect,
    ConnectionLost,
    CopyOver,
    Disconnect,
    ExitCode,
    Fetch,
    Finish,
    GoBack,
    HangUp,
    Instruction,
    KeepOnly,
    LeaveRequested,
    LendOut,
    LinksReady,
    LongAlone,
    MeasureLink,
    SessionEvent,
    SessionState,
    ShellFault,
    StateFetched,
    StopLending,
    SumUp,
    Tell,
    Upload,
    Uploaded,
    UploadFailed,
)
from atoll.peer.stage.boundaries import Boundaries
from atoll.peer.stage.events import (
    Accepted,
    Assign,
    BeginStep,
    CommitStep,
    DropState,
    Faulted,
    GradientsReady,
    HandedOut,
    HandOutState,
    HoldState,
    Initialise,
    KeepState,
    Loaded,
    MicrobatchLoss,
    Reported,
    SnapshotWritten,
    StateHeld,
    StateKept,
    StateReady,
    StepVoided,
    VoidStep,
    WriteSnapshot,
)
from atoll.protocol.assignment import Assignment, Donor, OptimizerSettings
from atoll.protocol.graph import StageGraph
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.v1 import session_pb2 as pb

ONE, TWO = Generation(1), Generation(2)
STEP = StepNumber(1)
GRAPH = StageGraph(stage=StageIndex(0), num_stages=1, nodes=(), parameters=(), buffers=(), inputs=(), receives=(), sends=())
LINK_FAULT = Fault(kind=FaultKind.LINK, reason="bob is silent", accused=PeerId("bob"))
Kind = TypeVar("Kind", bound=Instruction)


def assignment(generation: Generation = ONE, fetch: tuple[str, ...] = ()) -> Accepted:
    value = Assignment(
        generation=generation,
        graph=GRAPH,
        neighbours=(),
        run_seed=0,
        in_flight=1,
        recompute=False,
        precision="fp32",
        optimizer=OptimizerSettings(),
        groups=(Group(stage=GRAPH.stage, replicas=(PeerId("ann"),)),),
        fetch=fetch,
    )
    return Accepted(generation=generation, assignment=value, boundaries=Boundaries(GRAPH))


def report(generation: Generation = ONE, *, evaluation: bool = False) -> Reported:
    return Reported(
        generation=generation,
        step=STEP,
        evaluation=evaluation,
        losses=(MicrobatchLoss(microbatch=MicrobatchIndex(0), loss=2.5, metrics={"accuracy": 0.5}),),
        squared_norms={"w": 4.0},
        compute_seconds=0.1,
    )


def start(generation: int = ONE, step: int = STEP, *, evaluation: bool = False) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(
        start=pb.StartStep(generation=generation, step=step, num_microbatches=2, evaluation=evaluation)
    )


def commit(generation: int = ONE, step: int = STEP) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(commit=pb.Commit(generation=generation, step=step, clip_factor=0.5, learning_rate=0.1))


def void(generation: int = ONE, step: int = STEP, next_generation: int = TWO) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(void=pb.Void(generation=generation, step=step, next_generation=next_generation))


WELCOME = pb.CoordinatorMessage(welcome=pb.Welcome(run="r", name="ann"))


class Driver:
    """Feeds a session and remembers what it said last."""

    def __init__(self) -> None:
        self.session = Session()
        self.last: list[Instruction] = []

    def give(self, *events: SessionEvent) -> Driver:
        for event in events:
            self.last = self.session.handle(event)
        return self

    def one(self, kind: type[Kind]) -> Kind:
        """The only instruction of this kind among the last ones."""
        (found,) = [item for item in self.last if isinstance(item, kind)]
        return found

    def told(self) -> pb.PeerMessage:
        return self.one(Tell).message

    def fault(self) -> pb.Fault:
        message = self.told()
        assert message.HasField("fault")
        return message.fault


def ready() -> Driver:
    """A peer that has loaded its stage."""
    driver = Driver().give(WELCOME, AssignmentArrived(generation=ONE, payload=b"x"), assignment())
    return driver.give(Loaded(generation=ONE), LinksReady(generation=ONE))


def spare() -> Driver:
    return Driver().give(WELCOME)


def stepping() -> Driver:
    return ready().give(start())


def test_welcome_makes_a_member() -> None:
    session = Driver().give(WELCOME).session
    assert session.state is SessionState.IDLE
    assert (session.run, session.name) == ("r", "ann")


def test_refusal_ends_with_its_reason() -> None:
    rejected = pb.Rejected(reason="it speaks protocol 2, you speak 1: update", again=False)
    outcome = Driver().give(pb.CoordinatorMessage(rejected=rejected)).one(Finish).outcome
    assert outcome.exit_code == ExitCode.FAILED
    assert "update" in outcome.reason


def test_loading_validates_then_connects_and_initialises_then_is_ready() -> None:
    driver = Driver().give(WELCOME, AssignmentArrived(generation=ONE, payload=b"x"))
    assert driver.one(Compute).command == Assign(generation=ONE, payload=b"x")
    driver.give(assignment())
    driver.one(Connect)
    assert driver.one(Compute).command == Initialise(generation=ONE, given={})
    driver.give(LinksReady(generation=ONE))
    assert driver.last == []
    driver.give(Loaded(generation=ONE))
    assert driver.told().ready.generation == ONE


def test_given_state_is_fetched_before_initialising() -> None:
    driver = Driver().give(WELCOME, AssignmentArrived(generation=ONE, payload=b"x"), assignment(fetch=("w",)))
    driver.one(Fetch)
    assert not [item for item in driver.last if isinstance(item, Compute)]
    driver.give(StateFetched(generation=ONE, given={}))
    assert isinstance(driver.one(Compute).command, Initialise)


def test_a_step_from_start_to_commit() -> None:
    driver = stepping()
    assert driver.one(Compute).command == BeginStep(generation=ONE, step=STEP, num_microbatches=2)
    driver.give(report())
    told = driver.told().report
    assert (told.losses[0].loss, told.losses[0].metrics["accuracy"]) == (2.5, 0.5)
    assert (told.squared_norms[0].parameter, told.squared_norms[0].value) == ("w", 4.0)
    driver.give(commit())
    assert driver.one(Compute).command == CommitStep(generation=ONE, step=STEP, clip_factor=0.5, learning_rate=0.1)
    assert driver.session.state is SessionState.READY


def test_replicas_sum_their_gradients_unless_the_step_is_over() -> None:
    ready_to_sum = GradientsReady(generation=ONE, step=STEP, gradients=())
    assert stepping().give(ready_to_sum).last == [SumUp(ready_to_sum)]
    assert stepping().give(void(), ready_to_sum).last == []


@pytest.mark.parametrize("begin", [spare, ready, stepping])
def test_snapshots_are_told_of_copied_and_rotated_at_any_moment(begin: Callable[[], Driver]) -> None:
    driver = begin()
    before = driver.session.state
    written = SnapshotWritten(step=STEP, num_bytes=7, seconds=2.0, stalled_seconds=0.5, names=("a", "b"))
    taken = driver.give(written).told().snapshot_taken
    assert taken == pb.SnapshotTaken(step=STEP, num_bytes=7, seconds=2.0, stalled_seconds=0.5, names=("a", "b"))
    copy = pb.CopySnapshot(step=STEP, source="bob", address="host:1", names=["a"])
    assert driver.give(pb.CoordinatorMessage(copy_snapshot=copy)).one(CopyOver).copy == copy
    keep = pb.CoordinatorMessage(keep_snapshots=pb.KeepSnapshots(steps=[3, 5]))
    assert driver.give(keep).one(KeepOnly).steps == {3, 5}
    assert driver.session.state is before


def test_a_commit_may_ask_for_a_snapshot() -> None:
    commit = pb.Commit(generation=ONE, step=STEP, clip_factor=0.5, learning_rate=0.1, snapshot=True)
    command = stepping().give(report(), pb.CoordinatorMessage(commit=commit)).one(Compute).command
    assert isinstance(command, CommitStep)
    assert command.snapshot


def test_a_run_that_finished_needs_no_snapshots_any_more() -> None:
    assert ready().give(pb.CoordinatorMessage(end=pb.End(finished=True))).one(KeepOnly).steps == frozenset()
    failed = ready().give(pb.CoordinatorMessage(end=pb.End(finished=False, stopped=True)))
    assert not [item for item in failed.last if isinstance(item, KeepOnly)]


def test_an_evaluation_needs_no_commit() -> None:
    driver = ready().give(start(evaluation=True), report(evaluation=True))
    assert driver.told().report.evaluation
    assert driver.give(start(step=2)).session.state is SessionState.STEPPING


@pytest.mark.parametrize("reported", [False, True])
def test_void_moves_to_the_next_generation_at_any_moment(reported: bool) -> None:
    driver = stepping()
    if reported:
        driver.give(report())
    driver.give(void())
    assert driver.one(Compute).command == VoidStep(generation=ONE, step=STEP, next_generation=TWO)
    assert driver.give(report()).last == [], "a report that crossed the void"
    driver.give(StepVoided(next_generation=TWO, step=STEP))
    assert driver.one(Advance).generation == TWO
    assert driver.told().voided.generation == TWO
    assert driver.give(start(TWO)).session.state is SessionState.STEPPING


def test_a_probe_is_made_whatever_else_goes_on() -> None:
    probe = pb.CoordinatorMessage(probe=pb.Probe(number=3, peer="bob", address="127.0.0.1:5", limit_seconds=2.0))
    for driver in (Driver().give(WELCOME), ready(), stepping()):
        before = driver.session.state
        assert driver.give(probe).one(MeasureLink).probe.number == 3
        assert driver.session.state is before


def test_what_an_older_generation_said_is_dropped() -> None:
    driver = stepping().give(void(), StepVoided(next_generation=TWO, step=STEP))
    for old in (start(ONE), commit(ONE), void(ONE, next_generation=3), pb.CoordinatorMessage(store=pb.Store(generation=ONE))):
        assert driver.give(old).last == []
    assert driver.session.state is SessionState.READY


def test_a_void_while_loading_leaves_the_peer_without_a_stage() -> None:
    driver = Driver().give(WELCOME, AssignmentArrived(generation=ONE, payload=b"x"), void())
    assert driver.session.state is SessionState.IDLE
    assert driver.give(assignment(), Loaded(generation=ONE), LinksReady(generation=ONE)).last == []
    driver.give(AssignmentArrived(generation=Generation(3), payload=b"y"))
    assert isinstance(driver.one(Compute).command, Assign)


def test_a_newer_assignment_replaces_a_stage() -> None:
    driver = stepping().give(AssignmentArrived(generation=TWO, payload=b"y"))
    assert isinstance(driver.one(Compute).command, Assign)
    assert driver.give(AssignmentArrived(generation=ONE, payload=b"z")).last == []


def lend(generation: int = TWO, committed: int = STEP) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(lend=pb.Lend(generation=generation, committed_step=committed, borrowers=["bob"]))


def kept(generation: Generation = TWO) -> StateKept:
    return StateKept(generation=generation, step=STEP, borrowers=(PeerId("bob"),), state={})


def committed() -> Driver:
    """A peer that has done its first step."""
    return stepping().give(report(), commit())


def test_a_plan_that_is_over_leaves_its_state_here_to_lend_until_a_step_is_committed_under_the_next() -> None:
    driver = committed().give(lend())
    driver.one(Disconnect)
    assert driver.one(Compute).command == KeepState(generation=TWO, step=STEP, borrowers=(PeerId("bob"),))
    assert driver.session.state is SessionState.IDLE
    driver.give(kept())
    assert driver.one(Advance).generation == TWO
    driver.one(LendOut)
    driver.give(AssignmentArrived(generation=TWO, payload=b"y"))
    assert not [item for item in driver.last if isinstance(item, StopLending)]
    driver.give(assignment(TWO), Loaded(generation=TWO), LinksReady(generation=TWO))
    assert driver.told().ready.generation == TWO
    driver.give(start(TWO, 2), dataclasses.replace(report(TWO), step=StepNumber(2)), commit(TWO, 2))
    driver.one(StopLending)
    assert isinstance(driver.last[-1], Compute), "nothing is lent that computing is about to change"


def test_a_peer_without_a_stage_in_the_next_plan_lends_until_it_is_released() -> None:
    driver = committed().give(lend(), kept())
    assert driver.give(pb.CoordinatorMessage(release=pb.Release(generation=ONE))).last == []
    driver.give(pb.CoordinatorMessage(release=pb.Release(generation=TWO)))
    driver.one(StopLending)
    assert driver.one(Compute).command == DropState()


def test_a_release_that_overtakes_the_keeping_leaves_nothing_behind() -> None:
    driver = committed().give(lend(), pb.CoordinatorMessage(release=pb.Release(generation=TWO)))
    assert driver.one(Compute).command == DropState()
    assert not [item for item in driver.give(kept()).last if isinstance(item, LendOut)]


def test_what_other_peers_gave_is_told_with_ready() -> None:
    driver = committed().give(lend(), kept(), AssignmentArrived(generation=TWO, payload=b"y"))
    donor = Donor(peer=PeerId("bob"), address="127.0.0.1:1", names=("w",))
    accepted = assignment(TWO)
    accepted = dataclasses.replace(accepted, assignment=dataclasses.replace(accepted.assignment, donors=(donor,)))
    driver.give(accepted).one(Fetch)
    driver.give(StateFetched(generation=TWO, given={}, num_bytes=7, seconds=0.5))
    driver.give(Loaded(generation=TWO), LinksReady(generation=TWO))
    assert (driver.told().ready.fetched_bytes, driver.told().ready.fetch_seconds) == (7, 0.5)


def test_a_lack_of_memory_frees_what_is_only_kept_once_the_stage_is_complete() -> None:
    fault = Fault(kind=FaultKind.MEMORY, reason="out of memory")
    loading = committed().give(lend(), kept(), AssignmentArrived(generation=TWO, payload=b"y"), assignment(TWO))
    loading.give(Faulted(generation=TWO, step=STEP, fault=fault))
    assert not [item for item in loading.last if isinstance(item, StopLending)]
    ready_again = committed().give(lend(), kept(), AssignmentArrived(generation=TWO, payload=b"y"), assignment(TWO))
    ready_again.give(Loaded(generation=TWO), LinksReady(generation=TWO), start(TWO, 2))
    ready_again.give(Faulted(generation=TWO, step=STEP, fault=fault)).one(StopLending)


def test_a_fault_is_told_once_and_the_peer_waits() -> None:
    fault = Fault(kind=FaultKind.NOT_FINITE, reason="stage 0 saw a loss of nan at step 1")
    driver = stepping().give(Faulted(generation=ONE, step=STEP, fault=fault))
    assert driver.fault().kind == pb.Fault.FAULT_NOT_FINITE
    assert (driver.fault().generation, driver.fault().step, driver.fault().accused) == (ONE, STEP, "")
    assert driver.give(Faulted(generation=ONE, step=STEP, fault=fault)).last == []
    driver.give(void())
    assert driver.session.state is SessionState.READY


def test_a_refused_graph_leaves_the_peer_alive_for_another_one() -> None:
    fault = Fault(kind=FaultKind.REFUSED_GRAPH, reason="node 3: aten.from_file is not allowed")
    driver = Driver().give(WELCOME, AssignmentArrived(generation=ONE, payload=b"x"))
    driver.give(Faulted(generation=ONE, step=STEP, fault=fault))
    assert driver.fault().kind == pb.Fault.FAULT_REFUSED_GRAPH
    driver.give(AssignmentArrived(generation=TWO, payload=b"y"))
    assert driver.session.state is SessionState.LOADING


def test_a_link_fault_names_the_accused_and_does_not_stop_a_commit() -> None:
    driver = stepping().give(report(), ShellFault(generation=ONE, fault=LINK_FAULT))
    assert driver.fault().accused == "bob"
    assert isinstance(driver.give(commit()).one(Compute).command, CommitStep)


def test_a_link_fault_while_loading_ends_the_loading() -> None:
    driver = Driver().give(WELCOME, AssignmentArrived(generation=ONE, payload=b"x"), assignment())
    assert driver.give(ShellFault(generation=ONE, fault=LINK_FAULT)).fault().accused == "bob"
    assert driver.give(Loaded(generation=ONE)).last == []


def test_a_fatal_fault_is_told_and_ends_the_peer() -> None:
    fault = Fault(kind=FaultKind.INTERNAL, reason="RuntimeError during committing: no")
    driver = stepping().give(Faulted(generation=ONE, step=STEP, fault=fault, fatal=True))
    assert driver.fault().reason == fault.reason
    assert driver.one(Finish).outcome.exit_code == ExitCode.FAILED


def test_storing_hands_out_uploads_and_says_stored() -> None:
    driver = ready().give(pb.CoordinatorMessage(store=pb.Store(generation=ONE, step=3)))
    assert driver.one(Compute).command == HandOutState(generation=ONE, step=StepNumber(3))
    driver.give(StateReady(generation=ONE, step=StepNumber(3), items=()))
    driver.one(Upload)
    driver.give(Uploaded(generation=ONE, step=StepNumber(3)))
    assert driver.one(Compute).command == HandedOut(generation=ONE)
    assert driver.told().stored.step == 3


def test_a_failed_upload_is_a_fault_and_frees_computing() -> None:
    fault = Fault(kind=FaultKind.INTERNAL, reason="the disk is full")
    driver = ready().give(UploadFailed(generation=ONE, step=STEP, fault=fault))
    assert driver.one(Compute).command == HandedOut(generation=ONE)
    assert driver.fault().reason == "the disk is full"


@pytest.mark.parametrize(
    "wrong",
    [
        start(step=2),
        commit(),
        start(generation=5),
        void(next_generation=ONE),
        pb.CoordinatorMessage(store=pb.Store(generation=7)),
        pb.CoordinatorMessage(),
        WELCOME,
    ],
)
def test_a_coordinator_out_of_turn_is_told_so_and_left(wrong: pb.CoordinatorMessage) -> None:
    driver = stepping().give(wrong)
    assert "broke the protocol" in driver.fault().reason
    assert driver.one(Finish).outcome.exit_code == ExitCode.FAILED
    assert driver.give(commit()).last == []


@pytest.mark.parametrize(
    ("end", "exit_code", "words"),
    [
        (pb.End(finished=True), ExitCode.FINISHED, "finished"),
        (pb.End(stopped=True, reason="enough"), ExitCode.FINISHED, "the run was stopped: enough"),
        (pb.End(finished=False, reason="ann was lost"), ExitCode.FAILED, "ann was lost"),
    ],
)
def test_the_end_of_the_run(end: pb.End, exit_code: int, words: str) -> None:
    outcome = ready().give(pb.CoordinatorMessage(end=end)).one(Finish).outcome
    assert outcome.exit_code == exit_code
    assert words in outcome.reason


def test_leaving_is_announced() -> None:
    driver = stepping().give(LeaveRequested(reason="interrupted", exit_code=ExitCode.INTERRUPTED))
    assert driver.told().leave.reason == "interrupted"
    assert driver.one(Finish).outcome.exit_code == ExitCode.INTERRUPTED


def test_a_lost_connection_before_the_welcome_ends_the_peer() -> None:
    outcome = Driver().give(LOST).one(Finish).outcome
    assert (outcome.exit_code, outcome.reason) == (ExitCode.FAILED, "the coordinator is gone")


LOST = ConnectionLost(reason="the coordinator is gone")
AGAIN = pb.CoordinatorMessage(rejected=pb.Rejected(reason="nothing was heard from it for 10 s", again=True))


def held(reported: int = 0) -> StateHeld:
    return StateHeld(step=StepNumber(STEP if not reported else reported - 1), reported_step=StepNumber(reported), names=("w",))


def away(driver: Driver, found: StateHeld) -> Driver:
    return driver.give(LOST, found)


@pytest.mark.parametrize("how", [LOST, AGAIN])
def test_a_peer_that_lost_its_coordinator_or_its_place_goes_back_with_what_it_holds(how: SessionEvent) -> None:
    driver = committed().give(start(step=2), how)
    assert [type(item) for item in driver.last] == [Disconnect, HangUp, Compute]
    assert driver.one(Compute).command == HoldState()
    wish = driver.give(held()).one(GoBack)
    assert (wish.generation, wish.held) == (ONE, held())
    assert "the coordinator" in wish.reason
    assert driver.give(WELCOME).last == []
    assert driver.session.state is SessionState.IDLE


def test_what_is_kept_is_not_lent_while_away() -> None:
    driver = committed().give(lend(), kept(), LOST)
    assert [type(item) for item in driver.last] == [StopLending, Disconnect, HangUp, Compute]


def test_an_attempt_that_fails_is_followed_by_another() -> None:
    driver = away(committed(), held())
    for failure in (LOST, AGAIN):
        assert driver.give(failure).one(GoBack).held == held()
    assert driver.session.state is SessionState.AWAY


def test_a_second_loss_before_computing_has_said_what_there_is_changes_nothing() -> None:
    driver = committed().give(LOST)
    assert driver.give(LOST).last == []
    driver.give(held()).one(GoBack)


def test_a_refusal_for_good_ends_a_peer_that_is_away() -> None:
    rejected = pb.CoordinatorMessage(rejected=pb.Rejected(reason="a peer named ann is in the run already"))
    outcome = away(committed(), held()).give(rejected).one(Finish).outcome
    assert outcome.exit_code == ExitCode.FAILED
    assert "a peer named ann" in outcome.reason


def test_what_was_under_way_is_nothing_to_a_peer_that_is_away() -> None:
    fault = Fault(kind=FaultKind.LINK, reason="bob is silent")
    driver = stepping().give(LOST)
    stale = (
        report(),
        Faulted(generation=ONE, step=STEP, fault=fault),
        StateReady(generation=ONE, step=STEP, items=()),
        StateFetched(generation=ONE, given={}),
        LinksReady(generation=ONE),
        ShellFault(generation=ONE, fault=fault),
        UploadFailed(generation=ONE, step=STEP, fault=fault),
    )
    for event in stale:
        assert driver.give(event).last == []
        assert driver.session.state is SessionState.AWAY


def test_a_peer_that_is_alone_for_long_writes_its_state_to_the_disk() -> None:
    driver = away(committed(), held())
    assert driver.give(LongAlone()).one(Compute).command == WriteSnapshot()
    assert driver.give(SnapshotWritten(step=STEP)).last == []
    assert away(stepping(), StateHeld(step=StepNumber(0), reported_step=STEP, names=("w",))).give(LongAlone()).last == []
    assert committed().give(LongAlone()).last == []


def test_a_fatal_fault_ends_a_peer_that_is_away() -> None:
    fault = Fault(kind=FaultKind.INTERNAL, reason="RuntimeError")
    driver = stepping().give(LOST, Faulted(generation=ONE, step=STEP, fault=fault, fatal=True))
    assert driver.one(Finish).outcome.reason == "RuntimeError"


def test_a_commit_that_was_missed_comes_after_the_welcome() -> None:
    driver = away(stepping().give(report()), held(reported=STEP)).give(WELCOME, commit())
    assert driver.one(Compute).command == CommitStep(generation=ONE, step=STEP, clip_factor=0.5, learning_rate=0.1)
    assert driver.session.state is SessionState.IDLE
    assert driver.give(lend()).one(Compute).command == KeepState(generation=TWO, step=STEP, borrowers=(PeerId("bob"),))


@pytest.mark.parametrize("wrong", [commit(step=2), commit(generation=TWO)])
def test_another_commit_after_the_welcome_breaks_the_protocol(wrong: pb.CoordinatorMessage) -> None:
    driver = away(stepping().give(report()), held(reported=STEP)).give(WELCOME, wrong)
    assert "broke the protocol" in driver.fault().reason


def test_a_step_that_was_not_reported_cannot_be_committed_after_the_welcome() -> None:
    driver = away(stepping(), held()).give(WELCOME, commit())
    assert "broke the protocol" in driver.fault().reason


def test_after_the_welcome_an_assignment_begins_anew() -> None:
    driver = away(committed(), held()).give(WELCOME, AssignmentArrived(generation=TWO, payload=b"y"))
    assert isinstance(driver.last[-1], Compute)
    driver.give(assignment(TWO), Loaded(generation=TWO), LinksReady(generation=TWO))
    assert driver.told().ready.generation == TWO


def test_what_is_of_no_use_any_more_is_dropped() -> None:
    driver = away(committed(), held()).give(WELCOME, pb.CoordinatorMessage(release=pb.Release(generation=ONE)))
    assert driver.one(Compute).command == DropState()


def test_a_release_may_be_newer_than_what_a_peer_without_a_stage_has_heard() -> None:
    driver = away(committed(), held()).give(WELCOME, pb.CoordinatorMessage(release=pb.Release(generation=9)))
    assert driver.one(Compute).command == DropState()
    assert driver.give(lend(generation=9)).last == []
    driver.give(AssignmentArrived(generation=Generation(10), payload=b"y")).one(Disconnect)


def test_in_another_run_nothing_of_the_old_one_counts() -> None:
    other = pb.CoordinatorMessage(welcome=pb.Welcome(run="r", name="ann", run_id="another"))
    driver = away(committed(), held()).give(other)
    assert driver.one(Compute).command == DropState()
    driver.give(AssignmentArrived(generation=ONE, payload=b"y"))
    assert driver.session.state is SessionState.LOADING
