"""From a layout to the pipeline that the simulator runs, and what the step is then predicted to take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from atoll.compression.policy import Demand, Pace, Rung, first_choices
from atoll.coordinator.planning.codecs import coding_shares, link_rate
from atoll.coordinator.planning.costs import Constraints, CostTable, MemoryTable, PeerSeconds, peer_seconds
from atoll.coordinator.planning.cuts import Layout, layout_pace
from atoll.coordinator.planning.network import Matrix, Network
from atoll.coordinator.planning.pipeline import Exchange, Link, Pipeline, StageTimes, Transfer
from atoll.coordinator.planning.processors import full
from atoll.coordinator.planning.segments import PeerOffer, Segments
from atoll.coordinator.planning.simulator import simulate

HANDOVER_SECONDS = 2e-4
"""At each end of a message: from thread to thread, beside computing. Between two peers on one machine a message over loopback
took about 0.75 ms, and 1.1 to 1.4 ms more for each megabyte, all in all; how much of either is whose is a guess."""
CARRIED_BYTES_PER_SECOND = 1e9
"""What a processor core moves between memory and network, at either end: the other part of that measurement, rounded. It
matters where computing leaves no core free."""


BESIDE_COMPUTING = 2.9
"""How many times longer a message keeps a core busy while others compute, than alone: on one machine 0.9 to 1.1 ms an end in
steps of pipelines of two and three peers, where peers measured 0.34 ms alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCodecs:
    """The codecs of the link after a stage."""

    forward: Rung
    backward: Rung


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictor:
    """Predicts layouts of ``peers``. Peers, network and table are in the same order."""

    segments: Segments
    peers: tuple[PeerOffer, ...]
    network: Network
    constraints: Constraints
    memory: MemoryTable
    table: CostTable
    seconds: PeerSeconds

    @classmethod
    def of(
        cls,
        segments: Segments,
        peers: tuple[PeerOffer, ...],
        network: Network,
        constraints: Constraints,
        memory: MemoryTable,
        table: CostTable,
    ) -> Predictor:
        """A predictor with each peer's times looked up once."""
        return cls(
            segments=segments,
            peers=peers,
            network=network,
            constraints=constraints,
            memory=memory,
            table=table,
            seconds=peer_seconds(segments, peers),
        )

    def possible(self, peer: int, first: int, end: int, anew: bool) -> bool:
        """Whether the peer may run that stage and can hold at least one microbatch."""
        place = int(anew), peer, first, end
        return self.table.held.item(*place) >= 1.0 and self.table.compute.item(*place) < math.inf

    def fits(self, layout: Layout) -> bool:
        """Whether every stage is possible."""
        return all(self.possible(*stage) for stage in _stages(layout))

    def most_in_flight(self, layout: Layout) -> tuple[int, ...]:
        """As many microbatches at each stage as its memory holds."""
        return tuple(int(self.table.held[int(anew), peer, first, end]) for peer, first, end, anew in _stages(layout))

    def memory_bytes(self, layout: Layout, in_flight: tuple[int, ...]) -> tuple[int, ...]:
        """What each stage needs with so many in flight."""
        return tuple(
            int(self.memory.fixed[int(anew), first, end] + held * self.memory.microbatch[int(anew), first, end])
            for (_, first, end, anew), held in zip(_stages(layout), in_flight, strict=True)
        )

    def codecs(self, layout: Layout) -> tuple[LinkCodecs, ...]:
        """For each link and direction what the policy chooses at the layout's pace."""
        ladders = self.constraints.forward_codecs, self.constraints.backward_codecs
        if len(ladders[0]) == len(ladders[1]) == 1:
            return (LinkCodecs(forward=ladders[0][0], backward=ladders[1][0]),) * (layout.num_stages - 1)
        demands = []
        shares = coding_shares([self.peers[peer] for peer in layout.peers])
        last = layout.num_stages - 1
        for stage, (one, other) in enumerate(pairwise(layout.peers)):
            end = layout.bounds[stage + 1]
            users = 2 if stage else 1, 2 if stage + 1 < last else 1
            ends = shares[stage : stage + 2]
            demands.append(self._demand(one, other, self.segments.forward_bytes[end], users, ends))
            demands.append(self._demand(other, one, self.segments.backward_bytes[end], users[::-1], ends[::-1]))
        computing = [self.table.compute.item(int(anew), peer, first, end) for peer, first, end, anew in _stages(layout)]
        pace = Pace(
            microbatch_seconds=layout_pace(self.table, layout),
            num_microbatches=self.constraints.num_microbatches,
            fill_seconds=sum(computing) - max(computing),
        )
        chosen = first_choices(ladders * (layout.num_stages - 1), demands, pace)
        return tuple(LinkCodecs(forward=there, backward=back) for there, back in zip(chosen[::2], chosen[1::2], strict=True))

    def _demand(self, source: int, target: int, num_bytes: float, users: tuple[int, int], shares: tuple[float, ...]) -> Demand:
        rate = link_rate(self.network, self.peers[source], self.peers[target], users)
        return Demand(raw_bytes=num_bytes, bytes_per_second=rate, encoding_share=shares[0], decoding_share=shares[1])

    def pipeline(
        self, layout: Layout, in_flight: tuple[int, ...] | None = None, codecs: tuple[LinkCodecs, ...] | None = None
    ) -> Pipeline:
        """The pipeline of ``layout``; by default with all that memory holds in flight."""
        held = in_flight or self.most_in_flight(layout)
        chosen = self.codecs(layout) if codecs is None else codecs
        stages = [
            self._stage(peer, first, end, anew, held[stage]) for stage, (peer, first, end, anew) in enumerate(_stages(layout))
        ]
        links = tuple(self._link(layout, stage, chosen[stage]) for stage in range(layout.num_stages - 1))
        for index in full(stages):
            peer = self.peers[layout.peers[index]]
            own = BESIDE_COMPUTING * peer.handling_seconds
            besides = own + self._coordinator_seconds(layout) if peer.beside_coordinator else own
            before = links[index - 1] if index else None
            stages[index] = _with_messages(stages[index], before, links[index : index + 1], own, besides)
        return Pipeline(
            stages=tuple(stages),
            links=links,
            num_microbatches=self.constraints.num_microbatches,
            exchanges=self._exchanges(layout),
            commit_seconds=self.constraints.commit_seconds,
        )

    def step_seconds(self, layout: Layout, in_flight: tuple[int, ...] | None = None) -> float:
        """What the simulator says."""
        return simulate(self.pipeline(layout, in_flight)).step_seconds

    def _stage(self, peer: int, first: int, end: int, anew: bool, in_flight: int) -> StageTimes:
        offer, seconds = self.peers[peer], self.seconds
        forward = _between(seconds.forward, peer, first, end) + offer.overhead_seconds
        backward = _between(seconds.backward, peer, first, end) + offer.overhead_seconds
        accumulate = _between(seconds.accumulate, peer, first, end)
        # The first stage has nobody to send a gradient to and makes all its gradients at once.
        at_once = first == 0
        return StageTimes(
            forward_seconds=forward,
            backward_seconds=backward + accumulate if at_once else backward,
            accumulate_seconds=0.0 if at_once else accumulate,
            recompute_seconds=forward if anew else 0.0,
            update_seconds=_between(seconds.update, peer, first, end),
            finish_seconds=_between(seconds.finish, peer, first, end),
            coordinator_seconds=offer.coordinator_round_trip_seconds / 2.0,
            in_flight=in_flight,
            upload_bytes_per_second=float(self.network.upload[peer]),
            download_bytes_per_second=float(self.network.download[peer]),
            machine=offer.machine,
            cores=offer.cores,
            threads=offer.threads,
        )

    def _link(self, layout: Layout, stage: int, codecs: LinkCodecs) -> Link:
        one, other, cut = layout.peers[stage], layout.peers[stage + 1], layout.bounds[stage + 1]
        rate, latency = self.network.rate, self.network.latency
        return Link(
            forward=_transfer(
                self.segments.forward_bytes[cut], float(rate[one, other]), float(latency[one, other]), codecs.forward
            ),
            backward=_transfer(
                self.segments.backward_bytes[cut], float(rate[other, one]), float(latency[other, one]), codecs.backward
            ),
            duplex=self.constraints.duplex,
        )

    def _coordinator_seconds(self, layout: Layout) -> float:
        """For which the coordinator, which sends every stage its batches, keeps each peer on its machine from a microbatch."""
        beside = [offer for offer in (self.peers[peer] for peer in layout.peers) if offer.beside_coordinator]
        return BESIDE_COMPUTING * max(offer.handling_seconds for offer in beside) * layout.num_stages / len(beside)

    def _exchanges(self, layout: Layout) -> tuple[Exchange, ...]:
        exchanges = []
        for shared in self.segments.shared:
            holders = sorted({_stage_of(layout, segment) for segment in shared.segments})
            for source in holders:
                for target in holders:
                    if source != target:
                        one, other = layout.peers[source], layout.peers[target]
                        transfer = Transfer(
                            num_bytes=shared.num_bytes,
                            bytes_per_second=float(self.network.rate[one, other]),
                            latency_seconds=float(self.network.latency[one, other]),
                        )
                        exchanges.append(Exchange(source=source, target=target, transfer=transfer))
        return tuple(exchanges)


