"""From what probes found to the network that is planned with. Pure.

The coordinator stands in the network as one more peer while pairs are estimated: what its links show of a peer's line, and its
latencies, are evidence like any other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.coordinator.planning.network import LinkMeasurement, Network, PeerLine, Relayed, build_network
from atoll.coordinator.survey.probe_schedule import ProbePair, ProbeParty
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import session_pb2

THE_COORDINATOR = PeerId("the coordinator")
"""How measurements name it: no peer can be called so, for a peer's name has no space."""

FEWEST_ALIKE = 3
"""Two links may be alike by chance."""
ALIKE = 1.15
"""Probes of one line scatter by some percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One link as ``pair.source`` found it, ``relayed`` by the coordinator or not; a rate is None where only latency was
    measured."""

    pair: ProbePair
    round_trip_seconds: float
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    relayed: bool = False


def probe_result(pair: ProbePair, probed: session_pb2.Probed) -> ProbeResult | str:
    """What a peer answered, or why that is no measurement: in its words, or because its numbers are impossible."""
    if probed.failure:
        return probed.failure
    upload, download = probed.upload_bytes_per_second, probed.download_bytes_per_second
    numbers = (probed.round_trip_seconds, upload, download)
    if not all(math.isfinite(number) and number >= 0.0 for number in numbers) or probed.round_trip_seconds == 0.0:
        return f"it answered with impossible numbers: {', '.join(f'{number:g}' for number in numbers)}"
    return ProbeResult(
        pair=pair,
        round_trip_seconds=probed.round_trip_seconds,
        upload_bytes_per_second=upload or None,
        download_bytes_per_second=download or None,
        relayed=probed.relayed,
    )


def link_measurements(results: Iterable[ProbeResult]) -> tuple[LinkMeasurement, ...]:
    """Each direction of each link on its own; one way takes half of a round trip."""
    found = []
    for result in results:
        source, target = result.pair.source, result.pair.target or THE_COORDINATOR
        latency = result.round_trip_seconds / 2.0
        for one, other, rate in (
            (source, target, result.upload_bytes_per_second),
            (target, source, result.download_bytes_per_second),
        ):
            found.append(LinkMeasurement(source=one, target=other, bytes_per_second=rate, latency_seconds=latency))
    return tuple(found)


def peer_lines(parties: Iterable[ProbeParty], measurements: Iterable[LinkMeasurement] = ()) -> dict[PeerId, PeerLine]:
    """What the owners allow, which peers share a line, and what a line carries, where ``measurements`` tell.

    A probe has a line to itself and so cannot show what two connections share. But who is equally fast towards everybody is
    taken to be so because of the own line; where it is all others that are equally slow, that is too little.
    """
    parties = tuple(parties)
    location = {party.name: party.location or party.name for party in parties}
    out: defaultdict[str, list[float]] = defaultdict(list)
    into: defaultdict[str, list[float]] = defaultdict(list)
    for one in measurements:
        source, target = location.get(one.source, one.source), location.get(one.target, one.target)
        if one.bytes_per_second is not None and source != target:
            out[source].append(one.bytes_per_second)
            into[target].append(one.bytes_per_second)
    return {
        party.name: PeerLine(
            upload_bytes_per_second=_line_rate(out[location[party.name]]),
            download_bytes_per_second=_line_rate(into[location[party.name]]),
            max_upload_bytes_per_second=party.max_upload_bytes_per_second,
            max_download_bytes_per_second=party.max_download_bytes_per_second,
            location=party.location,
        )
        for party in parties
    }


def _line_rate(rates: Sequence[float]) -> float | None:
    """What a line carries whose connections are as fast as ``rates``, each by itself; None where they do not tell."""
    alike = len(rates) >= FEWEST_ALIKE and max(rates) <= min(rates) * ALIKE
    return max(rates) if alike else None


def probed_network(
    parties: Iterable[ProbeParty], results: Iterable[ProbeResult], traffic: Mapping[tuple[PeerId, PeerId], float] | None = None
) -> Network:
    """The network of ``parties``: probed where probed, else estimated and marked so.

    ``traffic`` gives the bytes a second that real traffic has shown from one peer to another; it takes a probe's place.
    """
    parties, results = tuple(parties), tuple(results)
    measurements = [*link_measurements(results)]
    lines = peer_lines(parties, measurements)
    relayed = relayed_pairs(parties, results, measurements)
    for (source, target), rate in (traffic or {}).items():
        measurements.append(LinkMeasurement(source=source, target=target, bytes_per_second=rate))
    network = build_network((*lines, THE_COORDINATOR), measurements, lines).select(tuple(lines))
    return replace(network, relayed=relayed)


def relayed_pairs(
    parties: Iterable[ProbeParty], results: Iterable[ProbeResult], measurements: Iterable[LinkMeasurement]
) -> Relayed:
    """Whose probes went through the coordinator, and what its line carries, as far as ``measurements`` tell: as for a peer, by
    those that are equally fast towards it. Peers of one location have one line and so are one witness."""
    location = {party.name: party.location or party.name for party in parties}
    out: dict[str, float] = {}
    into: dict[str, float] = {}
    for one in measurements:
        if one.bytes_per_second is None or THE_COORDINATOR not in (one.source, one.target):
            continue
        rates, peer = (out, one.target) if one.source == THE_COORDINATOR else (into, one.source)
        place = location.get(peer, peer)
        rates[place] = max(rates.get(place, 0.0), one.bytes_per_second)
    known = [rate for rate in (_line_rate([*out.values()]), _line_rate([*into.values()])) if rate is not None]
    return Relayed(
        pairs=frozenset(
            frozenset((result.pair.source, result.pair.target)) for result in results if result.relayed and result.pair.target
        ),
        bytes_per_second=min(known, default=math.inf),
    )
