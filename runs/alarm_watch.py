"""Alarm watch: reports each alarm of a run when it rises and when it is over."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.core.patience import Patience
from antiphon.core.reporting.alarms import (
    ALARMS,
    Alarm,
    StepAlarms,
    short_of_space,
    space_alarm,
    stall_alarm,
    status_alarms,
    turn_of,
)
from antiphon.core.status import LearnerProgress, RunStatus, WorkerState
from antiphon.lineage.cursors import standing
from antiphon.models.codec import resolve_model_path

_FIXES = {kind.name: kind.fix for kind in ALARMS}


def current_alarms(
    shown: StepAlarms, status: RunStatus, config: RunConfig, directory: Path
) -> tuple[Alarm, ...]:
    """Return what all commits of a run show, and its state, the disk of its folder and its sinks now."""
    every = *_step_alarms(shown, config), *_space(directory), *status_alarms(status)
    return (*every, *records_alarms(standing(directory)))


def records_alarms(late: Sequence[str]) -> tuple[Alarm, ...]:
    """Return the alarm of sinks that stand still, of a sentence about each; none where all go on."""
    return (Alarm("records_late", -1, "; ".join(late)),) if late else ()


def _step_alarms(shown: StepAlarms, config: RunConfig) -> tuple[Alarm, ...]:
    vocabulary = _vocabulary(config.model.path)
    return shown.find(config.loop.max_staleness, vocabulary, config.run.steps, config.sampling.max_tokens)


def alarm_line(alarm: Alarm) -> str:
    """Spell an alarm and what to do about it in one line.

    >>> alarm_line(Alarm("no_space", -1, "only 0.20 GiB are free for runs")).partition(";")[0]
    'alarm no_space: only 0.20 GiB are free for runs'
    """
    return f"alarm {alarm.name}: {alarm.text}; {_FIXES[alarm.name]}"


class AlarmWatch:
    """Compares each look at a run with the one before."""

    def __init__(self, config: RunConfig, directory: Path, shown: StepAlarms, now: float) -> None:
        """Begin at `now`, seconds on the clock of the calls of `look`; the caller adds commits to `shown`."""
        self._config, self._directory, self._shown = config, directory, shown
        self._raised: dict[str, Alarm] = {}
        self._seen = 0
        self._by_steps: tuple[Alarm, ...] = ()
        self._patience = Patience(now)

    def look(
        self, status: RunStatus, now: float, learner: LearnerProgress | None = None, late: Sequence[str] = ()
    ) -> list[str]:
        """Return a line for each alarm that rose or ended since the last look.

        `learner` says what the learner does; None where it did not answer. `late` are sentences about sinks
        of the records that stand still.
        """
        if self._shown.count > self._seen:
            self._seen, self._by_steps = self._shown.count, _step_alarms(self._shown, self._config)
        turn = turn_of(status, learner)
        working = any(worker.state is WorkerState.ACTIVE for worker in status.workers)
        absent = not working and status.sealed_steps <= status.committed_steps
        still_s = self._patience.still_s((turn.step, turn.counted, turn.counter), now, absent)
        # Who waits for workers is told so, and has the patience of services.empty_fleet_timeout_s.
        idle = status.finished or bool(status.paused_reason) or absent
        stall = None if idle else stall_alarm(still_s, self._config.services.stall_timeout_s, turn)
        # A full disk is why a run may not grow, so it is looked at every time.
        every = (*self._by_steps, *_space(self._directory), *status_alarms(status), *records_alarms(late))
        others = stall, short_of_space(learner)
        found = {alarm.name: alarm for alarm in (*every, *others) if alarm is not None}
        lines = [alarm_line(alarm) for name, alarm in found.items() if name not in self._raised]
        lines += [f"alarm {name} is over" for name in self._raised if name not in found]
        self._raised = found
        return lines


def _space(directory: Path) -> tuple[Alarm, ...]:
    """Return the alarm of a folder whose disk is nearly full, if it is."""
    found = space_alarm(shutil.disk_usage(directory).free, str(directory))
    return () if found is None else (found,)


@cache
def _vocabulary(model_path: str) -> int | None:
    """Return the number of tokens; None where the model's configuration is not on this machine."""
    try:
        path = Path(resolve_model_path(model_path)) / "config.json"
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ConfigError, OSError, ValueError):
        return None
    rows = plain.get("vocab_size") or plain.get("text_config", {}).get("vocab_size")
    return rows if isinstance(rows, int) else None
