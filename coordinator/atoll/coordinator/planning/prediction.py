"""From a layout to the pipeline that the simulator runs, and what the step is then predicted to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from atoll.compression.policy import Demand, Pace, Rung, first_choices
from atoll.coordinator.planning.codecs import coding_shares, link_rate
from atoll.coordinator.planning.costs import (
    AVERAGING_COPIES,
    Constraints,
    CostTable,
    MemoryTable,
    PeerSeconds,
    held_by_replicas,
    peer_seconds,
)
from atoll.coordinator.planning.dealing import deal
from atoll.coordinator.planning.layouts import Layout, layout_pace, speeds
from atoll.coordinator.planning.network import Matrix, Network
from atoll.coordinator.planning.pipeline import (
    Averaging,
    Exchange,
    Group,
    Link,
    Pipeline,
    StageTimes,
    Transfer,
    ends_of,
    holders_of,
    loads_of,
    seats_of,
)
from atoll.coordinator.planning.processors import full
from atoll.coordinator.planning.segments import PeerOffer, Segments
from atoll.coordinator.planning.simulator import simulate

HANDOVER_SECONDS = 2e-4
"""At each end of a message: from thread to thread, beside computing. Between two peers on one machine a message over loopback
took about 0.75 ms, and 1.1 to 1.4 ms more for each megabyte, all in all; how much of either is whose is a guess."""
CARRIED_BYTES_PER_SECOND = 1e9
"""What a processor core moves between memory and network, at either end: the other part of that measurement, rounded. It
matters where computing leaves no core free."""

ADDED_BYTES_PER_SECOND = 2e9
"""Bytes of other replicas' gradients that a processor adds up in a second: a guess; bound by memory, with more to move than for
norms."""
BESIDE_COMPUTING = 2.9
"""How many times longer a message keeps a core busy while others compute, than alone: on one machine 0.9 to 1.1 ms an end in
steps of pipelines of two and three peers, where peers measured 0.34 ms alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCodecs:
    """The codecs of a link."""

    forward: Rung
    backward: Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A peer's place in a layout."""

    stage: int
    peer: int
    first: int
    end: int
    anew: bool
    alone: bool


