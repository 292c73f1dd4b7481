"""Which links are probed, in which order, and what a probe occupies meanwhile. Pure; ``survey_plan`` says when.

Up to SMALL_FLEET lines to the network every two are measured against each other; beyond that each against about log2 of their
number plus two, at distances that grow geometrically around a circle, so that what is measured is connected and spreads. Peers
at one address share one line, so only one of them is measured for all that have the same caps, and one loopback pair of theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from atoll.coordinator.sessions.membership import Introduction
from atoll.protocol.channel import parse_address
from atoll.protocol.errors import JobError
from atoll.protocol.ids import PeerId

SMALL_FLEET = 6
"""Lines of which all pairs are measured: 15 probes, a few at a time."""
FEW_TO_COORDINATOR = 16
"""With more lines than this only latency to the coordinator is measured: its rate would take them one after the other."""
LATENCIES_AT_ONCE = 8
"""Peers that may measure their latency to the coordinator at the same time: a few small messages each."""

Place: TypeAlias = tuple[str, str]
"""A peer, a machine, a line or the coordinator, by name."""
Places: TypeAlias = Mapping[Place, int]
"""What is occupied, each with how many may occupy it at the same time as this one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeParty:
    """A peer. Peers of one ``machine`` share its processors, those of one ``host`` (of their addresses) its line; empty says
    nothing. The owner's caps are None where there are none. ``reachable``: others can dial it, as far as is known."""

    name: PeerId
    machine: str = ""
    host: str = ""
    max_upload_bytes_per_second: float | None = None
    max_download_bytes_per_second: float | None = None
    reachable: bool = True

    @property
    def location(self) -> str:
        """Parties of one location, unless it is empty, reach each other without any network."""
        return self.host or self.machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePair:
    """``source`` dials ``target``, or the coordinator where that is None. ``latency_only``: no rate is measured."""

    source: PeerId
    target: PeerId | None
    latency_only: bool = False


def again_pair(ends: frozenset[PeerId]) -> ProbePair:
    """A probe of the link between two peers, whatever was found before: whether there is one, and how quick."""
    source, target = sorted(ends)
    return ProbePair(source=source, target=target, latency_only=True)


def probe_party(introduction: Introduction, *, reachable: bool = True) -> ProbeParty:
    """The peer that introduced itself so."""
    try:
        host = parse_address(introduction.address).host
    except JobError:
        host = ""
    return ProbeParty(
        name=PeerId(introduction.name),
        machine=introduction.machine,
        host=host,
        max_upload_bytes_per_second=introduction.max_upload_bytes_per_second,
        max_download_bytes_per_second=introduction.max_download_bytes_per_second,
        reachable=reachable,
    )


def probe_pairs(peers: Sequence[ProbeParty], *, known: Iterable[ProbePair] = ()) -> tuple[ProbePair, ...]:
    """The probes to make, the same for any order of ``peers``. Those whose places are wanted by the most others come first, for
    they decide how long it all takes.

    ``known`` are pairs that were measured before, in either direction, and are left out.
    """
    parties = {party.name: party for party in sorted(peers, key=lambda party: party.name)}
    assert len(parties) == len(peers), "names are distinct"
    lines = _lines(list(parties.values()))
    pairs = [*_pairs_between(lines), *_pairs_within(list(parties.values())), *_pairs_with_coordinator(lines)]
    done = {frozenset((pair.source, pair.target)) for pair in known}
    places = {pair: places_of(pair, parties) for pair in pairs if frozenset((pair.source, pair.target)) not in done}
    load = Counter(place for its in places.values() for place in its)
    return tuple(sorted(places, key=lambda pair: -max(load[place] / room for place, room in places[pair].items())))


def processors_of(party: ProbeParty) -> Places:
    """What computing on a peer occupies."""
    return {("peer", party.name): 1, **({("machine", party.machine): 1} if party.machine else {})}


def places_of(pair: ProbePair, parties: Mapping[PeerId, ProbeParty]) -> Places:
    """What a probe of this pair occupies."""
    places: dict[Place, int] = {}
    for end in (parties[name] for name in (pair.source, pair.target) if name is not None):
        places.update(processors_of(end))
        if end.host:
            places["host", end.host] = 1
    if pair.target is None:
        places["coordinator", ""] = LATENCIES_AT_ONCE if pair.latency_only else 1
    return places


def _lines(parties: Sequence[ProbeParty]) -> list[ProbeParty]:
    """One party for all that share a line to the network and have the same caps; sorted."""
    found: dict[tuple[object, ...], ProbeParty] = {}
    for party in parties:
        caps = (party.max_upload_bytes_per_second, party.max_download_bytes_per_second)
        found.setdefault((party.location, *caps) if party.location else (party.name,), party)
    return list(found.values())


def _pairs_between(lines: Sequence[ProbeParty]) -> Iterator[ProbePair]:
    """All pairs of a few, each with a few of many. Who dials alternates."""
    count = len(lines)
    if count <= SMALL_FLEET:
        places = [(one, other) if (one + other) % 2 else (other, one) for one, other in combinations(range(count), 2)]
    else:
        places = [(one, (one + offset) % count) for offset in _offsets(count) for one in range(count)]
    for one, other in places:
        yield ProbePair(source=lines[one].name, target=lines[other].name)


def _offsets(count: int) -> list[int]:
    """Distances around a circle of ``count``, from 1, which connects it, to almost half of it; each gives two pairs a line."""
    wanted = round((math.log2(count) + 2.0) / 2.0)
    farthest = (count - 1) // 2
    return sorted({round(farthest ** (step / (wanted - 1))) for step in range(wanted)})


def _pairs_within(parties: Sequence[ProbeParty]) -> Iterator[ProbePair]:
    """One loopback pair a location; where the caps differ, its lines are measured against each other anyway."""
    inside: dict[tuple[object, ...], list[ProbeParty]] = {}
    for party in parties:
        if party.location:
            caps = (party.max_upload_bytes_per_second, party.max_download_bytes_per_second)
            inside.setdefault((party.location, *caps), []).append(party)
    for members in inside.values():
        if len(members) > 1:
            yield ProbePair(source=members[0].name, target=members[1].name)


def _pairs_with_coordinator(lines: Sequence[ProbeParty]) -> Iterator[ProbePair]:
    latency_only = len(lines) > FEW_TO_COORDINATOR
    for line in lines:
        yield ProbePair(source=line.name, target=None, latency_only=latency_only)
