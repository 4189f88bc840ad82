"""Progress: each look at a run is shown, with what changed since the one before."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from antiphon.core.config import RunConfig
from antiphon.core.reporting.alarms import StepAlarms
from antiphon.core.reporting.run_display import RunDisplay, TokenRates, planes_of
from antiphon.core.status import LearnerProgress, RunStatus
from antiphon.runs.alarm_watch import AlarmWatch

STATUS_S = 1.0
"""Seconds between two looks at the run."""


class Progress:
    """Shows the looks at one run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        display: RunDisplay,
        shown: StepAlarms,
        voided: Callable[[], None],
    ) -> None:
        """Show them on `display`; `shown` is what all commits show, and the caller adds to it.

        `voided` is called when an operator has voided a batch: services that could not work on it may now.
        """
        self._display, self._shown, self._voided = display, shown, voided
        self._rates, self._known = TokenRates(), -1
        self._alarms = AlarmWatch(config, run_dir, shown, time.perf_counter())

    def take(self, status: RunStatus, learner: LearnerProgress | None, late: Sequence[str]) -> None:
        """Show a look.

        `learner` says what the learner does; None where it did not answer. `late` are sentences about sinks
        of the records that stand still.
        """
        now = time.perf_counter()
        if 0 <= self._known < len(status.voided):
            self._voided()
            batch = status.voided[-1]
            self._display.message(f"batch {batch.digest[:12]} was voided: {batch.reason}")
        self._known = len(status.voided)
        self._display.status(status, planes_of(status, self._rates.take(status, now), learner))
        # The journal of a long run that is continued takes several looks, and its old steps are no alarm.
        if self._shown.count >= status.committed_steps:
            for line in self._alarms.look(status, now, learner, late):
                self._display.message(line)
