"""`atoll invite`: lets a peer into a run, by a line that its owner pastes."""

from __future__ import annotations

import datetime
import json
import socket
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.options import AsJson, ExistingState
from atoll.coordinator.cli.state import newest_state, read_address
from atoll.coordinator.run_files import disk_error
from atoll.protocol.addresses import Address, parse_address
from atoll.protocol.errors import IdentityRefused
from atoll.protocol.quantities import parse_seconds

if TYPE_CHECKING:
    from atoll.coordinator.identity.register import Register
    from atoll.protocol.invitation import Token

MOST_USES = 100_000
MOST_SECONDS = 366 * 86400.0
SOMEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has (RFC 5737, RFC 3849): the way to them is the way out of this machine."""


class InvitedAs(StrEnum):
    """Whether the operator trusts those who come by an invitation."""

    PEER = "peer"
    TRUSTED = "trusted"


def command(
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="How long the invitation holds, for example 30m, 24h or 7d.")
    ] = "24h",
    uses: Annotated[int, typer.Option(min=1, max=MOST_USES, help="How many peers may come by it.")] = 1,
    role: Annotated[InvitedAs, typer.Option(help="trusted: written down with the peer.")] = InvitedAs.PEER,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the peer reaches the coordinator, if not where it listens.")
    ] = None,
    state: ExistingState = None,
    as_json: AsJson = False,
) -> None:
    """Prints the line by which a peer joins a run. Whoever has the line can join: send it to its owner alone."""
    seconds = parse_seconds(expires)
    if not seconds or seconds > MOST_SECONDS:
        raise UsageError(f"--expires: {expires!r} is not a time of at most a year; write for example 24h")
    folder = state or newest_state()
    where = _address(folder, address)
    token = _invited(folder, seconds, uses, trusted=role is InvitedAs.TRUSTED)
    line = f"atoll-peer join {where} --token {token.text()}"
    if as_json:
        row = {"event": "invitation", "id": token.invitation, "address": str(where), "token": token.text(), "line": line}
        print(json.dumps({**row, "expires_seconds": seconds, "uses": uses, "role": role.value}))
        return
    if where.is_loopback:
        print(f"atoll: {where} is reached on this machine alone; give --address HOST:PORT for peers elsewhere", file=sys.stderr)
    print(line)


def invite_for_swarm(state: Path) -> str:
    """A token for a peer of a swarm, however often it begins anew, with its disk or without."""
    return _invited(state, MOST_SECONDS, MOST_USES, trusted=False).text()


def keep_invitation(path: Path, state: Path) -> None:
    """A token in a file that its owner alone may read, for as many peers as are given the file. One that still holds stays.
    Raises ResourceError when it cannot be written."""
    from atoll.coordinator.identity.authority import FOLDER, REGISTER, write_secret
    from atoll.coordinator.identity.register import Register

    register = Register(state / FOLDER / REGISTER)
    try:
        if not _still_holds(path, register):
            write_secret(path, f"{_invited(state, MOST_SECONDS, MOST_USES, trusted=False).text()}\n".encode())
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        register.close()


def _still_holds(path: Path, register: Register) -> bool:
    from atoll.protocol.invitation import parse_token

    now = time.time()
    try:
        token = parse_token(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, IdentityRefused):
        return False
    return any(one.id == token.invitation and one.expires > now for one in register.invitations(now))


def _invited(folder: Path, seconds: float, uses: int, *, trusted: bool) -> Token:
    from atoll.coordinator.identity.authority import FOLDER, REGISTER, Authority
    from atoll.coordinator.identity.register import Register
    from atoll.coordinator.identity.run_identity import Wanted, invite

    authority = Authority.existing(folder / FOLDER)
    register = Register(folder / FOLDER / REGISTER)
    try:
        return invite(authority, register, Wanted(lifetime=datetime.timedelta(seconds=seconds), uses=uses, trusted=trusted))
    finally:
        register.close()


def _address(folder: Path, given: str | None) -> Address:
    """Where peers reach the coordinator of the run in ``folder``. Raises UsageError, JobError."""
    found = read_address(folder)
    if found is not None and found.insecure:
        raise UsageError(
            f"the run in {folder} was started with --insecure: its peers join without an invitation, on its machine"
        )
    if given is not None:
        return parse_address(given, "--address")
    if found is None:
        raise UsageError(f"no coordinator has listened in {folder}: start `atoll run` first, or give --address HOST:PORT")
    listens = parse_address(found.listens)
    return Address(_outward(listens), listens.port) if listens.is_unspecified else listens


def _outward(listens: Address) -> str:
    """This machine's own address on the way out; asks the routing table, sends nothing."""
    six = ":" in listens.host
    family, somewhere = (socket.AF_INET6, SOMEWHERE[1]) if six else (socket.AF_INET, SOMEWHERE[0])
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "::1" if six else "127.0.0.1"
