"""Peers over real gRPC train as one process does: same losses, norms, weights and buffers, bit for bit."""

from __future__ import annotations

import pytest
import torch

from atoll.peer.session.values import ExitCode
from atoll.protocol.assignment import OptimizerSettings
from support.hand_models import HandModel, convolutional, transformer
from support.hand_run import HandRun, RunSettings, assert_equal, in_one_process, samples_of, swarm


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
