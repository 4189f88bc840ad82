"""Object store: payloads for workers that reach a bucket or a shared folder, but not the learner.

The learner's side keeps copies of its payloads there (`ObjectStoreMirror`), one object for each, named
by the payload's digest. A worker reads the spans of the chunks that it lacks, several at once. Nothing of the
store is believed: each chunk is checked against the signed manifest before it is kept.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from antiphon.core.digests import check_digest
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.errors import AntiphonError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.lineage.store.remote_place import RemotePlace
from antiphon.weights.payload_store import IncomingPayload, PayloadStore
from antiphon.weights.transport import MeasuredTransport

SPAN_BYTES = 8 << 20
"""Chunks that lie beside each other are read together up to this size; one that is larger is read alone."""
SPANS_AT_ONCE = 8
ATTEMPTS = 2
"""A chunk that does not match its digest is read once more, then the transfer fails."""
FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 5.0
"""Pauses between two questions whether an object is there; they double."""


def object_place(url: str, endpoint_url: str | None) -> RemotePlace:
    """Return the place that `broadcast.object_store` names; nothing is opened yet."""
    return RemotePlace(url, endpoint_url, "broadcast.object_store", "broadcast.object_endpoint")


def object_name(run_id: str, payload_digest: str) -> str:
    """Return the name of a payload's object in the place.

    Raises:
        ContractError: when `payload_digest` has not the form of a digest.
    """
    return f"{run_id}/{check_digest(payload_digest)}"


class ObjectStoreTransport(MeasuredTransport):
    """Payloads from an object store."""

    def __init__(
        self,
        store: PayloadStore,
        place: RemotePlace,
        timeout_s: float,
        wait_s: float = math.inf,
        network: NetworkLog | None = None,
    ) -> None:
        """Fill `store` from `place`; give up when nothing comes for `timeout_s`. `network` gets measures.

        An object that is not there is given up after `wait_s` already: by then its version may have been
        dropped, or a patch may be there, so the caller had better look at the newest manifest.
        """
        super().__init__(store, "object store", network)
        self._place, self._timeout_s = place, timeout_s
        self._wait_s = min(timeout_s, wait_s)
        self._threads = ThreadPoolExecutor(SPANS_AT_ONCE, "object-store")
        """Of its own: answers take long, and the threads that everyone shares are few."""

    async def bring(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        """Do what the protocol says; a version's file may still be on its way into the store.

        Other payloads, patches and compressed ones, are not waited for: the origin may have dropped them, and
        the file leads to the version too.

        Raises:
            ConfigError: when the store refuses the worker, or there is none; besides.
        """
        name = object_name(manifest.run_id, payload.digest)
        await self._until_there(manifest, name, payload)
        incoming = await asyncio.to_thread(self._store.receive, payload)
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:

                def note(length: int) -> None:
                    deadline.reschedule(clock() + self._timeout_s)
                    arrived(length)

                await self._read_missing(manifest, name, incoming, note)
        except TimeoutError:
            raise UnavailableError(
                f"{len(incoming.missing())} chunks of version {manifest.version} did not arrive from "
                f"{self._place.url}, and nothing came for {self._timeout_s:g} s; try again, what has "
                "arrived is kept"
            ) from None
        await asyncio.to_thread(incoming.finish)

    async def _until_there(self, manifest: SnapshotManifest, name: str, payload: Payload) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            async with asyncio.timeout(self._wait_s):
                while (size := await asyncio.to_thread(self._place.size, name)) is None:
                    if (payload.kind, payload.encoding) != ("full", "raw"):
                        raise UnavailableError(
                            f"{self._place.url} holds no {payload.kind} of version {manifest.version} (yet, "
                            "or any more); another payload leads there too"
                        )
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MOST_PAUSE_S)
        except TimeoutError:
            raise UnavailableError(
                f"{self._place.url} got no payload of version {manifest.version} for {self._wait_s:g} s; "
                "see the log of the run's origin for why it is not uploaded"
            ) from None
        if size != payload.payload_bytes:
            raise IntegrityError(
                f"{name} in {self._place.url} has {size} bytes instead of {payload.payload_bytes}, so chunk "
                f"{min(size, payload.payload_bytes) // payload.chunk_bytes} of version {manifest.version} is "
                "wrong; the origin uploads it again with its next version"
            )

    async def _read_missing(
        self,
        manifest: SnapshotManifest,
        name: str,
        incoming: IncomingPayload,
        arrived: Callable[[int], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        wrong: list[IntegrityError] = []
        failed: list[AntiphonError] = []

        async def read_in_turn(spans: Iterator[Sequence[int]]) -> None:
            """Read one span after the other; begin none after one failed, but let those that run finish."""
            for indices in spans:
                try:
                    kept, refused = await loop.run_in_executor(
                        self._threads, self._read, manifest, name, incoming, indices
                    )
                except AntiphonError as error:
                    failed.append(error)
                else:
                    wrong.extend(refused)
                    if kept:
                        arrived(kept)
                if failed:
                    return

        for _ in range(ATTEMPTS):
            wrong.clear()
            spans = _spans(incoming.payload, incoming.missing())
            async with asyncio.TaskGroup() as tasks:
                for _ in range(SPANS_AT_ONCE):
                    tasks.create_task(read_in_turn(spans))
            if failed:
                raise failed[0]
            if not wrong:
                return
        raise wrong[0]

    def _read(
        self,
        manifest: SnapshotManifest,
        name: str,
        incoming: IncomingPayload,
        indices: Sequence[int],
    ) -> tuple[int, list[IntegrityError]]:
        """Read chunks that lie beside each other; return the bytes kept, and why others were not."""
        payload = incoming.payload
        begin = payload.span(indices[0])[0]
        data = memoryview(self._place.read(name, begin, sum(payload.span(indices[-1]))))
        kept, refused = 0, []
        for index in indices:
            start, length = payload.span(index)
            try:
                incoming.write(index, data[start - begin : start - begin + length])
            except IntegrityError as error:
                refused.append(
                    IntegrityError(
                        f"chunk {index} of version {manifest.version} from {self._place.url} {error}; it was "
                        f"not kept; remove {name} there, and the origin uploads it with its next version"
                    )
                )
            else:
                kept += length
        return kept, refused

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _spans(payload: Payload, missing: Sequence[int]) -> Iterator[Sequence[int]]:
    """Group chunks that lie beside each other, up to `SPAN_BYTES` together."""
    most, span = max(1, SPAN_BYTES // payload.chunk_bytes), list[int]()
    for index in missing:
        if span and (index != span[-1] + 1 or len(span) == most):
            yield span
            span = []
        span.append(index)
    if span:
        yield span


LOOK_S = 0.5
"""Pause between two looks at the origin's folder."""
MOST_COPY_PAUSE_S = 30.0
"""Longest pause after a place refused something; pauses double from `LOOK_S`."""

