"""Payload store: one file for each payload, and the manifests of whole versions beside them.

The origin and every receiver keep one. A payload is written under another name and gets its own
when all of it is there, checked, and on the disk; from then on it never changes, and others may map it
or link it. What a killed process was receiving is continued: chunks that it had marked are checked
again, because a mark may have reached the disk before its chunk.
"""

import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from antiphon.api.manifest import full_payload, manifest_from_bytes, manifest_to_bytes
from antiphon.core.digests import check_digest
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.system.files import PREFIX, flush_folder, unusable, write_atomically
from antiphon.weights.payload_files import SUFFIX, IncomingPayload, OutgoingPayload, chunk_digest

PAYLOADS = "payloads"
"""Folder of a run, or of a worker, with its payload store."""
TOKEN = "token"
"""File whose content shows that a reader is on the store's machine and may read it."""


class PayloadStore:
    """Payloads and manifests in one folder; one process writes it, others may read and map."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, Payload] = {}
        """Payloads that were received or made here, and those of manifests that were read."""
        self._incoming: dict[str, IncomingPayload] = {}
        self._unlisted: set[str] = set()
        """Payloads that were made here and that no manifest names yet: nothing prunes them."""
        self._guard = threading.RLock()
        """Held while the folder's list of versions is read and changed by it."""

    def remove_leftovers(self) -> None:
        """Remove what a killed process was making; call it before anything is put. Transfers stay."""
        for path in self.root.glob(f"{PREFIX}*"):
            path.unlink(missing_ok=True)

    def token(self) -> str:
        """Return what the store's token file holds, made on first use.

        Raises:
            UnavailableError: when the folder cannot be used.
        """
        path = self.root / TOKEN
        try:
            return path.read_text(encoding="ascii")
        except OSError:
            write_atomically(path, secrets.token_hex(16).encode(), 0o600)
            return path.read_text(encoding="ascii")

    def path(self, digest: str) -> Path:
        """Return where a payload lies or would lie.

        Raises:
            ContractError: when `digest` has not the form of a digest.
        """
        return self.root / f"{check_digest(digest)}{SUFFIX}"

    def has(self, digest: str) -> bool:
        """Tell whether a payload is here whole."""
        return self.path(digest).is_file()

    def note(self, payload: Payload) -> None:
        """Remember what a payload is that is here, so that others find it."""
        with self._guard:
            self._known[payload.digest] = payload

    def find(self, digest: str) -> Payload:
        """Return what is known of a payload that is here, whole or in part.

        Raises:
            UnavailableError: when it is not held.
        """
        with self._guard:
            if digest not in self._known:
                # Another process may write the folder: what it has dropped is forgotten here too.
                self._known = {name: known for name, known in self._known.items() if self._holds(name)}
                for version in self.versions():
                    for payload in self.manifest(version).payloads:
                        self._known[payload.digest] = payload
            if digest not in self._known or not self._holds(digest):
                raise _not_held(digest)
            return self._known[digest]

    def _holds(self, digest: str) -> bool:
        return digest in self._incoming or self.has(digest)

    def make(self, chunk_bytes: int, head_bytes: int = 0) -> OutgoingPayload:
        """Begin a payload whose bytes come in order; the first `head_bytes` are given at the end."""
        return OutgoingPayload(self.root, chunk_bytes, head_bytes, self._made)

    def receive(self, payload: Payload) -> IncomingPayload:
        """Begin to receive a payload, or go on where an earlier transfer stopped; reads what that marked.

        Raises:
            UnavailableError: when there is no space for it, or the folder cannot be written.
        """
        with self._guard:
            if payload.digest not in self._incoming:
                self._incoming[payload.digest] = IncomingPayload(self.root, payload, self._received)
                self._known[payload.digest] = payload
            return self._incoming[payload.digest]

    def adopt(self, payload: Payload, path: Path) -> bool:
        """Link the file of another store on this machine; False where that cannot be done.

        Nothing of it is believed: the weights in it are verified like any others.
        """
        target = self.path(payload.digest)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # A link that stands there is followed by no one.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size != payload.payload_bytes:
                    return False
            finally:
                os.close(descriptor)
            os.link(path, target, follow_symlinks=False)
        except OSError:
            return False
        self._known[payload.digest] = payload
        return True

    def map(self, digest: str) -> memoryview:
        """Return a whole payload, mapped read-only; it stays readable when its name is removed.

        Raises:
            UnavailableError: when it is not held.
        """
        try:
            with self.path(digest).open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise _not_held(digest) from None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise UnavailableError(f"{self.path(digest)} cannot be mapped: {error}") from error

    def checked(self, manifest: SnapshotManifest) -> Path:
        """Return a version's policy file after comparing each of its chunks with the manifest.

        Raises:
            UnavailableError: when it is not held.
            IntegrityError: when it was altered.
        """
        payload = full_payload(manifest)
        mapping = self.map(payload.digest)
        for index, digest in enumerate(payload.chunk_digests):
            start, length = payload.span(index)
            if chunk_digest(mapping[start : start + length]) != digest:
                raise IntegrityError(
                    f"chunk {index} of version {manifest.version} was altered in "
                    f"{self.path(payload.digest)}; restore it from a copy"
                )
        return self.path(payload.digest)

    def read_chunks(self, payload: Payload, run: range) -> bytes:
        """Return chunks that follow each other, of a payload that is here, whole or in part.

        The receiver checks their digests.

        Raises:
            UnavailableError: when one of them is not held.
        """
        incoming = self._incoming.get(payload.digest)
        paths = [self.path(payload.digest)]
        if incoming is not None:
            if not incoming.held[run.start : run.stop].all():
                raise _not_held(payload.digest, run[0])
            paths.insert(0, incoming.path)  # it may get its own name meanwhile
        start, length = payload.span(run[0])[0], sum(payload.span(index)[1] for index in run)
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    data = os.pread(descriptor, length, start)
                finally:
                    os.close(descriptor)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise unusable(error, self.root) from error
            if len(data) != length:
                raise UnavailableError(f"{path} ends before chunk {run.stop}; fetch it from another holder")
            return data
        raise _not_held(payload.digest, run[0])

    def held(self, payload: Payload) -> npt.NDArray[np.bool_]:
        """Return, per chunk of a payload, whether it is here."""
        incoming = self._incoming.get(payload.digest)
        if incoming is not None:
            return incoming.held
        return np.full(len(payload.chunk_digests), self.has(payload.digest))

    def drop(self, digest: str) -> None:
        """Remove a payload, such as one that was altered, so that it is fetched again."""
        with self._guard:
            self._incoming.pop(digest, None)
        for path in self.root.glob(f"*{check_digest(digest)}*"):
            path.unlink(missing_ok=True)

    def put_manifest(self, manifest: SnapshotManifest) -> None:
        """List a version as whole.

        Raises:
            UnavailableError: when none of its payloads is held, or the folder cannot be written.
        """
        with self._guard:
            if not any(self.has(payload.digest) for payload in manifest.payloads):
                raise UnavailableError(
                    f"no payload of version {manifest.version} is held; write it before listing it"
                )
            write_atomically(self._manifest_path(manifest.version), manifest_to_bytes(manifest))
            self._unlisted.difference_update(payload.digest for payload in manifest.payloads)

    def manifest(self, version: int | None) -> SnapshotManifest:
        """Return the manifest of `version`, or of the newest version held.

        Raises:
            UnavailableError: when it is not held.
        """
        held = self.versions()
        if not held:
            raise UnavailableError("no snapshot is held here yet; wait for the learner to publish")
        if version is None:
            version = held[-1]
        if version not in held:
            listed = ", ".join(map(str, held))
            raise UnavailableError(
                f"version {version} is not held here; there is {listed}; ask for the newest one"
            )
        try:
            return manifest_from_bytes(self._manifest_path(version).read_bytes())
        except FileNotFoundError:  # it was listed a moment ago
            raise UnavailableError(f"version {version} was pruned; ask for the newest one") from None

    def versions(self) -> list[int]:
        """Return the versions held whole, oldest first."""
        return sorted(int(path.stem) for path in self.root.glob("*.manifest") if path.stem.isdigit())

    def weights(self) -> dict[int, str]:
        """Return the versions held whole and the digests of their weights, oldest first."""
        with self._guard:
            return {version: self.manifest(version).weights_digest for version in self.versions()}

    def prune_announced(self, version: int, kept: int, recorded: int | None = None) -> None:
        """Keep the newest `kept` versions up to the one that is announced, and all that wait for that.

        Those above `recorded` stay too, as the records of the run need them still; None: nothing does.
        """
        with self._guard:
            held = self.versions()
            old = [found for found in held if found <= version][:-kept]
            old = [found for found in old if recorded is None or found <= recorded]
            self.prune([self.manifest(found) for found in held if found not in old])

    def prune(self, keep: Sequence[SnapshotManifest]) -> None:
        """Drop every version not in `keep`, and every payload and transfer that none of them needs.

        What is being made, and what was made and is not listed yet, stays.
        """
        versions = {manifest.version for manifest in keep}
        with self._guard:
            wanted = {payload.digest for manifest in keep for payload in manifest.payloads} | self._unlisted
            for version in self.versions():
                if version not in versions:
                    self._manifest_path(version).unlink(missing_ok=True)
            for digest in self._incoming.keys() - wanted:
                del self._incoming[digest]
            self._known = {digest: known for digest, known in self._known.items() if digest in wanted}
            for path in self.root.glob(f"*{SUFFIX}*"):
                if not path.name.startswith(PREFIX) and path.name.partition(".")[0] not in wanted:
                    path.unlink(missing_ok=True)

    def _manifest_path(self, version: int) -> Path:
        return self.root / f"{version}.manifest"

    def _made(self, path: Path, payload: Payload) -> Path:
        with self._guard:
            self._unlisted.add(payload.digest)
            return self._named(path, payload)

    def _received(self, path: Path, payload: Payload) -> Path:
        with self._guard:
            named = self._named(path, payload)
            self._incoming.pop(payload.digest, None)
            return named

    def _named(self, path: Path, payload: Payload) -> Path:
        """Give a payload that is on the disk its name."""
        target = self.path(payload.digest)
        os.replace(path, target)
        flush_folder(self.root)
        self._known[payload.digest] = payload
        return target


def _not_held(digest: str, index: int | None = None) -> UnavailableError:
    what = "" if index is None else f"chunk {index} of "
    return UnavailableError(
        f"{what}payload {digest[:64]} is not held here (any more); fetch the newest manifest"
    )
