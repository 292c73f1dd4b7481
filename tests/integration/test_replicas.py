"""Several peers hold one stage: the run comes to what one process comes to, up to the order in which gradients are added; the
replicas have the same bits after every step, and so have two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.events import EvaluationEvent, FinishedEvent, PlanEvent, StepEvent
from atoll.protocol import hive
from atoll.protocol.errors import PlacementError
from atoll.protocol.hive import hivemind_is_here
from atoll.protocol.job import AveragingSection, Job
from support.coordinated import coordinated
from support.jobs import TOKENS, encoder_decoder_job, gpt_job, resnet_job
from support.marks import release
from support.outcomes import watched_snapshots
from support.placements import Placement, ScriptedPlacements, placed
from support.reference import Trained, train_plainly

STEPS = 4
A, B, C, D, E, F = "peer-0", "peer-1", "peer-2", "peer-3", "peer-4", "peer-5"
LAYOUTS: Mapping[str, Placement] = {
    "two of the first": placed(((A, B), 1), (C, 1)),
    "two of the last": placed((A, 1), ((B, C), 1)),
    "three of the only one": placed(((A, B, C), 1)),
    "one, two and three": placed((A, 1), ((B, C), 1), ((D, E, F), 1)),
}
TRAINING: dict[str, Any] = {"steps": STEPS, "batch": 12}
"""Six microbatches: each of three replicas has two, and has to add them to others'."""
EVALUATED: dict[str, Any] = {**TRAINING, "evaluate_every": 2, "data": {**TOKENS, "validation": 0.05}}


def plain(base: Path) -> Job:
    return gpt_job(base, **EVALUATED)


def tied(base: Path) -> Job:
    return gpt_job(base, tied=True, **EVALUATED)


def dropout(base: Path) -> Job:
    return gpt_job(base, dropout=0.1, **EVALUATED)


def encoder_decoder(base: Path) -> Job:
    return encoder_decoder_job(base, **TRAINING, optimizer={"name": "sgd", "learning_rate": 0.1, "momentum": 0.9})


