"""What the coordinator asks a peer to measure: one kind of segment, alone; travels as one blob in a MEASUREMENT message."""

from __future__ import annotations

import math
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from atoll.protocol.assignment import PRECISIONS, OptimizerSettings, optimizer_from_proto, optimizer_to_proto
from atoll.protocol.errors import WireError
from atoll.protocol.graph import StageGraph
from atoll.protocol.graph_codec import stage_graph_from_proto, stage_graph_to_proto
from atoll.protocol.v1 import graph_pb2 as wire

MEASUREMENT_VERSION = 1
"""Part of every fingerprint and of a cache's keys: raise it when what is measured, or how, changes."""

REQUEST_TENSOR = "request"
INPUT_PREFIX = "input:"
BUFFER_PREFIX = "buffer:"
MAX_LIMIT_SECONDS = 60.0
"""A peer measures for no longer than this, whatever it is asked for."""
MAX_KIND_LENGTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRequest:
    """``kind`` is the fingerprint that the answer repeats; ``clips`` says whether a commit scales the gradients.

    ``limit_seconds`` is about what the measuring may take; however slow the peer is, it measures once.
    """

    kind: str
    graph: StageGraph
    precision: str
    optimizer: OptimizerSettings
    clips: bool
    limit_seconds: float


def request_to_bytes(request: MeasurementRequest) -> bytes:
    """The blob of a MEASUREMENT message."""
    message = wire.MeasurementRequest(
        kind=request.kind,
        graph=stage_graph_to_proto(request.graph),
        precision=request.precision,
        optimizer=optimizer_to_proto(request.optimizer),
        clips=request.clips,
        limit_seconds=request.limit_seconds,
    )
    return message.SerializeToString(deterministic=True)


def request_from_bytes(data: bytes) -> MeasurementRequest:
    """Inverse of :func:`request_to_bytes`; raises WireError for anything that is no request."""
    try:
        message = wire.MeasurementRequest.FromString(data)
    except DecodeError as error:
        raise WireError("these bytes are no request for a measurement") from error
    if not 0 < len(message.kind) <= MAX_KIND_LENGTH:
        raise WireError("the request for a measurement names no kind of segment")
    if not message.HasField("graph"):
        raise WireError("the request for a measurement has no graph")
    if message.precision not in PRECISIONS:
        raise WireError(f"the precision {message.precision!r} to measure is none of {', '.join(PRECISIONS)}")
    if not math.isfinite(message.limit_seconds) or message.limit_seconds <= 0:
        raise WireError(f"a measurement cannot be made within {message.limit_seconds} s")
    return MeasurementRequest(
        kind=message.kind,
        graph=stage_graph_from_proto(message.graph),
        precision=message.precision,
        optimizer=optimizer_from_proto(message.optimizer),
        clips=message.clips,
        limit_seconds=min(message.limit_seconds, MAX_LIMIT_SECONDS),
    )
