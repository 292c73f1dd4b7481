"""How a peer comes by what it shows in a run: from its disk, or with a token; and how it goes on to be known.

With a token: look which authority the coordinator presents; go on only if it is the token's; ask it for a certificate over a
connection that trusts this authority alone.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import time
from collections.abc import Iterable
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509

from atoll.peer.session.identity_folder import IdentityFolder, Kept
from atoll.peer.settings import PeerSettings
from atoll.protocol.certificates import (
    CLOCK_TOLERANCE,
    certificate_of_pem,
    certificate_pem,
    fingerprint,
    is_issued_by,
    key_of_pem,
    key_pem,
    new_key,
    signing_request,
)
from atoll.protocol.channel import PROTOCOL_VERSION, open_channel
from atoll.protocol.errors import IdentityRefused, ResourceError, SessionError, WireError
from atoll.protocol.identity import Verifier, run_of_authority
from atoll.protocol.invitation import Token, asking_certificate, parse_token
from atoll.protocol.presented import presented_authority, short, why_refused
from atoll.protocol.security import Credentials, MutualTls, PlainText, Security
from atoll.protocol.v1 import enrolment_pb2, enrolment_pb2_grpc

ASK_SECONDS = 20.0
SKEW_SECONDS = 60.0
"""By how much two clocks may differ before it is told."""
LEFT_SECONDS = 120.0
"""A certificate that ends sooner is not worth beginning with."""
LOOK_SECONDS = 30.0
"""How often the time of day is looked at: the monotonic clock stands still while a laptop sleeps."""

_FILE_SECONDS = 0.5
_PAUSES_SECONDS = (0.3, 0.6, 1.2)

_log = logging.getLogger("atoll.peer")


class Belonging:
    """This peer's place in a run; :meth:`open` gets it, :meth:`keep_renewing` keeps it. ``security`` protects all of the
    peer's connections."""

    def __init__(self, settings: PeerSettings) -> None:
        self.security: Security = PlainText()
        self.coordinator = settings.coordinator
        """Where to ask."""
        self._settings = settings
        self._folder = IdentityFolder(settings.cache, settings.name)
        self._revoked: set[str] = set()
        self._said_waiting = float("-inf")

    async def open(self) -> Security:
        """Raises IdentityRefused or SessionError, with what to do."""
        settings = self._settings
        if settings.insecure:
            return self.security
        text = settings.token or await self._token_in_file()
        token = None if text is None else parse_token(text)
        kept = None if token is None else await asyncio.to_thread(self._folder.load, token.fingerprint)
        if kept is None or token is None or not _is_of_use(kept, token):
            authority = await presented_authority(settings.coordinator, settings.patience.end, self._say_waiting)
            kept = await self._kept_or_given(authority, token)
        verifier = Verifier(certificate_of_pem(kept.credentials.authority), revoked=self._revoked)
        self.security = MutualTls(kept.credentials, verifier)
        return self.security

    def revoke(self, serials: Iterable[str]) -> None:
        """These are no more in the run: what they have open here ends, and they are let in no more. All others are."""
        now = frozenset(serials)
        new = now - self._revoked
        self._revoked.clear()
        self._revoked.update(now)
        self.security.guard.end_calls_of(new)

    async def keep_renewing(self) -> None:
        """Asks for the next certificate when two thirds of the present one's time are over, and goes on for ever. One that
        the coordinator refuses is told of; the session says the rest."""
        while isinstance(self.security, MutualTls):
            wait = _until_renewal(self.security.credentials, random.random())
            if wait > 0.0:
                await asyncio.sleep(min(wait, LOOK_SECONDS))
                continue
            try:
                await self._renew(self.security)
            except (SessionError, IdentityRefused, ResourceError) as error:
                _log.warning("this peer's certificate was not renewed: %s", error)
                await asyncio.sleep(LOOK_SECONDS)

    async def _token_in_file(self) -> str | None:
        """What the file holds that was named, once it is there: a coordinator may only be about to write it. None where no file
        was named. Raises IdentityRefused when that takes longer than this peer looks for a coordinator."""
        path, seconds = self._settings.token_file, self._settings.patience.end
        if path is None:
            return None
        deadline, told = time.monotonic() + seconds, False
        while time.monotonic() < deadline:
            text = await asyncio.to_thread(_first_word, path)
            if text:
                return text
            if not told:
                _log.info("waiting for a token in %s", path)
                told = True
            await asyncio.sleep(_FILE_SECONDS)
        raise IdentityRefused(f"--token-file: no token was in {path} within {seconds:g} s; `atoll invite` prints one")

    def _say_waiting(self, problem: str) -> None:
        """Tells people now and then whom this peer waits for."""
        patience, now = self._settings.patience, time.monotonic()
        if now - self._said_waiting >= patience.between_logs:
            self._said_waiting = now
            _log.info("%s", patience.words(self.coordinator, problem))

    async def _kept_or_given(self, authority: x509.Certificate, token: Token | None) -> Kept:
        address, found = self.coordinator, fingerprint(authority)
        if token is None:
            kept = await asyncio.to_thread(self._folder.load, found)
            if kept is None or not _is_of_use(kept, None):
                raise IdentityRefused(
                    f"the run at {address} is for those whom its operator invites: run `atoll invite` on the coordinator's "
                    "machine, and paste here the line that it prints"
                )
            return kept
        if found != token.fingerprint:
            raise IdentityRefused(
                f"what listens at {address} shows the authority {short(found)}, the token is of {short(token.fingerprint)}: "
                "the token is of another run, or somebody is in between; nothing was sent"
            )
        return await self._enrol(authority, token)

    async def _enrol(self, authority: x509.Certificate, token: Token) -> Kept:
        settings, now = self._settings, datetime.datetime.now(datetime.UTC)
        before = await asyncio.to_thread(self._folder.load, token.fingerprint)
        key = new_key() if before is None else key_of_pem(before.credentials.key)
        asking_key, asking = asking_certificate(token, run_of_authority(authority), now)
        root = certificate_pem(authority)
        shown = Credentials(key=key_pem(asking_key), certificate=certificate_pem(asking), authority=root)
        request = enrolment_pb2.EnrolRequest(
            protocol_version=PROTOCOL_VERSION, name=settings.name, signing_request=signing_request(settings.name, key)
        )
        answer = await self._ask_often(MutualTls(shown, Verifier(authority)), request)
        self._take_in(answer, authority)
        given = Credentials(key=key_pem(key), certificate=answer.certificate, authority=root)
        kept = Kept(credentials=given, invitation=token.invitation)
        await asyncio.to_thread(self._folder.keep, token.fingerprint, kept)
        _log.info("enrolled as %s with invitation %s", settings.name, token.invitation)
        return kept

    async def _ask_often(self, security: MutualTls, request: enrolment_pb2.EnrolRequest) -> enrolment_pb2.Enrolled:
        """Asks again for a moment: a coordinator hears of an invitation a little after it was printed."""
        for patience in (*_PAUSES_SECONDS, None):
            async with open_channel(str(self.coordinator), security) as channel:
                try:
                    call = enrolment_pb2_grpc.EnrolmentStub(channel).Enrol(request, timeout=ASK_SECONDS)
                    return await self._ask(security, call)
                except SessionError:
                    if patience is None:
                        raise
            await asyncio.sleep(patience)
        raise AssertionError("the last attempt answers or raises")

    async def _renew(self, security: MutualTls) -> None:
        shown = security.credentials
        authority = certificate_of_pem(shown.authority)
        request = enrolment_pb2.RenewRequest(signing_request=signing_request(self._settings.name, key_of_pem(shown.key)))
        async with open_channel(str(self.coordinator), security) as channel:
            answer = await self._ask(security, enrolment_pb2_grpc.EnrolmentStub(channel).Renew(request, timeout=ASK_SECONDS))
        self._take_in(answer, authority)
        before = await asyncio.to_thread(self._folder.load, fingerprint(authority))
        kept = Kept(credentials=shown, invitation=before.invitation if before else "").with_certificate(answer.certificate)
        security.replace(kept.credentials)
        await asyncio.to_thread(self._folder.keep, fingerprint(authority), kept)

    async def _ask(
        self, security: MutualTls, call: grpc.aio.UnaryUnaryCall[object, enrolment_pb2.Enrolled]
    ) -> enrolment_pb2.Enrolled:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            address = self.coordinator
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise SessionError(await why_refused(address, security.credentials)) from error
            raise IdentityRefused(f"the coordinator at {address} refuses: {error.details() or error.code().name}") from error

    def _take_in(self, answer: enrolment_pb2.Enrolled, authority: x509.Certificate) -> None:
        """Checks what was given, and tells of clocks that differ. Raises IdentityRefused."""
        try:
            certificate = certificate_of_pem(answer.certificate)
        except WireError as error:
            raise IdentityRefused(f"the coordinator sent no certificate: {error}") from error
        if not is_issued_by(certificate, authority):
            raise IdentityRefused("the coordinator sent a certificate that its own authority has not issued")
        self.revoke(answer.revoked)
        skew = time.time() - answer.time
        if abs(skew) > SKEW_SECONDS:
            way = "ahead of" if skew > 0.0 else "behind"
            _log.warning(
                "this machine's clock is %.0f s %s the coordinator's: certificates stand an hour; have both set by NTP",
                abs(skew),
                way,
            )


def _first_word(path: Path) -> str:
    """Empty for a file that is not there. Raises IdentityRefused for one that cannot be read."""
    try:
        return next(iter(path.read_text(encoding="utf-8").split()), "")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityRefused(f"--token-file: {path} cannot be read: {error}") from error


def _is_of_use(kept: Kept, token: Token | None) -> bool:
    """Whether one may begin with it. A token of another invitation means that the operator wants this peer to come anew."""
    left = (kept.expires - datetime.datetime.now(datetime.UTC)).total_seconds()
    return left > LEFT_SECONDS and (token is None or token.invitation == kept.invitation)


def _until_renewal(shown: Credentials, chance: float) -> float:
    """Seconds until the next certificate is to be asked for; peers that began together do not ask together."""
    certificate = certificate_of_pem(shown.certificate)
    now = datetime.datetime.now(datetime.UTC)
    whole = (certificate.not_valid_after_utc - certificate.not_valid_before_utc - CLOCK_TOLERANCE).total_seconds()
    return (certificate.not_valid_after_utc - now).total_seconds() - whole * (0.30 + 0.05 * chance)
