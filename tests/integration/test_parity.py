"""A run over real gRPC comes to what one process comes to: the losses, the weights and the buffers, bit for bit.

The peers' declared speeds choose the cuts, so each model runs under several. Models in which a parameter is used more than once
are compared bit for bit with the uncut graph, and to rounding with the plain loop, where autograd adds the uses' gradients in
another order; those with dropout with the uncut graph, since a plain loop draws other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.events import FinishedEvent, PlanEvent, StepEvent
from atoll.protocol.job import Job
from support.coordinated import coordinated
from support.jobs import TOKENS, encoder_decoder_job, gpt_job, huggingface_job, resnet_job
from support.marks import release
from support.reference import Trained, train_plainly

JobMaker = Callable[[Path], Job]
Speeds = tuple[float, ...]

CUTS = (release((1, 1)), (3, 1), release((1, 1, 1)), (1, 2, 4), release((1, 1, 1, 1)), (4, 1, 2, 1))
SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}
LENGTHS = {"random": {**TOKENS["random"], "lengths": [64, 33, 48]}, "sequence_length": 64}  # type: ignore[dict-item]


def llama(base: Path) -> Job:
    return huggingface_job(base, "llama")


def gpt2(base: Path) -> Job:
    return huggingface_job(base, "gpt2", optimizer=SGD)


def bf16(base: Path) -> Job:
    return gpt_job(base, precision="bf16")


def unclipped_sgd(base: Path) -> Job:
    return gpt_job(base, optimizer={**SGD, "nesterov": True, "weight_decay": 0.01}, clip_norm=None)


def lengths(base: Path) -> Job:
    return gpt_job(base, data=LENGTHS)


def recomputed(base: Path) -> Job:
    job = gpt_job(base, dropout=0.1)
    return job.model_copy(update={"plan": job.plan.model_copy(update={"recompute": True})})


def dropout(base: Path) -> Job:
    return gpt_job(base, dropout=0.1)


def tied(base: Path) -> Job:
    return gpt_job(base, tied=True, optimizer=SGD)


def encoder_decoder(base: Path) -> Job:
    return encoder_decoder_job(base, optimizer=SGD)


def tied_dropout(base: Path) -> Job:
    return gpt_job(base, tied=True, dropout=0.1)


async def train(job: Job, folder: Path, speeds: Sequence[float]) -> Trained:
    """Trains ``job`` with one peer, and one stage, for each of ``speeds``."""
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"stages": len(speeds)})})
    async with coordinated(job, folder, peers=0, min_peers=len(speeds)) as run:
        for number, speed in enumerate(speeds):
            run.join(f"peer-{number}", flops_per_second=speed * 1e9)
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    steps = run.told(StepEvent)
    assert [event.step for event in steps] == list(range(1, job.training.steps + 1))
    assert len(run.told(PlanEvent)[-1].stages) == len(speeds)
    state = load_file(run.told(FinishedEvent)[0].weights)
    return Trained(losses=tuple(event.loss for event in steps), norms=tuple(event.grad_norm for event in steps), state=state)


def assert_same(trained: Trained, expected: Trained) -> None:
    """Bit for bit."""
    assert trained.losses == expected.losses
    assert trained.state.keys() == expected.state.keys()
    different = [name for name, value in trained.state.items() if not torch.equal(value, expected.state[name])]
    assert different == []


def assert_close(trained: Trained, expected: Trained) -> None:
    """To the rounding of sums in another order, over five steps of SGD."""
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in trained.state.items():
        torch.testing.assert_close(value, expected.state[name], rtol=1e-4, atol=1e-6)


class References:
    """Each model's plain loop and uncut run, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain: dict[JobMaker, Trained] = {}
        self._uncut: dict[JobMaker, Trained] = {}

    def plain(self, make: JobMaker) -> Trained:
        if make not in self._plain:
            self._plain[make] = train_plainly(make(self._folder), self._folder / "cache")
        return self._plain[make]

    async def uncut(self, make: JobMaker) -> Trained:
        if make not in self._uncut:
            self._uncut[make] = await train(make(self._folder), self._folder / f"uncut-{len(self._uncut)}", (1,))
        return self._uncut[make]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("speeds", [(1,), *CUTS], ids=str)
@pytest.mark.parametrize("make", [gpt_job, llama], ids=lambda make: make.__name__)
async def test_models_train_as_in_a_plain_loop(make: JobMaker, speeds: Speeds, references: References, tmp_path: Path) -> None:
    assert_same(await train(make(tmp_path), tmp_path / "run", speeds), references.plain(make))


@pytest.mark.parametrize("make", [bf16, unclipped_sgd, lengths], ids=lambda make: make.__name__)
async def test_settings_change_what_a_plain_loop_does_and_nothing_else(
    make: JobMaker, references: References, tmp_path: Path
) -> None:
    assert_same(await train(make(tmp_path), tmp_path / "run", (2, 1, 1)), references.plain(make))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("speeds", [release((1, 1)), (4, 1, 2, 1)], ids=str)
async def test_resnet_101_trains_as_in_a_plain_loop(speeds: Speeds, references: References, tmp_path: Path) -> None:
    assert_same(await train(resnet_job(tmp_path), tmp_path / "run", speeds), references.plain(resnet_job))


@pytest.mark.parametrize("speeds", CUTS, ids=str)
@pytest.mark.parametrize("make", [tied, gpt2, encoder_decoder], ids=lambda make: make.__name__)
async def test_shared_parameters_train_as_in_the_uncut_graph(
    make: JobMaker, speeds: Speeds, references: References, tmp_path: Path
) -> None:
    assert_same(await train(make(tmp_path), tmp_path / "run", speeds), await references.uncut(make))


@pytest.mark.parametrize("make", [tied, gpt2, encoder_decoder], ids=lambda make: make.__name__)
async def test_shared_parameters_train_as_in_a_plain_loop_to_rounding(make: JobMaker, references: References) -> None:
    assert_close(await references.uncut(make), references.plain(make))


@pytest.mark.parametrize("speeds", [release((1, 1)), (1, 2, 4), (4, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("make", [dropout, tied_dropout], ids=lambda make: make.__name__)
async def test_dropout_masks_do_not_depend_on_the_cuts(
    make: JobMaker, speeds: Speeds, references: References, tmp_path: Path
) -> None:
    assert_same(await train(make(tmp_path), tmp_path / "run", speeds), await references.uncut(make))


async def test_recomputed_activations_see_the_same_dropout_masks(references: References, tmp_path: Path) -> None:
    assert_same(await train(recomputed(tmp_path), tmp_path / "run", (1, 2, 1)), await references.uncut(dropout))


@pytest.mark.parametrize("num_microbatches", [1, release(2), 3, release(4), 5, release(6), release(7), 8])
async def test_any_number_of_stages_and_microbatches_finishes(
    num_microbatches: int, references: References, tmp_path: Path
) -> None:
    def make(base: Path) -> Job:
        return gpt_job(base, steps=2, batch=num_microbatches, microbatch=1)

    for num_stages in range(1, 5):
        trained = await train(make(tmp_path), tmp_path / f"run-{num_stages}", (1.0,) * num_stages)
        assert_same(trained, references.plain(make))


async def test_microbatches_are_one_big_batch(references: References, tmp_path: Path) -> None:
    def whole(base: Path) -> Job:
        return gpt_job(base, batch=24, microbatch=24, optimizer=SGD)

    parts = await train(gpt_job(tmp_path, batch=24, microbatch=2, optimizer=SGD), tmp_path / "run", (1, 1))
    assert_close(parts, references.plain(whole))