async def train(
    job: Job, folder: Path, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> tuple[Trained, list[EvaluationEvent], dict[int, dict[str, set[str]]]]:
    """What came of it, and the hashes of what the peers held after each step."""
    ScriptedPlacements(monkeypatch, [placement])
    durability = job.durability.model_copy(update={"snapshot_every": 1, "copies": 0})
    job = job.model_copy(update={"durability": durability})
    names = [name for replicas in placement.peers for name in replicas]
    async with watched_snapshots(folder) as watch, coordinated(job, folder, peers=0, min_peers=len(names)) as run:
        for name in names:
            run.join(name, cache=folder / "cache" / name)
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    told = run.told(PlanEvent)
    assert [stage.peers for stage in told[-1].stages] == list(placement.peers)
    assert len(told) == 1, "nobody was lost"
    steps = run.told(StepEvent)
    state = load_file(run.told(FinishedEvent)[0].weights)
    losses, norms = tuple(event.loss for event in steps), tuple(event.grad_norm for event in steps)
    return Trained(losses=losses, norms=norms, state=state), run.told(EvaluationEvent), watch.found


CASES = [(plain, layout) for layout in LAYOUTS] + [(make, "one, two and three") for make in (tied, encoder_decoder)]


@pytest.mark.parametrize(("make", "layout"), CASES, ids=lambda case: case if isinstance(case, str) else case.__name__)
async def test_replicas_train_as_one_process_does(
    make: Callable[[Path], Job], layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the order of sums differs: the bound is rounding, after four steps of AdamW (where much is tied, of SGD)."""
    expected = train_plainly(make(tmp_path), tmp_path / "plain")
    trained, evaluations, held = await train(make(tmp_path), tmp_path / "run", LAYOUTS[layout], monkeypatch)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in trained.state.items():
        torch.testing.assert_close(value, expected.state[name], rtol=1e-4, atol=2e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023
    assert [event.step for event in evaluations] == ([] if make is encoder_decoder else [2, 4])
    assert_alike(held)


def assert_alike(held: Mapping[int, Mapping[str, set[str]]]) -> None:
    """Weights and what the optimizer keeps have one hash each after a step, whoever holds them."""
    assert held, "no snapshot was seen"
    apart = [(step, name) for step, tensors in held.items() for name, digests in tensors.items() if len(digests) > 1]
    assert apart == []


async def test_two_runs_have_the_same_bits_and_dropout_the_same_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = LAYOUTS["one, two and three"]
    first, told, _ = await train(dropout(tmp_path), tmp_path / "first", placement, monkeypatch)
    second, again, _ = await train(dropout(tmp_path), tmp_path / "second", placement, monkeypatch)
    assert first.losses == second.losses
    assert [event.loss for event in told] == [event.loss for event in again]
    assert all(torch.equal(value, second.state[name]) for name, value in first.state.items())
    alone, _, _ = await train(dropout(tmp_path), tmp_path / "alone", placed((A, 1)), monkeypatch)
    assert first.losses == pytest.approx(alone.losses, rel=1e-5), "masks do not depend on who has the microbatch"


def averaged(job: Job, **averaging: str) -> Job:
    return job.model_copy(update={"averaging": AveragingSection(**averaging)})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
@pytest.mark.skipif(not hivemind_is_here(), reason="hivemind has no wheel for this platform")
async def test_hivemind_brings_the_same_bits_as_our_own_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placement = LAYOUTS["two of the first"]
    links, _, _ = await train(plain(tmp_path), tmp_path / "links", placement, monkeypatch)
    hivemind, _, held = await train(averaged(plain(tmp_path), transport="hivemind"), tmp_path / "hive", placement, monkeypatch)
    assert links.losses == hivemind.losses
    assert all(torch.equal(value, hivemind.state[name]) for name, value in links.state.items())
    assert_alike(held)
    assert not [record for record in caplog.records if "links" in record.message], "the second run used hivemind's connections"


@pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
@pytest.mark.skipif(not hivemind_is_here(), reason="hivemind has no wheel for this platform")
@pytest.mark.parametrize(
    "averaging",
    [
        {"compression": "powersgd-4"},
        release({"transport": "hivemind", "compression": "fp16"}),
        release({"transport": "hivemind", "compression": "int8"}),
        release({"transport": "hivemind", "compression": "powersgd-4"}),
    ],
    ids=lambda averaging: "-".join(averaging.values()),
)
async def test_compressed_gradients_leave_replicas_alike_and_close_to_one_process(
    averaging: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_plainly(plain(tmp_path), tmp_path / "plain")
    placement = LAYOUTS["three of the only one"]
    trained, _, held = await train(averaged(plain(tmp_path), **averaging), tmp_path / "run", placement, monkeypatch)
    assert_alike(held)
    assert trained.losses == pytest.approx(expected.losses, rel=2e-2)
    assert any(not torch.equal(value, expected.state[name]) for name, value in trained.state.items()), "bits were lost"
    again, _, _ = await train(averaged(plain(tmp_path), **averaging), tmp_path / "again", placement, monkeypatch)
    assert again.losses == trained.losses


async def test_where_hivemind_is_missing_the_links_are_used_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hive, "hivemind_is_here", lambda: False)
    job = averaged(plain(tmp_path), transport="hivemind")
    _, _, held = await train(job, tmp_path / "run", LAYOUTS["two of the first"], monkeypatch)
    assert_alike(held)
    assert "pip install" in caplog.text
    assert "gradients are summed over the peers' own links: peer-0, peer-1 cannot use hivemind" in caplog.text


async def test_a_stage_whose_buffers_change_has_no_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"stage 0 cannot have replicas, for each microbatch changes .*running_mean"):
        await train(resnet_job(tmp_path, depth=18, steps=1), tmp_path / "run", placed(((A, B), 1)), monkeypatch)
    assert issubclass(PlacementError, Exception)
