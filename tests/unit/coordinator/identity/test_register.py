"""Invitations and the peers that came by them, across restarts and removals."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from atoll.coordinator.identity.authority import (
    AUTHORITY,
    AUTHORITY_KEY,
    FOLDER,
    OPERATOR,
    REGISTER,
    Authority,
    read_credentials,
)
from atoll.coordinator.identity.enrolment import Registrar
from atoll.coordinator.identity.register import Register
from atoll.coordinator.identity.run_identity import RunIdentity, Wanted, invite
from atoll.protocol.certificates import certificate_pem, new_key, signing_request
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.errors import IdentityRefused, WireError
from atoll.protocol.identity import Role, Verifier
from atoll.protocol.v1 import enrolment_pb2
from support.identities import RUN_ID

HOUR = datetime.timedelta(hours=1)


class Desk:
    """A register and what decides with it, at a time of day that the test sets."""

    def __init__(self, state: Path) -> None:
        self.now = datetime.datetime.now(datetime.UTC)
        folder = state / FOLDER
        self.authority = Authority.open(folder, RUN_ID, self.now)
        self.register = Register(folder / REGISTER)
        self.registrar = Registrar(self.authority, self.register, clock=lambda: self.now)

    def invite(self, **wanted: object) -> str:
        return invite(self.authority, self.register, Wanted(**{"lifetime": HOUR, **wanted})).invitation  # type: ignore[arg-type]

    def enrol(self, invitation: str, name: str, key: object = None) -> str:
        """The serial of the certificate."""
        request = enrolment_pb2.EnrolRequest(
            protocol_version=PROTOCOL_VERSION,
            name=name,
            signing_request=signing_request(name, key or new_key()),  # type: ignore[arg-type]
        )
        certificate = self.registrar.enrol(invitation, request).certificate
        return Verifier(self.authority.certificate).identify(certificate, self.now).serial

    def refused(self, invitation: str, name: str, key: object = None) -> str:
        with pytest.raises(IdentityRefused) as caught:
            self.enrol(invitation, name, key)
        return str(caught.value)


def test_a_folder_is_the_owners_alone_and_others_are_told_apart(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = tmp_path / FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in (AUTHORITY_KEY, OPERATOR, REGISTER):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    again = Authority.open(folder, RUN_ID, desk.now)
    assert again.certificate == desk.authority.certificate
    operator = read_credentials(folder / OPERATOR)
    found = Verifier(again.certificate).identify(operator.certificate, desk.now)
    assert found.role is Role.OPERATOR
    assert Authority.open(folder, "0f" * 16, desk.now).certificate != desk.authority.certificate, "another run"
    (folder / AUTHORITY_KEY).chmod(0o644)
    with pytest.raises(IdentityRefused, match="chmod 600"):
        Authority.open(folder, RUN_ID, desk.now)


def test_a_damaged_authority_is_no_new_one(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    other = Authority.open(tmp_path / "other", RUN_ID, desk.now)
    (tmp_path / FOLDER / AUTHORITY).write_bytes(certificate_pem(other.certificate))
    with pytest.raises(IdentityRefused, match="do not belong together"):
        Authority.open(tmp_path / FOLDER, RUN_ID, desk.now)
    (tmp_path / FOLDER / AUTHORITY).write_bytes(b"nothing")
    with pytest.raises(IdentityRefused, match="damaged"):
        Authority.open(tmp_path / FOLDER, RUN_ID, desk.now)


def test_an_invitation_serves_as_many_keys_as_it_says_also_after_a_restart(tmp_path: Path) -> None:
    invitation, key = Desk(tmp_path).invite(uses=2), new_key()
    Desk(tmp_path).enrol(invitation, "ann", key)
    desk = Desk(tmp_path)
    desk.enrol(invitation, "bob")
    assert "was used 2 times already" in desk.refused(invitation, "eve")
    desk.enrol(invitation, "ann", key)  # the same peer, which lost its certificate


def test_an_invitation_expires_and_an_unknown_one_never_served(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    invitation = desk.invite()
    desk.now += HOUR + datetime.timedelta(minutes=5)
    assert "expired 5 min ago; make a new one with `atoll invite`" in desk.refused(invitation, "ann")
    assert "is not known to this run" in desk.refused("00" * 6, "ann")


def test_a_name_is_its_first_owners(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first, second = desk.invite(uses=2), desk.invite()
    lost = desk.enrol(first, "ann")
    assert "a peer named ann enrolled before" in desk.refused(second, "ann")
    assert desk.register.revoked() == frozenset()
    desk.enrol(first, "ann")  # its disk was lost, the token was not
    assert desk.register.revoked() == {lost}


@pytest.mark.parametrize("name", ["", "coordinator", "../x", "a" * 65])
def test_names_that_no_peer_may_have(tmp_path: Path, name: str) -> None:
    desk = Desk(tmp_path)
    invitation = desk.invite()
    with pytest.raises((IdentityRefused, ValueError)):
        desk.registrar.enrol(
            invitation,
            enrolment_pb2.EnrolRequest(
                protocol_version=PROTOCOL_VERSION, name=name, signing_request=signing_request("x", new_key())
            ),
        )
    desk.enrol(invitation, "ann")  # that was no use of it


def test_removal_revokes_and_closes_the_invitation_until_the_peer_is_allowed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    invitation, key = desk.invite(uses=5), new_key()
    serial = desk.enrol(invitation, "ann", key)
    desk.register.remove("ann")
    assert desk.register.revoked() == {serial}
    assert desk.register.key_of("ann") is None, "it cannot renew"
    assert "the operator removed ann" in desk.refused(invitation, "ann", key)
    assert "the operator removed ann, which came by" in desk.refused(invitation, "under-another-name")
    assert "the operator removed ann" in desk.refused(desk.invite(), "ann")
    assert desk.register.allow("ann")
    assert not desk.register.allow("ann")
    assert desk.register.revoked() == frozenset()
    desk.enrol(invitation, "ann", key)


def test_renewal_is_for_the_same_key(tmp_path: Path) -> None:
    desk, key = Desk(tmp_path), new_key()
    desk.enrol(desk.invite(), "ann", key)
    assert desk.registrar.renew("ann", enrolment_pb2.RenewRequest(signing_request=signing_request("ann", key))).certificate
    with pytest.raises(IdentityRefused, match="another key"):
        desk.registrar.renew("ann", enrolment_pb2.RenewRequest(signing_request=signing_request("ann", new_key())))
    with pytest.raises(WireError):
        desk.registrar.renew("ann", enrolment_pb2.RenewRequest(signing_request=b"nothing"))


def test_another_version_is_told_which_both_are(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    request = enrolment_pb2.EnrolRequest(protocol_version=1, name="ann", signing_request=signing_request("ann", new_key()))
    with pytest.raises(IdentityRefused, match=f"protocol {PROTOCOL_VERSION}, the peer protocol 1: install the same version"):
        desk.registrar.enrol(desk.invite(), request)


def test_only_those_invited_as_trusted_are_trusted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.enrol(desk.invite(trusted=True), "ann")
    desk.enrol(desk.invite(), "bob")
    assert desk.register.trusted() == {"ann"}


def test_a_coordinator_hears_of_what_others_write(tmp_path: Path) -> None:
    identity = RunIdentity.open(tmp_path, RUN_ID)
    desk = Desk(tmp_path)
    before = identity.security.shown
    assert not identity.refresh()
    assert identity.security.shown is before
    invitation = desk.invite()
    assert not identity.refresh(), "nothing was revoked"
    assert identity.security.shown[1].count(b"BEGIN CERTIFICATE") == 1
    serial = desk.enrol(invitation, "ann")
    desk.register.remove("ann")
    assert identity.refresh()
    assert identity.revoked == {serial}
    identity.close()
