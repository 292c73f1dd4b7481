"""How commands reach a running coordinator, and show that they are the operator's.

The run's folder holds both: where its coordinator listens, and the operator's certificate. From another machine the address is
given, and the certificate is a copy that the environment names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.state import RUNS, find_address, newest_state, read_address
from atoll.coordinator.identity.authority import FOLDER, OPERATOR, read_credentials
from atoll.coordinator.run_files import ADDRESS
from atoll.protocol.addresses import Address, parse_address
from atoll.protocol.folders import paths_in

if TYPE_CHECKING:
    from atoll.protocol.security import Security

CERTIFICATE = "ATOLL_OPERATOR"
"""The environment variable that names a copy of the operator's certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A coordinator, and how it is to be spoken to."""

    address: Address
    security: Security


def find_coordinator(target: str | None, state: Path | None) -> Found:
    """The coordinator that a person means: ``target`` is HOST:PORT or a state folder, ``state`` the folder with the operator's
    certificate; nothing is the newest run. Raises UsageError, IdentityRefused."""
    given = target is not None and not Path(target).is_dir()
    if target is not None and state is not None and not given:
        raise UsageError("give the run's folder once")
    if not given:
        folder = state or (Path(target) if target is not None else newest_state())
        return Found(address=parse_address(find_address(str(folder))), security=_security_of(folder))
    address = parse_address(find_address(target))
    folder_or_none = state or _folder_of(address)
    if folder_or_none is not None:
        return Found(address=address, security=_security_of(folder_or_none))
    certificate = os.environ.get(CERTIFICATE)
    if certificate:
        return Found(address=address, security=_security_with(Path(certificate)))
    raise UsageError(
        f"the coordinator at {address} answers its operator alone: give the run's folder with --state DIR, or copy "
        f"{FOLDER}/{OPERATOR} from it to this machine and have {CERTIFICATE} name the copy"
    )


def _folder_of(address: Address) -> Path | None:
    """The run under ``runs/`` whose coordinator listens there, as far as is known on this machine."""
    for path in paths_in(RUNS, f"*/{ADDRESS}"):
        found = read_address(path.parent)
        if found is not None and found.address == str(address):
            return path.parent
    return None


def _security_of(folder: Path) -> Security:
    found = read_address(folder)
    if found is not None and found.insecure:
        from atoll.protocol.security import PlainText

        return PlainText()
    return _security_with(folder / FOLDER / OPERATOR)


def _security_with(path: Path) -> Security:
    from atoll.protocol.certificates import certificate_of_pem
    from atoll.protocol.identity import Verifier
    from atoll.protocol.security import MutualTls

    shown = read_credentials(path)
    return MutualTls(shown, Verifier(certificate_of_pem(shown.authority)))
