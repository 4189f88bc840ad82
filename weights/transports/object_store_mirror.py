"""Object store mirror: what the origin holds, kept a second time where workers reach it.

It reads the origin's folder, so nothing has to be told to it, and what a killed process left undone is found
again. The newest version goes first, and of its payloads the smallest: with patches that is what most workers
wait for. Payloads that the origin has dropped are removed.
"""

import threading
from collections.abc import Callable

import structlog

from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.records import Payload
from antiphon.lineage.store.remote_place import RemotePlace
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.transports.object_store import object_name

LOOK_S = 0.5
"""Pause between two looks at the origin's folder."""
MOST_PAUSE_S = 30.0
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
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                _log.warning("object_store.not_uploaded", reason=str(error), again_in_s=pause_s)
            except Exception:  # noqa: BLE001 - without this thread no worker would get weights any more
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
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