def _between(sums: Matrix, peer: int, first: int, end: int) -> float:
    return sums.item(peer, end) - sums.item(peer, first)


def _stages(layout: Layout) -> list[tuple[int, int, int, bool]]:
    return list(zip(layout.peers, layout.bounds[:-1], layout.bounds[1:], layout.recompute, strict=True))


def _stage_of(layout: Layout, segment: int) -> int:
    return next(stage for stage, end in enumerate(layout.bounds[1:]) if segment < end)


def _transfer(num_bytes: float, rate: float, latency: float, codec: Rung) -> Transfer:
    return Transfer(
        num_bytes=num_bytes * codec.ratio,
        bytes_per_second=rate,
        latency_seconds=latency,
        encode_seconds=HANDOVER_SECONDS + num_bytes / codec.encode_bytes_per_second,
        decode_seconds=HANDOVER_SECONDS + num_bytes / codec.decode_bytes_per_second,
    )


def _with_messages(
    stage: StageTimes, before: Link | None, after: tuple[Link, ...], handling_seconds: float, besides: float
) -> StageTimes:
    """The stage where no core is free to take care of its messages beside computing; ``besides`` is what its batch takes, and
    what others on the machine do for a microbatch."""
    forward, backward = stage.forward_seconds + besides, stage.backward_seconds
    if before is not None:
        forward += _end_seconds(before.forward, before.forward.decode_seconds, handling_seconds)
        backward += _end_seconds(before.backward, before.backward.encode_seconds, handling_seconds)
    for link in after:
        forward += _end_seconds(link.forward, link.forward.encode_seconds, handling_seconds)
        backward += _end_seconds(link.backward, link.backward.decode_seconds, handling_seconds)
    return replace(stage, forward_seconds=forward, backward_seconds=backward)


def _end_seconds(transfer: Transfer, coding_seconds: float, handling_seconds: float) -> float:
    """For which one end of a message keeps a core busy; ``coding_seconds`` hold the handing over."""
    return (
        max(coding_seconds, coding_seconds - HANDOVER_SECONDS + handling_seconds)
        + transfer.num_bytes / CARRIED_BYTES_PER_SECOND
    )