_log = structlog.get_logger(__name__)


class ObjectStoreMirror:
    """Copies of one run's payloads in a place."""

    def __init__(
        self,
        store: PayloadStore,
        place: RemotePlace,
        run_id: str,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        """Copy from `store` into the run's folder of `place`; after each part `pace` is waited for."""
        self._store, self._place, self._run_id, self._pace = store, place, run_id, pace
        self._stopped = threading.Event()
        # A daemon: an upload that hangs does not keep the process.
        self._thread = threading.Thread(target=self._run, name="object-store-mirror", daemon=True)

    def start(self) -> None:
        """Copy in a thread of its own until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more; what is being sent is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        copied: list[int] | None = None
        pause_s = LOOK_S
        while not self._stopped.wait(pause_s):
            try:
                versions = self._store.versions()
                if versions != copied:
                    while not self._stopped.is_set() and (name := self.copy_next()) is not None:
                        _log.info("object_store.uploaded", object=name)
                    copied = versions
                pause_s = LOOK_S
            except AntiphonError as error:
                pause_s = min(2 * pause_s, MOST_COPY_PAUSE_S)
                _log.warning("object_store.not_uploaded", reason=str(error), again_in_s=pause_s)
            except Exception:  # noqa: BLE001 - without this thread no worker would get weights any more
                pause_s = min(2 * pause_s, MOST_COPY_PAUSE_S)
                _log.exception("object_store.not_uploaded", again_in_s=pause_s)

    def copy_next(self) -> str | None:
        """Copy the payload that is wanted most; where none is missing, remove those that were dropped.

        Returns:
            The name of the object that was made; another may be missing. None when none was.

        Raises:
            ConfigError: when the place refuses, or is absent.
            UnavailableError: when it does not answer.
        """
        there = self._place.sizes(self._run_id)
        wanted = {object_name(self._run_id, payload.digest): payload for payload in self._held()}
        for name, payload in wanted.items():
            if there.get(name) != payload.payload_bytes:
                try:
                    self._place.put(name, self._store.path(payload.digest), self._pace)
                except AntiphonError:
                    if self._store.has(payload.digest):
                        raise  # otherwise it was dropped meanwhile
                else:
                    return name
        for name in there.keys() - wanted.keys():
            self._place.remove(name)
        return None

    def _held(self) -> list[Payload]:
        found: list[Payload] = []
        for version in reversed(self._store.versions()):
            try:
                payloads = self._store.manifest(version).payloads
            except UnavailableError:
                continue  # it has just been dropped
            found += sorted(payloads, key=lambda payload: payload.payload_bytes)
        return [payload for payload in found if self._store.has(payload.digest)]
