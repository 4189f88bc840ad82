"""Payload store: one file for each payload, and the manifests of whole versions beside them.

The origin and every receiver keep one. A payload is written under another name and gets its own
when all of it is there, checked, and on the disk; from then on it never changes, and others may map it
or link it. What a killed process was receiving is continued: chunks that it had marked are checked
again, because a mark may have reached the disk before its chunk. A payload costs one flush of its file and
one of its folder.
"""

import mmap
import os
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from antiphon.api.manifest import full_payload, manifest_from_bytes, manifest_to_bytes, payload_digest
from antiphon.core.digests import is_digest
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.system.files import PREFIX, flush_folder, unusable, write_atomically
from antiphon.system.wakeup import Wakeup

Buffer = bytes | bytearray | memoryview
PAYLOADS = "payloads"
"""Folder of a run, or of a worker, with its payload store."""
TOKEN = "token"
"""File whose content shows that a reader is on the store's machine and may read it."""
SUFFIX = ".payload"
_PART, _MARKS = ".part", ".marks"
THREADED_BYTES = 1 << 20
"""Fewer bytes are digested sooner than threads are woken for them."""
_MODE = 0o444
"""Payloads never change, and others link to the very same file: none may write to them."""


def is_chunk(data: Buffer, digest: str) -> bool:
    """Tell whether a chunk has a digest; that of a large one is computed by all threads of the machine."""
    threads = blake3.AUTO if len(data) >= THREADED_BYTES else 1
    return blake3(data, max_threads=threads).hexdigest() == digest


class Arrivals:
    """Wakes those who wait for chunks of a payload."""

    def __init__(self) -> None:
        self._waiting: dict[str, Wakeup] = {}
        self._count: Counter[str] = Counter()
        """Who waits, by payload. Peers may name any payload: what nobody waits for takes no memory."""

    def notify(self, payload_digest: str) -> None:
        if (wakeup := self._waiting.get(payload_digest)) is not None:
            wakeup.notify()

    async def wait(self, payload_digest: str, timeout_s: float) -> bool:
        """Wait until something of a payload arrives; False when `timeout_s` seconds passed without."""
        wakeup = self._waiting.setdefault(payload_digest, Wakeup())
        self._count[payload_digest] += 1
        try:
            return await wakeup.wait(timeout_s)
        finally:
            self._count[payload_digest] -= 1
            if not self._count[payload_digest]:
                del self._count[payload_digest]
                self._waiting.pop(payload_digest, None)


