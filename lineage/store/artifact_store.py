"""Artifact store: immutable bytes under their digest; what is read is what was written.

An object lies at ``objects/ab/<digest>``, where ab are the digest's first two digits. It is
written beside its place, flushed to the disk and renamed, so a name never stands for half a
file. Every read is checked against the name. Where a remote store is named, an object counts as
stored once it is on the local disk and in the outbox; sending it is the uploader's work, and
what is missing here is read from there.

The outbox says what a remote store does not have yet, after any crash: an empty file named after the object
stands in it before the object itself gets its name, and leaves when the remote store has it. So whatever a
store acknowledged is either there or listed; the bytes stay in the local store and are never held in memory.
"""

import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path

from antiphon.core.config_sections import RecordSection
from antiphon.core.digests import check_digest, digest_bytes, digest_file
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage.store.remote_place import RemoteStore
from antiphon.system.files import copy_atomically, flush_folder, hold, unusable, write_atomically

_OBJECT_MODE = 0o444
"""Objects never change, and the ledger may link to the very same file: none may write to them."""

CLEANING_TIMEOUT_S = 60.0
"""Longest wait for `antiphon gc` to be through with the store."""
_POLL_S = 0.05
_PLACE = "place.json"
_MARKS = "?" * 64


class ArtifactStore:
    """Content-addressed objects in one folder; any number of processes may share it."""

    def __init__(self, root: Path, remote: RemoteStore | None = None) -> None:
        """Name the store at `root`; folders are made by the first `put`.

        Its objects go to `remote` too, and missing ones are looked for there.
        """
        self.root = root
        self.remote = remote
        self.outbox = None if remote is None else Outbox(root, remote.url, remote.endpoint_url)
        self._objects = root / "objects"
        self._in_use = False
        self._using = threading.Lock()

    def put(self, payload: bytes) -> str:
        """Store `payload` and return its digest; storing the same bytes again changes nothing.

        An object of that name whose bytes were altered is replaced.

        Raises:
            UnavailableError: when the folder has no space left or cannot be written, or
                `antiphon gc` does not leave it.
        """
        digest = digest_bytes(payload)
        with self._entering(digest) as target:
            if not (target.exists() and digest_file(target) == digest):
                write_atomically(target, payload, _OBJECT_MODE)
        return digest

    def take(self, path: Path) -> str:
        """Store a file that never changes and return its digest; it is linked where the file system can.

        Raises:
            UnavailableError: as `put`.
        """
        try:
            digest = digest_file(path)
        except OSError as error:
            raise unusable(error, path.parent) from error
        with self._entering(digest) as target:
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # another file system, or one without links
                    copy_atomically(path, target, _OBJECT_MODE)
                flush_folder(target.parent)
        return digest

    def discard(self, digest: str) -> None:
        """Remove an object from this machine; the caller knows that nobody else needs it."""
        self.path(digest).unlink(missing_ok=True)

    def get(self, digest: str) -> bytes:
        """Return the object's bytes, checked.

        Raises:
            ContractError: when `digest` has not the form of a digest.
            UnavailableError: when there is no such object, here or in the remote store.
            ConfigError: when the remote store had to be asked and refuses the keys.
            IntegrityError: when its bytes do not match its name.
        """
        target = self.path(digest)
        try:
            if not target.exists():
                self._bring(digest)
            payload = target.read_bytes()
        except OSError as error:
            raise unusable(error, self.root) from error
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
        """Tell whether an object of that name is on this machine; its bytes are checked when read."""
        return self.path(digest).is_file()

    def _bring(self, digest: str) -> None:
        """Copy a missing object from the remote store to its place."""
        target = self.path(digest)
        if self.remote is not None:
            self._use()
            target.parent.mkdir(parents=True, exist_ok=True)
            incoming = self.remote.bring(digest, target.parent)
            if incoming is not None:
                incoming.chmod(_OBJECT_MODE)
                os.replace(incoming, target)
                return
        also = "" if self.remote is None else f" or in {self.remote.url}"
        raise UnavailableError(
            f"there is no object {digest} in {self.root}{also}; check that the run uses this store"
        )

    @contextmanager
    def _entering(self, digest: str) -> Iterator[Path]:
        """Yield the place of an object that is about to be there, listed for the remote store."""
        try:
            self._use()
            if self.outbox is not None:
                self.outbox.add(digest)
            yield self.path(digest)
            if self.outbox is not None:
                self.outbox.add(digest)  # an uploader that found no object under the mark took it away
        except OSError as error:
            raise unusable(error, self.root) from error

    def _use(self) -> None:
        """Keep `antiphon gc` out for as long as this object exists."""
        with self._using:
            if self._in_use:
                return
            deadline = time.perf_counter() + CLEANING_TIMEOUT_S
            while (held := hold(self.root / "lock", shared=True)) is None:
                if time.perf_counter() > deadline:
                    raise UnavailableError(
                        f"`antiphon gc` has been cleaning {self.root} for {CLEANING_TIMEOUT_S:g} s; "
                        "wait until it is through, then give the same command again"
                    )
                time.sleep(_POLL_S)
            weakref.finalize(self, held.close)
            self._in_use = True


class Outbox:
    """The objects that one remote store still lacks; any number of processes may add to it."""

    def __init__(self, root: Path, url: str, endpoint_url: str | None = None) -> None:
        """Name the outbox of the store at `root` for one remote store (see `RemoteStore`)."""
        self.url, self.endpoint_url = url, endpoint_url
        self._place = json.dumps({"url": url, "endpoint_url": endpoint_url}).encode()
        self._folder = root / "outbox" / digest_bytes(self._place)[:16]
        self._refused = self._folder / "refused"

    def add(self, digest: str) -> None:
        """List an object; it is on the disk when this returns, and once is enough.

        Raises:
            ContractError: when `digest` has not the form of a digest.
            OSError: when the folder cannot be written.
        """
        mark = self._folder / check_digest(digest)
        if not mark.exists():
            self._make()
            mark.touch()
            flush_folder(self._folder)

    def pending(self, limit: int) -> list[str]:
        """Return up to `limit` objects that wait, in no particular order."""
        return [mark.name for mark in islice(self._folder.glob(_MARKS), limit)]

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.glob(_MARKS))

    def remove(self, digest: str) -> None:
        """Strike an object off: the remote store has it."""
        for folder in (self._folder, self._refused):
            (folder / check_digest(digest)).unlink(missing_ok=True)

    def refuse(self, digest: str) -> None:
        """Put an object aside that was altered or lost here, so that the others do not wait for it."""
        self._refused.mkdir(parents=True, exist_ok=True)
        (self._folder / check_digest(digest)).rename(self._refused / digest)

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Yield whether this process may send: one at a time does, so nothing is sent twice."""
        self._make()
        held = hold(self._folder / "lock")
        with held or nullcontext():
            yield held is not None

    def _make(self) -> None:
        """Make the folder, which says whose it is before the first mark is in it."""
        if not (self._folder / _PLACE).exists():
            write_atomically(self._folder / _PLACE, self._place)
            flush_folder(self._folder.parent)


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
    folder = root / "outbox"
    return {mark.name for place in ("*", "*/refused") for mark in folder.glob(f"{place}/{_MARKS}")}


def open_store(root: Path, record: RecordSection) -> ArtifactStore:
    """Open the store that a run's configuration means: local at `root`, remote by `record.artifact_url`."""
    if record.artifact_url is None:
        return ArtifactStore(root)
    return ArtifactStore(root, RemoteStore(record.artifact_url, record.artifact_endpoint))
