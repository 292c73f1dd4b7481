"""Invitations, and the peers that came by them: an SQLite file beside the authority, so that all of it survives a restart.

`atoll invite` writes into it while a coordinator runs, or before one does. What is kept of an invitation is its authority,
which is of no use without the token's secret. A peer that was removed stays so until it is allowed again; meanwhile its
certificates are revoked, and the invitation that it came by lets nobody in.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from atoll.coordinator.transactions import transaction
from atoll.protocol.certificates import certificate_of_pem, certificate_pem
from atoll.protocol.errors import IdentityRefused, ResourceError
from atoll.protocol.ids import COORDINATOR, PEER_NAME

KEPT_SECONDS = 7 * 86400.0
"""How long an invitation that has expired is remembered, to tell its holder so."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS invitations (id TEXT PRIMARY KEY, authority BLOB NOT NULL, expires REAL NOT NULL,
uses INTEGER NOT NULL, trusted INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS peers (name TEXT PRIMARY KEY, key TEXT NOT NULL, invitation TEXT NOT NULL, trusted INTEGER NOT NULL)
WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (invitation TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (invitation, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS certificates (serial TEXT PRIMARY KEY, name TEXT NOT NULL, key TEXT NOT NULL, expires REAL NOT NULL)
WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """``expires`` is a time of day; ``uses`` is how many peers may come by it, ``trusted`` whether the operator trusts them
    with the data and the loss."""

    id: str
    authority: x509.Certificate
    expires: float
    uses: int = 1
    trusted: bool = False


class Register:
    """From any thread. Raises ResourceError where the disk does not do its part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._spoken():
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
            path.chmod(0o600)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @property
    def version(self) -> tuple[int, int]:
        """Another one after every change, also by another process."""
        with self._spoken():
            (others,) = self._connection.execute("PRAGMA data_version").fetchone()
            return int(others), self._connection.total_changes

    def add(self, invitation: Invitation) -> None:
        with self._spoken():
            authority = certificate_pem(invitation.authority)
            row = (invitation.id, authority, invitation.expires, invitation.uses, invitation.trusted)
            self._connection.execute("INSERT INTO invitations VALUES (?, ?, ?, ?, ?)", row)

    def invitations(self, now: float) -> list[Invitation]:
        """Those that are open, or have not been over for long."""
        with self._spoken():
            query = "SELECT id, authority, expires, uses, trusted FROM invitations WHERE expires > ? ORDER BY expires"
            rows = self._connection.execute(query, (now - KEPT_SECONDS,)).fetchall()
        return [
            Invitation(id=number, authority=certificate_of_pem(authority), expires=expires, uses=uses, trusted=bool(trusted))
            for number, authority, expires, uses, trusted in rows
        ]

    def enrol(self, name: str, key: str, invitation: str, now: float) -> None:
        """Counts in a peer that comes by an invitation with a key (its digest). Raises IdentityRefused with the reason."""
        if not PEER_NAME.fullmatch(name) or name == COORDINATOR:
            raise IdentityRefused(
                f"{name[:80]!r} is not a name for a peer; give --name up to 64 letters, digits, dots, hyphens and underscores"
            )
        with self._spoken(), transaction(self._connection):
            trusted = self._check_invitation(invitation, key, now)
            self._check_name(name, key, invitation)
            self._connection.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (invitation, key))
            self._connection.execute("INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?)", (name, key, invitation, trusted))

    def note_certificate(self, serial: str, name: str, key: str, expires: float, now: float) -> None:
        """The peer was given this certificate."""
        with self._spoken(), transaction(self._connection):
            self._connection.execute("DELETE FROM certificates WHERE expires < ?", (now,))
            self._connection.execute("INSERT INTO certificates VALUES (?, ?, ?, ?)", (serial, name, key, expires))

    def key_of(self, name: str) -> str | None:
        """The digest of the key that the peer enrolled with last; None for a peer that is not known, or was removed."""
        with self._spoken():
            query = "SELECT key FROM peers WHERE name = ? AND name NOT IN (SELECT name FROM removed)"
            row = self._connection.execute(query, (name,)).fetchone()
        return None if row is None else str(row[0])

    def trusted(self) -> frozenset[str]:
        """The peers that came by an invitation for those whom the operator trusts."""
        with self._spoken():
            return frozenset(name for (name,) in self._connection.execute("SELECT name FROM peers WHERE trusted"))

    def remove(self, name: str) -> None:
        """The peer's certificates are revoked, and nobody comes by its invitation, until :meth:`allow`."""
        with self._spoken():
            self._connection.execute("INSERT OR IGNORE INTO removed VALUES (?)", (name,))

    def allow(self, name: str) -> bool:
        """False when it was not removed."""
        with self._spoken():
            return self._connection.execute("DELETE FROM removed WHERE name = ?", (name,)).rowcount > 0

    def removed(self) -> frozenset[str]:
        """The names of peers that were removed."""
        with self._spoken():
            return frozenset(name for (name,) in self._connection.execute("SELECT name FROM removed"))

    def revoked(self) -> frozenset[str]:
        """Serials of certificates that are valid no more: those of peers that were removed, and those with a key that was
        replaced by another."""
        query = (
            "SELECT serial FROM certificates WHERE name IN (SELECT name FROM removed) "
            "OR key != (SELECT key FROM peers WHERE peers.name = certificates.name)"
        )
        with self._spoken():
            return frozenset(serial for (serial,) in self._connection.execute(query))

    def _check_invitation(self, invitation: str, key: str, now: float) -> bool:
        """Whether those who come by it are trusted."""
        query = "SELECT expires, uses, trusted FROM invitations WHERE id = ?"
        row = self._connection.execute(query, (invitation,)).fetchone()
        again = "make a new one with `atoll invite`"
        if row is None:
            raise IdentityRefused(f"the invitation {invitation} is not known to this run; {again}")
        expires, uses, trusted = row
        if now > expires:
            raise IdentityRefused(f"the invitation {invitation} expired {(now - expires) / 60.0:.0f} min ago; {again}")
        gone = "SELECT name FROM peers WHERE invitation = ? AND name IN (SELECT name FROM removed)"
        removed = self._connection.execute(gone, (invitation,)).fetchone()
        if removed is not None:
            raise IdentityRefused(f"the operator removed {removed[0]}, which came by the invitation {invitation}; {again}")
        query = "SELECT count(*), max(key = ?) FROM keys WHERE invitation = ?"
        count, known = self._connection.execute(query, (key, invitation)).fetchone()
        if count >= uses and not known:
            times = "once" if uses == 1 else f"{uses} times"
            raise IdentityRefused(f"the invitation {invitation} was used {times} already, and serves no more peers; {again}")
        return bool(trusted)

    def _check_name(self, name: str, key: str, invitation: str) -> None:
        """A name is its first owner's, who is known by the key, or by the invitation where the key was lost."""
        if self._connection.execute("SELECT 1 FROM removed WHERE name = ?", (name,)).fetchone() is not None:
            raise IdentityRefused(
                f"the operator removed {name} from this run; have the operator run `atoll peers allow {name}`, or give this "
                "peer another name with --name"
            )
        row = self._connection.execute("SELECT key, invitation FROM peers WHERE name = ?", (name,)).fetchone()
        if row is not None and key != row[0] and invitation != row[1]:
            raise IdentityRefused(
                f"a peer named {name} enrolled before, with another key; give this one another name with --name"
            )

    @contextmanager
    def _spoken(self) -> Iterator[None]:
        """One thread at a time, and SQLite's errors as sentences."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                folder = self._path.parent
                raise ResourceError(
                    f"{self._path} cannot be used: {error}; check the disk and the rights of {folder}"
                ) from error
