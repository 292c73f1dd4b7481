"""Authorities and certificates for tests, right and wrong ones."""

from __future__ import annotations

import datetime

from cryptography import x509

from atoll.protocol.certificates import Key, certificate_pem, key_pem, make_authority, make_end, new_key
from atoll.protocol.identity import Role, alternative_names, authority_name
from atoll.protocol.security import Credentials

NOW = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
RUN_ID = "5e" * 16


class SmallAuthority:
    """An authority in memory; ``run_id`` may be that of another one, as a swindler's would be."""

    def __init__(self, run_id: str = RUN_ID, now: datetime.datetime | None = None) -> None:
        self.now = now or datetime.datetime.now(datetime.UTC)
        self.run_id = run_id
        self.key = new_key()
        self.certificate = make_authority(authority_name(run_id), self.key, self.now, DAY)

    def issue(
        self, role: Role, name: str = "", *, key: Key | None = None, lifetime: datetime.timedelta = DAY
    ) -> x509.Certificate:
        """A certificate; one with a negative lifetime has expired."""
        names = alternative_names(self.run_id, role, name)
        public = (key or new_key()).public_key()
        begun = min(self.now, self.now + lifetime) - DAY if lifetime < DAY * 0 else self.now
        return make_end(name or role, public, names, (self.certificate.subject, self.key), begun, self.now + lifetime - begun)

    def credentials(self, role: Role, name: str = "", lifetime: datetime.timedelta = DAY) -> Credentials:
        """A fresh key and its certificate."""
        key = new_key()
        certificate = self.issue(role, name, key=key, lifetime=lifetime)
        return Credentials(
            key=key_pem(key), certificate=certificate_pem(certificate), authority=certificate_pem(self.certificate)
        )
