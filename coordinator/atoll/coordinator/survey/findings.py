"""What was found out about peers and the links between them: kept, corrected by real traffic, told, and handed to the planner.
Pure.

What was not measured is estimated and marked. A peer whose segments could not be measured is taken for as much slower than its
FLOP/s promise as those that were measured are; an owner's word is taken as it is."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from atoll.coordinator.events import MeasurementEvent
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.segments import MeasuredSeconds, PeerOffer, Segments
from atoll.coordinator.survey.observed import Observed
from atoll.coordinator.survey.probe_results import THE_COORDINATOR, ProbeResult, probed_network
from atoll.coordinator.survey.probe_schedule import ProbePair, ProbeParty
from atoll.coordinator.survey.segment_measuring import Combined, SegmentMeasuring
from atoll.coordinator.survey.survey_plan import GivenUp
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

_log = logging.getLogger(__name__)

Ends = frozenset[PeerId]


class Findings:
    """Everything is forgotten with the peer that it is about."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._kinds: dict[PeerId, dict[str, session_pb2.Measured]] = {}
        self._results: dict[Ends, ProbeResult] = {}
        self._failed_peers: dict[PeerId, str] = {}
        self._failed_links: dict[Ends, tuple[ProbePair, str]] = {}
        self._machines: dict[PeerId, str] = {}
        self._how: dict[PeerId, str] = {}
        self._estimated: set[tuple[PeerId, PeerId]] = set()
        self._told: set[PeerId | Ends] = set()
        self.dialled: dict[tuple[PeerId, PeerId], bool] = {}
        """Of (dialler, dialled) whether a probe reached the one from the other without a relay."""

    def measured(self, peer: PeerId, answer: session_pb2.Measured) -> None:
        """The peer's answer for one kind of segment."""
        self._kinds.setdefault(peer, {})[answer.kind] = answer

    def probed(self, result: ProbeResult) -> None:
        """A link was measured."""
        self._results[_ends(result.pair)] = result
        if result.pair.target is not None:
            self.dialled[result.pair.source, result.pair.target] = not result.relayed

    def not_probed(self, pair: ProbePair) -> None:
        """The source of the pair has tried, and failed."""
        if pair.target is not None:
            self.dialled[pair.source, pair.target] = False

    def give_up(self, given_up: Iterable[GivenUp]) -> None:
        """What could not be measured."""
        for entry in given_up:
            if entry.pair is None:
                self._failed_peers.setdefault(entry.peer, entry.reason)
            else:
                self._failed_links[_ends(entry.pair)] = entry.pair, entry.reason

    def forget(self, peer: PeerId) -> None:
        """The peer is gone."""
        for table in (self._kinds, self._failed_peers, self._how, self._machines):
            table.pop(peer, None)
        self._results = {ends: result for ends, result in self._results.items() if peer not in ends}
        self._failed_links = {ends: failed for ends, failed in self._failed_links.items() if peer not in ends}
        self._told = {what for what in self._told if what != peer and not (isinstance(what, frozenset) and peer in what)}
        self.dialled = {ends: could for ends, could in self.dialled.items() if peer not in ends}
        self._observed.forget(peer)

    def forget_links(self, pairs: Collection[Ends]) -> None:
        """What probes found, or did not, of the links of these pairs is old; the rates that traffic has shown stay."""
        for pair in pairs:
            self._results.pop(pair, None)
            self._failed_links.pop(pair, None)
            self._told.discard(pair)
        self.dialled = {ends: could for ends, could in self.dialled.items() if frozenset(ends) not in pairs}

    def tell_segments_anew(self) -> None:
        """What peers need for a model's segments is news again: it is another model."""
        self._told = {what for what in self._told if isinstance(what, frozenset)}

    def is_probed(self, pair: Ends) -> bool:
        """Whether a probe has found the link between these two."""
        return pair in self._results

    def how_measured(self, peer: PeerId) -> str:
        """``measured``, or why it is planned by an estimate; empty before a plan."""
        return self._how.get(peer, "")

    def round_trip_seconds(self, one: PeerId, other: PeerId) -> float:
        """What a probe found; 0 where there was none."""
        result = self._results.get(frozenset((one, other)))
        return result.round_trip_seconds if result is not None else 0.0

    def coordinator_round_trip_seconds(self, peer: PeerId) -> float:
        """What a small message to the coordinator and back takes: as probed, else as of another peer of the same machine, else
        as is usual; 0 where nothing is known."""
        known = {other: self.round_trip_seconds(other, THE_COORDINATOR) for other in self._machines}
        known = {other: seconds for other, seconds in known.items() if seconds > 0.0}
        machine = self._machines.get(peer, "")
        near = [seconds for other, seconds in known.items() if machine and self._machines[other] == machine]
        return known.get(peer, 0.0) or median(near or known.values() or [0.0])

    def kinds(self, peer: PeerId) -> tuple[session_pb2.Measured, ...]:
        """What the peer measured, as its steps have corrected it since."""
        factor = self.factor(peer)
        return tuple(_times(answer, factor) for answer in self._kinds.get(peer, {}).values() if not answer.failure)

    def offers(self, peers: Sequence[PeerOffer], measuring: SegmentMeasuring, segments: Segments) -> tuple[PeerOffer, ...]:
        """The peers with what was measured of them, else with a speed that follows from what was measured of others."""
        combined = {offer.name: self._combined(offer.name, measuring) for offer in peers}
        for offer in peers:
            self._machines[offer.name] = offer.machine
        promised = segments.forward_flops[-1] + segments.backward_flops[-1]
        shortfalls = [
            _total(seconds) * offer.flops_per_second / promised
            for offer in peers
            if (seconds := combined[offer.name].seconds) is not None and promised > 0.0
        ]
        usual = median(shortfalls) if shortfalls else 1.0
        return tuple(self._offer(offer, combined[offer.name].seconds, usual) for offer in peers)

    def network(self, parties: Iterable[ProbeParty], names: Sequence[PeerId]) -> Network:
        """The links between ``names``; of those that are no party nothing is known."""
        known = {party.name: party for party in parties}
        known.update((name, ProbeParty(name=name)) for name in names if name not in known)
        network = probed_network(known.values(), self._results.values(), self._observed.rates).select(tuple(names))
        places = {name: index for index, name in enumerate(names)}
        pairs = ((one, other) for one in names for other in names)
        self._estimated = {pair for pair in pairs if network.estimated[places[pair[0]], places[pair[1]]]}
        return network

    def is_estimated(self, source: PeerId, target: PeerId) -> bool:
        """Whether the rate that was last counted on from one peer to another was not measured."""
        return (source, target) in self._estimated

    def news(self, peers: Iterable[PeerId], network: Network, measuring: SegmentMeasuring) -> tuple[MeasurementEvent, ...]:
        """What was found out since it was last asked for, failures and what is planned with instead."""
        found: list[MeasurementEvent] = []
        for peer in peers:
            if peer not in self._told:
                self._told.add(peer)
                found.append(self._segments_news(peer, measuring))
        for ends, result in self._results.items():
            if ends not in self._told:
                self._told.add(ends)
                found += _link_news(result)
        for ends, (pair, reason) in self._failed_links.items():
            if ends not in self._told:
                self._told.add(ends)
                found += _failed_link_news(pair, reason, network)
        return tuple(found)

    def _combined(self, peer: PeerId, measuring: SegmentMeasuring) -> Combined:
        combined = measuring.seconds(self._kinds.get(peer, {}))
        reason = self._failed_peers.get(peer, combined.reason if peer in self._kinds else "it was not asked yet")
        self._how[peer] = "measured" if combined.seconds is not None else f"estimated: {reason}"
        return Combined(seconds=combined.seconds, reason=reason)

    def factor(self, peer: PeerId) -> float:
        """How many times longer than measured the peer takes: what its steps have shown, else what those of others on the same
        machine have, for whatever else keeps the machine busy is in its way too."""
        machine = self._machines.get(peer, "")
        if self._observed.is_seen(peer) or not machine:
            return self._observed.factor(peer)
        others = (other for other, its in self._machines.items() if its == machine and self._observed.is_seen(other))
        return median([self._observed.factor(other) for other in others] or [1.0])

    def _is_declared(self, peer: PeerId) -> bool:
        return any(answer.declared for answer in self._kinds.get(peer, {}).values())

    def _offer(self, offer: PeerOffer, seconds: MeasuredSeconds | None, usual_shortfall: float) -> PeerOffer:
        factor = self.factor(offer.name)
        offer = replace(offer, coordinator_round_trip_seconds=self.coordinator_round_trip_seconds(offer.name))
        if seconds is None:
            shortfall = 1.0 if self._is_declared(offer.name) else usual_shortfall
            return replace(offer, flops_per_second=offer.flops_per_second / (shortfall * factor))
        scaled = MeasuredSeconds(
            forward=tuple(factor * value for value in seconds.forward),
            backward=tuple(factor * value for value in seconds.backward),
            accumulate=tuple(factor * value for value in seconds.accumulate),
            update=tuple(factor * value for value in seconds.update),
        )
        return replace(offer, measured=scaled)

    def _segments_news(self, peer: PeerId, measuring: SegmentMeasuring) -> MeasurementEvent:
        combined = self._combined(peer, measuring)
        seconds = combined.seconds
        if seconds is None:
            level = logging.INFO if self._is_declared(peer) else logging.WARNING
            _log.log(level, "the layers on %s were not measured, its FLOP/s are counted on: %s", peer, combined.reason)
            return MeasurementEvent(what="segments", peer=peer, estimated=True, reason=combined.reason)
        _log.info(
            "a microbatch of the whole model on %s: forward %.4g s, backward %.4g s, accumulate %.4g s; update %.4g s",
            peer,
            seconds.forward[-1],
            seconds.backward[-1],
            seconds.accumulate[-1],
            seconds.update[-1],
        )
        return MeasurementEvent(
            what="segments",
            peer=peer,
            estimated=False,
            forward_seconds=seconds.forward[-1],
            backward_seconds=seconds.backward[-1],
            accumulate_seconds=seconds.accumulate[-1],
            update_seconds=seconds.update[-1],
        )


