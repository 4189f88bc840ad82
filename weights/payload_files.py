"""Payload files: one that is made here, and one that arrives in chunks.

Each costs one flush of the file and one of its folder, when all of it is written.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from antiphon.api.manifest import payload_digest
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import Payload
from antiphon.system.files import PREFIX, unusable

Buffer = bytes | bytearray | memoryview
Named = Callable[[Path, Payload], Path]
"""Gives a file that is on the disk its name, and returns that."""
SUFFIX = ".payload"
_PART, _MARKS = ".part", ".marks"
THREADED_BYTES = 1 << 20
"""Fewer bytes are digested sooner than threads are woken for them."""
_MODE = 0o444
"""Payloads never change, and others link to the very same file: none may write to them."""


def chunk_digest(data: Buffer) -> str:
    """Return the digest of a chunk; of a large one computed by as many threads as the machine has."""
    return blake3(data, max_threads=blake3.AUTO if len(data) >= THREADED_BYTES else 1).hexdigest()


class OutgoingPayload:
    """A payload that is made here: written once, in order, and digested in chunks on the way.

    Until `finish` it has no name, and `discard` leaves nothing; a killed maker's is removed by
    `PayloadStore.remove_leftovers`.
    """

    def __init__(self, root: Path, chunk_bytes: int, head_bytes: int, named: Named) -> None:
        """Open the file.

        Raises:
            UnavailableError: when the folder cannot be written.
        """
        self._root, self._named = root, named
        self._chunk_bytes = chunk_bytes
        self._digests: list[str] = []
        self._hasher = _hasher()
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
            raise unusable(error, self._root) from error

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
                heads.append(
                    chunk_digest(os.pread(self._descriptor, min(self._chunk_bytes, self._end - start), start))
                )
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
            self._named(self._path, payload)
            os.close(self._descriptor)
            self._descriptor = -1
        except OSError as error:
            self.discard()
            raise unusable(error, self._root) from error
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
                self._hasher = _hasher()


class IncomingPayload:
    """A payload that arrives in chunks, in any order: a sparse file, and a mark for each chunk.

    Methods may be called from any thread; different chunks may be written at the same time.
    """

    def __init__(self, root: Path, payload: Payload, named: Named) -> None:
        """Open or continue the file; chunks that are marked are read and checked.

        Raises:
            UnavailableError: when the folder cannot be written or has no space left.
        """
        self._root, self._named = root, named
        self.payload = payload
        self.path = root / f"{payload.digest}{SUFFIX}{_PART}"
        self._marks = root / f"{payload.digest}{SUFFIX}{_MARKS}"
        self.held: npt.NDArray[np.bool_] = np.zeros(len(payload.chunk_digests), np.bool_)
        """Per chunk: whether it is here, checked."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            marked = self._marked()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            if self.path.exists():  # what was killed just before the file got its name left it read-only
                self.path.chmod(0o644)
            self._descriptor = os.open(self.path, flags, 0o644)
            os.ftruncate(self._descriptor, payload.payload_bytes)
            self._mark_file = os.open(self._marks, flags, 0o644)
            for index in np.flatnonzero(marked):
                start, length = payload.span(int(index))
                data = os.pread(self._descriptor, length, start)
                self.held[index] = chunk_digest(data) == payload.chunk_digests[index]
        except OSError as error:
            raise unusable(error, root) from error

    def _marked(self) -> npt.NDArray[np.bool_]:
        if not self.path.exists() or not self._marks.exists():
            return np.zeros(0, np.bool_)
        marked: npt.NDArray[np.bool_] = (
            np.frombuffer(self._marks.read_bytes()[: len(self.held)], np.uint8) == 1
        )
        return marked

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
        if chunk_digest(data) != self.payload.chunk_digests[index]:
            raise IntegrityError("was altered: its bytes do not match its digest")
        try:
            _write_all(self._descriptor, memoryview(data), start)
            os.pwrite(self._mark_file, b"\x01", index)
        except OSError as error:
            raise unusable(error, self._root) from error
        self.held[index] = True

    def finish(self) -> Path:
        """Bring the whole payload to the disk, give it its name, and return where it lies.

        Raises:
            UnavailableError: when chunks are missing, or the disk fails.
        """
        if missing := self.missing():
            raise UnavailableError(f"{len(missing)} chunks of payload {self.payload.digest} are missing")
        try:
            os.fdatasync(self._descriptor)
            os.fchmod(self._descriptor, _MODE)
            path = self._named(self.path, self.payload)
            self._marks.unlink(missing_ok=True)
        except OSError as error:
            raise unusable(error, self._root) from error
        return path

    def __del__(self) -> None:
        for name in ("_descriptor", "_mark_file"):
            if (descriptor := self.__dict__.pop(name, None)) is not None:
                os.close(descriptor)


def _hasher() -> blake3:
    return blake3(max_threads=blake3.AUTO)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
