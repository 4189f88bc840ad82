"""Certificates: a private authority for one home, and what it issues to services and workers.

P-256 keys, because every TLS library speaks them. A certificate names its bearer once, in the
subject alternative names; the services' own names their hosts too, which clients compare with
the address they dialled. The holder of `ca.key` can let processes in: it stays on its machine.
"""

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from antiphon.core.errors import ConfigError
from antiphon.net.security.keys import check_private, make_private_folder, write_private

AUTHORITY_DAYS = 3650
"""How long an authority lasts."""
_SKEW = timedelta(minutes=10)
"""Certificates begin this much earlier, for machines whose clocks are behind."""


def ensure_authority(folder: Path, now: datetime) -> bool:
    """Make `ca.pem` and `ca.key` in `folder` unless they are there; True when they are new."""
    if (folder / "ca.key").exists() and (folder / "ca.pem").exists():
        check_private(folder / "ca.key")
        return False
    make_private_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Antiphon private authority")])
    builder = _begin(name, name, key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(authority=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    write_private(folder / "ca.key", _private_pem(key))
    write_private(folder / "ca.pem", certificate.public_bytes(Encoding.PEM))
    return True


def issue(authority: Path, bundle: Path, name: str, hosts: Sequence[str], days: int, now: datetime) -> None:
    """Write `cert.pem`, `key.pem` and `ca.pem` for one process into `bundle`; an earlier one is replaced.

    Args:
        authority: folder with `ca.pem` and `ca.key`.
        bundle: where the files go.
        name: its name; a DNS name among its alternative names.
        hosts: for a process that serves: names and addresses they are dialled by.
        days: how long the certificate lasts.
        now: the time, with its zone.

    Raises:
        ConfigError: when the authority cannot be read or a host is invalid.
    """
    try:
        check_private(authority / "ca.key")
        authority_key = load_pem_private_key((authority / "ca.key").read_bytes(), password=None)
        authority_pem = (authority / "ca.pem").read_bytes()
        issuer = x509.load_pem_x509_certificate(authority_pem)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the authority in {authority} cannot be used: {error}; restore its files"
        ) from error
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{authority / 'ca.key'} is no key of this authority; restore it")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _begin(subject, issuer.subject, key.public_key(), now, days)
    names = [x509.DNSName(name), *(_host(host) for host in hosts)]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(authority=False), critical=True)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    make_private_folder(bundle)
    write_private(bundle / "key.pem", _private_pem(key))
    write_private(
        bundle / "cert.pem", builder.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM)
    )
    write_private(bundle / "ca.pem", authority_pem)


def hosts_of(certificate: bytes) -> list[str]:
    """Return the names and addresses under which a certificate (PEM) may serve; none for a caller's."""
    try:
        found = x509.load_pem_x509_certificate(certificate).extensions
        purposes = found.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    if ExtendedKeyUsageOID.SERVER_AUTH not in purposes:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def bearer_of(certificate: bytes) -> str:
    """Return whose a certificate (PEM) is: the name that it was issued to.

    Raises:
        ConfigError: when it is none, or names no one.
    """
    try:
        subject = x509.load_pem_x509_certificate(certificate).subject
        (name,) = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError as error:
        raise ConfigError(
            f"the certificate of the credentials names no one ({error}); copy it again"
        ) from None
    return str(name.value)


def serves_as(certificate: bytes, host: str) -> bool:
    """Return whether a certificate (PEM) allows to serve those who dial `host`."""
    try:
        return str(ipaddress.ip_address(host)) in hosts_of(certificate)
    except ValueError:
        return host in hosts_of(certificate)


def check_dates(path: Path, now: datetime) -> None:
    """Check that the certificate in a file holds at `now`, as this machine's clock has it.

    Raises:
        ConfigError: when it does not, or there is none in it.
        OSError: when the file cannot be read.
    """
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no certificate: {error}; `antiphon invite` makes one") from error
    clock = f"and the clock of this machine says {now:%Y-%m-%d %H:%M} UTC; set it right"
    if now < found.not_valid_before_utc:
        raise ConfigError(f"{path} holds from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, {clock}")
    if now > found.not_valid_after_utc:
        raise ConfigError(
            f"{path} held until {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, {clock}, or renew it with "
            "`antiphon invite`"
        )


def _begin(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SKEW).not_valid_after(now + timedelta(days=days))


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # no address, so a name
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"--host {host!r} is neither a name nor an address: {error}") from error


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
