"""All peers' sessions: admits peers, keeps their leases, turns what they say into events of the run, and speaks to them by
name."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.events import PeerGone, PeerJoined, RunEvent, StateMoved
from atoll.coordinator.run.instructions import EndRun
from atoll.coordinator.sessions import translation
from atoll.coordinator.sessions.membership import Introduction, Member, Membership, Refusal, Taken
from atoll.coordinator.sessions.session import PeerSession, SessionContext
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.machine import machine_name
from atoll.protocol.v1 import session_pb2

_log = logging.getLogger(__name__)

OnReport = Callable[[PeerId, session_pb2.PeerMessage], None]

SIGN_OF_LIFE_SECONDS = (1.0, 4.0)
"""A peer that is here speaks every two seconds. What is heard within the first one may have been on its way when it died."""


class Sessions:
    """``run`` is the run's name, ``run_id`` what it is called for ever, known once its folder is open. ``post`` takes the
    events; ``on_measured`` is shown each Ready and StageReport for what it tells of memory and links. ``on_answer`` gets each
    Measured and Probed, which are no matter of the run, ``on_joined`` each peer that is here, ``on_gone`` its
    name when it is here no longer, and ``on_removed`` of each that the operator removed, once it must go. ``is_vouched``:
    whether a peer was invited as trusted."""

    def __init__(
        self,
        *,
        run: str,
        version: str,
        lease_seconds: float,
        post: Callable[[RunEvent], None],
        on_measured: OnReport,
        on_answer: OnReport = lambda peer, message: None,
        on_joined: Callable[[Member], None] = lambda member: None,
        on_gone: Callable[[PeerId], None] = lambda peer: None,
        on_removed: Callable[[PeerId], None] = lambda peer: None,
        is_vouched: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self.membership = Membership(time.monotonic(), lease_seconds)
        self.run_id = ""
        self._run = run
        self._version = version
        self._post = post
        self._on_measured = on_measured
        self._on_answer = on_answer
        self._on_joined = on_joined
        self._on_gone = on_gone
        self._on_removed = on_removed
        self._is_vouched = is_vouched
        self._revoked: tuple[str, ...] = ()
        self._sessions: dict[PeerId, PeerSession] = {}
        self._over: str | None = None
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    async def admit(self, join: session_pb2.Join, came_from: str) -> PeerSession | Refusal:
        """A session for a peer that may join; the run hears of it when the session begins. Where its name is taken this takes
        as long as whoever has the name may take to speak."""
        introduction = translation.introduction(join)
        verdict = self._judge(introduction, came_from)
        if isinstance(verdict, Taken):
            verdict = await self._settle(verdict, introduction, came_from)
        if isinstance(verdict, Refusal):
            _log.warning("refused %r: %s", introduction.name, verdict.reason)
            return verdict
        session = PeerSession(verdict, translation.held(join, self.run_id), self._on_message)
        self._sessions[session.peer] = session
        self._all_closed.clear()
        welcome = session_pb2.Welcome(run=self._run, name=session.peer, run_id=self.run_id)
        session.tell(session_pb2.CoordinatorMessage(welcome=welcome))
        if self._revoked:
            session.tell(self._revocations())
        self._on_joined(session.member)
        return session

    def _judge(self, introduction: Introduction, came_from: str) -> Member | Refusal | Taken:
        if self._over is not None:
            return Refusal(reason=f"the run is over: {self._over}")
        return self.membership.admit(introduction, came_from, self._version, time.monotonic())

    async def _settle(self, taken: Taken, introduction: Introduction, came_from: str) -> Member | Refusal:
        """Whether the newcomer takes the place of whoever has its name."""
        name = taken.holder.name
        if not taken.same_process and await self._speaks(name):
            return taken.refusal
        if self._sessions.get(name) is not None and self.membership.find(name) is taken.holder:
            self._lose(
                taken.holder,
                "it has come back" if taken.same_process else "it was silent when another of its name joined",
            )
        verdict = self._judge(introduction, came_from)
        return verdict.refusal if isinstance(verdict, Taken) else verdict  # somebody else of that name was quicker

    async def _speaks(self, peer: PeerId) -> bool:
        """Whether the peer is here indeed, and says something."""
        session, (earliest, latest) = self._sessions.get(peer), SIGN_OF_LIFE_SECONDS
        began = time.monotonic()
        while session is not None and self._sessions.get(peer) is session:
            session.news.clear()
            try:
                await asyncio.wait_for(session.news.wait(), began + latest - time.monotonic())
            except TimeoutError:
                return False
            if time.monotonic() - began >= earliest and self._sessions.get(peer) is session:
                return True
        return False

    async def converse(self, session: PeerSession, context: SessionContext) -> None:
        """Carry an admitted peer's session from its first word to its last."""
        reason = "its connection ended"
        try:
            self._post(self._joined(session))
            reason = await session.run(context)
        finally:
            if self._forget(session):
                silent = time.monotonic() - session.member.heard
                self._post(PeerGone(peer=session.peer, reason=reason, silent_seconds=silent))
            await session.wind_up()

    def find(self, peer: PeerId) -> PeerSession | None:
        return self._sessions.get(peer)

    def tell(self, peers: Iterable[PeerId], message: session_pb2.CoordinatorMessage) -> None:
        """Send a control message to those of ``peers`` that are here."""
        for peer in peers:
            session = self._sessions.get(peer)
            if session is not None:
                session.tell(message)

    def revoke(self, serials: Iterable[str]) -> None:
        """From now on these certificates are revoked, and no others: every peer hears of it."""
        self._revoked = tuple(sorted(serials))
        self.tell(list(self._sessions), self._revocations())

    def permit(self, peer: PeerId, asker: PeerId, purpose: session_pb2.Permit.Purpose, seconds: float, step: int = 0) -> None:
        """Let ``asker`` ask ``peer`` for something; to be said before the asker hears of it."""
        permit = session_pb2.Permit(peer=asker, purpose=purpose, step=step, seconds=seconds)
        self.tell([peer], session_pb2.CoordinatorMessage(permit=permit))

    def _revocations(self) -> session_pb2.CoordinatorMessage:
        return session_pb2.CoordinatorMessage(revoked=session_pb2.Revoked(serials=self._revoked))

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
        if removed:
            self._on_removed(peer)

    def expel_silent(self) -> None:
        """End the sessions whose lease is over."""
        for member in self.membership.expired(time.monotonic()):
            self._lose(member, f"nothing was heard from it for {self.membership.lease_seconds:g} s")

    def _lose(self, member: Member, reason: str) -> None:
        """The peer is not here any more, whatever its stream looks like."""
        silent = time.monotonic() - member.heard
        self.expel(member.name, reason)
        self._post(PeerGone(peer=member.name, reason=reason, silent_seconds=silent, may_return=True))

    async def end(self, ending: EndRun, *, within_seconds: float) -> None:
        """Tell every peer that the run is over and wait until they have heard; nobody joins any more."""
        self._over = ending.reason
        end = session_pb2.End(finished=ending.finished, stopped=ending.stopped, reason=ending.reason)
        message = session_pb2.CoordinatorMessage(end=end)
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
        session.news.set()
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

    def _joined(self, session: PeerSession) -> PeerJoined:
        said = session.member.introduction
        return PeerJoined(
            offer=_offer(session.member, vouched=self._is_vouched(session.peer)),
            held=session.held,
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
        session.news.set()
        if not self._sessions:
            self._all_closed.set()
        return known


def _offer(member: Member, *, vouched: bool) -> PeerOffer:
    said = member.introduction
    return PeerOffer(
        name=member.name,
        flops_per_second=said.flops_per_second,
        memory_bytes=said.memory_bytes,
        vouched=vouched,
        machine=said.machine,
        cores=said.cores,
        threads=said.threads,
        beside_coordinator=said.machine == machine_name(),
        handling_seconds=said.handling_seconds,
        codecs=said.codecs,
    )
