"""Files: written whole or not at all, and flushed to the disk."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import quote

from antiphon.core.errors import UnavailableError

PREFIX = ".incoming-"
"""Begins the name of a file that is being written; one that a killed process left may be removed."""


def sqlite_url(path: Path, scheme: str = "sqlite") -> str:
    """Return the URL of an SQLite file; a path as it is would be cut at ? and lose its %.

    What a URL can have stays as it is: MLflow makes the file's folder by the URL's own words.

    >>> sqlite_url(Path("/home/50%?/a.db"))
    'sqlite:////home/50%25%3F/a.db'
    >>> sqlite_url(Path("/home/a b/c.db"))
    'sqlite:////home/a b/c.db'
    """
    plain = str(path)
    for letter in "%?#":  # the percent sign first
        plain = plain.replace(letter, quote(letter))
    return f"{scheme}:///{plain}"


def write_atomically(path: Path, payload: bytes, mode: int = 0o600) -> None:
    """Write a file that is either absent, or old, or whole, also after the machine lost its power.

    Args:
        path: the file; its folder is made when missing.
        payload: its bytes.
        mode: its permissions, in force before its name appears.

    Raises:
        UnavailableError: when the folder has no space left or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _incoming(path, mode) as file:
            file.write(payload)
        flush_folder(path.parent)
    except OSError as error:
        raise unusable(error, path.parent) from error


def append(path: Path, payload: bytes) -> None:
    """Write behind the end of a file, flushed to the disk; a kill may leave a part of it.

    Raises:
        UnavailableError: as `write_atomically`.
    """
    try:
        with path.open("ab") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unusable(error, path.parent) from error


def hold(path: Path, shared: bool = False) -> IO[bytes] | None:
    """Lock a file, made when missing, until the returned handle is closed; None where others hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = path.open("ab")
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def copy_atomically(source: Path, path: Path, mode: int = 0o600) -> None:
    """Copy a file of any size, as `write_atomically` writes one; its folder must be there.

    Raises:
        OSError: when one of the two cannot be used.
    """
    with source.open("rb") as file, _incoming(path, mode) as target:
        shutil.copyfileobj(file, target, 1 << 20)


@contextmanager
def _incoming(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield a file that gets the name `path` at the end of the block, flushed; an error leaves none."""
    handle, name = tempfile.mkstemp(prefix=PREFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # also on cancellation and Ctrl-C
        Path(name).unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush every file and every folder below `folder` to the disk, and itself."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            flush_folder(path)
    flush_folder(folder)


def unusable(error: OSError, folder: Path) -> UnavailableError:
    """Return the sentence for a folder that cannot be used."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(
            f"no space is left in {folder}; free some, then give the same command again: a run continues "
            "where it stopped"
        )
    return UnavailableError(
        f"cannot use {folder}: {error.strerror or error}; check that it exists, is a folder and may be "
        "written"
    )