def _total(seconds: MeasuredSeconds) -> float:
    return seconds.forward[-1] + seconds.backward[-1] + seconds.accumulate[-1]


def _times(answer: session_pb2.Measured, factor: float) -> session_pb2.Measured:
    scaled = session_pb2.Measured()
    scaled.CopyFrom(answer)
    for name in ("forward_seconds", "backward_seconds", "accumulate_seconds", "update_seconds"):
        setattr(scaled, name, factor * getattr(answer, name))
    return scaled


def _ends(pair: ProbePair) -> Ends:
    return frozenset((pair.source, pair.target or THE_COORDINATOR))


def _link_news(result: ProbeResult) -> Iterator[MeasurementEvent]:
    source, target = result.pair.source, result.pair.target or THE_COORDINATOR
    rates = result.upload_bytes_per_second, result.download_bytes_per_second
    _log.info(
        "the link %s - %s%s: round trip %.3g ms, there %s bytes/s, back %s bytes/s",
        source,
        target,
        " (through the coordinator)" if result.relayed else "",
        1e3 * result.round_trip_seconds,
        *("?" if rate is None else f"{rate:.3g}" for rate in rates),
    )
    for (one, other), rate in zip(((source, target), (target, source)), rates, strict=True):
        yield MeasurementEvent(
            what="link",
            peer=one,
            target=other,
            estimated=rate is None,
            reason="" if rate is not None else "only its latency was measured",
            bytes_per_second=rate,
            round_trip_seconds=result.round_trip_seconds,
        )


def _failed_link_news(pair: ProbePair, reason: str, network: Network) -> Iterator[MeasurementEvent]:
    source, target = pair.source, pair.target or THE_COORDINATOR
    _log.warning("the link %s - %s could not be measured, an estimate is counted on: %s", source, target, reason)
    places = {name: index for index, name in enumerate(network.names)}
    for one, other in ((source, target), (target, source)):
        known = one in places and other in places
        yield MeasurementEvent(
            what="link",
            peer=one,
            target=other,
            estimated=True,
            reason=reason,
            bytes_per_second=float(network.rate[places[one], places[other]]) if known else None,
        )
