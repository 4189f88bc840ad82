"""Uploader: empties an outbox in the background, for as long as it takes, and no one waits for it.

A few objects travel at a time, each read from the local store's file, so memory does not grow
with what waits. While the remote store is away or refuses, pauses grow, with jitter, up to
half a minute; what is not sent stays in the outbox, for this process or a later one.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat

import structlog
from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type, stop_when_event_set
from tenacity.wait import wait_random_exponential

from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.lineage.store.artifact_store import ArtifactStore

CONCURRENCY = 4
"""Objects that travel at the same time."""
ROUND = 64
"""Objects taken from the outbox at a time."""
FIRST_PAUSE_S = 0.5
"""Scale of the pause after the first failure; it doubles, and each pause is drawn from zero up to it."""
LONGEST_PAUSE_S = 30.0
"""Most seconds between two attempts."""
LOOK_S = 1.0
"""Seconds between two looks at an outbox that was empty; other processes fill it too."""
FLUSH_LOOK_S = 0.1
"""Seconds between two looks of a waiting caller; another process may be the one that sends."""

_log = structlog.get_logger("antiphon.lineage")


@dataclass(slots=True)
class UploadReport:
    """What an uploader did so far."""

    uploaded: int = 0
    """Objects sent by this process."""
    known: int = 0
    """Objects that the remote store had already."""
    refused: int = 0
    """Objects put aside, because their bytes were altered or lost here."""
    pending: int = 0
    """Objects that the remote store still lacks."""
    retries: int = 0
    """Rounds that ended because the remote store was away or refused."""
    reason: str = ""
    """The latest failure, or nothing."""


class Uploader:
    """One outbox and the thread that empties it."""

    def __init__(self, store: ArtifactStore) -> None:
        """Begin to send what `store`'s outbox holds.

        Raises:
            ConfigError: when the store has no remote store.
        """
        if store.remote is None or store.outbox is None:
            raise ConfigError("there is nowhere to upload to; name a place in record.artifact_url")
        self._store, self._remote, self._outbox = store, store.remote, store.outbox
        self._state = threading.Condition()
        self._hurry, self._closing = threading.Event(), threading.Event()
        self._done = UploadReport()
        self._thread = threading.Thread(target=self._work, name="antiphon-uploader", daemon=True)
        self._thread.start()

    def report(self) -> UploadReport:
        with self._state:
            return replace(self._done, pending=len(self._outbox))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the outbox is empty; False when the time runs out."""
        deadline = time.perf_counter() + timeout_s
        self._hurry.set()
        with self._state:
            while self._outbox.pending(1):
                left = deadline - time.perf_counter()
                if left <= 0:
                    return False
                self._state.wait(min(left, FLUSH_LOOK_S))
        return True

    def close(self, timeout_s: float) -> UploadReport:
        """Send what is left, for at most `timeout_s` seconds, and stop; the rest stays in the outbox."""
        deadline = time.perf_counter() + timeout_s
        self.flush(timeout_s)
        self._closing.set()
        self._hurry.set()
        self._thread.join(max(0.1, deadline - time.perf_counter()))
        report = self.report()
        if report.pending:
            url, pending = self._remote.url, report.pending
            _log.warning("upload.pending", store=url, pending=pending, reason=report.reason)
        return report

    def _work(self) -> None:
        attempts = Retrying(
            retry=retry_if_exception_type((UnavailableError, ConfigError)),
            wait=wait_random_exponential(FIRST_PAUSE_S, LONGEST_PAUSE_S),
            stop=stop_when_event_set(self._closing),
            sleep=self._rest,
            before_sleep=self._say,
        )
        with ThreadPoolExecutor(CONCURRENCY, "antiphon-upload") as pool:
            while not self._closing.is_set():
                with self._outbox.claimed() as mine:
                    while mine and not self._closing.is_set():
                        with suppress(RetryError):  # it was asked to stop; the outbox knows what is left
                            attempts(self._round, pool)
                        self._rest(LOOK_S)
                if not mine:
                    self._rest(LOOK_S)

    def _round(self, pool: ThreadPoolExecutor) -> None:
        """Send until the outbox is empty.

        Raises:
            UnavailableError, ConfigError: when nothing more gets through for now.
        """
        while not self._closing.is_set() and (names := self._outbox.pending(ROUND)):
            stop = threading.Event()
            failures = list(filter(None, pool.map(self._send, names, repeat(stop))))
            with self._state:
                self._state.notify_all()
            if failures:
                raise failures[0]

    def _send(self, digest: str, stop: threading.Event) -> AntiphonError | None:
        """Send one object unless another one of the round has failed, and strike it off."""
        if stop.is_set() or self._closing.is_set():
            return None
        try:
            if not self._store.has(digest):
                self._outbox.remove(digest)  # its writer died before the object had a name, or adds it again
                return None
            new = self._remote.send(digest, self._store.path(digest))
        except IntegrityError as error:
            self._outbox.refuse(digest)
            _log.warning("upload.refused", digest=digest, reason=str(error))
            with self._state:
                self._done.refused += 1
                self._done.reason = str(error)
            return None
        except (UnavailableError, ConfigError) as error:
            stop.set()
            return error
        self._outbox.remove(digest)
        with self._state:
            self._done.uploaded += new
            self._done.known += not new
        return None

    def _say(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        with self._state:
            self._done.retries += 1
            self._done.reason = str(error)
        if state.attempt_number == 1:
            _log.warning("upload.waiting", store=self._remote.url, reason=str(error))

    def _rest(self, seconds: float) -> None:
        """Pause, unless someone waits for the outbox to be empty."""
        if self._hurry.wait(seconds):
            self._hurry.clear()
