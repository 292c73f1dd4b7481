"""Who shows a certificate, and why some are not believed."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509

from atoll.protocol.certificates import certificate_pem, fingerprint, make_end, new_key
from atoll.protocol.errors import IdentityRefused
from atoll.protocol.identity import Role, Verifier, alternative_names, run_of_authority, server_name
from atoll.protocol.invitation import Token, asking_certificate, invitation_authority, new_token, parse_token
from support.identities import DAY, NOW, RUN_ID, SmallAuthority


def refused(verifier: Verifier, certificate: x509.Certificate, at: datetime.datetime = NOW) -> str:
    with pytest.raises(IdentityRefused) as caught:
        verifier.identify(certificate_pem(certificate), at)
    return str(caught.value)


def invited(authority: SmallAuthority) -> Token:
    return new_token(fingerprint(authority.certificate))


@pytest.mark.parametrize(("role", "name"), [(Role.PEER, "ann.b_c-d"), (Role.OPERATOR, ""), (Role.COORDINATOR, "")])
def test_a_certificate_says_role_and_name(role: Role, name: str) -> None:
    authority = SmallAuthority(now=NOW)
    verifier = Verifier(authority.certificate)
    certificate = authority.issue(role, name)
    for _ in range(2):
        found = verifier.identify(certificate_pem(certificate), NOW)
    assert (found.role, found.name) == (role, name)
    assert found.serial == f"{certificate.serial_number:x}"
    assert run_of_authority(authority.certificate) == verifier.run_id == RUN_ID


def test_what_has_expired_or_is_not_valid_yet_is_refused_also_when_it_was_seen_before() -> None:
    authority = SmallAuthority(now=NOW)
    verifier = Verifier(authority.certificate)
    certificate = authority.issue(Role.PEER, "ann")
    assert verifier.identify(certificate_pem(certificate), NOW).name == "ann"
    assert "ann: this certificate expired 2.0 h ago" in refused(verifier, certificate, NOW + DAY + datetime.timedelta(hours=2))
    assert "valid in 1.0 h only" in refused(verifier, certificate, NOW - datetime.timedelta(hours=2))
    # A clock that is behind by less than an hour is tolerated.
    assert verifier.identify(certificate_pem(certificate), NOW - datetime.timedelta(minutes=50)).name == "ann"


def test_a_revoked_one_is_refused_at_once() -> None:
    authority, revoked = SmallAuthority(now=NOW), set[str]()
    verifier = Verifier(authority.certificate, revoked=revoked)
    certificate = authority.issue(Role.PEER, "ann")
    revoked.add(verifier.identify(certificate_pem(certificate), NOW).serial)
    assert "ann: this certificate was revoked" in refused(verifier, certificate)


def test_another_authority_is_refused_whatever_it_says_of_the_run() -> None:
    authority = SmallAuthority(now=NOW)
    verifier = Verifier(authority.certificate)
    swindler, other = SmallAuthority(now=NOW), SmallAuthority("0f" * 16, now=NOW)
    assert "not issued by this run's authority" in refused(verifier, swindler.issue(Role.PEER, "ann"))
    assert "of another run ('0f0f" in refused(verifier, other.issue(Role.PEER, "ann"))


def test_one_that_signed_itself_is_refused() -> None:
    key = new_key()
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ann")])
    names = alternative_names(RUN_ID, Role.PEER, "ann")
    certificate = make_end("ann", key.public_key(), names, (issuer, key), NOW, DAY)
    assert "not issued by" in refused(Verifier(SmallAuthority(now=NOW).certificate), certificate)


@pytest.mark.parametrize(("role", "name"), [(Role.OPERATOR, "ann"), (Role.PEER, ""), (Role.PEER, ".."), (Role.PEER, "a/b")])
def test_names_that_nobody_has_are_refused(role: Role, name: str) -> None:
    authority = SmallAuthority(now=NOW)
    refused(Verifier(authority.certificate), authority.issue(role, name))


def test_a_token_round_trips_and_shows_no_secret() -> None:
    token = invited(SmallAuthority(now=NOW))
    assert parse_token(f" {token.text()}\n") == token
    for shown in (str(token), repr(token)):
        assert token.secret.hex() not in shown
        assert token.text() not in shown
        assert repr(token.secret) not in shown


@pytest.mark.parametrize("spoil", [lambda t: t[:-1], lambda t: t[:20] + "A" + t[21:] + "B", lambda t: "", lambda t: t[1:]])
def test_a_token_that_is_not_whole_is_refused_without_being_repeated(spoil: object) -> None:
    text = spoil(invited(SmallAuthority(now=NOW)).text())  # type: ignore[operator]
    with pytest.raises(IdentityRefused, match="paste the whole line") as caught:
        parse_token(text)
    assert len(text) < 20 or text[10:] not in str(caught.value)


def test_who_has_the_token_is_known_by_the_invitation_and_by_nothing_else() -> None:
    authority = SmallAuthority(now=NOW)
    token, other = invited(authority), invited(authority)
    kept = {token.invitation: invitation_authority(token, NOW)}
    verifier = Verifier(authority.certificate, invitation=kept.get)
    _, asking = asking_certificate(token, RUN_ID, NOW)
    found = verifier.identify(certificate_pem(asking), NOW)
    assert (found.role, found.name) == (Role.INVITATION, token.invitation)
    _, unknown = asking_certificate(other, RUN_ID, NOW)
    assert f"the invitation {other.invitation} is not known" in refused(verifier, unknown)
    guessed = Token(fingerprint=token.fingerprint, invitation=token.invitation, secret=bytes(16))
    _, wrong = asking_certificate(guessed, RUN_ID, NOW)
    assert "not issued by" in refused(verifier, wrong)
    assert "is not known" in refused(Verifier(authority.certificate), asking)


def test_names_for_tls_are_of_one_run_one_role_and_one_peer() -> None:
    names = [
        server_name(run, role, name)
        for run in (RUN_ID, "0f" * 16)
        for role, name in ((Role.PEER, "a"), (Role.PEER, "A"), (Role.COORDINATOR, ""))
    ]
    assert len({name.lower() for name in names}) == len(names)
