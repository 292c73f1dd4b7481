"""`training.microbatch: auto`: the first plan chooses, the run holds to it, and the weights are those of that number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.events import MeasurementEvent, PlanEvent, StepEvent
from atoll.coordinator.planning.network import LinkMeasurement, build_network
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.run_files import JOB, WEIGHTS
from atoll.coordinator.sizing import MOST_SIZES, Sizing, close_to_best, open_sizing, preferred, some_of
from atoll.coordinator.traced_model import trace_model, with_sizes_of
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import PeerId
from atoll.protocol.job import Compression, Job, NetworkSection, load_job
from support.coordinated import coordinated, tiny_job
from support.jobs import encoder_decoder_job, gpt_job, huggingface_job, resnet_job

TWO = (PeerId("a"), PeerId("b"))


def offers(*, flops: float = 1e9, memory: int = 10**12) -> tuple[PeerOffer, ...]:
    return tuple(PeerOffer(name=name, flops_per_second=flops, memory_bytes=memory) for name in TWO)


@pytest.fixture(scope="module")
def sizing(tmp_path_factory: pytest.TempPathFactory) -> Sizing:
    """A small GPT in two stages at a batch of 16."""
    folder = tmp_path_factory.mktemp("sizing")
    job = gpt_job(folder, batch=16, microbatch="auto")
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"stages": 2})})
    return open_sizing(job, folder / "cache")


async def test_a_run_that_chose_ends_with_the_weights_of_the_chosen_number(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, batch=8, microbatch="auto", evaluate_every=2, plan={"stages": 2}, options={"dropout": 0.1})
    async with coordinated(job, tmp_path / "auto") as run:
        assert (await run.ended()).finished
    (plan,) = run.told(PlanEvent)
    assert plan.microbatch in job.training.microbatch_sizes
    fixed = job.with_microbatch(plan.microbatch)
    async with coordinated(fixed, tmp_path / "fixed") as other:
        assert (await other.ended()).finished
    assert [event.loss for event in run.told(StepEvent)] == [event.loss for event in other.told(StepEvent)]
    assert [event.samples for event in run.told(StepEvent)] == [event.samples for event in other.told(StepEvent)]
    chosen, given = (load_file(tmp_path / name / WEIGHTS) for name in ("auto", "fixed"))
    assert chosen.keys() == given.keys()
    assert all(torch.equal(chosen[name], given[name]) for name in given)
    # Whoever takes the run up again finds the number, not the wish.
    journal = Journal(tmp_path / "auto" / JOURNAL)
    try:
        assert journal.job() == (tmp_path / "auto" / JOB).read_text()
    finally:
        journal.close()
    assert load_job(tmp_path / "auto" / JOB) == fixed


async def test_a_run_over_slow_links_takes_small_microbatches(tmp_path: Path) -> None:
    """Peers that compute faster than they start work would take one; their links are probed before that is decided."""
    raw = NetworkSection(compression=Compression(forward="raw", backward="raw"))
    job = tiny_job(tmp_path, steps=1, batch=8, microbatch="auto", plan={"stages": 2}).model_copy(update={"network": raw})
    chosen = []
    for name, caps in (("quick", {}), ("slow", {"max_upload": 1e5})):
        async with coordinated(job, tmp_path / name, peers=0, min_peers=2) as run:
            run.join("peer-0", "peer-1", flops_per_second=1e12, **caps)
            assert (await run.ended()).finished
        (plan,) = run.told(PlanEvent)
        chosen.append(plan.microbatch)
    assert chosen[0] == 8
    assert chosen[1] < 8


@pytest.mark.parametrize(
    "make",
    [
        lambda base: gpt_job(base, dropout=0.1, tied=True, microbatch=2),
        lambda base: resnet_job(base, depth=18, microbatch=2),
        lambda base: huggingface_job(base, "llama", microbatch=2),
        lambda base: encoder_decoder_job(base, microbatch=2),
    ],
    ids=["gpt", "resnet", "llama", "encoder-decoder"],
)
def test_a_trace_for_one_size_is_the_trace_for_all_above_one(make: Callable[[Path], Job], tmp_path: Path) -> None:
    job = make(tmp_path)
    feed = open_feed(job, tmp_path / "cache")
    larger = feed.with_microbatch(4)
    resized = with_sizes_of(trace_model(job, feed), larger)
    anew = trace_model(job.with_microbatch(4), larger)
    assert resized.graph == anew.graph
    assert resized.job == anew.job
    assert resized.segments.forward_flops == anew.segments.forward_flops
    assert resized.segments.forward_bytes == anew.segments.forward_bytes


def test_pipelines_get_small_microbatches_and_slow_starters_large_ones(sizing: Sizing) -> None:
    """Where computing takes long, many fill the pipeline; where starting work does, few pay less for it."""
    slow = sizing.choose(offers(flops=1e7)).feed.microbatch
    fast = sizing.choose(offers(flops=1e12)).feed.microbatch
    assert slow < fast == 16


def test_a_long_way_between_peers_is_gone_by_few(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, batch=16, microbatch="auto")
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"stages": 2, "in_flight": 1})})
    sizing = open_sizing(job, tmp_path / "cache")
    there_and_back = [(TWO[0], TWO[1]), (TWO[1], TWO[0])]
    chosen = []
    for delay in (1e-6, 1.0):
        links = [LinkMeasurement(source=one, target=other, latency_seconds=delay) for one, other in there_and_back]
        chosen.append(sizing.choose(offers(flops=1e7), build_network(TWO, links)).feed.microbatch)
    assert chosen[0] < chosen[1] == 16


def test_little_memory_means_small_microbatches(sizing: Sizing) -> None:
    roomy = sizing.choose(offers(flops=1e12))
    need = roomy.model.segments.memory(0, roomy.model.segments.num_segments, True)
    tight = sizing.choose(offers(flops=1e12, memory=int(0.6 * (need.fixed_bytes + need.microbatch_bytes))))
    assert tight.feed.microbatch < roomy.feed.microbatch
    with pytest.raises(PlacementError, match="the model does not fit"):
        sizing.choose(offers(memory=10**4))


def test_the_choice_is_the_same_for_any_order_of_peers(sizing: Sizing) -> None:
    peers = offers()
    assert sizing.choose(peers).feed.microbatch == sizing.choose(peers[::-1]).feed.microbatch


def test_a_job_that_gives_the_size_gets_it(tmp_path: Path) -> None:
    sized = open_sizing(gpt_job(tmp_path, batch=12, microbatch=3), tmp_path / "cache").choose(())
    assert (sized.feed.microbatch, sized.model.job.training.num_microbatches) == (3, 4)


def test_sizes_that_validation_cannot_fill_are_left_out(tmp_path: Path) -> None:
    data = {"random": {"kind": "tokens", "vocabulary": 64, "samples": 40}, "sequence_length": 16, "validation": 0.1}
    sizing = open_sizing(gpt_job(tmp_path, data=data, batch=16, microbatch="auto"), tmp_path / "cache")
    assert sizing.choose(offers(flops=1e12)).feed.microbatch == 4


def test_few_of_many_sizes_are_tried() -> None:
    assert some_of((1, 2, 4)) == (1, 2, 4)
    many = tuple(size for size in range(1, 721) if 720 % size == 0)
    few = some_of(many)
    assert len(few) == MOST_SIZES
    assert (few[0], few[-1]) == (1, 720)
    assert list(few) == sorted(set(few) & set(many))


def test_two_sizes_are_measured_where_estimates_are_close() -> None:
    assert close_to_best({1: 1.0, 2: 1.05, 4: 1.08, 8: 2.0}) == (2, 1)
    assert close_to_best({1: 1.0, 2: 1.2}) == (1,)
    assert close_to_best({2: 1.0, 4: 1.0, 8: 1.0}) == (8, 4)
    assert close_to_best({3: 1.0}) == (3,)


def test_a_smaller_microbatch_must_be_notably_faster() -> None:
    assert preferred({1: 3.70, 2: 3.71}) == 2
    assert preferred({1: 3.40, 2: 3.71}) == 1
    assert preferred({1: 3.80, 2: 3.71}) == 2


async def test_sizes_that_are_close_are_both_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = tiny_job(tmp_path, steps=1, batch=4, microbatch="auto", plan={"stages": 2})
    async with coordinated(job, tmp_path / "state") as run:
        assert (await run.ended()).finished
    (plan,) = run.told(PlanEvent)
    assert f"microbatches have {plan.microbatch} samples: seconds a step by size, as measured" in caplog.text
    segments = [event for event in run.told(MeasurementEvent) if event.what == "segments"]
    assert sorted(event.peer for event in segments) == sorted({event.peer for event in segments})
