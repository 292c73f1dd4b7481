"""Which authority whatever listens at an address presents, before anything is said to it.

gRPC takes a whole certificate as its root and tells little of why a handshake failed; so Python's own TLS looks first.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography import x509

from atoll.protocol.addresses import Address
from atoll.protocol.certificates import CLOCK_TOLERANCE, certificate_of_pem, fingerprint
from atoll.protocol.errors import SessionError, WireError
from atoll.protocol.security import Credentials

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
LOOK_SECONDS = 2.0
ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """What is shown at an address: whose certificate it is, and the one at the end of the chain. It proves nothing yet: the
    caller compares the fingerprint, and gRPC then checks the chain and who has its keys."""

    own: x509.Certificate
    authority: x509.Certificate

    def wrong_clock(self, now: datetime.datetime) -> str | None:
        """A sentence where this machine's clock lies outside the time for which the certificate holds, by which the
        connection would fail; None where it lies within."""
        begins, ends = self.own.not_valid_before_utc, self.own.not_valid_after_utc
        if begins <= now <= ends:
            return None
        # Certificates are made as if an hour earlier, which a clock may be behind.
        behind = now < begins
        hours = ((begins + CLOCK_TOLERANCE - now) if behind else (now - ends)).total_seconds() / 3600.0
        held = f"valid from {_shown(begins)} on" if behind else f"valid until {_shown(ends)}"
        return (
            f"this machine's clock says {_shown(now)}, and what the run shows is {held}: the clock is at least {hours:.1f} h "
            f"{'behind' if behind else 'ahead'}, or the run's is wrong; set it, for example with `timedatectl set-ntp true`"
        )


async def presented_authority(
    address: Address, within_seconds: float, on_waiting: Callable[[str], None] = lambda problem: None
) -> x509.Certificate:
    """The certificate at the end of the chain. ``on_waiting`` gets why nothing was found, each time. Raises SessionError when
    nothing listens there in time, no TLS is spoken, or this machine's clock is so wrong that no connection will be."""
    found = await presented(address, within_seconds, on_waiting)
    wrong = found.wrong_clock(datetime.datetime.now(datetime.UTC))
    if wrong is not None:
        raise SessionError(wrong)
    return found.authority


async def presented(
    address: Address, within_seconds: float, on_waiting: Callable[[str], None] = lambda problem: None
) -> Presented:
    """What is shown there, looked for with pauses that grow. Raises SessionError when nothing listens there in time, or no TLS
    is spoken."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    problem, pause = "nothing listens there", FIRST_PAUSE_SECONDS
    while True:
        left = deadline - loop.time()
        try:
            return await asyncio.wait_for(_look(address), min(ANSWER_SECONDS, max(0.1, left)))
        except ssl.SSLError as error:
            raise SessionError(
                f"what listens at {address} does not speak TLS as Atoll does ({error.reason or error}): check address and "
                "port; if it is a coordinator that was started with --insecure, this side needs --insecure as well"
            ) from error
        except (OSError, TimeoutError) as error:
            problem = str(error) or "it does not answer"
        if left <= pause:
            raise SessionError(
                f"no coordinator answers at {address} after {within_seconds:g} s ({problem}): check that `atoll run` is "
                "running there with --listen on that port, and that no firewall is in between"
            )
        on_waiting(problem)
        await asyncio.sleep(pause)
        pause = min(2.0 * pause, LONGEST_PAUSE_SECONDS)


async def why_refused(address: Address, shown: Credentials) -> str:
    """Why a connection with these credentials does not come about, as far as can be told from here; a sentence."""
    certificate = certificate_of_pem(shown.certificate)
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        ended = _shown(certificate.not_valid_after_utc)
        return (
            f"this side's certificate ended at {ended}: get a new invitation with `atoll invite`, or set this machine's clock"
        )
    try:
        found = await presented_authority(address, LOOK_SECONDS)
    except SessionError as error:
        return str(error)
    own = fingerprint(certificate_of_pem(shown.authority))
    if fingerprint(found) != own:
        return (
            f"what listens at {address} shows another authority ({short(fingerprint(found))}) than this run's ({short(own)}): "
            "another run listens there now, or somebody is in between"
        )
    return (
        f"{address} does not accept this side's certificate, or its own is not valid by this machine's clock "
        f"({_shown(now)}): set both machines' clocks, or get a new invitation with `atoll invite`"
    )


def short(fingerprint_bytes: bytes) -> str:
    """The beginning of a fingerprint, for people to compare."""
    return fingerprint_bytes[:8].hex(":")


def _shown(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


async def _look(address: Address) -> Presented:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # where the other side shows its chain before it asks for ours
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(address.host, address.port, ssl=context, server_hostname="")
    try:
        chain = _chain(writer.get_extra_info("ssl_object"))
    finally:
        writer.close()
        with contextlib.suppress(OSError):  # it ends the connection because we showed nothing
            await writer.wait_closed()
    if not chain:
        raise ssl.SSLError(1, "it shows no certificate")
    try:
        return Presented(own=certificate_of_pem(chain[0]), authority=certificate_of_pem(chain[-1]))
    except WireError as error:
        raise ssl.SSLError(1, str(error)) from error


def _chain(connection: Any) -> list[bytes]:
    """What was presented, in PEM, unverified. Python before 3.13 has it on an inner object only."""
    if hasattr(connection, "get_unverified_chain"):
        return [ssl.DER_cert_to_PEM_cert(data).encode() for data in connection.get_unverified_chain()]
    return [ssl.DER_cert_to_PEM_cert(one.public_bytes(2)).encode() for one in connection._sslobj.get_unverified_chain() or ()]
