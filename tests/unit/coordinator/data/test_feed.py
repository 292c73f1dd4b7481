"""Batches are a function of seed and step; every sample counts once an epoch; validation samples are never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.data.feed import IGNORED_TARGET, Batch, Feed, FeedSettings, Unit
from atoll.protocol.errors import JobError
from atoll.protocol.ids import MicrobatchIndex, StepNumber


class CountedSamples:
    """Sample ``n`` holds the number ``n``; remembers what was read."""

    field = "data.counted"
    unit = Unit.SAMPLES

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_reads = 0

    @property
    def varying_dimensions(self) -> Mapping[str, tuple[int, ...]]:
        return {"images": (), "labels": ()}

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        self.num_reads += 1
        return {"images": torch.zeros(len(sample_ids), 3), "labels": torch.tensor(sample_ids)}


class PaddedTokens(CountedSamples):
    """Sample ``n`` has ``n`` targets that do not count."""

    unit = Unit.TOKENS

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        targets = torch.ones(len(sample_ids), 20, dtype=torch.int64)
        for row, number in enumerate(sample_ids):
            targets[row, :number] = IGNORED_TARGET
        return {"tokens": torch.ones_like(targets), "targets": targets}


def _feed(samples: CountedSamples, *, batch: int = 4, microbatch: int = 2, validation: float = 0.0, seed: int = 0) -> Feed:
    settings = FeedSettings(seed=seed, batch=batch, microbatch=microbatch, validation=validation, evaluation_batches=2)
    return Feed(samples, settings)


def _ids(batches: Sequence[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.sample_ids]


@given(num_samples=st.integers(8, 60), batch=st.sampled_from([1, 2, 4, 6]), seed=st.integers(0, 5), epochs=st.integers(1, 3))
def test_every_training_sample_counts_once_an_epoch(num_samples: int, batch: int, seed: int, epochs: int) -> None:
    feed = _feed(CountedSamples(num_samples), batch=batch, microbatch=1, validation=0.2, seed=seed)
    steps = -(-epochs * feed.num_training_samples // batch)

    ids = _ids([feed.batch(StepNumber(step)) for step in range(1, steps + 1)])

    size = feed.num_training_samples
    for epoch in range(epochs):
        assert len(set(ids[epoch * size : (epoch + 1) * size])) == size


def test_a_batch_is_a_function_of_seed_and_step_alone() -> None:
    feed, again, other = (_feed(CountedSamples(50), seed=seed) for seed in (3, 3, 4))
    there_and_back = [feed.batch(StepNumber(step)) for step in (9, 2, 30, 2)]

    assert there_and_back[1].sample_ids == there_and_back[3].sample_ids == again.batch(StepNumber(2)).sample_ids
    assert there_and_back[1].samples_hash == again.batch(StepNumber(2)).samples_hash != other.batch(StepNumber(2)).samples_hash
    assert feed.sample_ids(StepNumber(30)) == there_and_back[2].sample_ids


def test_epochs_differ_in_order() -> None:
    feed = _feed(CountedSamples(20), batch=20)

    assert feed.sample_ids(StepNumber(1)) != feed.sample_ids(StepNumber(2))


def test_validation_is_disjoint_from_training_and_the_same_for_every_seed() -> None:
    feed, other = (_feed(CountedSamples(60), validation=0.2, seed=seed) for seed in (0, 1))
    trained = set(_ids([feed.batch(StepNumber(step)) for step in range(1, 40)]))
    evaluated = [number for microbatch in feed.validation() for number in microbatch.sample_ids]

    assert len(evaluated) == len(set(evaluated)) == 8  # two batches of four
    assert trained.isdisjoint(evaluated)
    assert evaluated == [number for microbatch in other.validation() for number in microbatch.sample_ids]
    assert list(_feed(CountedSamples(60)).validation()) == []


def test_validation_microbatches_are_read_when_looked_at() -> None:
    samples = CountedSamples(60)
    validation = _feed(samples, validation=0.2).validation()

    assert len(validation) == 4
    assert samples.num_reads == 0
    assert validation[-1].index == 3
    assert [one.index for one in validation[1:3]] == [1, 2]
    assert samples.num_reads == 3
    with pytest.raises(IndexError):
        validation[4]


def test_the_weight_of_classification_is_its_rows() -> None:
    batch = _feed(CountedSamples(20), batch=6).batch(StepNumber(1))

    assert [microbatch.weight for microbatch in batch.microbatches] == [2, 2, 2]
    assert [microbatch.index for microbatch in batch.microbatches] == [0, 1, 2]
    assert (batch.total_weight, batch.num_tokens) == (6, 6)
    for microbatch in batch.microbatches:
        assert microbatch.inputs["labels"].tolist() == list(microbatch.sample_ids)


def test_the_weight_of_text_is_its_target_tokens() -> None:
    batch = _feed(PaddedTokens(12), batch=4).batch(StepNumber(1))

    for microbatch in batch.microbatches:
        assert microbatch.weight == microbatch.num_tokens == 40 - sum(microbatch.sample_ids)


def test_the_example_is_the_first_microbatch_with_its_dynamic_dimensions() -> None:
    feed = _feed(CountedSamples(20))

    assert torch.equal(feed.example_inputs()["labels"], feed.batch(StepNumber(1)).microbatches[0].inputs["labels"])
    assert feed.dynamic_dimensions == {"images": (0,), "labels": (0,)}
    assert _feed(CountedSamples(20), microbatch=1).dynamic_dimensions == {"images": (), "labels": ()}


def test_too_little_data_is_refused() -> None:
    with pytest.raises(JobError) as caught:
        _feed(CountedSamples(20), batch=20, validation=0.1)
    assert str(caught.value) == (
        "training.batch: 20 is more than the 18 training samples of data.counted (2 more are kept for validation); "
        "lower it or give more data"
    )
    with pytest.raises(JobError) as caught:
        _feed(CountedSamples(20), validation=0.04)
    assert str(caught.value) == (
        "data.validation: 0.04 of the 20 samples of data.counted is 1, less than a microbatch (2); raise it"
    )
