"""Why a peer is left over: a sentence about what it would do to the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planning.costs import Constraints, MemoryTable, allowed_bytes, peer_seconds
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.pipeline import Pipeline
from atoll.coordinator.planning.processors import crowded
from atoll.coordinator.planning.segments import PeerOffer, Segments
from atoll.protocol.ids import PeerId
from atoll.protocol.job_errors import listed
from atoll.protocol.quantities import format_bytes, format_rate, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """``code``: memory, compute, line, processors or surplus."""

    peer: PeerId
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation:
    """What was planned for; ``peers`` and ``network`` in the same order."""

    segments: Segments
    peers: tuple[PeerOffer, ...]
    network: Network
    constraints: Constraints
    memory: MemoryTable


def explain_spares(situation: Situation, used: frozenset[PeerId], pipeline: Pipeline) -> tuple[Spare, ...]:
    """One for each peer that is not used, in the order of the peers."""
    pace = _pace(pipeline)
    own = np.diff(peer_seconds(situation.segments, situation.peers).all_works, axis=1).min(axis=1)
    single = np.arange(situation.segments.num_segments)
    memory = situation.memory
    least_bytes = float((memory.fixed + memory.microbatch)[:, single, single + 1].min())
    spares = []
    for index, peer in enumerate(situation.peers):
        if peer.name in used:
            continue
        allowed = allowed_bytes(peer, situation.constraints)
        line = _line_seconds(situation.segments, situation.network, index)
        if allowed < least_bytes:
            code = "memory"
            reason = (
                f"the smallest part of the model needs {format_bytes(least_bytes)}, and it can give {format_bytes(allowed)}"
            )
        elif own[index] > pace:
            code = "compute"
            slow = f"even the smallest part of the model takes it {format_seconds(float(own[index]))} a microbatch"
            reason = f"{slow}, and the pipeline gets by with {format_seconds(pace)}"
        elif line > pace:
            code = "line"
            slow = f"its line ({format_rate(_rate(situation.network, index))}) is busy for {format_seconds(line)} a microbatch"
            reason = f"{slow}, and the pipeline gets by with {format_seconds(pace)}"
        elif companions := _companions(situation.peers, peer, used):
            code, reason = "processors", f"it shares its processors with {listed(companions, 'and')}, and these keep them busy"
        elif len(used) >= situation.segments.num_segments and situation.constraints.num_replicas == 1:
            code, reason = "surplus", f"the model has {situation.segments.num_segments} parts, and each has a peer"
        elif situation.constraints.num_replicas is None:
            code, reason = "surplus", _no_use_as_a_replica(situation, pipeline, index)
        else:
            code, reason = "surplus", "one more stage would make the pipeline longer, not the step shorter"
        spares.append(Spare(peer=peer.name, code=code, reason=reason))
    return tuple(spares)


def _no_use_as_a_replica(situation: Situation, pipeline: Pipeline, index: int) -> str:
    """What summing gradients with it would take, beside what it could save at the slowest stage."""
    neither = "neither one more stage nor another replica would make the step noticeably shorter"
    count, sizes = pipeline.num_microbatches, situation.segments.parameter_bytes
    seconds = peer_seconds(situation.segments, situation.peers).all_works[index]
    share = 1.0 / len(pipeline.seats)
    summing = share * sizes[-1] * situation.constraints.averaging.ratio / _rate(situation.network, index)
    pace = _pace(pipeline)
    saved = count * pace * pace / (pace + share * float(seconds[-1]))
    words = f"a stage of usual size takes {format_seconds(summing)} to sum its gradients with it in a step"
    return f"{neither}: {words}, and it would save {format_seconds(saved)} at most"


def _companions(peers: tuple[PeerOffer, ...], peer: PeerOffer, used: frozenset[PeerId]) -> list[str]:
    """The used peers of its machine, where these and it want more threads than there are cores."""
    others = [other for other in peers if other.name in used and other.machine == peer.machine]
    return [str(other.name) for other in others] if crowded([peer, *others]) else []


def _pace(pipeline: Pipeline) -> float:
    """The time between microbatches of a full pipeline, as far as stages and links decide it."""
    count = pipeline.num_microbatches
    paces = [
        pipeline.stages[seat].microbatch_seconds * pipeline.holders[stage].count(seat) / count
        for seat, stage in enumerate(pipeline.stage_of)
    ]
    for link, load in zip(pipeline.links, pipeline.loads, strict=True):
        paces += [load / count * link.forward.wire_seconds, load / count * link.backward.wire_seconds]
    return max(paces)


def _rate(network: Network, index: int) -> float:
    """What the peer's line or its best links give, in the worse direction."""
    others = np.arange(len(network.names)) != index
    line = min(float(network.upload[index]), float(network.download[index]))
    if not others.any():
        return line
    return min(line, float(network.rate[index, others].max()), float(network.rate[others, index].max()))


def _line_seconds(segments: Segments, network: Network, index: int) -> float:
    """How long the narrowest cut keeps the peer's line busy."""
    if segments.num_segments < 2:
        return 0.0
    cuts = zip(segments.forward_bytes[1:-1], segments.backward_bytes[1:-1], strict=True)
    return min(max(there, back) for there, back in cuts) / _rate(network, index)
