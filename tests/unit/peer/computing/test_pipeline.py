"""Computing without a thread: commands that come out of turn, and what the thread does about a bug."""

from __future__ import annotations

import threading

import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.computing.compute_thread import ComputeThread
from atoll.peer.computing.pipeline import Pipeline, PipelineSurroundings
from atoll.peer.faults import FaultKind
from atoll.peer.stage.events import (
    Assign,
    BeginStep,
    Command,
    CommitStep,
    DropState,
    Faulted,
    Initialise,
    KeepState,
    Measure,
    Measured,
    Notice,
    StepVoided,
    VoidStep,
)
from atoll.protocol.assignment import Assignment, OptimizerSettings, assignment_to_bytes
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import Message
from support.hand_models import transformer
from support.measurements import measurements_of

ONE = Generation(1)
STEP = StepNumber(1)
COMMIT = CommitStep(generation=ONE, step=STEP, clip_factor=1.0, learning_rate=0.1)


def no_neighbour(peer: PeerId, message: Message) -> None:
    raise AssertionError(f"nothing is to be sent, least of all {message.key} to {peer}")


def after(*commands: Command, memory_bytes: int = 10**9) -> tuple[Pipeline, list[Notice]]:
    """A pipeline that has taken these commands, and what it said."""
    notices: list[Notice] = []
    pipeline = Pipeline(PipelineSurroundings(device="cpu", memory_bytes=memory_bytes, send=no_neighbour, notify=notices.append))
    for command in commands:
        pipeline.handle(command)
        while pipeline.work():
            pass
    return pipeline, notices


def only_fault(notices: list[Notice]) -> Faulted:
    (notice,) = notices
    assert isinstance(notice, Faulted)
    return notice


def test_a_commit_of_a_step_that_is_not_here_is_fatal() -> None:
    _, notices = after(COMMIT)
    assert only_fault(notices).fatal
    assert only_fault(notices).fault.kind is FaultKind.INTERNAL


def test_a_step_without_a_stage_is_a_fault() -> None:
    _, notices = after(BeginStep(generation=ONE, step=STEP, num_microbatches=1))
    assert not only_fault(notices).fatal


def test_nonsense_for_an_assignment_is_refused() -> None:
    pipeline, notices = after(Assign(generation=ONE, payload=b"\xff\xff"))
    assert only_fault(notices).fault.kind is FaultKind.REFUSED_GRAPH
    assert only_fault(notices).generation == ONE
    assert pipeline.progress.phase == "idle"


def test_first_values_for_an_assignment_that_was_replaced_are_ignored() -> None:
    _, notices = after(Initialise(generation=ONE, given={}))
    assert notices == []


def test_a_void_is_answered_whatever_the_state() -> None:
    pipeline, notices = after(VoidStep(generation=ONE, step=STEP, next_generation=Generation(2)))
    assert notices == [StepVoided(next_generation=Generation(2), step=STEP)]
    assert pipeline.progress.generation == 2


def test_progress_counts_what_is_done() -> None:
    pipeline, _ = after()
    before = pipeline.progress.count
    pipeline.handle(VoidStep(generation=ONE, step=STEP, next_generation=Generation(2)))
    assert pipeline.progress.count > before


def test_measuring_takes_what_a_stage_or_kept_state_leaves() -> None:
    model = transformer()
    (graph,) = slice_graph(model.graph, ())
    assignment = Assignment(
        generation=ONE,
        graph=graph,
        neighbours=(),
        run_seed=0,
        in_flight=1,
        recompute=False,
        precision="fp32",
        optimizer=OptimizerSettings(name="adamw"),
        groups=(Group(stage=graph.stage, replicas=(PeerId("ann"),)),),
        committed_step=StepNumber(0),
    )
    weights = sum(4 * torch.Size(spec.shape).numel() for spec in graph.parameters)
    measure = Measure(message=measurements_of(model.graph, model.sample(2, torch.Generator().manual_seed(0)))[0])
    keep = KeepState(generation=Generation(2), step=StepNumber(0), borrowers=())
    _, notices = after(
        Assign(generation=ONE, payload=assignment_to_bytes(assignment)),
        Initialise(generation=ONE, given={}),
        measure,
        keep,
        measure,
        DropState(),
        measure,
        memory_bytes=weights,
    )
    failures = [notice.failure for notice in notices if isinstance(notice, Measured)]
    assert len(failures) == 3
    moments = 2 * weights + 4 * len(graph.parameters)
    assert f"limit of {-weights - moments}" in failures[0]
    assert "limit of 0" in failures[1]
    assert failures[2] == ""


class BrokenPipeline(Pipeline):
    """Has a bug."""

    def handle(self, command: Command) -> None:
        raise SystemError("a bug")


def test_a_bug_ends_the_thread_and_is_told() -> None:
    told = threading.Event()
    deaths: list[BaseException] = []

    def on_death(error: BaseException) -> None:
        deaths.append(error)
        told.set()

    surroundings = PipelineSurroundings(device="cpu", memory_bytes=1, send=no_neighbour, notify=lambda notice: None)
    thread = ComputeThread(BrokenPipeline(surroundings), num_threads=None, on_death=on_death)
    thread.start()
    thread.post(COMMIT)
    assert told.wait(10)
    assert thread.join(10)
    assert isinstance(deaths[0], SystemError)
