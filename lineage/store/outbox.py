"""Outbox: what a remote store does not have yet, known after any crash.

An empty file named after the object stands in the outbox before the object itself gets its
name, and leaves when the remote store has it. So whatever a store acknowledged is either
there or listed here; the object's bytes stay in the local store and are never held in memory.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path

from antiphon.core.digests import check_digest, digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.system.files import flush_folder, hold, write_atomically

_PLACE = "place.json"


class Outbox:
    """The objects that one remote store still lacks; any number of processes may add to it."""

    def __init__(self, root: Path, url: str, endpoint_url: str | None = None) -> None:
        """Name the outbox of the store at `root` for one remote store (see `RemoteStore`)."""
        self.url, self.endpoint_url = url, endpoint_url
        place = json.dumps({"url": url, "endpoint_url": endpoint_url})
        self.folder = root / "outbox" / digest_bytes(place.encode())[:16]
        self.refused = self.folder / "refused"
        """Objects that cannot be sent, because their bytes were altered or lost here."""

    def add(self, digest: str) -> None:
        """List an object; it is on the disk when this returns, and once is enough.

        Raises:
            ContractError: when `digest` has not the form of a digest.
            OSError: when the folder cannot be written.
        """
        mark = self.folder / check_digest(digest)
        if mark.exists():
            return
        self._make()
        mark.touch()
        flush_folder(self.folder)

    def pending(self, limit: int) -> list[str]:
        """Return up to `limit` objects that wait, in no particular order."""
        return list(islice(self._names(), limit))

    def __len__(self) -> int:
        return sum(1 for _ in self._names())

    def remove(self, digest: str) -> None:
        """Strike an object off: the remote store has it."""
        (self.folder / check_digest(digest)).unlink(missing_ok=True)
        (self.refused / digest).unlink(missing_ok=True)

    def refuse(self, digest: str) -> None:
        """Put an object aside that cannot be sent, so that the others do not wait for it."""
        self.refused.mkdir(parents=True, exist_ok=True)
        (self.folder / check_digest(digest)).rename(self.refused / digest)

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Yield whether this process may send: one at a time does, so nothing is sent twice."""
        self._make()
        held = hold(self.folder / "lock")
        with held or nullcontext():
            yield held is not None

    def _make(self) -> None:
        """Make the folder, which says whose it is before the first mark is in it."""
        place = self.folder / _PLACE
        if place.exists():
            return
        write_atomically(place, json.dumps({"url": self.url, "endpoint_url": self.endpoint_url}).encode())
        flush_folder(self.folder.parent)

    def _names(self) -> Iterator[str]:
        if not self.folder.is_dir():
            return
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if len(entry.name) == 64:
                    yield entry.name


def outboxes(root: Path) -> list[Outbox]:
    """Return every outbox of the store at `root`.

    Raises:
        IntegrityError: when one does not say whose it is.
    """
    found = []
    for path in sorted((root / "outbox").glob(f"*/{_PLACE}")):
        try:
            plain = json.loads(path.read_bytes())
            found.append(Outbox(root, plain["url"], plain["endpoint_url"]))
        except (ValueError, TypeError, KeyError) as error:
            raise IntegrityError(
                f"{path} does not say where its objects go ({type(error).__name__}); remove it and start a "
                "run with the same record.artifact_url"
            ) from error
    return found


def waiting_objects(root: Path) -> set[str]:
    """Return the objects of the store at `root` that any remote store still lacks."""
    marks = (root / "outbox").glob("*/" + "?" * 64)
    refused = (root / "outbox").glob("*/refused/" + "?" * 64)
    return {path.name for group in (marks, refused) for path in group}
