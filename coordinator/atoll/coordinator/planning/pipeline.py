"""A pipeline as the simulator sees it: how long each work takes, what crosses each link. Values only.

Seconds and bytes are for one microbatch unless the name says otherwise. ``Transfer`` is one direction of a link between
neighbouring stages; a stage's upload and download are shared by all that it sends and receives at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Duplex(StrEnum):
    """How the two directions of a link share it.

    FULL: each direction has its own rate. HALF: both share the rate. SERIAL: one message at a time in either direction,
    and the link is taken until the message has arrived.
    """

    FULL = "full"
    HALF = "half"
    SERIAL = "serial"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """``backward_seconds`` is until the gradient of the input leaves, ``accumulate_seconds`` the gradients of the weights
    after that.

    ``recompute_seconds`` precedes each backward. Once a step, ``update_seconds`` is the optimizer's, for the step before, and
    ``finish_seconds`` what a stage does when it has all its gradients: their norms. At most ``in_flight`` microbatches have
    begun forward and not ended accumulate. ``coordinator_seconds`` is one way between the coordinator and the peer.

    Stages that name the same ``machine`` share its ``cores`` with their ``threads``; without a machine or cores a stage has its
    processors for itself.
    """

    forward_seconds: float
    backward_seconds: float
    accumulate_seconds: float = 0.0
    recompute_seconds: float = 0.0
    update_seconds: float = 0.0
    finish_seconds: float = 0.0
    coordinator_seconds: float = 0.0
    in_flight: int
    upload_bytes_per_second: float = math.inf
    download_bytes_per_second: float = math.inf
    machine: str = ""
    cores: int = 0
    threads: int = 1

    @property
    def microbatch_seconds(self) -> float:
        """Computing for one microbatch, all works together."""
        return self.forward_seconds + self.backward_seconds + self.accumulate_seconds + self.recompute_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message a microbatch in one direction. Encoding and decoding go on beside computing, one message at a time."""

    num_bytes: float
    bytes_per_second: float
    latency_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def wire_seconds(self) -> float:
        """How long an otherwise idle link is busy with one message."""
        return self.num_bytes / self.bytes_per_second if self.num_bytes else 0.0

    @property
    def seconds(self) -> float:
        """From handing over a message to having it, on an otherwise idle link."""
        return self.encode_seconds + self.wire_seconds + self.latency_seconds + self.decode_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between stage ``s`` and stage ``s + 1``."""

    forward: Transfer
    backward: Transfer
    duplex: Duplex = Duplex.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What stage ``source`` sends to stage ``target`` once its gradients are complete: gradients of shared parameters."""

    source: int
    target: int
    transfer: Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One step. ``commit_seconds`` is what the coordinator takes from the last stage's report until it sends its word."""

    stages: tuple[StageTimes, ...]
    links: tuple[Link, ...]
    num_microbatches: int
    exchanges: tuple[Exchange, ...] = ()
    commit_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.links) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages need {len(self.stages) - 1} links, got {len(self.links)}")
        if self.num_microbatches < 1 or any(stage.in_flight < 1 for stage in self.stages):
            raise ValueError("a pipeline needs at least one microbatch, and one in flight at each stage")


class WorkKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"
    SEND_FORWARD = "send forward"
    SEND_BACKWARD = "send backward"
    EXCHANGE = "exchange"
    UPDATE = "update"
    FINISH = "norms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One bar of the picture. For what is sent, ``stage`` is the sender's."""

    kind: WorkKind
    stage: int
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened in one step, from the coordinator's word for the step before to its word for this one.

    ``compute_seconds`` is what each stage computes for microbatches at full speed, ``busy_seconds`` how long it is at them and
    at the norms by the clock, slowed down by others on its machine. ``sent_seconds`` is how long each link was busy (forward,
    backward), ``peak_in_flight`` the most microbatches each stage held.
    """

    step_seconds: float
    compute_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    sent_seconds: tuple[tuple[float, float], ...]
    peak_in_flight: tuple[int, ...]
    activities: tuple[Activity, ...] = ()