class PayloadStore:
    """Payloads and manifests in one folder; one process writes it, others may read and map."""

    def __init__(self, root: Path) -> None:
        self.root, self.arrivals = root, Arrivals()
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
        if not is_digest(digest):  # no peer smuggles a path
            raise ContractError(f"{digest[:80]!r} is not a digest; expected 64 lower-case hex digits")
        return self.root / f"{digest}{SUFFIX}"

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
                for dropped in [
                    one for one in self._known if one not in self._incoming and not self.has(one)
                ]:
                    del self._known[dropped]
                for version in self.versions():
                    for payload in self.manifest(version).payloads:
                        self._known[payload.digest] = payload
            known = self._known.get(digest)
            if known is None or not (digest in self._incoming or self.has(digest)):
                raise _not_held(digest)
            return known

    def make(self, chunk_bytes: int, head_bytes: int = 0) -> "OutgoingPayload":
        """Begin a payload whose bytes come in order; the first `head_bytes` are given at the end.

        Raises:
            UnavailableError: when the folder cannot be written.
        """
        return OutgoingPayload(self, chunk_bytes, head_bytes)

    def receive(self, payload: Payload) -> "IncomingPayload":
        """Begin to receive a payload, or go on where an earlier transfer stopped; reads what that marked.

        Raises:
            UnavailableError: when there is no space for it, or the folder cannot be written.
        """
        with self._guard:
            if payload.digest not in self._incoming:
                self._incoming[payload.digest] = IncomingPayload(self, payload)
                self._known[payload.digest] = payload
            return self._incoming[payload.digest]

    def name(self, path: Path, payload: Payload, unlisted: bool) -> None:
        """Give a payload that is whole, checked and on the disk its name; called by what was writing it."""
        with self._guard:
            if unlisted:
                self._unlisted.add(payload.digest)
            os.replace(path, f"{self.root}/{payload.digest}{SUFFIX}")
            flush_folder(self.root)
            self._known[payload.digest] = payload
            self._incoming.pop(payload.digest, None)

    def adopt(self, payload: Payload, path: Path) -> bool:
        """Link the file of another store on this machine; False where that cannot be done.

        Nothing of it is believed: the weights in it are verified like any others.
        """
        target = self.path(payload.digest)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            facts = path.lstat()  # a link that stands there is followed by no one
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != payload.payload_bytes:
                return False
            os.link(path, target, follow_symlinks=False)
        except OSError:
            return False
        self.note(payload)
        return True

    def map(self, digest: str) -> memoryview:
        """Return a whole payload, mapped read-only; it stays readable when its name is removed.

        Raises:
            UnavailableError: when it is not held.
        """
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise _not_held(digest) from None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise UnavailableError(f"{path} cannot be mapped: {error}") from error

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
            if not is_chunk(mapping[start : start + length], digest):
                raise IntegrityError(
                    f"chunk {index} of version {manifest.version} was altered in "
                    f"{self.path(payload.digest)}; restore it from a copy"
                )
        return self.path(payload.digest)

    def adapter(self, version: int) -> Path | None:
        """Return the file that makes a version of another, for a version that has one.

        Raises:
            UnavailableError: when the version is not held.
        """
        adapters = [one.digest for one in self.manifest(version).payloads if one.encoding == "lora"]
        return next((self.path(digest) for digest in adapters if self.has(digest)), None)

    def read_chunks(self, payload: Payload, run: range) -> bytes:
        """Return chunks that follow each other, of a payload that is here, whole or in part.

        The receiver checks their digests.

        Raises:
            UnavailableError: when one of them is not held.
        """
        incoming = self._incoming.get(payload.digest)
        if incoming is not None and not incoming.held[run.start : run.stop].all():
            raise _not_held(payload.digest, run[0])
        start, length = payload.span(run[0])[0], sum(payload.span(index)[1] for index in run)
        # What arrives may get its own name meanwhile.
        for path in (*([] if incoming is None else [incoming.path]), self.path(payload.digest)):
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
        for path in self.root.glob(f"{self.path(digest).name}*"):
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
            self._unlisted -= {payload.digest for payload in manifest.payloads}

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

    def prune_announced(
        self, version: int, kept: int, recorded: int | None = None, pinned: Collection[int] = ()
    ) -> None:
        """Keep the newest `kept` versions up to the one that is announced, and all that wait for that.

        Those above `recorded` stay too, as the records of the run need them still; None: nothing does. So do
        those that are `pinned`.
        """
        with self._guard:
            held = self.versions()
            old = [found for found in held if found <= version and found not in pinned][:-kept]
            old = [found for found in old if recorded is None or found <= recorded]
            self.prune([self.manifest(found) for found in held if found not in old])

    def prune(self, keep: Sequence[SnapshotManifest]) -> None:
        """Drop every version not in `keep`, and every payload and transfer that none of them needs.

        What is being made, and what was made and is not listed yet, stays. So does what an adapter changes.
        """
        with self._guard:
            bases = {one.parent for manifest in keep for one in manifest.payloads if one.encoding == "lora"}
            bases -= {manifest.version for manifest in keep}
            keep = [*keep, *(self.manifest(version) for version in self.versions() if version in bases)]
            versions = {manifest.version for manifest in keep}
            wanted = {payload.digest for manifest in keep for payload in manifest.payloads} | self._unlisted
            for version in self.versions():
                if version not in versions:
                    self._manifest_path(version).unlink(missing_ok=True)
            self._incoming = {one: found for one, found in self._incoming.items() if one in wanted}
            self._known = {one: found for one, found in self._known.items() if one in wanted}
            for path in self.root.glob(f"*{SUFFIX}*"):
                if not path.name.startswith(PREFIX) and path.name.partition(".")[0] not in wanted:
                    path.unlink(missing_ok=True)

    def _manifest_path(self, version: int) -> Path:
        return self.root / f"{version}.manifest"


