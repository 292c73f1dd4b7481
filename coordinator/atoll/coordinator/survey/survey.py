"""Has peers measure the model's segments and the links between them before a plan is made, and keeps what they found.

The shell around ``survey_plan``: messages, the clock, and what came back. Whatever could not be measured in time is estimated,
and said so. What real traffic shows later (``observed``) corrects what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.coordinator.data.feed import Feed
from atoll.coordinator.events import MeasurementEvent
from atoll.coordinator.offload import Offload
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.reach.ways import Ways
from atoll.coordinator.sessions.membership import Member, Reach
from atoll.coordinator.sessions.sessions import Sessions
from atoll.coordinator.survey.findings import Findings
from atoll.coordinator.survey.observed import Observed
from atoll.coordinator.survey.probe_results import ProbeResult, probe_result
from atoll.coordinator.survey.probe_schedule import ProbePair, ProbeParty, again_pair, probe_pairs, probe_party
from atoll.coordinator.survey.segment_measuring import SegmentMeasuring, prepare_measuring
from atoll.coordinator.survey.survey_plan import MeasureKinds, ProbeLink, Request, Survey, SurveyLimits
from atoll.coordinator.traced_model import TracedModel
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.v1 import session_pb2
from atoll.protocol.wording import listed

_log = logging.getLogger(__name__)

_PROBE_SLACK_SECONDS = 30.0
"""For which a probe is permitted beyond its limit: messages take their time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surveyed:
    """What a plan is made with: ``offers`` count on each peer taking ``factors`` times longer than it measured. ``events`` are
    what is new, to be told; ``shown`` the pairs of which it was to be found out whether their link is in order, and is."""

    offers: tuple[PeerOffer, ...]
    factors: Mapping[PeerId, float]
    network: Network
    events: tuple[MeasurementEvent, ...] = ()
    shown: frozenset[frozenset[PeerId]] = frozenset()