@dataclass(frozen=True, kw_only=True, eq=False)
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

    @cached_property
    def replica_held(self) -> Matrix:
        """As ``table.held``, for one of several replicas."""
        return held_by_replicas(self.segments, self.memory, self.peers, self.constraints)

    @cached_property
    def _deals(self) -> dict[tuple[tuple[int, ...], int, int, bool], tuple[int, ...]]:
        return {}

    def possible(self, peer: int, first: int, end: int, anew: bool, *, alone: bool = True) -> bool:
        """Whether the peer may run that stage, ``alone`` or as one of several, and can hold at least one microbatch."""
        place = int(anew), peer, first, end
        held = self.table.held if alone else self.replica_held
        return held.item(*place) >= 1.0 and self.table.compute.item(*place) < math.inf

    def fits(self, layout: Layout) -> bool:
        """Whether every stage is possible, and every replica gets a microbatch."""
        return all(
            self.possible(seat.peer, seat.first, seat.end, seat.anew, alone=seat.alone) for seat in seats(layout)
        ) and all(
            not dealt or len(set(dealt)) == len(group) for dealt, group in zip(self.deals(layout), layout.groups, strict=True)
        )

    def deals(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """For each stage which replica gets which microbatch, by their speeds; empty for a single one."""
        if not layout.helpers:
            return ((),) * layout.num_stages
        places = zip(layout.groups, layout.bounds[:-1], layout.bounds[1:], layout.recompute, strict=True)
        return tuple(self._deal(*place) if len(place[0]) > 1 else () for place in places)

    def _deal(self, group: tuple[int, ...], first: int, end: int, anew: bool) -> tuple[int, ...]:
        place = group, first, end, anew
        if place not in self._deals:
            own = speeds(self.table, *place)
            even = [round(speed / max(own), 3) or 1e-3 for speed in own]
            self._deals[place] = deal(even, self.constraints.num_microbatches)
        return self._deals[place]

    def most_in_flight(self, layout: Layout) -> tuple[int, ...]:
        """As many microbatches at each seat as its memory holds."""
        held = self.table.held if not layout.helpers else self.replica_held
        return tuple(
            int((self.table.held if seat.alone else held)[int(seat.anew), seat.peer, seat.first, seat.end])
            for seat in seats(layout)
        )

    def memory_bytes(self, layout: Layout, in_flight: tuple[int, ...]) -> tuple[int, ...]:
        """What each seat needs with so many in flight."""
        sizes = self.segments.parameter_bytes
        return tuple(
            int(
                self.memory.fixed[int(seat.anew), seat.first, seat.end]
                + held * self.memory.microbatch[int(seat.anew), seat.first, seat.end]
                + (0 if seat.alone else AVERAGING_COPIES * (sizes[seat.end] - sizes[seat.first]))
            )
            for seat, held in zip(seats(layout), in_flight, strict=True)
        )

    def codecs(self, layout: Layout) -> tuple[LinkCodecs, ...]:
        """For each link and direction what the policy chooses at the layout's pace."""
        crossing = self._crossing(layout)
        ladders = self.constraints.forward_codecs, self.constraints.backward_codecs
        if len(ladders[0]) == len(ladders[1]) == 1:
            return (LinkCodecs(forward=ladders[0][0], backward=ladders[1][0]),) * len(crossing.ends)
        demands = []
        places = seats(layout)
        shares = coding_shares([self.peers[seat.peer] for seat in places])
        last = layout.num_stages - 1
        for (one, other), load in zip(crossing.ends, crossing.loads, strict=True):
            source, target, end = places[one], places[other], places[one].end
            users = 2 if source.stage else 1, 2 if target.stage < last else 1
            ends = shares[one], shares[other]
            part = load / self.constraints.num_microbatches
            there, back = part * self.segments.forward_bytes[end], part * self.segments.backward_bytes[end]
            demands.append(self._demand(source.peer, target.peer, there, users, ends))
            demands.append(self._demand(target.peer, source.peer, back, users[::-1], ends[::-1]))
        computing = [self.table.compute.item(int(seat.anew), seat.peer, seat.first, seat.end) for seat in _leaders(layout)]
        pace = Pace(
            microbatch_seconds=layout_pace(self.table, layout),
            num_microbatches=self.constraints.num_microbatches,
            fill_seconds=sum(computing) - max(computing),
        )
        chosen = first_choices(ladders * len(crossing.ends), demands, pace)
        return tuple(LinkCodecs(forward=there, backward=back) for there, back in zip(chosen[::2], chosen[1::2], strict=True))

    def _crossing(self, layout: Layout) -> Crossing:
        if not layout.helpers:
            count = layout.num_stages
            loads = (self.constraints.num_microbatches,) * (count - 1)
            return Crossing(deals=((),) * count, ends=tuple(pairwise(range(count))), loads=loads)
        deals = self.deals(layout)
        holders = holders_of(deals, seats_of(list(map(len, layout.groups))), self.constraints.num_microbatches)
        ends = ends_of(holders)
        return Crossing(deals=deals, ends=ends, loads=loads_of(holders, ends))

    def _demand(self, source: int, target: int, num_bytes: float, users: tuple[int, int], shares: tuple[float, ...]) -> Demand:
        rate = link_rate(self.network, self.peers[source], self.peers[target], users)
        return Demand(raw_bytes=num_bytes, bytes_per_second=rate, encoding_share=shares[0], decoding_share=shares[1])

    def pipeline(
        self, layout: Layout, in_flight: tuple[int, ...] | None = None, codecs: tuple[LinkCodecs, ...] | None = None
    ) -> Pipeline:
        """The pipeline of ``layout``; by default with all that memory holds in flight."""
        held = in_flight or self.most_in_flight(layout)
        chosen = self.codecs(layout) if codecs is None else codecs
        places, crossing = seats(layout), self._crossing(layout)
        stages = [self._stage(seat.peer, seat.first, seat.end, seat.anew, held[number]) for number, seat in enumerate(places)]
        links = tuple(
            self._link(places[one], places[other].peer, chosen[number]) for number, (one, other) in enumerate(crossing.ends)
        )
        for index in full(stages):
            peer = self.peers[places[index].peer]
            own = BESIDE_COMPUTING * peer.handling_seconds
            besides = own + self._coordinator_seconds(layout) if peer.beside_coordinator else own
            # Whichever of its neighbours a message is from or for, there is one of them a microbatch.
            before = next((link for link, ends in zip(links, crossing.ends, strict=True) if ends[1] == index), None)
            after = next((link for link, ends in zip(links, crossing.ends, strict=True) if ends[0] == index), None)
            stages[index] = _with_messages(stages[index], before, (after,) if after is not None else (), own, besides)
        return Pipeline(
            stages=tuple(stages),
            links=links,
            num_microbatches=self.constraints.num_microbatches,
            exchanges=self._exchanges(layout),
            commit_seconds=self.constraints.commit_seconds,
            groups=self._groups(layout, crossing.deals) if layout.helpers else (),
            relayed=self._relayed(places),
            relay_bytes_per_second=self.network.relayed.bytes_per_second,
        )

    def _relayed(self, places: Sequence[Seat]) -> frozenset[tuple[int, int]]:
        """Between which seats the coordinator's line lies."""
        pairs = self.network.relayed.pairs
        if not pairs:
            return frozenset()
        names = [self.network.names[seat.peer] for seat in places]
        return frozenset(
            (one, other)
            for other in range(len(names))
            for one in range(other)
            if frozenset((names[one], names[other])) in pairs
        )

    def _groups(self, layout: Layout, deals: tuple[tuple[int, ...], ...]) -> tuple[Group | None, ...]:
        places = zip(layout.groups, deals, layout.bounds[:-1], layout.bounds[1:], strict=True)
        return tuple(
            Group(deal=dealt, averaging=self.averaging(group, first, end)) if dealt else None
            for group, dealt, first, end in places
        )

    def averaging(self, group: tuple[int, ...], first: int, end: int) -> Averaging:
        """What the replicas ``group`` of a stage send to each other to sum its gradients."""
        sizes = self.segments.parameter_bytes
        part = (sizes[end] - sizes[first]) / len(group)
        return Averaging(
            parts=tuple(
                tuple(
                    None
                    if one == other
                    else _transfer(
                        part,
                        float(self.network.rate[one, other]),
                        float(self.network.latency[one, other]),
                        self.constraints.averaging,
                        adding_seconds=part / ADDED_BYTES_PER_SECOND,
                    )
                    for other in group
                )
                for one in group
            )
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

    def _link(self, source: Seat, other: int, codecs: LinkCodecs) -> Link:
        one, cut = source.peer, source.end
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
        beside = [offer for offer in (self.peers[peer] for peer in layout.seats) if offer.beside_coordinator]
        return BESIDE_COMPUTING * max(offer.handling_seconds for offer in beside) * layout.num_stages / len(beside)

    def _exchanges(self, layout: Layout) -> tuple[Exchange, ...]:
        """The first replica of a stage sends the gradients of shared parameters to every replica of the others."""
        exchanges = []
        members = seats_of(list(map(len, layout.groups)))
        peers = layout.seats
        for shared in self.segments.shared:
            holders = sorted({_stage_of(layout, segment) for segment in shared.segments})
            for source in holders:
                for target in (seat for stage in holders if stage != source for seat in members[stage]):
                    one, other = peers[members[source][0]], peers[target]
                    transfer = Transfer(
                        num_bytes=shared.num_bytes,
                        bytes_per_second=float(self.network.rate[one, other]),
                        latency_seconds=float(self.network.latency[one, other]),
                    )
                    exchanges.append(Exchange(source=members[source][0], target=target, transfer=transfer))
        return tuple(exchanges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How the microbatches go through a layout: ``deals`` by stage, the seats that exchange messages, and how many each."""

    deals: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int], ...]
    loads: tuple[int, ...]


def seats(layout: Layout) -> list[Seat]:
    """The places of all peers of ``layout``, stage by stage."""
    return [
        Seat(stage=stage, peer=peer, first=first, end=end, anew=anew, alone=len(group) == 1)
        for stage, (group, first, end, anew) in enumerate(
            zip(layout.groups, layout.bounds[:-1], layout.bounds[1:], layout.recompute, strict=True)
        )
        for peer in group
    ]


def _leaders(layout: Layout) -> list[Seat]:
    found = seats(layout)
    return [seat for number, seat in enumerate(found) if not number or found[number - 1].stage != seat.stage]


def _between(sums: Matrix, peer: int, first: int, end: int) -> float:
    return sums.item(peer, end) - sums.item(peer, first)


def _stage_of(layout: Layout, segment: int) -> int:
    return next(stage for stage, end in enumerate(layout.bounds[1:]) if segment < end)


def _transfer(num_bytes: float, rate: float, latency: float, codec: Rung, adding_seconds: float = 0.0) -> Transfer:
    return Transfer(
        num_bytes=num_bytes * codec.ratio,
        bytes_per_second=rate,
        latency_seconds=latency,
        encode_seconds=HANDOVER_SECONDS + num_bytes / codec.encode_bytes_per_second,
        decode_seconds=HANDOVER_SECONDS + num_bytes / codec.decode_bytes_per_second + adding_seconds,
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
