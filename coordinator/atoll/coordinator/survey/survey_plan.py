"""What is to be measured before a plan is made, of whom, and when: a state machine. No sockets, no clock, no threads.

Peers of one machine share its processors, those of one host its line; so each of them does one thing at a time: one of its
peers measures segments, or takes part in one probe. Others work at the same time. A request that is not answered in time is
given up; a peer that did not answer one is asked nothing more, but others still probe their links to it. What came back or was
given up is remembered until the peer is gone, so that the next plan asks for what is new only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from atoll.coordinator.survey.probe_schedule import Place, Places, ProbePair, ProbeParty, places_of, processors_of
from atoll.protocol.ids import PeerId

Ends: TypeAlias = frozenset[PeerId | None]
"""Both ends of a link, in no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyLimits:
    """Limits in seconds. ``kind`` is for each kind of segment, ``probe`` what a peer may spend on a link, ``answer`` how much
    later its answer may come, ``total`` for all that is asked before one plan."""

    kind_seconds: float = 20.0
    probe_seconds: float = 3.0
    answer_seconds: float = 2.0
    total_seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureKinds:
    """Have ``peer`` measure these kinds of segments."""

    peer: PeerId
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLink:
    """Have the source of ``pair`` probe its link to the target, or if it cannot dial that and ``relay`` is set, the way through
    the coordinator."""

    number: int
    pair: ProbePair
    relay: bool = False

    @property
    def peer(self) -> PeerId:
        return self.pair.source

    @property
    def link(self) -> str:
        """The link as sentences name it."""
        return f"{self.pair.source} - {self.pair.target or 'the coordinator'}"