class Surveyor:
    """``spawn`` runs work in the background."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        offload: Offload,
        observed: Observed,
        limits: SurveyLimits,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._sessions = sessions
        self._offload = offload
        self._limits = limits
        self._spawn = spawn
        self._model: TracedModel | None = None
        self._feed: Feed | None = None
        self._measuring: SegmentMeasuring | None = None
        self._survey = Survey((), limits)
        self._preparing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._round = 0
        self._reach_known: Callable[[Iterable[PeerId]], Awaitable[None]] = _at_once
        self._relay_allows: Callable[[PeerId, PeerId, float], None] = lambda one, other, until: None
        self.findings = Findings(observed)

    def know_reach(
        self, settled: Callable[[Iterable[PeerId]], Awaitable[None]], relay_allows: Callable[[PeerId, PeerId, float], None]
    ) -> None:
        """``settled`` returns when it is known of peers whether they can be dialled, which decides who probes whom;
        ``relay_allows`` lets two meet at the relay until then, where neither can be."""
        self._reach_known, self._relay_allows = settled, relay_allows

    def know(self, model: TracedModel, feed: Feed) -> None:
        """The model is traced, and ``feed`` gives its microbatches. What peers measured for another size stays known."""
        if model is not self._model:
            self._model, self._feed, self._measuring = model, feed, None
            self.findings.tell_segments_anew()

    async def links(
        self, generation: Generation, peers: Sequence[PeerOffer], progress: Callable[[str], None] = lambda doing: None
    ) -> Network:
        """The links of ``peers``, probed where they were not. Needs no model. A later call takes over from an earlier one."""
        await self._reach_known([offer.name for offer in peers])
        parties = self._parties(offer.name for offer in peers)
        await self._look(generation, parties, (), progress)
        return self.findings.network(parties, [offer.name for offer in peers])

    async def complete(
        self,
        generation: Generation,
        peers: Sequence[PeerOffer],
        progress: Callable[[str], None] = lambda doing: None,
        again: frozenset[frozenset[PeerId]] = frozenset(),
    ) -> Surveyed:
        """All that is to be known of ``peers``, what is not known yet asked of them first, and the links of the pairs ``again``
        in any case. ``progress`` is told what is being done, as the rest of a sentence. A later call takes over from an earlier
        one, which returns with what it has."""
        measuring = await self._prepare()
        await self._reach_known([offer.name for offer in peers])
        parties = self._parties(offer.name for offer in peers)
        known = {party.name for party in parties}
        anew = tuple(again_pair(pair) for pair in sorted(again, key=sorted) if pair <= known)
        self._survey.reopen(anew)
        self.findings.forget_links(again)
        await self._look(generation, parties, anew, progress)
        assert self._model is not None
        surveyed = self._surveyed(peers, measuring, self._model)
        return replace(
            surveyed,
            events=self.findings.news([party.name for party in parties], surveyed.network, measuring),
            shown=frozenset(pair for pair in again if self.findings.is_probed(pair)),
        )

    async def reach_known(self, peers: Iterable[PeerOffer]) -> None:
        """Returns when it is known who of these can be dialled, or has taken too long to find out."""
        await self._reach_known([offer.name for offer in peers])

    def knows(self, peer: PeerId) -> bool:
        """Whether there is nothing more to ask the peer about the model."""
        return self._survey is not None and self._survey.knows(peer)

    async def estimate(self, peers: Sequence[PeerOffer]) -> Surveyed:
        """What is known of ``peers`` at this moment, the rest estimated: nobody is asked for anything."""
        measuring = await self._prepare()
        assert self._model is not None
        return self._surveyed(peers, measuring, self._model)

    def _surveyed(self, peers: Sequence[PeerOffer], measuring: SegmentMeasuring, model: TracedModel) -> Surveyed:
        names = [offer.name for offer in peers]
        return Surveyed(
            offers=self.findings.offers(peers, measuring, model.segments),
            factors={name: self.findings.factor(name) for name in names},
            network=self.findings.network(self._parties(names), names),
        )

    def network(self) -> Network:
        """The links between all peers that are here, as they are known now."""
        names = [member.name for member in self._sessions.membership]
        return self.findings.network(self._parties(names), names)

    async def _look(
        self,
        generation: Generation,
        parties: Sequence[ProbeParty],
        anew: tuple[ProbePair, ...],
        progress: Callable[[str], None],
    ) -> None:
        """Ask these peers for what is wanted of them and of their links and not known yet, the pairs ``anew`` in any case."""
        self._round += 1
        own_round = self._round
        self._changed.set()
        pairs = probe_pairs(parties, known=(*self._survey.known_pairs, *anew))
        self._survey.aim(parties, (*anew, *pairs))
        began = time.monotonic()
        await self._carry_out(generation, lambda: self._round != own_round, progress)
        _log.info("surveyed %d peers in %.1f s", len(parties), time.monotonic() - began)
        self.findings.give_up(self._survey.take_given_up())

    async def _prepare(self) -> SegmentMeasuring:
        model, feed = self._model, self._feed
        assert model is not None, "peers are asked about a traced model"
        assert feed is not None
        async with self._preparing:
            if self._measuring is None:
                self._measuring = await self._offload.run(prepare_measuring, model, feed)
                self._survey.want(self._measuring.fingerprints)
            return self._measuring

    async def _carry_out(self, generation: Generation, outdated: Callable[[], bool], progress: Callable[[str], None]) -> None:
        survey = self._survey
        give_up_at = time.monotonic() + self._limits.total_seconds
        while not outdated():
            now = time.monotonic()
            for request in survey.advance(now):
                self._ask(request, generation)
            if now >= give_up_at:
                survey.give_up(f"it was not done within {self._limits.total_seconds:g} s")
            if survey.finished:
                return
            progress(describe(survey.running))
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, min(survey.deadline, give_up_at) - now))

    def _ask(self, request: Request, generation: Generation) -> None:
        if isinstance(request, MeasureKinds):
            assert self._measuring is not None, "kinds are wanted once there is a model"
            self._spawn(self._send(request, generation, self._measuring))
            return
        target = None if request.pair.target is None else self._sessions.membership.find(request.pair.target)
        probe = session_pb2.Probe(
            number=request.number,
            peer=request.pair.target or "",
            address=target.introduction.address if target is not None else "",
            limit_seconds=self._limits.probe_seconds,
            latency_only=request.pair.latency_only,
            relay=request.relay,
        )
        if target is not None:
            seconds = self._limits.probe_seconds + _PROBE_SLACK_SECONDS
            self._sessions.permit(target.name, request.peer, session_pb2.Permit.PERMIT_PROBE, seconds)
            if request.relay:
                self._relay_allows(request.peer, target.name, time.monotonic() + seconds)
        self._sessions.tell([request.peer], session_pb2.CoordinatorMessage(probe=probe))

    async def _send(self, request: MeasureKinds, generation: Generation, measuring: SegmentMeasuring) -> None:
        session = self._sessions.find(request.peer)
        for kind, message in zip(measuring.fingerprints, measuring.messages(generation), strict=True):
            if session is not None and kind in request.kinds:
                await session.send(message)

    def answered(self, peer: PeerId, message: session_pb2.PeerMessage) -> None:
        """A Measured or a Probed has come."""
        if message.HasField("measured"):
            if self._survey.measured(peer, message.measured.kind, time.monotonic(), message.measured.failure):
                self.findings.measured(peer, message.measured)
        else:
            self._probed(peer, message.probed)
        self._changed.set()

    def _probed(self, peer: PeerId, probed: session_pb2.Probed) -> None:
        request = self._survey.awaited(peer, probed.number)
        if request is None:
            return  # it comes too late
        result = probe_result(request.pair, probed)
        if isinstance(result, ProbeResult):
            self._survey.probed(request)
            self.findings.probed(result)
        else:
            _log.info("%s could not probe its link to %s: %s", peer, request.pair.target or "the coordinator", result)
            self._survey.probed(request, result)
            self.findings.not_probed(request.pair)

    def gone(self, peer: PeerId) -> None:
        """The peer has left or was lost."""
        self.findings.forget(peer)
        self._survey.forget(peer)
        self._changed.set()

    def _parties(self, names: Iterable[PeerId]) -> list[ProbeParty]:
        members = (self._sessions.membership.find(name) for name in names)
        return [_party(member) for member in members if member is not None]

    def ways(self) -> Ways:
        """How the peers that are here reach each other, as far as is known now."""
        members = tuple(self._sessions.membership)
        return Ways(
            {member.name: member.introduction.address for member in members},
            {member.name for member in members if member.reach is Reach.OUTBOUND_ONLY},
            self.findings.dialled,
        )


async def _at_once(names: Iterable[PeerId]) -> None:
    """Nothing is found out of them."""


def _party(member: Member) -> ProbeParty:
    return probe_party(member.introduction, reachable=member.reach is not Reach.OUTBOUND_ONLY)


def describe(running: Sequence[Request]) -> str:
    """``measures the layers on peer-1 and peer-2 and probes the link peer-3 - peer-4``."""
    measuring = [request.peer for request in running if isinstance(request, MeasureKinds)]
    probed = [request.link for request in running if isinstance(request, ProbeLink)]
    layers = [f"measures the layers on {listed(measuring)}"] if measuring else []
    links = [f"probes the links {listed(probed)}" if len(probed) > 1 else f"probes the link {probed[0]}"] if probed else []
    return " and ".join([*layers, *links])
