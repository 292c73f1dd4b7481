"""The authority of one run: its key and certificate in a folder that only its owner may read, and what it signs.

``identity/`` in a run's folder holds ``authority.key`` and ``authority.pem``, and ``operator.pem``: key, certificate and
authority of whoever runs `atoll status` and the like. Whoever can read these is the operator.
"""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.coordinator.run_files import disk_error
from atoll.protocol.certificates import (
    Key,
    certificate_of_pem,
    certificate_pem,
    key_of_pem,
    key_pem,
    make_authority,
    make_end,
    new_key,
)
from atoll.protocol.errors import IdentityRefused, WireError
from atoll.protocol.identity import Role, alternative_names, authority_name, run_of_authority
from atoll.protocol.security import Credentials

FOLDER = "identity"
AUTHORITY_KEY = "authority.key"
AUTHORITY = "authority.pem"
OPERATOR = "operator.pem"
REGISTER = "register.sqlite"
LIFETIME = datetime.timedelta(days=3650)
"""Of the authority and of the operator's certificate, which lies beside its key: a run may take long."""

_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----.+?-----END \1-----\n?", re.DOTALL)


class Authority:
    """Signs the certificates of one run."""

    def __init__(self, certificate: x509.Certificate, key: Key) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def open(cls, folder: Path, run_id: str, now: datetime.datetime) -> Authority:
        """The run's authority, made now if ``folder`` has none, or one of another run. Raises IdentityRefused when others can
        read it or it is damaged, ResourceError when the folder cannot be written."""
        try:
            found = cls._load(folder)
            if found is None or run_of_authority(found.certificate) != run_id:
                found = cls._make(folder, run_id, now)
        except OSError as error:
            raise disk_error(error, folder) from error
        return found

    @classmethod
    def existing(cls, folder: Path) -> Authority:
        """The authority that a run has already. Raises IdentityRefused when there is none, or it cannot be used."""
        try:
            found = cls._load(folder)
        except OSError as error:
            raise IdentityRefused(f"{folder} cannot be read: {error.strerror or error}") from error
        if found is None:
            raise IdentityRefused(f"there is no authority in {folder}: start the run with `atoll run` first")
        return found

    @classmethod
    def _load(cls, folder: Path) -> Authority | None:
        if not (folder / AUTHORITY_KEY).exists():
            return None
        try:
            key = key_of_pem(read_secret(folder / AUTHORITY_KEY))
            certificate = certificate_of_pem((folder / AUTHORITY).read_bytes())
        except WireError as error:
            raise IdentityRefused(
                f"the run's authority in {folder} is damaged ({error}): restore it, or start a new run"
            ) from error
        if certificate.public_key() != key.public_key():
            raise IdentityRefused(f"key and certificate in {folder} do not belong together: restore them, or start a new run")
        return cls(certificate, key)

    @classmethod
    def _make(cls, folder: Path, run_id: str, now: datetime.datetime) -> Authority:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        for path in folder.glob(f"{REGISTER}*"):  # another run's, of which nothing is left
            path.unlink()
        key = new_key()
        made = cls(make_authority(authority_name(run_id), key, now, LIFETIME), key)
        (folder / AUTHORITY).write_bytes(certificate_pem(made.certificate))
        shown = made.credentials(Role.OPERATOR, now, LIFETIME)
        write_secret(folder / OPERATOR, shown.key + shown.certificate + shown.authority)
        # The key comes last: where it is, all of it is.
        write_secret(folder / AUTHORITY_KEY, key_pem(key))
        return made

    def sign(self, data: bytes) -> bytes:
        """ECDSA with SHA-256, for what others keep of this run."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))

    def issue(
        self, role: Role, name: str, public: ec.EllipticCurvePublicKey, now: datetime.datetime, lifetime: datetime.timedelta
    ) -> x509.Certificate:
        """A certificate for whoever has the private half of ``public``."""
        names = alternative_names(run_of_authority(self.certificate), role, name)
        issuer = (self.certificate.subject, self._key)
        return make_end(name or role, public, names, issuer, now, lifetime)

    def credentials(self, role: Role, now: datetime.datetime, lifetime: datetime.timedelta) -> Credentials:
        """A fresh key with its certificate, for a role without a name."""
        key = new_key()
        certificate = self.issue(role, "", key.public_key(), now, lifetime)
        return Credentials(
            key=key_pem(key), certificate=certificate_pem(certificate), authority=certificate_pem(self.certificate)
        )


def read_credentials(path: Path) -> Credentials:
    """What a file like ``operator.pem`` holds. Raises IdentityRefused."""
    try:
        data = read_secret(path)
    except OSError as error:
        raise IdentityRefused(f"{path} cannot be read: {error.strerror or error}") from error
    blocks = [match[0] for match in _BLOCK.finditer(data)]
    if len(blocks) != 3:
        raise IdentityRefused(f"{path} is not an operator's certificate: copy identity/{OPERATOR} of the run's folder")
    key, certificate, authority = blocks
    try:
        key_of_pem(key), certificate_of_pem(certificate), certificate_of_pem(authority)
    except WireError as error:
        raise IdentityRefused(f"{path} is damaged ({error}): copy identity/{OPERATOR} of the run's folder") from error
    return Credentials(key=key, certificate=certificate, authority=authority)


def read_secret(path: Path) -> bytes:
    """A file that nobody else may read. Raises IdentityRefused when somebody may."""
    mode = path.stat().st_mode
    if mode & 0o077:
        raise IdentityRefused(f"others may read {path}, which holds a private key: chmod 600 {path}")
    return path.read_bytes()


def write_secret(path: Path, data: bytes) -> None:
    """Readers see the whole file or none; it is nobody else's from its first byte on."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)
