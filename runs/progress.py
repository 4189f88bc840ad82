"""Progress: reads a run's journal and looks at it about once a second, and shows both."""

import threading
import time
from collections.abc import Callable

import structlog

from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.reporting.run_display import RunDisplay, TokenRates, planes_of
from antiphon.core.status import LearnerProgress
from antiphon.runs.alarm_watch import AlarmWatch
from antiphon.runs.context import RunContext

_log = structlog.get_logger(__name__)

STATUS_S = 1.0
"""Seconds between two looks at the run."""


def _learner(run: RunContext) -> LearnerProgress | None:
    """Return what the learner does; None while it does not answer."""
    try:
        return run.clients.run(run.learner.status(), 5.0).progress
    except UnavailableError:
        return None


def show_progress(run: RunContext, display: RunDisplay, voided: Callable[[], None]) -> Callable[[], None]:
    """Feed the display about once a second until the returned function is called.

    `voided` is called when an operator has voided a batch: services that could not work on it may now.
    """
    over = threading.Event()
    rates = TokenRates()
    alarms = AlarmWatch(run.config, run.run_dir, run.view.alarms, time.perf_counter())

    def look(known: int | None) -> int:
        status = run.clients.run(run.coordinator.status(), 5.0)
        if known is not None and len(status.voided) > known:
            voided()
            display.message(f"batch {status.voided[-1].digest[:12]} was voided: {status.voided[-1].reason}")
        learner = _learner(run)
        display.status(status, planes_of(status, rates.take(status, time.perf_counter()), learner))
        # The journal of a long run that is continued takes several looks, and its old steps are no alarm.
        run.clients.run(run.read_journal(), 5.0)
        if run.view.alarms.count >= status.committed_steps:
            late = [] if run.records is None else run.records.standing()
            for line in alarms.look(status, time.perf_counter(), learner, late):
                display.message(line)
        return len(status.voided)

    def show() -> None:
        known: int | None = None
        while not over.wait(STATUS_S):
            try:
                known = look(known)
            except UnavailableError:
                continue  # the stages notice and say so; the display just waits
            except AntiphonError as error:
                _log.warning("view.failed", error=str(error))
                return

    thread = threading.Thread(target=show, name="view", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join(10.0)

    return stop
