"""Artifact store: immutable bytes under their digest; what is read is what was written.

An object lies at ``objects/ab/<digest>``, where ab are the digest's first two digits. It is
written beside its place, flushed to the disk and renamed, so a name never stands for half a
file. Every read is checked against the name.
"""

import errno
import os
import tempfile
from pathlib import Path

from antiphon.core.digests import check_digest, digest_bytes, digest_file
from antiphon.core.errors import IntegrityError, UnavailableError

_OBJECT_MODE = 0o444
"""Objects never change, and the ledger may link to the very same file: nobody writes to them."""


class ArtifactStore:
    """Content-addressed objects in one folder; any number of processes may share it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / "objects"

    def put(self, payload: bytes) -> str:
        """Store `payload` and return its digest; storing the same bytes again changes nothing.

        An object of that name whose bytes were altered is replaced.

        Raises:
            UnavailableError: when the folder has no space left or cannot be written.
        """
        digest = digest_bytes(payload)
        target = self.path(digest)
        try:
            if target.exists() and digest_file(target) == digest:
                return digest
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_then_rename(payload, target)
        except OSError as error:
            raise _in_words(error, self.root) from error
        return digest

    def get(self, digest: str) -> bytes:
        """Return the object's bytes, checked.

        Raises:
            ContractError: when `digest` has not the form of a digest.
            UnavailableError: when there is no such object.
            IntegrityError: when its bytes do not match its name.
        """
        target = self.path(digest)
        try:
            payload = target.read_bytes()
        except FileNotFoundError:
            raise UnavailableError(
                f"there is no object {digest} in {self.root}; check that the run uses this store"
            ) from None
        except OSError as error:
            raise _in_words(error, self.root) from error
        if digest_bytes(payload) != digest:
            raise IntegrityError(
                f"object {digest} in {self.root} does not match its digest ({len(payload)} bytes); "
                "remove the file and restore it from a copy"
            )
        return payload

    def path(self, digest: str) -> Path:
        """Return where the object lies or would lie.

        Raises:
            ContractError: when `digest` has not the form of a digest.
        """
        return self._objects / check_digest(digest)[:2] / digest

    def has(self, digest: str) -> bool:
        """Tell whether an object of that name is there; its bytes are checked when read."""
        return self.path(digest).is_file()


def write_atomically(path: Path, payload: bytes) -> None:
    """Write a file that is either absent, or old, or whole; never half-written.

    Raises:
        UnavailableError: when the folder has no space left or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_then_rename(payload, path, mode=0o644)
    except OSError as error:
        raise _in_words(error, path.parent) from error


def _write_then_rename(payload: bytes, target: Path, mode: int = _OBJECT_MODE) -> None:
    handle, name = tempfile.mkstemp(prefix=".incoming-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        # Also on cancellation and Ctrl-C: a leftover would be taken for somebody's work.
        Path(name).unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_words(error: OSError, folder: Path) -> UnavailableError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(
            f"no space is left in {folder} for another artifact; free some, then start the same run "
            "again: it goes on where it stopped"
        )
    return UnavailableError(
        f"cannot use {folder} as an artifact folder: {error.strerror or error}; check that it exists, "
        "is a folder and may be written"
    )
