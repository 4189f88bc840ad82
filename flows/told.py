"""Told: what a run says to its viewers, kept for its page in Prefect.

The same sentences go to the terminal, where there is one. Prefect's own handler for logs would print when
its server is away; here lines wait for the page's thread, which tries again.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import structlog

from antiphon.core.reporting.run_display import PlaneView, RunDisplay
from antiphon.core.status import RunStatus
from antiphon.system.logs import configure_logs

ALARMS_KEPT = 50
"""Newest alarms that the page lists; the log has all."""
LINES_KEPT = 10_000
"""Newest lines that wait for a server that is away."""
_ALARM = "alarm "
_OWN = {"alarm.changed"}
"""Log lines that say what the view is told anyway."""


@dataclass
class ToldView(RunDisplay):
    """Shows a run to another view, and keeps what it says."""

    inner: RunDisplay
    alarms: deque[str] = field(default_factory=lambda: deque(maxlen=ALARMS_KEPT))
    """The newest alarms that rose or ended, oldest first."""
    outcome: list[str] = field(default_factory=list)
    """What came of the run, once it is complete."""
    lines: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    """What the page's log lacks, oldest first, as Prefect takes it; its reader removes what it sends."""

    def started(self, run_id: str, links: Mapping[str, str]) -> None:
        self.say(f"the services of {run_id} are up")
        self.inner.started(run_id, links)

    def status(self, status: RunStatus, planes: Mapping[str, PlaneView]) -> None:
        self.inner.status(status, planes)

    def message(self, text: str) -> None:
        if text.startswith(_ALARM):
            self.alarms.append(text)
        self.say(text, logging.WARNING if text.startswith(_ALARM) else logging.INFO)
        self.inner.message(text)

    def stopping(self, text: str) -> None:
        self.say(text, logging.WARNING)
        self.inner.stopping(text)

    def finished(self, lines: Sequence[str]) -> None:
        self.outcome = list(lines)
        for line in lines:
            self.say(line)
        self.inner.finished(lines)

    def stopped(self, reason: str) -> None:
        """Keep why the run ended before its last step."""
        self.outcome = [f"ended early: {reason}"]
        self.say(reason, logging.ERROR)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Keep a line for the page alone."""
        at = datetime.now(UTC).isoformat()
        text = text.encode(errors="replace").decode()  # a path may hold what is no UTF-8
        self.lines.append({"name": "antiphon", "level": level, "message": text, "timestamp": at})


@contextmanager
def hear_logs(told: ToldView) -> Iterator[None]:
    """Keep the log lines of this process too, warnings and worse, wherever else they go."""
    if not structlog.is_configured():
        configure_logs("warning")  # a Prefect worker started this process, not our command
    before = structlog.get_config()["processors"]

    def keep(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        level = logging.getLevelNamesMapping().get(method.upper(), logging.INFO)
        if level >= logging.WARNING and event.get("event") not in _OWN:
            facts = [f"{k}={v}" for k, v in event.items() if k not in {"event", "level", "timestamp"}]
            told.say(" ".join([str(event.get("event")), *facts]), level)
        return event

    structlog.configure(processors=[*before[:-1], keep, before[-1]])
    try:
        yield
    finally:
        structlog.configure(processors=before)
