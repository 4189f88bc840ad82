"""Writer: one thread that does record-keeping in order, so that no one waits for it.

Jobs are done in the order they came. One that finds its service unavailable is tried again,
with growing pauses, and the jobs behind it wait; one that fails for good is counted and left
out. Closing waits until a deadline and then says what was not written. A writer may rest before
it begins with the next jobs, so that what can be written together has come; nobody waits for that.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from antiphon.core.errors import AntiphonError, UnavailableError

FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; it doubles with each further one."""
LONGEST_PAUSE_S = 30.0
"""Most seconds between two attempts."""
UNANSWERED_S = 20.0
"""Longest wait at the end for a service that has never answered."""
HOLD_S = 120.0
"""Longest time that a writer is held back at its start."""

FAILURES_KEPT = 50
"""Failed jobs whose reason is kept for the report; all are counted."""

_log = structlog.get_logger("antiphon.lineage")


@dataclass(frozen=True, slots=True)
class WriterReport:
    """What a writer did so far."""

    name: str
    done: int
    """Jobs written."""
    failed: int
    """Jobs given up for good."""
    pending: int
    """Jobs not written yet."""
    retries: int
    """Attempts that found the service unavailable."""
    cpu_s: float
    """CPU seconds of the writer's thread, imports included."""
    busy_s: float
    """Seconds in which the thread was at work."""
    failures: tuple[str, ...]
    """Reasons, the latest last."""


class Writer:
    """A queue and its one thread; `put` never blocks."""

    def __init__(
        self,
        name: str,
        first_pause_s: float = FIRST_PAUSE_S,
        begin: threading.Event | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """Start the thread.

        Args:
            name: names it in reports.
            first_pause_s: pause before a second attempt; it doubles with each further one.
            begin: nothing is written before it is set, or `HOLD_S` have passed.
            rest_s: a job that finds the writer idle is begun so much later, unless someone waits for it.
        """
        self.name = name
        self._begin = begin
        self._rest_s = rest_s
        self._waited_for = 0
        self._first_pause_s = first_pause_s
        self._jobs: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._closing = self._abandoned = False
        self._done = self._failed = self._retries = 0
        self._cpu_s = self._busy_s = 0.0
        self._failures: deque[str] = deque(maxlen=FAILURES_KEPT)
        self._thread = threading.Thread(target=self._work, name=f"antiphon-{name}", daemon=True)
        self._thread.start()

    def put(self, label: str, job: Callable[[], None]) -> None:
        """Queue a job; `label` names it in reports. After `close` it is counted as failed."""
        with self._changed:
            if self._closing:
                self._failed += 1
                self._failures.append(f"{label}: came after the {self.name} writer was closed")
                return
            self._jobs.append((label, job))
            self._changed.notify_all()

    def report(self) -> WriterReport:
        with self._changed:
            counts = (self._done, self._failed, len(self._jobs), self._retries)
            return WriterReport(self.name, *counts, self._cpu_s, self._busy_s, tuple(self._failures))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued so far is dealt with; False when the time runs out."""
        self._hold_no_longer()
        with self._changed:
            self._waited_for += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._jobs, min(timeout_s, UNANSWERED_S))
                return (
                    self._changed.wait_for(
                        lambda: not self._jobs or not self._has_answered(), max(0.0, timeout_s - UNANSWERED_S)
                    )
                    and not self._jobs
                )
            finally:
                self._waited_for -= 1

    def close(self, timeout_s: float) -> WriterReport:
        """Write what is queued, for at most `timeout_s` seconds, and stop the thread.

        What the time did not suffice for stays in the report as pending.
        """
        self._hold_no_longer()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(min(timeout_s, UNANSWERED_S))
        if self._has_answered():
            self._thread.join(max(0.0, timeout_s - UNANSWERED_S))
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        report = self.report()
        if report.pending:
            _log.warning("record.pending", writer=self.name, pending=report.pending, failures=report.failures)
        return report

    def _work(self) -> None:
        if self._begin is not None:
            self._begin.wait(HOLD_S)
        attempt = 0
        while (job := self._next()) is not None:
            label, call = job
            started = time.perf_counter()
            try:
                call()
                outcome = ""
            except UnavailableError as error:
                attempt += 1
                if attempt == 1:  # once for each outage; the report counts the attempts
                    _log.warning("record.delayed", writer=self.name, record=label, reason=str(error))
                self._book(started, retries=1, failure=f"{label}: {error}")
                self._pause(min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(attempt - 1, 30)))
                continue
            except AntiphonError as error:
                outcome = f"{label}: {error}"
                _log.warning("record.failed", writer=self.name, record=label, reason=str(error))
            except BaseException as error:
                # A fault of ours: the thread ends with its traceback, the rest stays pending.
                self._book(started, failure=f"{label}: the {self.name} writer broke: {error!r}")
                raise
            if attempt:
                _log.warning("record.resumed", writer=self.name, record=label, attempts=attempt + 1)
            attempt = 0
            self._book(started, done=not outcome, failed=bool(outcome), failure=outcome)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _has_answered(self) -> bool:
        """Return whether anything was written, or refused; a first attempt that still runs counts, too."""
        return bool(self._done or self._failed or not self._retries)

    def _hold_no_longer(self) -> None:
        if self._begin is not None:
            self._begin.set()

    def _next(self) -> tuple[str, Callable[[], None]] | None:
        with self._changed:
            if not self._jobs:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                self._changed.wait_for(lambda: self._waited_for or self._closing, self._rest_s)
            return self._jobs[0] if self._jobs and not self._abandoned else None

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._closing:
                self._changed.wait_for(lambda: self._abandoned, self._first_pause_s)
            else:
                self._changed.wait_for(lambda: self._closing, seconds)

    def _book(
        self, started: float, *, done: bool = False, failed: bool = False, retries: int = 0, failure: str = ""
    ) -> None:
        with self._changed:
            self._done += done
            self._failed += failed
            self._retries += retries
            self._busy_s += time.perf_counter() - started
            self._cpu_s = time.thread_time()
            if failure and (not self._failures or self._failures[-1] != failure):
                self._failures.append(failure)
