"""What the planner must know of a model and of the peers. Values only.

The graph may be cut at ``positions``; segment ``k`` holds the nodes from ``positions[k]`` up to ``positions[k + 1]``. A
stage is a range of segments, from position ``i`` to position ``j``. Costs are for one microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from atoll.compression.policy import Rung
from atoll.protocol.ids import NodeIndex, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes that a stage needs: ``fixed_bytes`` always, ``microbatch_bytes`` more for each microbatch in flight."""

    fixed_bytes: int
    microbatch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBytes:
    """Parameters of ``num_bytes`` that several ``segments`` use. Stages that hold them exchange their gradients at a step's
    end."""

    segments: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The graph between its possible cuts.

    ``forward_flops[k]``, ``backward_flops[k]`` and ``parameter_bytes[k]`` are sums over all nodes before ``positions[k]``.
    ``forward_bytes[k]`` is what a cut there sends to the later stage, ``backward_bytes[k]`` what comes back.
    ``memory(i, j, recompute)`` is the need of a stage from position ``i`` to position ``j``, messages included. ``changing``
    are the segments whose forward writes into buffers, such as running statistics.
    """

    positions: tuple[NodeIndex, ...]
    forward_flops: tuple[float, ...]
    backward_flops: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]
    memory: Callable[[int, int, bool], StageMemory]
    shared: tuple[SharedBytes, ...] = ()
    changing: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.positions)
        lengths = {
            len(values)
            for values in (
                self.forward_flops,
                self.backward_flops,
                self.parameter_bytes,
                self.forward_bytes,
                self.backward_bytes,
            )
        }
        if count < 2 or lengths != {count}:
            raise ValueError(f"{count} positions need as many sums and crossing bytes, got {sorted(lengths)}")

    @property
    def num_segments(self) -> int:
        return len(self.positions) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSeconds:
    """What a peer measured: sums over all segments before each position, in seconds.

    ``backward`` is until the gradients of what a segment received are there, ``accumulate`` the gradients of its weights
    after that; ``update`` is once a step, the norms of the gradients and the optimizer."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    accumulate: tuple[float, ...]
    update: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOffer:
    """What a peer said of itself at joining, and what was measured of it. ``measured`` replaces the estimate from
    ``flops_per_second``; ``overhead_seconds`` is added to each work. ``coordinator_round_trip_seconds`` is what a small message
    takes to the coordinator and back.

    Only ``trusted`` peers hold the first and the last stage where the request asks for trusted ends; ``vouched``: the operator
    invited it as one of them. Peers that name the same
    ``machine`` share its ``cores``: while more of their ``threads`` compute than there are, each gets its part. An empty name
    is a machine of its own; ``beside_coordinator`` says that the coordinator runs there too. ``handling_seconds`` are those for
    which one end of a small message keeps a core busy, 0 where that is not known. ``codecs`` are those whose speed there was
    measured.
    """

    name: PeerId
    flops_per_second: float
    memory_bytes: int
    measured: MeasuredSeconds | None = None
    overhead_seconds: float = 0.0
    coordinator_round_trip_seconds: float = 0.0
    trusted: bool = True
    vouched: bool = False
    machine: str = ""
    cores: int = 0
    threads: int = 1
    beside_coordinator: bool = False
    handling_seconds: float = 0.0
    codecs: tuple[Rung, ...] = ()


RAW = Rung(name="raw")


def state_copies(optimizer: str, momentum: float) -> int:
    """Bytes of weights and of what the optimizer keeps for them, for each byte of weights."""
    if optimizer == "adamw":
        return 3
    return 2 if momentum else 1


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sorts ``peer-2`` before ``peer-10``."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]+)", name)]
