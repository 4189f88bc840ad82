"""Findings: what is wrong with which artifact, so that a person can act on it.

A file that several names lead to (the store, DVC's cache and the ledger share one where the
file system can) is read once and complained about once, with all its names.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

READ_BYTES = 1 << 20
"""Bytes read at a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was recorded."""

    artifact: str
    """What it is, such as `batch 7`."""
    paths: tuple[Path, ...]
    """The file, under each of its names."""
    problem: str
    fix: str

    @property
    def sentence(self) -> str:
        first, *others = map(str, self.paths)
        also = f" (the same file as {', '.join(others)})" if others else ""
        return f"{self.artifact}: {first}{also} {self.problem}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a file holds."""

    blake3: str
    md5: str
    size: int
    """Bytes."""


class FileReader:
    """Reads every file once, however many names it has, and keeps count."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Fingerprint] = {}
        self.bytes = 0
        """Bytes read so far."""

    @property
    def files(self) -> int:
        return len(self._known)

    def read(self, path: Path) -> Fingerprint | None:
        """Return what a file holds, or None when there is none."""
        try:
            place = identity(path)
            if place not in self._known:
                self._known[place] = self._digest(path)
            return self._known[place]
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _digest(self, path: Path) -> Fingerprint:
        own, dvc, size = blake3(), hashlib.md5(usedforsecurity=False), 0
        with path.open("rb") as file:
            while part := file.read(READ_BYTES):
                own.update(part)
                dvc.update(part)
                size += len(part)
        self.bytes += size
        return Fingerprint(own.hexdigest(), dvc.hexdigest(), size)


class Findings:
    """The findings so far; a file that was complained about gets its further names added."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._by_file: dict[tuple[int, int], int] = {}

    def add(self, artifact: str, path: Path, problem: str, fix: str) -> None:
        """Note a finding about a file that is there or is missing."""
        new = len(self._found)
        at = self._by_file.setdefault(identity(path), new) if path.exists() else new
        if at == new:
            self._found.append(Finding(artifact, (path,), problem, fix))
        elif path not in (known := self._found[at]).paths:
            self._found[at] = replace(known, paths=(*known.paths, path))

    def all(self) -> tuple[Finding, ...]:
        return tuple(self._found)


def identity(path: Path) -> tuple[int, int]:
    """Return what is equal for two names that lead to one file."""
    status = path.stat()
    return status.st_dev, status.st_ino


def shortened(names: Iterable[str], most: int = 3) -> str:
    """Name the first few of many.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
