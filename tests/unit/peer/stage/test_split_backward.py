"""The gradient of a stage's input is on its way before the gradients of its weights are made."""

from __future__ import annotations

import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.boundaries import Boundaries
from atoll.peer.stage.events import BeginStep, Notice
from atoll.peer.stage.mailbox import Mailbox
from atoll.peer.stage.stage import MicrobatchInput, Stage, StageSettings
from atoll.peer.stage.step import COORDINATOR_STAGE, Phase, StepRun, StepSurroundings
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.graph import StageGraph, bind
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey
from support.hand_models import transformer

FIRST, LAST = StageIndex(0), StageIndex(1)
STEP, GENERATION = StepNumber(1), Generation(1)
NUM_MICROBATCHES = 2


def key(kind: Kind, index: int, source: StageIndex) -> MessageKey:
    return MessageKey(
        generation=GENERATION, step=STEP, microbatch=MicrobatchIndex(index), kind=kind, source=source, target=LAST
    )


def stage_of(graph: StageGraph) -> Stage:
    stage = Stage(graph, StageSettings(run_seed=7, device=torch.device("cpu"), optimizer=OptimizerSettings()))
    stage.initialise()
    return stage


def filled_mailbox(graphs: tuple[StageGraph, StageGraph]) -> Mailbox:
    """What the coordinator and the first stage send to the last one for all microbatches of a step."""
    model, first, mailbox = transformer(), stage_of(graphs[0]), Mailbox()
    first.begin(STEP)
    for index in range(NUM_MICROBATCHES):
        inputs = model.sample(2, torch.Generator().manual_seed(index))
        bindings = bind(model.graph.inputs, {name: tuple(value.shape) for name, value in inputs.items()})
        sent = first.forward(
            MicrobatchInput(index=MicrobatchIndex(index), step=STEP, inputs=inputs, received={}, bindings=bindings, scale=0.5)
        ).sends
        numbers = {"scale": 0.5, **{f"size:{name}": float(size) for name, size in bindings.items()}}
        batch = tuple((name, inputs[name]) for name, _ in graphs[1].inputs)
        mailbox.put(None, Message(key=key(Kind.BATCH, index, COORDINATOR_STAGE), tensors=batch, numbers=numbers))
        activation = Boundaries(graphs[0]).activation(LAST, sent)
        mailbox.put(PeerId("first"), Message(key=key(Kind.ACTIVATION, index, FIRST), tensors=activation))
    return mailbox


def matrices_with_gradients(stage: Stage) -> int:
    return sum(weight.dim() > 1 and weight.grad is not None for weight in stage._parameters.values())


def test_a_gradient_leaves_before_those_of_the_weights_are_made() -> None:
    model = transformer()
    graphs = slice_graph(model.graph, (model.cuts[1],))
    stage = stage_of(graphs[1])
    left: list[tuple[MicrobatchIndex, int]] = []
    notices: list[Notice] = []
    run = StepRun(
        BeginStep(generation=GENERATION, step=STEP, num_microbatches=NUM_MICROBATCHES),
        StepSurroundings(
            stage=stage,
            boundaries=Boundaries(graphs[1]),
            mailbox=filled_mailbox((graphs[0], graphs[1])),
            groups={
                FIRST: Group(stage=FIRST, replicas=(PeerId("first"),)),
                StageIndex(1): Group(stage=StageIndex(1), replicas=(PeerId("second"),)),
            },
            own=PeerId("second"),
            in_flight=1,
            send=lambda peer, message: left.append((message.key.microbatch, matrices_with_gradients(stage))),
            notify=notices.append,
            clock=lambda: 0.0,
        ),
    )
    while run.phase is Phase.WORKING and len(left) < 1:
        assert run.advance()
    assert left == [(MicrobatchIndex(0), 0)], "the first gradient has left, and no matrix has one"
    assert run.activity == "accumulate"
    run.advance()
    assert matrices_with_gradients(stage) > 0
    while run.advance():
        pass
    assert run.phase is Phase.REPORTED
    assert [index for index, _ in left] == [0, 1]
