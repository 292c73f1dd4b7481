"""Keys and X.509 certificates as Atoll uses them: one kind of key, few kinds of certificate. Knows nothing of runs.

Keys are on the curve P-256, which every TLS library supports and which is quick on both sides. Certificates are valid from an
hour before they are made: that much a machine's clock may be behind.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.protocol.errors import WireError

Key = ec.EllipticCurvePrivateKey

CLOCK_TOLERANCE = datetime.timedelta(hours=1)
"""How far a machine's clock may be behind the one of the machine that makes certificates."""

_AUTHORITY_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
_UNREADABLE = (
    *(ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What the library raises for what is not as it should be, the sooner or the later it looks."""
_ENDS = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """The private key, not encrypted: for a file that only its owner may read, and for gRPC."""
    form, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, encryption)


def key_of_pem(pem: bytes) -> Key:
    """Raises WireError for anything but such a key."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except _UNREADABLE as error:
        raise WireError(f"this is no private key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise WireError("this is a key of another kind than Atoll's")
    return key


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def certificate_of_pem(pem: bytes) -> x509.Certificate:
    """Raises WireError for anything but a certificate with a key that can be used."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        # The library reads these when they are asked for: what cannot be read is found here, and nowhere else.
        _ = certificate.public_key(), certificate.subject, certificate.issuer, certificate.extensions
        _ = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    except _UNREADABLE as error:
        raise WireError(f"this is no certificate: {error}") from error
    return certificate


def key_digest(public: ec.EllipticCurvePublicKey) -> str:
    """What stands for a key in records."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def fingerprint(certificate: x509.Certificate) -> bytes:
    """32 bytes that stand for this certificate alone."""
    return certificate.fingerprint(hashes.SHA256())


def make_authority(name: str, key: Key, now: datetime.datetime, lifetime: datetime.timedelta) -> x509.Certificate:
    """The certificate of an authority by itself, for certificates of ends alone."""
    subject = _named(name)
    return (
        _begun(subject, subject, key.public_key(), now, lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_AUTHORITY_USAGE, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def make_end(
    name: str,
    public: ec.EllipticCurvePublicKey,
    alternatives: Sequence[x509.GeneralName],
    issuer: tuple[x509.Name, Key],
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> x509.Certificate:
    """A certificate for one end of connections, dialling or dialled, from the authority of that name and key."""
    issuer_name, issuer_key = issuer
    return (
        _begun(_named(name), issuer_name, public, now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_ENDS, critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def signing_request(name: str, key: Key) -> bytes:
    """What asks an authority for a certificate, in DER; shows that whoever asks has the key."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def public_key_of_request(data: bytes) -> ec.EllipticCurvePublicKey:
    """The key that a signing request is for. Raises WireError where it is damaged, of another kind, or not signed with it."""
    try:
        request = x509.load_der_x509_csr(data)
        public, signed = request.public_key(), request.is_signature_valid
    except _UNREADABLE as error:
        raise WireError(f"this is no signing request: {error}") from error
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise WireError("a signing request for a key of another kind than Atoll's")
    if not signed:
        raise WireError("a signing request that is not signed with its own key")
    return public


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether ``authority`` signed it; dates are not looked at."""
    try:
        certificate.verify_directly_issued_by(authority)
    except _UNREADABLE:
        return False
    return True


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(now + lifetime)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
