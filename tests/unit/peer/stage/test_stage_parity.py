"""Placement never changes numbers: however a graph is cut, losses, weights and buffers are a plain loop's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from atoll.coordinator.tracing.rehearsal import differentiable_values
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.stage import StageSettings
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.graph import StageGraph
from support.hand_models import HandModel, convolutional, transformer
from support.pipelines import HandPipeline, Sample
from support.plain_loops import Trained, assert_same, train_in_a_loop

STEPS, LEARNING_RATE, CLIP_NORM = 4, 3e-2, 0.5
ROWS = (4, 2, 3)
ADAMW = OptimizerSettings(name="adamw", weight_decay=0.1, beta1=0.9, beta2=0.95)
SGD = OptimizerSettings(name="sgd", weight_decay=0.01, momentum=0.9, nesterov=True)
SETTINGS = StageSettings(run_seed=7, device=torch.device("cpu"), optimizer=ADAMW)

Make = Callable[[], HandModel]
MODELS: Mapping[str, Make] = {
    "transformer": transformer,
    "tied": partial(transformer, tied=True),
    "dropout": partial(transformer, tied=True, dropout=0.2),
    "convolutional": convolutional,
}


def steps_of(model: HandModel) -> list[list[Sample]]:
    """The same microbatches for everyone, with different numbers of rows, each weighted by its rows."""
    generator = torch.Generator().manual_seed(0)
    return [[Sample(inputs=model.sample(rows, generator), weight=float(rows)) for rows in ROWS] for _ in range(STEPS)]


def train(model: HandModel, cuts: tuple[int, ...], settings: StageSettings = SETTINGS, in_flight: int = 1) -> Trained:
    return train_stages(model, slice_graph(model.graph, cuts), settings, in_flight)


def train_stages(
    model: HandModel, stages: Sequence[StageGraph], settings: StageSettings = SETTINGS, in_flight: int = 1
) -> Trained:
    pipeline = HandPipeline(stages, settings, in_flight)
    told = [pipeline.step(number, samples, LEARNING_RATE, CLIP_NORM) for number, samples in enumerate(steps_of(model), 1)]
    return Trained(told=tuple(told), state=pipeline.state())


def in_a_loop(model: HandModel, settings: StageSettings = SETTINGS) -> Trained:
    return train_in_a_loop(
        model,
        HandPipeline(slice_graph(model.graph, ()), settings).state(),
        steps_of(model),
        settings.optimizer,
        learning_rate=LEARNING_RATE,
        clip_norm=CLIP_NORM,
        bf16=settings.precision == "bf16",
    )


def spread(model: HandModel, stages: int) -> tuple[int, ...]:
    """``stages - 1`` of the model's cuts, far from one another."""
    return tuple(model.cuts[round(number * (len(model.cuts) - 1) / max(1, stages - 2))] for number in range(stages - 1))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [transformer, convolutional])
def test_a_cut_model_equals_a_plain_loop(make: Make, stages: int) -> None:
    model = make()
    assert_same(train(model, spread(model, stages)), in_a_loop(model))


@pytest.mark.parametrize("make", [transformer, convolutional])
@pytest.mark.parametrize(
    "settings", [replace(SETTINGS, optimizer=SGD), replace(SETTINGS, precision="bf16")], ids=["sgd", "bf16"]
)
def test_other_settings_equal_a_plain_loop(make: Make, settings: StageSettings) -> None:
    model = make()
    for stages in (1, 3):
        assert_same(train(model, spread(model, stages), settings), in_a_loop(model, settings))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_cuts_flights_and_recomputation_change_nothing(name: str, recompute: bool) -> None:
    model = MODELS[name]()
    uncut = train(model, ())
    settings = replace(SETTINGS, recompute=recompute)
    for stages in (1, 2, 3, 4):
        for in_flight in (1, 3):
            assert_same(train(model, spread(model, stages), settings, in_flight), uncut)


@pytest.mark.parametrize("name", ["tied", "convolutional"])
def test_every_single_cut_equals_the_uncut_graph(name: str) -> None:
    model = MODELS[name]()
    uncut = train(model, ())
    tried = 0
    differentiable = differentiable_values(model.graph)
    for position in range(1, len(model.graph.nodes)):
        try:
            stages = slice_graph(model.graph, (position,), differentiable)
        except ValueError:
            continue
        assert_same(train_stages(model, stages), uncut)
        tried += 1
    assert tried > len(model.cuts)


def test_a_tied_weight_equals_a_plain_loop_to_rounding() -> None:
    model = MODELS["tied"]()
    # Not AdamW, which turns the rounding of a gradient near zero into a full step.
    settings = replace(SETTINGS, optimizer=SGD)
    ours, plain = train(model, spread(model, 3), settings), in_a_loop(model, settings)
    for name, value in plain.state.items():
        assert torch.allclose(ours.state[name], value, atol=1e-5)


def test_dropout_does_something_and_depends_on_the_seed() -> None:
    model = MODELS["dropout"]()
    seven, eight = train(model, ()), train(model, (), replace(SETTINGS, run_seed=8))
    assert seven.told[0] != train(MODELS["tied"](), ()).told[0]
    assert seven.told[0] != eight.told[0]
