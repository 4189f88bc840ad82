"""Credentials: what one process shows to others, and what it believes them by.

A bundle is a folder: `ca.pem` (whom to believe), `cert.pem` and `key.pem` (who one is), `token`
(what one may do), `learner.pub` (who signs weights). The services' own bundle also holds
`tokens.pub`, with which they check the tokens of others.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.net.security.certificates import check_dates
from antiphon.net.security.keys import (
    LEARNER_KEY,
    TOKEN_KEY,
    SigningKey,
    check_private,
    ensure_key,
    load_key,
    load_public,
)

VARIABLE = "ANTIPHON_CREDENTIALS"
"""Environment variable that names the bundle where no option or configuration does."""
SERVICES_NAME = "services"
"""Name in the certificate of the run's own services, and folder of their bundle."""
KEYS = "keys"
"""Folder of keys in a run's folder and in the home directory."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The bundle of one process, read."""

    authority: bytes = field(repr=False)
    """PEM of the certificate authority that both sides must descend from."""
    certificate: bytes = field(repr=False)
    private_key: bytes = field(repr=False)
    token_file: Path | None = None
    """Read for every call, so that a renewed token counts at once; None shows none."""
    learner_key: bytes | None = field(default=None, repr=False)
    """Public key of the learner, 32 bytes; None: the coordinator's welcome names it."""
    token_key: bytes | None = field(default=None, repr=False)
    """Public key that tokens are checked with, 32 bytes; services need it."""
    local: bool = False
    """Whether a run made them for itself, so that no one but its owner can join it."""


def load_credentials(folder: Path) -> Credentials:
    """Read a bundle.

    Raises:
        ConfigError: when a file is missing, a secret can be read by others, or the certificate does not hold
            by this machine's clock.
    """
    try:
        check_dates(folder / "cert.pem", datetime.now(UTC))
        for secret in ("key.pem", "token"):
            if (folder / secret).exists():
                check_private(folder / secret)
        token_file = folder / "token"
        return Credentials(
            authority=(folder / "ca.pem").read_bytes(),
            certificate=(folder / "cert.pem").read_bytes(),
            private_key=(folder / "key.pem").read_bytes(),
            token_file=token_file if token_file.exists() else None,
            learner_key=load_public(folder, LEARNER_KEY),
            token_key=load_public(folder, TOKEN_KEY),
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"the credentials in {folder} lack {Path(str(error.filename)).name}; make them with "
            "`antiphon invite` and give the folder of one of them, such as keys/services or keys/workers/NAME"
        ) from None
    except OSError as error:
        raise ConfigError(f"the credentials in {folder} cannot be read: {error}; copy them again") from error


def read_token(path: Path) -> str:
    """Return the token in a file, or "" when it cannot be read: the other side says what is missing."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def find_credentials(folder: str | None) -> Credentials | None:
    """Read the bundle that is named, or return None when none is."""
    return load_credentials(Path(folder).expanduser()) if folder else None


def lets_others_in(credentials: Credentials | None) -> bool:
    """Return whether workers of other people can join services with these credentials."""
    return credentials is not None and not credentials.local


def needed_token_key(credentials: Credentials) -> bytes:
    """Return the key that tokens are checked with.

    Raises:
        ConfigError: when the bundle is a worker's.
    """
    if credentials.token_key is None:
        raise ConfigError(
            "these credentials have no tokens.pub and cannot check tokens; a service needs the bundle of the "
            f"services, keys/{SERVICES_NAME}"
        )
    return credentials.token_key


def learner_public(run_dir: Path, credentials: Credentials | None) -> bytes | None:
    """Return the public key that the learner of a run signs with, or None where it is not known yet."""
    if credentials is not None and credentials.learner_key is not None:
        return credentials.learner_key
    return load_public(run_dir / KEYS, LEARNER_KEY)


def learner_signer(run_dir: Path, bundle: Path | None) -> SigningKey:
    """Return the key that the learner of a run signs with, made on first use.

    Raises:
        ConfigError: when it cannot be read, or can be read by others.
    """
    if bundle is not None and (bundle / f"{LEARNER_KEY}.key").exists():
        return load_key(bundle, LEARNER_KEY)
    return ensure_key(run_dir / KEYS, LEARNER_KEY)
