"""Keys: ed25519 pairs in files that only their owner can read, and the signatures they make.

The one place that signs and verifies. A private key lies in NAME.key (mode 0600, written once
and never replaced), its public half in NAME.pub as 64 hex digits.
"""

import os
import re
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from antiphon.core.errors import ConfigError
from antiphon.system.files import write_atomically

PUBLIC_BYTES = 32
"""Bytes of an ed25519 public key."""
SIGNATURE_BYTES = 64
"""Bytes of an ed25519 signature."""
LEARNER_KEY = "learner"
"""Signs what the learner publishes and keeps: manifests and lists of checkpoint files."""
TOKEN_KEY = "tokens"
"""Signs access tokens; its holder can let workers in."""

_HEX = re.compile(r"[0-9a-f]{64}")


class SigningKey:
    """A private key at work."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self.private = private

    @property
    def public(self) -> bytes:
        """Return the public half, 32 bytes."""
        return self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of `message`, 64 bytes."""
        return self.private.sign(message)


def signing_key(seed: bytes) -> SigningKey:
    """Return the key that 32 bytes stand for: the same bytes, the same key."""
    return SigningKey(Ed25519PrivateKey.from_private_bytes(seed))


def public_key(public: bytes) -> Ed25519PublicKey:
    """Return a public key of 32 bytes as the libraries take it; ValueError for another length."""
    return Ed25519PublicKey.from_public_bytes(public)


def verifies(public: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether `signature` was made over `message` with the key whose public half is given."""
    if len(public) != PUBLIC_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        public_key(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter; an existing one is made so."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def write_private(path: Path, payload: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    write_atomically(path, payload, mode=0o600)


def check_private(path: Path) -> None:
    """Check that a secret is readable by its owner alone.

    Raises:
        ConfigError: naming the file and the fix.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode:04o}); `chmod 600 {path}`")


def ensure_key(folder: Path, name: str) -> SigningKey:
    """Return the key pair NAME in `folder`, made now if there is none.

    Two processes that make it at the same time end up with the same one.

    Raises:
        ConfigError: when it cannot be read, or can be read by others.
    """
    private = folder / f"{name}.key"
    if not private.exists():
        make_private_folder(folder)
        made = Ed25519PrivateKey.generate()
        pem = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        temporary = folder / f".{name}.{os.getpid()}"
        write_private(temporary, pem)
        try:
            os.link(temporary, private)  # unlike a rename, it never replaces what another one made
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    key = load_key(folder, name)
    public = folder / f"{name}.pub"
    if not public.exists():
        write_private(public, key.public.hex().encode() + b"\n")
        public.chmod(0o644)
    return key


def load_key(folder: Path, name: str) -> SigningKey:
    """Return the private key NAME in `folder`.

    Raises:
        ConfigError: when it is missing, damaged, of another kind, or can be read by others.
    """
    path = folder / f"{name}.key"
    try:
        check_private(path)
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise ConfigError(f"there is no key {path}; `antiphon invite` makes it") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no private key: {error}; restore it, or make new ones") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no ed25519 key; restore it, or make new ones")
    return SigningKey(key)


def load_public(folder: Path, name: str) -> bytes | None:
    """Return the public key NAME in `folder`, 32 bytes, or None without one.

    Raises:
        ConfigError: when the file holds something else.
    """
    path = folder / f"{name}.pub"
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        text = ""
    if not _HEX.fullmatch(text):
        raise ConfigError(f"{path} is no public key of 64 hex digits; copy it again")
    return bytes.fromhex(text)
