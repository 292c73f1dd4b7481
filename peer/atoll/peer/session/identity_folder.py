"""A peer's key and certificates on its own disk: one file for each run and name, which only its owner may read.

The key never leaves this machine. A certificate that is still valid lets the peer back in without its token.
"""

from __future__ import annotations

import datetime
import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.protocol.certificates import certificate_of_pem, key_of_pem
from atoll.protocol.errors import ResourceError, WireError
from atoll.protocol.security import Credentials

FOLDER = "identity"
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----.+?-----END \1-----\n?", re.DOTALL)
_INVITATION = re.compile(rb"^invitation: ([0-9a-f]*)$", re.MULTILINE)

_log = logging.getLogger("atoll.peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a peer shows in one run, and by which invitation it came."""

    credentials: Credentials
    invitation: str

    @property
    def expires(self) -> datetime.datetime:
        return certificate_of_pem(self.credentials.certificate).not_valid_after_utc

    def with_certificate(self, certificate: bytes) -> Kept:
        """The same with the next certificate."""
        return replace(self, credentials=replace(self.credentials, certificate=certificate))


class IdentityFolder:
    """In a peer's cache folder; without one nothing is kept, and a peer that is started again needs its token again."""

    def __init__(self, cache: Path | None, name: str) -> None:
        self._folder = None if cache is None else cache / FOLDER
        self._name = name

    def load(self, authority: bytes) -> Kept | None:
        """What is there for the run whose authority has this fingerprint; None for nothing, or what is damaged or not this
        user's alone."""
        path = self._path(authority)
        try:
            if path is None:
                return None
            if path.stat().st_mode & 0o077:
                _log.warning("others may read %s, so it is not used: chmod 600 it, or join with a new invitation", path)
                return None
            data = path.read_bytes()
        except OSError:
            return None
        blocks, invitation = [match[0] for match in _BLOCK.finditer(data)], _INVITATION.search(data)
        try:
            key, certificate, root = blocks
            key_of_pem(key), certificate_of_pem(certificate), certificate_of_pem(root)
        except (WireError, ValueError):
            return None
        shown = Credentials(key=key, certificate=certificate, authority=root)
        return Kept(credentials=shown, invitation=invitation[1].decode() if invitation else "")

    def keep(self, authority: bytes, kept: Kept) -> None:
        """Writes it; readers see the whole file or none. Raises ResourceError."""
        path = self._path(authority)
        if path is None:
            return
        shown = kept.credentials
        data = shown.key + shown.certificate + shown.authority + f"invitation: {kept.invitation}\n".encode()
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
                stream.write(data)
            part.replace(path)
        except OSError as error:
            cure = f"{error.strerror or error}; give another folder with --cache DIR"
            raise ResourceError(f"this peer's key cannot be kept in {path.parent}: {cure}") from error

    def _path(self, authority: bytes) -> Path | None:
        return None if self._folder is None else self._folder / authority.hex()[:32] / f"{self._name}.pem"
