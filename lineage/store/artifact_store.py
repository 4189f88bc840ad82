"""Artifact store: immutable bytes under their digest; what is read is what was written.

An object lies at ``objects/ab/<digest>``, where ab are the digest's first two digits. It is
written beside its place, flushed to the disk and renamed, so a name never stands for half a
file. Every read is checked against the name. Where a remote store is named, an object counts as
stored once it is on the local disk and in the outbox; sending it is the uploader's work, and
what is missing here is read from there.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from antiphon.core.config_sections import RecordSection
from antiphon.core.digests import check_digest, digest_bytes, digest_file
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage.store.outbox import Outbox
from antiphon.lineage.store.remote import RemoteStore
from antiphon.system.files import copy_atomically, flush_folder, hold, unusable, write_atomically

_OBJECT_MODE = 0o444
"""Objects never change, and the ledger may link to the very same file: none may write to them."""

CLEANING_TIMEOUT_S = 60.0
"""Longest wait for `antiphon gc` to be through with the store."""
_POLL_S = 0.05


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


def open_store(root: Path, record: RecordSection) -> ArtifactStore:
    """Open the store that a run's configuration means: local at `root`, remote by `record.artifact_url`."""
    if record.artifact_url is None:
        return ArtifactStore(root)
    return ArtifactStore(root, RemoteStore(record.artifact_url, record.artifact_endpoint))
