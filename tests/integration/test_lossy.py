"""Runs over lossy links: the same bits each time, losses beside a lossless run's, and what crosses is as short as said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.compression.context import Direction
from atoll.compression.registry import codec
from atoll.coordinator.events import LinkEvent, StepEvent
from atoll.coordinator.run_files import WEIGHTS
from atoll.protocol.job import Compression, NetworkSection
from atoll.protocol.job_data import DataSection, RandomData
from support.coordinated import coordinated, tiny_job
from support.marks import release

STEPS, MICROBATCHES = 10, 2
CROSSING = 2 * 32 * 64  # rows, tokens and width of what crosses in a microbatch
PLACES = {"token_embedding": "peer-0", "blocks.0": "peer-0", "blocks.1": "peer-1", "blocks.2": "peer-2", "head": "peer-2"}
Run = tuple[list[float], dict[str, torch.Tensor], list[LinkEvent]]


async def train(folder: Path, state: str, forward: str, backward: str, samples: int | None = None) -> Run:
    """Losses, weights and links of a run of three stages whose embedding is shared by the first and the last. With so many
    ``samples`` an epoch is as short."""
    job = tiny_job(folder, steps=STEPS, options={"width": 64}, plan={"stages": 3, "pin": PLACES})
    if samples is not None:
        data = DataSection(random=RandomData(samples=samples), sequence_length=job.data.sequence_length)
        job = job.model_copy(update={"data": data})
    network = NetworkSection(compression=Compression(forward=forward, backward=backward))
    async with coordinated(job.model_copy(update={"network": network}), folder / state, peers=3) as run:
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    losses = [event.loss for event in run.told(StepEvent)]
    return losses, load_file(folder / state / WEIGHTS), run.told(LinkEvent)


@pytest.mark.parametrize(
    ("forward", "backward", "difference"),
    [("int8", "int8", 2e-3), release("int4", "int4", 5e-2), ("transform", "transform-1.5", 0.1), ("delta-4", "int8", 2e-3)],
)
async def test_a_lossy_run_is_reproducible_and_near_a_lossless_one(
    tmp_path: Path, forward: str, backward: str, difference: float
) -> None:
    losses, weights, links = await train(tmp_path, "first", forward, backward)
    again, weights_again, _ = await train(tmp_path, "again", forward, backward)
    assert losses == again
    assert all(torch.equal(weights_again[name], tensor) for name, tensor in weights.items())

    raw, _, _ = await train(tmp_path, "raw", "raw", "raw")
    assert raw[-1] < raw[0] - 0.05
    assert losses != raw
    assert losses == pytest.approx(raw, abs=difference)

    used = {(link.source, link.target): link for link in links}
    assert used["peer-0", "peer-1"].codec == used["peer-1", "peer-2"].codec == forward
    assert used["peer-1", "peer-0"].codec == used["peer-2", "peer-1"].codec == backward
    assert used["peer-0", "peer-2"].codec == "raw"  # both sum the shared weights' gradients, so both must see the same
    assert all(0 < link.relative_error < 0.6 for link in links if link.codec != "raw")


async def test_what_crosses_is_as_short_as_the_codec_says(tmp_path: Path) -> None:
    _, _, links = await train(tmp_path, "first", "int8", "int2")
    sent = {(link.source, link.target): link.bytes for link in links}
    assert sent["peer-0", "peer-1"] == STEPS * MICROBATCHES * CROSSING * 33 // 32
    num_messages, rest = divmod(sent["peer-1", "peer-0"], CROSSING * 9 // 32)
    assert rest == 0
    assert num_messages >= (STEPS - 1) * MICROBATCHES  # the last report may leave before the last gradient


async def test_gradients_of_sparse_activations_cross_without_places(tmp_path: Path) -> None:
    _, _, links = await train(tmp_path, "first", "topk-10", "topk-10")
    sent = {(link.source, link.target): link.bytes for link in links}
    shape, sparse = (2, 32, 64), codec("topk-10")
    assert sent["peer-0", "peer-1"] == STEPS * MICROBATCHES * sparse.num_bytes(shape, torch.float32)
    _, rest = divmod(sent["peer-1", "peer-0"], sparse.mean_bytes(shape, torch.float32, Direction.BACKWARD))
    assert rest == 0


async def test_from_the_second_epoch_on_differences_cross(tmp_path: Path) -> None:
    """Eight samples, four a step: the first two steps are an epoch."""
    losses, _, links = await train(tmp_path, "first", "delta-4", "int8", samples=8)
    raw, _, _ = await train(tmp_path, "raw", "raw", "raw", samples=8)
    assert losses == pytest.approx(raw, abs=5e-2)
    sent = {(link.source, link.target): link.bytes for link in links}
    shape, delta = (2, 32, 64), codec("delta-4")
    whole, difference = delta.num_bytes(shape, torch.float32), delta.mean_bytes(shape, torch.float32)
    assert sent["peer-0", "peer-1"] == MICROBATCHES * (2 * whole + (STEPS - 2) * difference)
