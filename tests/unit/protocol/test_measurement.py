"""Requests for measurements as bytes and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.errors import WireError
from atoll.protocol.measurement import MAX_LIMIT_SECONDS, MeasurementRequest, request_from_bytes, request_to_bytes
from atoll.protocol.v1 import graph_pb2 as wire
from support.hand_models import transformer

REQUEST = MeasurementRequest(
    kind="0123abcd",
    graph=slice_graph(transformer().graph, ())[0],
    precision="bf16",
    optimizer=OptimizerSettings(name="sgd", momentum=0.9, nesterov=True),
    clips=True,
    limit_seconds=0.5,
)


def test_a_request_comes_back_as_it_was() -> None:
    assert request_from_bytes(request_to_bytes(REQUEST)) == REQUEST


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda message: message.ClearField("graph"), "has no graph"),
        (lambda message: message.ClearField("kind"), "names no kind"),
        (lambda message: setattr(message, "kind", "x" * 1000), "names no kind"),
        (lambda message: setattr(message, "precision", "fp8"), "'fp8'"),
        (lambda message: setattr(message.optimizer, "name", "lion"), "'lion'"),
        (lambda message: setattr(message, "limit_seconds", 0.0), "within 0.0 s"),
        (lambda message: setattr(message, "limit_seconds", math.nan), "within nan s"),
    ],
)
def test_nonsense_is_refused(damage: Callable[[wire.MeasurementRequest], None], words: str) -> None:
    message = wire.MeasurementRequest.FromString(request_to_bytes(REQUEST))
    damage(message)
    with pytest.raises(WireError, match=words):
        request_from_bytes(message.SerializeToString())


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(WireError, match="no request"):
        request_from_bytes(b"\xff\xff")


def test_nobody_makes_a_peer_measure_for_ever() -> None:
    message = wire.MeasurementRequest.FromString(request_to_bytes(REQUEST))
    message.limit_seconds = 1e9
    assert request_from_bytes(message.SerializeToString()).limit_seconds == MAX_LIMIT_SECONDS