Request: TypeAlias = MeasureKinds | ProbeLink


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What could not be measured: the segments of ``peer``, or where ``pair`` says so that link."""

    peer: PeerId
    pair: ProbePair | None
    reason: str


@dataclass(slots=True)
class _Running:
    request: Request
    places: Places
    deadline: float
    open_kinds: set[str] = field(default_factory=set)


class Survey:
    """Told what happened, says what to do. ``aim`` sets what is wanted; ``advance`` is to be called after every event and when
    ``deadline`` has come."""

    def __init__(self, kinds: Iterable[str], limits: SurveyLimits) -> None:
        self._kinds = tuple(kinds)
        self._limits = limits
        self._parties: dict[PeerId, ProbeParty] = {}
        self._pairs: tuple[ProbePair, ...] = ()
        self._asked_kinds: dict[PeerId, set[str]] = {}
        self._settled_kinds: dict[PeerId, set[str]] = {}
        self._settled_pairs: dict[Ends, ProbePair] = {}
        self._tried: dict[Ends, dict[PeerId, str]] = {}
        self._silent: set[PeerId] = set()
        self._running: list[_Running] = []
        self._number = 0
        self._given_up: list[GivenUp] = []

    def want(self, kinds: Iterable[str]) -> None:
        """Want these kinds of segments of every peer from now on."""
        self._kinds = tuple(kinds)

    def aim(self, parties: Iterable[ProbeParty], pairs: Iterable[ProbePair]) -> None:
        """Want the segments of these peers measured and these links probed, the first ones first."""
        self._parties = {party.name: party for party in parties}
        self._pairs = tuple(pairs)
        assert all(end in self._parties for pair in self._pairs for end in _ends(pair) if end is not None), "a stranger's link"

    def reopen(self, pairs: Iterable[ProbePair]) -> None:
        """What was found out of these links, or given up, is not to be counted on any more."""
        for pair in pairs:
            self._settled_pairs.pop(_ends(pair), None)
            self._tried.pop(_ends(pair), None)

    @property
    def known_pairs(self) -> tuple[ProbePair, ...]:
        """The links that were probed or given up."""
        return tuple(self._settled_pairs.values())

    @property
    def running(self) -> tuple[Request, ...]:
        """What peers do at the moment."""
        return tuple(entry.request for entry in self._running)

    @property
    def deadline(self) -> float:
        """When the next request is given up; infinite while none runs."""
        return min((entry.deadline for entry in self._running), default=float("inf"))

    @property
    def finished(self) -> bool:
        """Whether all that is wanted has come back or is given up."""
        return not any(self._missing(peer) for peer in self._parties) and not any(map(self._is_open, self._pairs))

    def take_given_up(self) -> tuple[GivenUp, ...]:
        """What was given up since the last call."""
        taken, self._given_up = tuple(self._given_up), []
        return taken

    def advance(self, now: float) -> tuple[Request, ...]:
        """Give up what is overdue at ``now``; returns what is to begin."""
        for entry in [entry for entry in self._running if entry.deadline <= now]:
            self._running.remove(entry)
            self._unanswered(entry)
        held = Counter(place for entry in self._running for place in entry.places)
        begun: list[Request] = []
        for peer, party in self._parties.items():
            kinds = self._missing(peer)
            if kinds and _has_room(places := processors_of(party), held):
                begun.append(self._measure(peer, kinds, places, now))
                held.update(places.keys())
        for pair in self._pairs:
            if self._is_open(pair) and _has_room(places := places_of(pair, self._parties), held):
                for request in self._probe(pair, places, now):
                    begun.append(request)
                    held.update(places.keys())
        return tuple(begun)

    def measured(self, peer: PeerId, kind: str, now: float, failure: str = "") -> bool:
        """The peer has answered for a kind, at ``now``. False when it was never asked."""
        if kind not in self._asked_kinds.get(peer, ()):
            return False
        self._silent.discard(peer)
        self._settled_kinds.setdefault(peer, set()).add(kind)
        if failure:
            self._given_up.append(GivenUp(peer=peer, pair=None, reason=failure))
        for entry in list(self._running):
            if isinstance(entry.request, MeasureKinds) and entry.request.peer == peer and kind in entry.open_kinds:
                entry.open_kinds.discard(kind)
                entry.deadline = now + self._limits.kind_seconds
                if not entry.open_kinds:
                    self._running.remove(entry)
        return True

    def awaited(self, peer: PeerId, number: int) -> ProbeLink | None:
        """The probe of that number, when its answer is still awaited from the peer."""
        running = (entry.request for entry in self._running if isinstance(entry.request, ProbeLink))
        return next((request for request in running if (request.number, request.peer) == (number, peer)), None)

    def probed(self, request: ProbeLink, failure: str = "") -> None:
        """An awaited probe was answered."""
        self._running = [entry for entry in self._running if entry.request is not request]
        if failure:
            self._tried.setdefault(_ends(request.pair), {})[request.peer] = failure
        else:
            self._settled_pairs[_ends(request.pair)] = request.pair

    def forget(self, peer: PeerId) -> None:
        """The peer is gone: whoever comes under its name is asked anew."""
        self._parties.pop(peer, None)
        self._pairs = tuple(pair for pair in self._pairs if peer not in _ends(pair))
        self._asked_kinds.pop(peer, None)
        self._settled_kinds.pop(peer, None)
        self._silent.discard(peer)
        self._settled_pairs = {ends: pair for ends, pair in self._settled_pairs.items() if peer not in ends}
        self._tried = {ends: tried for ends, tried in self._tried.items() if peer not in ends}
        self._running = [entry for entry in self._running if ("peer", peer) not in entry.places]

    def knows(self, peer: PeerId) -> bool:
        """Whether the peer has measured everything, or that was given up."""
        return not self._missing(peer)

    def give_up(self, reason: str) -> None:
        """There is no more time: whatever is still wanted is given up."""
        self._running = []
        for peer in self._parties:
            missing = self._missing(peer)
            if missing:
                self._give_up_kinds(peer, missing, reason)
        for pair in filter(self._is_open, self._pairs):
            self._give_up_pair(pair, reason)

    def _missing(self, peer: PeerId) -> tuple[str, ...]:
        """The kinds that the peer is still to measure."""
        settled = self._settled_kinds.get(peer, set())
        return tuple(kind for kind in self._kinds if kind not in settled)

    def _is_open(self, pair: ProbePair) -> bool:
        return _ends(pair) not in self._settled_pairs

    def _is_reachable(self, target: PeerId | None) -> bool:
        return target is None or self._parties[target].reachable

    def _measure(self, peer: PeerId, kinds: tuple[str, ...], places: Places, now: float) -> MeasureKinds:
        request = MeasureKinds(peer=peer, kinds=kinds)
        self._asked_kinds.setdefault(peer, set()).update(kinds)
        self._running.append(_Running(request, places, now + self._limits.kind_seconds, set(kinds)))
        return request

    def _probe(self, pair: ProbePair, places: Places, now: float) -> Iterable[ProbeLink]:
        """A probe from that end which has not tried yet, towards one that can be dialled if there is; nothing when no end is
        left."""
        tried = self._tried.get(_ends(pair), {})
        ways = [pair] if pair.target is None else [pair, replace(pair, source=pair.target, target=pair.source)]
        ways.sort(key=lambda way: not self._is_reachable(way.target))
        left = [way for way in ways if way.source not in tried and way.source not in self._silent]
        if not left:
            self._give_up_pair(pair, "; ".join(tried.values()) or "it does not answer")
            return
        self._number += 1
        request = ProbeLink(number=self._number, pair=left[0], relay=not self._is_reachable(left[0].target))
        limit = self._limits.probe_seconds + self._limits.answer_seconds
        self._running.append(_Running(request, places, now + limit))
        yield request

    def _unanswered(self, entry: _Running) -> None:
        request, limits = entry.request, self._limits
        self._silent.add(request.peer)
        if isinstance(request, MeasureKinds):
            self._give_up_kinds(request.peer, entry.open_kinds, f"it did not answer within {limits.kind_seconds:g} s")
        else:
            reason = f"{request.peer} did not answer within {limits.probe_seconds + limits.answer_seconds:g} s"
            self._tried.setdefault(_ends(request.pair), {})[request.peer] = reason

    def _give_up_kinds(self, peer: PeerId, kinds: Iterable[str], reason: str) -> None:
        self._settled_kinds.setdefault(peer, set()).update(kinds)
        self._given_up.append(GivenUp(peer=peer, pair=None, reason=reason))

    def _give_up_pair(self, pair: ProbePair, reason: str) -> None:
        self._settled_pairs[_ends(pair)] = pair
        self._given_up.append(GivenUp(peer=pair.source, pair=pair, reason=reason))


def _ends(pair: ProbePair) -> Ends:
    return frozenset((pair.source, pair.target))


def _has_room(places: Places, held: Mapping[Place, int]) -> bool:
    return all(held.get(place, 0) < room for place, room in places.items())
