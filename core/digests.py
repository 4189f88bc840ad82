"""Digests: blake3 in lower-case hex, the one name every artifact goes by."""

import re
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from antiphon.core.errors import ContractError

PIECE_BYTES = 16 << 20
"""Bytes of a file that are read at once."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_bytes(payload: bytes | bytearray | memoryview) -> str:
    """Return the blake3 digest of `payload`, 64 hex digits.

    >>> digest_bytes(b"")[:8]
    'af1349b9'
    """
    return blake3(payload).hexdigest()


def digest_file(path: Path, done: Callable[[int], None] = lambda length: None) -> str:
    """Return the blake3 digest of a file's bytes, 64 hex digits; `done` gets the length of each piece."""
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
            done(len(piece))
    return hasher.hexdigest()


def is_digest(text: str) -> bool:
    """Tell whether a text has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


def check_digest(text: str) -> str:
    """Return `text` if it has the form of a digest; it may then name a file.

    Raises:
        ContractError: for anything else, so that no peer can smuggle a path.
    """
    if not is_digest(text):
        raise ContractError(f"{text[:80]!r} is not a digest; expected 64 lower-case hex digits")
    return text