class OutgoingPayload:
    """A payload that is made here: written once, in order, and digested in chunks on the way.

    Until `finish` it has no name, and `discard` leaves nothing; a killed maker's is removed by
    `PayloadStore.remove_leftovers`.
    """

    def __init__(self, store: PayloadStore, chunk_bytes: int, head_bytes: int) -> None:
        """Open the file; see `PayloadStore.make`."""
        self._store, root = store, store.root
        self._chunk_bytes = chunk_bytes
        self._digests: list[str] = []
        self._hasher = blake3(max_threads=blake3.AUTO)
        self._end = head_bytes
        # Chunks that hold some of the head are digested when it is known.
        self._head_bytes, self._headed = head_bytes, -(-head_bytes // chunk_bytes)
        self._path = root / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unusable(error, root) from error

    def write(self, data: Buffer) -> None:
        """Append bytes, and let the disk begin with them.

        Raises:
            UnavailableError: when no space is left.
        """
        view = memoryview(data).cast("B")
        begun = self._end
        self._digest(view)
        try:
            _write_all(self._descriptor, view, begun)
            # Dirty pages go to the disk from now on, instead of all at the end; none is dropped meanwhile.
            os.posix_fadvise(self._descriptor, begun, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise unusable(error, self._store.root) from error

    def finish(
        self,
        head: bytes = b"",
        kind: str = "full",
        parent: int | None = None,
        encoding: str = "raw",
        digest: str = "",
    ) -> Payload:
        """Write the head, bring everything to the disk and give the payload its name.

        Raises:
            UnavailableError: when no space is left; nothing is left then.
            IntegrityError: when `digest` is given and the payload has another one; nothing is left then.
        """
        assert len(head) == self._head_bytes
        try:
            _write_all(self._descriptor, memoryview(head), 0)
            if self._end > self._headed * self._chunk_bytes and self._end % self._chunk_bytes:
                self._digests.append(self._hasher.hexdigest())
            heads = []
            for start in range(0, min(self._headed * self._chunk_bytes, self._end), self._chunk_bytes):
                length = min(self._chunk_bytes, self._end - start)
                heads.append(blake3(os.pread(self._descriptor, length, start)).hexdigest())
            digests = (*heads, *self._digests)
            payload = Payload(
                kind,  # type: ignore[arg-type]
                parent,
                encoding,  # type: ignore[arg-type]
                payload_digest(self._end, self._chunk_bytes, digests),
                self._end,
                self._chunk_bytes,
                digests,
            )
            if digest and payload.digest != digest:
                self.discard()
                raise IntegrityError(f"what was made is payload {payload.digest} instead of {digest}")
            os.fdatasync(self._descriptor)
            os.fchmod(self._descriptor, _MODE)
            self._store.name(self._path, payload, unlisted=True)
            os.close(self._descriptor)
            self._descriptor = -1
        except OSError as error:
            self.discard()
            raise unusable(error, self._store.root) from error
        return payload

    def discard(self) -> None:
        """Leave nothing of it, unless it is finished."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._path.unlink(missing_ok=True)

    def _digest(self, view: memoryview) -> None:
        place = 0
        while place < len(view):
            part = view[place : place + self._chunk_bytes - self._end % self._chunk_bytes]
            place += len(part)
            headed = self._end < self._headed * self._chunk_bytes
            self._end += len(part)
            if headed:
                continue
            self._hasher.update(part)
            if self._end % self._chunk_bytes == 0:
                self._digests.append(self._hasher.hexdigest())
                self._hasher = blake3(max_threads=blake3.AUTO)


class IncomingPayload:
    """A payload that arrives in chunks, in any order: a sparse file, and a mark for each chunk.

    Methods may be called from any thread; different chunks may be written at the same time.
    """

    def __init__(self, store: PayloadStore, payload: Payload) -> None:
        """Open or continue the file; see `PayloadStore.receive`."""
        self._store, self.arrivals, root = store, store.arrivals, store.root
        self.payload = payload
        self.path = root / f"{payload.digest}{SUFFIX}{_PART}"
        self._marks = root / f"{payload.digest}{SUFFIX}{_MARKS}"
        self.held: npt.NDArray[np.bool_] = np.zeros(len(payload.chunk_digests), np.bool_)
        """Per chunk: whether it is here, checked."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            is_marked = self.path.exists() and self._marks.exists()
            marked = np.frombuffer(self._marks.read_bytes()[: len(self.held)] if is_marked else b"", np.uint8)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            if self.path.exists():  # what was killed just before the file got its name left it read-only
                self.path.chmod(0o644)
            self._descriptor = os.open(self.path, flags, 0o644)
            os.ftruncate(self._descriptor, payload.payload_bytes)
            self._mark_file = os.open(self._marks, flags, 0o644)
            for index in np.flatnonzero(marked == 1):
                start, length = payload.span(int(index))
                data = os.pread(self._descriptor, length, start)
                self.held[index] = is_chunk(data, payload.chunk_digests[index])
        except OSError as error:
            raise unusable(error, root) from error

    def missing(self) -> list[int]:
        """Return the chunks that are not here yet, in order."""
        return [int(index) for index in np.flatnonzero(~self.held)]

    def write(self, index: int, data: Buffer) -> None:
        """Check a chunk and keep it; one that is here already changes nothing.

        Raises:
            IntegrityError: when it is not the payload's chunk of that place; nothing is kept then.
            UnavailableError: when no space is left.
        """
        if not 0 <= index < len(self.held):
            raise IntegrityError(
                f"there is no chunk {index} among the {len(self.held)} of {self.payload.digest}"
            )
        if self.held[index]:
            return
        start, length = self.payload.span(index)
        if len(data) != length:
            how = "is truncated" if len(data) < length else "is oversized"
            raise IntegrityError(f"{how}: {len(data)} bytes instead of {length}")
        if not is_chunk(data, self.payload.chunk_digests[index]):
            raise IntegrityError("was altered: its bytes do not match its digest")
        try:
            _write_all(self._descriptor, memoryview(data), start)
            os.pwrite(self._mark_file, b"\x01", index)
        except OSError as error:
            raise unusable(error, self._store.root) from error
        self.held[index] = True

    def finish(self) -> None:
        """Bring the whole payload to the disk and give it its name.

        Raises:
            UnavailableError: when chunks are missing, or the disk fails.
        """
        if missing := self.missing():
            raise UnavailableError(f"{len(missing)} chunks of payload {self.payload.digest} are missing")
        try:
            os.fdatasync(self._descriptor)
            os.fchmod(self._descriptor, _MODE)
            self._store.name(self.path, self.payload, unlisted=False)
            self._marks.unlink(missing_ok=True)
        except OSError as error:
            raise unusable(error, self._store.root) from error

    def __del__(self) -> None:
        for name in ("_descriptor", "_mark_file"):
            if (descriptor := self.__dict__.pop(name, None)) is not None:
                os.close(descriptor)


def _not_held(digest: str, index: int | None = None) -> UnavailableError:
    what = "" if index is None else f"chunk {index} of "
    return UnavailableError(
        f"{what}payload {digest[:64]} is not held here (any more); fetch the newest manifest"
    )


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
