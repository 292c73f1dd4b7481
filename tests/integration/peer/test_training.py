"""Peers over real gRPC train as one process does: same losses, norms, weights and buffers, bit for bit."""

from __future__ import annotations

import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.session_values import ExitCode
from atoll.peer.stage import StageSettings
from atoll.protocol.assignment import OptimizerSettings
from support.hand_models import HandModel, convolutional, transformer
from support.hand_run import HandRun, RunSettings, swarm
from support.pipelines import HandPipeline, Sample

STEPS = 3


def samples_of(model: HandModel, num_microbatches: int = 3) -> list[list[Sample]]:
    """The microbatches of each step, of different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 4, 3)[index % 3] for index in range(num_microbatches)]
    return [[Sample(inputs=model.sample(size, generator), weight=float(size)) for size in sizes] for _ in range(STEPS)]


def in_one_process(model: HandModel, settings: RunSettings) -> HandPipeline:
    """The uncut graph, before its first step."""
    used = StageSettings(
        run_seed=settings.run_seed,
        device=torch.device("cpu"),
        optimizer=settings.optimizer,
        precision=settings.precision,
        recompute=settings.recompute,
    )
    return HandPipeline(slice_graph(model.graph, ()), used)


async def assert_parity(model: HandModel, cuts: tuple[int, ...], settings: RunSettings, num_microbatches: int = 3) -> None:
    """Trains over peers and in one process, and compares everything."""
    steps = samples_of(model, num_microbatches)
    alone = in_one_process(model, settings)
    names = [f"peer{index}" for index in range(len(cuts) + 1)]
    async with swarm(*names) as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, settings)
        await run.load(cuts)
        for number, samples in enumerate(steps, 1):
            assert await run.step(number, samples) == alone.step(number, samples)
        assert_equal(await run.state(), alone.state())
        run.end()
        outcomes = await peers.outcomes()
    assert {outcome.exit_code for outcome in outcomes.values()} == {ExitCode.FINISHED}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("num_cuts", [0, 1, 2])
async def test_a_tied_transformer_with_dropout_and_skips(num_cuts: int) -> None:
    model = transformer(tied=True, dropout=0.1)
    cuts = {0: (), 1: model.cuts[2:3], 2: (model.cuts[1], model.cuts[3])}[num_cuts]
    await assert_parity(model, cuts, RunSettings())


@pytest.mark.parametrize("recompute", [False, True])
async def test_batch_norm_in_place_and_momentum(recompute: bool) -> None:
    model = convolutional()
    optimizer = OptimizerSettings(name="sgd", momentum=0.9, weight_decay=0.01)
    await assert_parity(model, model.cuts[1:3], RunSettings(optimizer=optimizer, recompute=recompute, in_flight=3))


@pytest.mark.parametrize(("num_microbatches", "in_flight"), [(1, 1), (1, 4), (2, 1), (5, 2)])
async def test_any_number_of_microbatches_finishes(num_microbatches: int, in_flight: int) -> None:
    model = transformer()
    await assert_parity(model, (model.cuts[1], model.cuts[3]), RunSettings(in_flight=in_flight), num_microbatches)


async def test_evaluation_changes_nothing() -> None:
    model = convolutional()
    steps = samples_of(model)
    async with swarm("ann", "bob") as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings(in_flight=1))
        await run.load(model.cuts[1:2])
        await run.step(1, steps[0])
        before = await run.state(1)
        losses = {await run.evaluate(1, steps[1]) for _ in range(2)}
        assert len(losses) == 1
        assert_equal(await run.state(1), before)
        alone = in_one_process(model, RunSettings())
        for number in (1, 2):
            wanted = alone.step(number, steps[number - 1])
        assert await run.step(2, steps[1]) == wanted


async def test_given_first_values_are_fetched() -> None:
    model = transformer()
    value = torch.full((32, 16), 0.25)
    async with swarm("ann", "bob") as peers:
        peers.coordinator.values["embedding"] = value
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load(model.cuts[2:3], fetch=("embedding",))
        assert torch.equal((await run.state())["embedding"], value)
