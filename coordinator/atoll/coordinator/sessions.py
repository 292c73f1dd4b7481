"""All peers' sessions: admits peers, keeps their leases, turns what they say into events of the run, and speaks to them by
name."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable

from atoll.coordinator import translation
from atoll.coordinator.membership import Introduction, Member, Membership, Refusal
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.events import PeerGone, PeerJoined, RunEvent, StateMoved
from atoll.coordinator.session import PeerSession, SessionContext
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.machine import machine_name
from atoll.protocol.v1 import session_pb2

_log = logging.getLogger(__name__)

OnReport = Callable[[PeerId, session_pb2.PeerMessage], None]


class Sessions:
    """``run`` is the run's name, ``run_id`` its own for ever. ``post`` takes the events; ``on_measured`` is shown each
    Ready and StageReport for what it tells of memory and links. ``on_answer`` gets each Measured and Probed, which are no
    matter of the run, and ``on_gone`` the name of each peer that is here no longer."""

    def __init__(
        self,
        *,
        run: str,
        version: str,
        lease_seconds: float,
        post: Callable[[RunEvent], None],
        on_measured: OnReport,
        on_answer: OnReport = lambda peer, message: None,
        on_gone: Callable[[PeerId], None] = lambda peer: None,
    ) -> None:
        self.membership = Membership(time.monotonic(), lease_seconds)
        self.run_id = uuid.uuid4().hex
        self._run = run
        self._version = version
        self._post = post
        self._on_measured = on_measured
        self._on_answer = on_answer
        self._on_gone = on_gone
        self._sessions: dict[PeerId, PeerSession] = {}
        self._over: str | None = None
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    def admit(self, introduction: Introduction, came_from: str) -> PeerSession | Refusal:
        """A session for a peer that may join; the run hears of it when the session begins."""
        if self._over is not None:
            return Refusal(reason=f"the run is over: {self._over}")
        verdict = self.membership.admit(introduction, came_from, self._version, time.monotonic())
        if isinstance(verdict, Refusal):
            _log.warning("refused %r: %s", introduction.name, verdict.reason)
            return verdict
        session = PeerSession(verdict, self._on_message)
        self._sessions[session.peer] = session
        self._all_closed.clear()
        welcome = session_pb2.Welcome(run=self._run, name=session.peer, run_id=self.run_id)
        session.tell(session_pb2.CoordinatorMessage(welcome=welcome))
        return session

    async def converse(self, session: PeerSession, context: SessionContext) -> None:
        """Carry an admitted peer's session from its first word to its last."""
        reason = "its connection ended"
        try:
            self._post(self._joined(session.member))
            reason = await session.run(context)
        finally:
            if self._forget(session):
                silent = time.monotonic() - session.member.heard
                self._post(PeerGone(peer=session.peer, reason=reason, silent_seconds=silent))

    def find(self, peer: PeerId) -> PeerSession | None:
        return self._sessions.get(peer)

    def tell(self, peers: Iterable[PeerId], message: session_pb2.CoordinatorMessage) -> None:
        """Send a control message to those of ``peers`` that are here."""
        for peer in peers:
            session = self._sessions.get(peer)
            if session is not None:
                session.tell(message)

    def advance(self, generation: Generation) -> None:
        """Older generations' frames are not sent any more."""
        for session in self._sessions.values():
            session.advance(generation)

    def expel(self, peer: PeerId, reason: str) -> None:
        """End the peer's session; it may join anew."""
        session = self._sessions.get(peer)
        if session is not None:
            _log.warning("%s is expelled: %s", peer, reason)
            session.expel(reason)
            self._forget(session)

    def let_go(self, peer: PeerId, reason: str, *, removed: bool = False) -> None:
        """End the session of a peer that leaves, or that the operator removed, with a last word."""
        session = self._sessions.get(peer)
        if session is None:
            return
        word = session_pb2.CoordinatorMessage(may_leave=session_pb2.MayLeave())
        if removed:
            rejected = session_pb2.Rejected(reason=f"{reason}: {Membership.barred_reason(peer)}", again=False)
            word = session_pb2.CoordinatorMessage(rejected=rejected)
        session.dismiss(word, reason)
        self._forget(session)

    def expel_silent(self) -> None:
        """End the sessions whose lease is over."""
        for member in self.membership.expired(time.monotonic()):
            reason = f"nothing was heard from it for {self.membership.lease_seconds:g} s"
            silent = time.monotonic() - member.heard
            self.expel(member.name, reason)
            self._post(PeerGone(peer=member.name, reason=reason, silent_seconds=silent, may_return=True))

    async def end(self, *, finished: bool, reason: str, within_seconds: float) -> None:
        """Tell every peer that the run is over and wait until they have heard; nobody joins any more."""
        self._over = reason
        message = session_pb2.CoordinatorMessage(end=session_pb2.End(finished=finished, reason=reason))
        for session in list(self._sessions.values()):
            session.end(message)
        try:
            await asyncio.wait_for(self._all_closed.wait(), within_seconds)
        except TimeoutError:
            for session in list(self._sessions.values()):
                session.close("it did not take the end of the run")

    def _on_message(self, session: PeerSession, message: session_pb2.PeerMessage) -> None:
        if self._sessions.get(session.peer) is not session:
            return  # it is counted as gone; what it still says must not be taken for the words of a successor of its name
        member = session.member
        member.heard = time.monotonic()
        kind = message.WhichOneof("content")
        if kind == "progress":
            progress = message.progress
            member.resident_at_join = member.resident_at_join or progress.resident_bytes
            member.phase, member.waiting_for, member.resident_bytes = (
                progress.phase,
                progress.waiting_for,
                progress.resident_bytes,
            )
            if progress.fetched_bytes > member.fetched_bytes:
                member.fetched_bytes = progress.fetched_bytes
                self._post(StateMoved(peer=session.peer))
        elif kind in ("ready", "report"):
            self._on_measured(session.peer, message)
        elif kind in ("measured", "probed"):
            self._on_answer(session.peer, message)
            return
        event = translation.run_event(session.peer, message)
        if isinstance(event, PeerGone):
            session.close(event.reason)
            self._forget(session)
        self._post(event)

    def _joined(self, member: Member) -> PeerJoined:
        said = member.introduction
        return PeerJoined(
            offer=_offer(member),
            snapshots=said.snapshots.get(self.run_id, ()),
            disk_bytes=said.disk_bytes,
            download_bytes_per_second=said.max_download_bytes_per_second,
        )

    def _forget(self, session: PeerSession) -> bool:
        """Free the peer's name; False when that was done already."""
        self.membership.remove(session.member)
        known = self._sessions.get(session.peer) is session
        if known:
            del self._sessions[session.peer]
            self._on_gone(session.peer)
        if not self._sessions:
            self._all_closed.set()
        return known


def _offer(member: Member) -> PeerOffer:
    said = member.introduction
    return PeerOffer(
        name=member.name,
        flops_per_second=said.flops_per_second,
        memory_bytes=said.memory_bytes,
        machine=said.machine,
        cores=said.cores,
        threads=said.threads,
        beside_coordinator=said.machine == machine_name(),
        handling_seconds=said.handling_seconds,
        codecs=said.codecs,
    )
