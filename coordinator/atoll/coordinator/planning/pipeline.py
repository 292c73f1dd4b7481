"""A pipeline as the simulator sees it: how long each work takes, what crosses each link. Values only.

A *seat* is one peer's place in the pipeline: a replica of a stage. Where no stage has several replicas, seats are stages.
Seconds and bytes are for one microbatch unless the name says otherwise. ``Transfer`` is one direction of a link between seats
of neighbouring stages; a seat's upload and download are shared by all that it sends and receives at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise


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
    """Between a seat and one of the next stage."""

    forward: Transfer
    backward: Transfer
    duplex: Duplex = Duplex.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What seat ``source`` sends to seat ``target`` of another stage once its gradients are complete: those of shared
    parameters."""

    source: int
    target: int
    transfer: Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """How the replicas of a stage sum their gradients at a step's end: each owns an equal part, gets it from all others, adds
    and gives them the sum, so that each sends and receives ``2 (n - 1) / n`` of the gradients' bytes.

    This is reduce-scatter and all-gather in one round each, the butterfly of hivemind's averaging; its bytes are the least that
    any all-reduce can do with (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009).
    ``parts[i][j]`` is what replica ``i`` sends to ``j`` in either round, None to itself."""

    parts: tuple[tuple[Transfer | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The replicas of a stage. Microbatch ``m`` goes to replica ``deal[m]``; every replica is dealt one at least."""

    deal: tuple[int, ...]
    averaging: Averaging

    @property
    def num_replicas(self) -> int:
        return len(self.averaging.parts)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One step. ``stages`` has an entry for each seat, in the order of the stages. ``groups`` has one for each stage, None
    where a single peer has it; empty where that is so everywhere. ``links`` join the seats of ``ends``. ``commit_seconds`` is
    what the coordinator takes from the last seat's report until it sends its word. All that goes between seats of ``relayed``
    pairs shares ``relay_bytes_per_second``."""

    stages: tuple[StageTimes, ...]
    links: tuple[Link, ...]
    num_microbatches: int
    exchanges: tuple[Exchange, ...] = ()
    commit_seconds: float = 0.0
    groups: tuple[Group | None, ...] = ()
    relayed: frozenset[tuple[int, int]] = frozenset()
    relay_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or any(stage.in_flight < 1 for stage in self.stages):
            raise ValueError("a pipeline needs at least one microbatch, and one in flight at each stage")
        if self.groups and self.seats[-1][-1] != len(self.stages) - 1:
            raise ValueError(f"there are {len(self.stages)} stage times for {self.seats[-1][-1] + 1} replicas")
        for group in self.groups:
            if group is not None and (
                len(group.deal) != self.num_microbatches or set(group.deal) != set(range(group.num_replicas))
            ):
                raise ValueError(f"every microbatch goes to a replica and every replica gets one, not {group.deal}")
        if len(self.links) != len(self.ends):
            raise ValueError(f"{len(self.seats)} stages need {len(self.ends)} links, got {len(self.links)}")

    @cached_property
    def seats(self) -> tuple[tuple[int, ...], ...]:
        """The seats of each stage."""
        return seats_of([1 if group is None else group.num_replicas for group in self.groups] or [1] * len(self.stages))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each seat."""
        return tuple(stage for stage, members in enumerate(self.seats) for _ in members)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the seat of each microbatch."""
        return holders_of(
            [group.deal if group is not None else () for group in self.groups] or [()] * len(self.stages),
            self.seats,
            self.num_microbatches,
        )

    @cached_property
    def ends(self) -> tuple[tuple[int, int], ...]:
        """The seats that each link joins: those of neighbouring stages that share a microbatch."""
        return ends_of(self.holders) if self.groups else tuple(pairwise(range(len(self.stages))))

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """How many microbatches cross each link."""
        if not self.groups:
            return (self.num_microbatches,) * len(self.links)
        return loads_of(self.holders, self.ends)


class WorkKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"
    SEND_FORWARD = "send forward"
    SEND_BACKWARD = "send backward"
    EXCHANGE = "exchange"
    AVERAGE = "average"
    UPDATE = "update"
    FINISH = "norms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One bar of the picture. ``stage`` is the seat; for what is sent, the sender's."""

    kind: WorkKind
    stage: int
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened in one step, from the coordinator's word for the step before to its word for this one.

    ``compute_seconds`` is what each seat computes for microbatches at full speed, ``busy_seconds`` how long it is at them and
    at the norms by the clock, slowed down by others on its machine. ``sent_seconds`` is how long each link was busy (forward,
    backward), ``peak_in_flight`` the most microbatches each seat held. ``averaging_seconds`` is, for each stage, how long its
    replicas wait for the sum of their gradients when the last of them has its own; 0 for one replica.
    """

    step_seconds: float
    compute_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    sent_seconds: tuple[tuple[float, float], ...]
    peak_in_flight: tuple[int, ...]
    averaging_seconds: tuple[float, ...]
    activities: tuple[Activity, ...] = ()


def seats_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The seats of stages with so many replicas."""
    seats, first = [], 0
    for size in sizes:
        seats.append(tuple(range(first, first + size)))
        first += size
    return tuple(seats)


def holders_of(
    deals: Sequence[tuple[int, ...]], seats: Sequence[tuple[int, ...]], num_microbatches: int
) -> tuple[tuple[int, ...], ...]:
    """For each stage the seat of each microbatch; an empty deal is that of a single replica."""
    return tuple(
        tuple(map(own.__getitem__, dealt)) if dealt else own[:1] * num_microbatches
        for dealt, own in zip(deals, seats, strict=True)
    )


def ends_of(holders: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """The pairs of seats of neighbouring stages that share a microbatch, in order."""
    return tuple(pair for one, other in pairwise(holders) for pair in sorted(set(zip(one, other, strict=True))))


def loads_of(holders: Sequence[tuple[int, ...]], ends: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """How many microbatches each pair of ``ends`` shares."""
    counts = Counter(pair for one, other in pairwise(holders) for pair in zip(one, other, strict=True))
    return tuple(counts[pair] for pair in ends)
