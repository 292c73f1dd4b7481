"""What is sent to a peer to measure, and what its answers amount to."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from atoll.compression.registry import decode_message
from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.survey.segment_measuring import SegmentMeasuring, prepare_measuring
from atoll.coordinator.traced_model import TracedModel, trace_model
from atoll.protocol.ids import Generation
from atoll.protocol.measurement import INPUT_PREFIX, REQUEST_TENSOR, request_from_bytes
from atoll.protocol.messages import Kind
from atoll.protocol.tensors import tensor_to_bytes
from atoll.protocol.v1.session_pb2 import Measured
from support.coordinated import tiny_job


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedModel, SegmentMeasuring]:
    folder: Path = tmp_path_factory.mktemp("job")
    job = tiny_job(folder)
    feed = open_feed(job, folder / "cache")
    model = trace_model(job, feed)
    return model, prepare_measuring(model, feed, total_seconds=1.0)


def answers(measuring: SegmentMeasuring) -> dict[str, Measured]:
    return {
        name: Measured(
            kind=name,
            forward_seconds=float(number),
            backward_seconds=2.0 * number,
            accumulate_seconds=0.5 * number,
            update_seconds=0.25 * number,
        )
        for number, name in enumerate(measuring.fingerprints, 1)
    }


def test_each_kind_is_a_message_with_what_it_needs(prepared: tuple[TracedModel, SegmentMeasuring]) -> None:
    _, measuring = prepared
    messages = [decode_message(encoded) for encoded in measuring.messages(Generation(3))]
    assert len(messages) == len(measuring.kinds.kinds)
    for message, kind in zip(messages, measuring.kinds.kinds, strict=True):
        assert (message.key.kind, message.key.generation) == (Kind.MEASUREMENT, 3)
        request = request_from_bytes(bytes(tensor_to_bytes(message.tensor(REQUEST_TENSOR))))
        assert request.kind == kind.fingerprint
        assert request.graph == kind.graph
        assert (request.precision, request.clips, request.limit_seconds) == ("fp32", True, measuring.limit_seconds)
        assert {name for name, _ in message.tensors} == {REQUEST_TENSOR, *(INPUT_PREFIX + name for name in kind.inputs)}
        for name, spec in kind.graph.inputs:
            sizes = {symbol: int(message.numbers[f"size:{symbol}"]) for symbol, _ in kind.graph.example}
            assert tuple(message.tensor(INPUT_PREFIX + name).shape) == spec.sizes(sizes)


@pytest.mark.parametrize(("total_seconds", "each"), [(1000.0, 1.0), (2.0, 0.4), (0.01, 0.1)])
def test_all_kinds_share_the_time(tmp_path: Path, total_seconds: float, each: float) -> None:
    job = tiny_job(tmp_path)
    feed = open_feed(job, tmp_path / "cache")
    measuring = prepare_measuring(trace_model(job, feed), feed, total_seconds=total_seconds)
    assert len(measuring.kinds.kinds) == 5
    assert measuring.limit_seconds == each


def test_answers_become_sums_over_the_segments(prepared: tuple[TracedModel, SegmentMeasuring]) -> None:
    model, measuring = prepared
    found = measuring.seconds(answers(measuring)).seconds
    assert found is not None
    expected = [float(kind + 1) for kind in measuring.kinds.of_segment]
    assert len(found.forward) == len(model.segments.positions)
    assert [after - before for before, after in itertools.pairwise(found.forward)] == expected
    assert [found.forward[-1], found.backward[-1], found.accumulate[-1], found.update[-1]] == [
        factor * sum(expected) for factor in (1.0, 2.0, 0.5, 0.25)
    ]
    assert (found.forward[0], found.update[0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "did not answer"),
        (Measured(failure="memory ran out"), "memory ran out"),
        (Measured(forward_seconds=math.nan), "cannot be"),
        (Measured(forward_seconds=1.0, backward_seconds=-1.0), "cannot be"),
        (Measured(forward_seconds=1.0, update_seconds=math.inf), "cannot be"),
        (Measured(), "cannot be"),
    ],
)
def test_one_answer_that_is_missing_or_absurd_spoils_all(
    prepared: tuple[TracedModel, SegmentMeasuring], wrong: Measured | None, words: str
) -> None:
    _, measuring = prepared
    given = answers(measuring)
    last = measuring.fingerprints[-1]
    if wrong is None:
        del given[last]
    else:
        given[last] = wrong
    combined = measuring.seconds(given)
    assert combined.seconds is None
    assert words in combined.reason
