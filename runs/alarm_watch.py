"""Alarm watch: reports each alarm of a run once when it rises and once when it is over."""

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
    audit_alarm,
    heldout_alarm,
    short_of_space,
    space_alarm,
    stall_alarm,
    swap_alarm,
    turn_of,
)
from antiphon.core.status import LearnerProgress, RunStatus, WorkerState
from antiphon.models.codec import resolve_model_path

_ASKED = ("stall", "no_space", "unaudited", "swap_failed", "heldout_fall", "records_late")
"""Alarms that no commit shows: they are looked at every time."""
_FIXES = {kind.name: kind.fix for kind in ALARMS}


def current_alarms(shown: StepAlarms, config: RunConfig, directory: Path) -> tuple[Alarm, ...]:
    """Return what all commits of a run show, and the disk of its folder now."""
    vocabulary = _vocabulary(config.model.path)
    limits = config.loop.max_staleness, vocabulary, config.run.steps, config.sampling.max_tokens
    return (*shown.find(*limits), *_space(directory))


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
        self._patience = Patience(now)

    def look(
        self, status: RunStatus, now: float, learner: LearnerProgress | None = None, late: Sequence[str] = ()
    ) -> list[str]:
        """Return a line for each alarm that rose or ended since the last look.

        `learner` says what the learner does; None where it did not answer. `late` are sentences about sinks
        of the records that stand still.
        """
        grown = self._shown.count > self._seen
        self._seen = self._shown.count
        turn = turn_of(status, learner)
        working = any(worker.state is WorkerState.ACTIVE for worker in status.workers)
        absent = not working and status.sealed_steps <= status.committed_steps
        still_s = self._patience.still_s((turn.step, turn.counted, turn.counter), now, absent)
        # Who waits for workers is told so, and has the patience of services.empty_fleet_timeout_s.
        idle = status.finished or bool(status.paused_reason) or absent
        stall = None if idle else stall_alarm(still_s, self._config.services.stall_timeout_s, turn)
        found = {alarm.name: alarm for alarm in self._newest(grown)}
        asked = short_of_space(learner), audit_alarm(status), swap_alarm(status), heldout_alarm(status)
        records = Alarm("records_late", -1, "; ".join(late)) if late else None
        for alarm in (stall, *asked, records):
            if alarm is not None:
                found[alarm.name] = alarm
        lines = [alarm_line(alarm) for name, alarm in found.items() if name not in self._raised]
        lines += [f"alarm {name} is over" for name in self._raised if name not in found]
        self._raised = found
        return lines

    def _newest(self, grown: bool) -> Sequence[Alarm]:
        if grown:
            return current_alarms(self._shown, self._config, self._directory)
        # A full disk is why a run may not grow, so it is looked at every time.
        kept = [alarm for alarm in self._raised.values() if alarm.name not in _ASKED]
        return [*kept, *_space(self._directory)]


def _space(directory: Path) -> tuple[Alarm, ...]:
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
