"""View: a run as people see it, live on a terminal and line by line anywhere else.

Drawing never holds a run up: it reads what it is given and keeps a short history of its own.
"""

import os
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from antiphon.core.reporting.figures import score, score_name
from antiphon.core.reporting.plain_text import plain
from antiphon.core.reporting.run_display import (
    PlaneView,
    RunDisplay,
    drafting_words,
    reward_of,
    status_rows,
    unscored_words,
)
from antiphon.core.status import RunStatus

SPARKS = "▁▂▃▄▅▆▇█"
HISTORY = 48
"""Steps that the sparkline shows."""

BESIDE = ("paused", "workers", "waiting for")
"""Rows of a status that the panel's table of stages, or the line below it, says."""
WIDTH = 120
"""Columns of the widest panel, and of a line without a terminal."""

PLAIN_INTERVAL_S = 10.0
"""Without a terminal, longest silence while nothing changes is this many seconds or one step."""


def sparkline(values: Sequence[float], width: int = HISTORY) -> str:
    """Draw the last `width` values as blocks between their smallest and largest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    >>> sparkline([0.3, 0.3])
    '▁▁'
    """
    shown = list(values)[-width:]
    low = min(shown, default=0.0)
    span = max(shown, default=0.0) - low or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in shown)


def clock(seconds: float) -> timedelta:
    """Return a duration that prints in hours, minutes and whole seconds."""
    return timedelta(seconds=int(seconds))


@dataclass
class RunHistory:
    """What a view remembers of the looks it took."""

    rewards: dict[int, float] = field(default_factory=dict)
    """Step -> mean training reward."""
    scores: dict[int, float] = field(default_factory=dict)
    """Version -> held-out score."""
    first_step: int | None = None
    """Steps done at the first look; a run that continues does not start at 0."""

    def take(self, status: RunStatus) -> list[int]:
        """Remember one look and return the versions whose evaluation is news."""
        if self.first_step is None:
            self.first_step = status.committed_steps
        commit, reward = status.last_commit, reward_of(status.last_commit)
        if commit is not None and reward is not None:
            self.rewards[commit.step] = reward
        news = [e.version for e in status.evaluations if e.complete and e.version not in self.scores]
        self.scores |= {e.version: e.reward_mean for e in status.evaluations if e.complete}
        return news

    def remaining_s(self, status: RunStatus, elapsed_s: float) -> float | None:
        """Estimate the seconds left from the steps done since the first look."""
        done = status.committed_steps - (self.first_step or 0)
        if done <= 0:
            return None
        return elapsed_s / done * (status.steps_total - status.committed_steps)


def picture(
    status: RunStatus, planes: Mapping[str, PlaneView], history: RunHistory, elapsed_s: float | None
) -> RenderableType:
    """Draw one look at a run; without `elapsed_s` nothing is said about time."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    time_said = ""
    if elapsed_s is not None:
        remaining = history.remaining_s(status, elapsed_s)
        time_said = f"   {clock(elapsed_s)}" + (
            "" if remaining is None else f", about {clock(remaining)} left"
        )
    courses = {"reward": history.rewards, f"held-out {score_name(status.reward_range)}": history.scores}
    for row in status_rows(status):
        said = Text(plain(row.text))
        if row.label == "step":
            bar = ProgressBar(total=max(1, status.steps_total), completed=status.committed_steps, width=32)
            step = Table.grid(padding=(0, 1))
            step.add_row(bar, said + Text(time_said))
            rows.add_row(row.label, step)
        elif row.label in courses:
            course = courses[row.label]
            rows.add_row(row.label, said + Text(f"  {sparkline([course[at] for at in sorted(course)])}"))
        elif row.label not in BESIDE:
            rows.add_row(row.label, said)
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("stage", "state", "tokens/s", "waits for"):
        fixed = name in ("stage", "tokens/s")
        table.add_column(name, justify="right" if name == "tokens/s" else "left", no_wrap=fixed)
    for plane in planes.values():
        rate = f"{plane.rate:,.0f}" if plane.rate else "–"
        table.add_row(plane.name, plane.state, rate, plane.waits_for or "–")
    parts: list[RenderableType] = [rows, Text(""), table]
    if status.paused_reason:
        parts += [Text(""), Text(f"paused: {plain(status.paused_reason)}", style="bold red")]
    panel = Panel(Group(*parts), title=status.run_id, title_align="left", border_style="dim")
    return Constrain(panel, WIDTH)


class TurnsConsole(Console):
    """A console at which threads take turns: rich's own place a panel by its height when a thread began to
    write, though another may have drawn it again since."""

    def __init__(self, **settings: Any) -> None:
        self._turn = threading.RLock()
        super().__init__(**settings)

    def __enter__(self) -> "TurnsConsole":
        self._turn.acquire()
        super().__enter__()
        return self

    def on_broken_pipe(self) -> None:
        """Go on without the output, whose reader has left; rich would end the process without a word."""
        if not self.quiet:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            said = (
                "antiphon: nobody reads the output any more; the run goes on, and `antiphon status` shows it"
            )
            print(said, file=sys.stderr, flush=True)

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._turn.release()


class PlainView(RunDisplay):
    """One line per step, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._history = RunHistory()
        self._started_s = time.perf_counter()
        self._said_s = self._started_s
        self._step = -1
        self._paused = ""
        self._unscored = 0

    def started(self, run_id: str, links: Mapping[str, str]) -> None:
        self._started_s = time.perf_counter()
        self.message(f"run {run_id}")
        for name, target in links.items():
            self.message(f"  {name}: {target}")

    def status(self, status: RunStatus, planes: Mapping[str, PlaneView]) -> None:
        """Print a line when a step was made, or when nothing was printed for PLAIN_INTERVAL_S."""
        self._say_scores(status)
        if status.trajectories_failed >= max(1, 10 * self._unscored):  # at 1, 10, 100 and so on
            self._unscored = status.trajectories_failed
            self.message(unscored_words(status))
        if status.paused_reason and status.paused_reason != self._paused:
            self._paused = status.paused_reason
            self.message(f"paused: {status.paused_reason}")
        now = time.perf_counter()
        moved = status.committed_steps != self._step
        # Records are written behind the last step: no stage waits for anything then.
        done = status.committed_steps >= status.steps_total and all(e.complete for e in status.evaluations)
        if not moved and (done or now - self._said_s < PLAIN_INTERVAL_S):
            return
        self._step = status.committed_steps
        waits = [f"{p.name} waits for {p.waits_for}" for p in planes.values() if p.waits_for]
        rates = [f"{p.name} {p.rate:,.0f} tokens/s" for p in planes.values() if p.rate]
        reward = score(reward_of(status.last_commit), status.reward_range)
        stale = max(status.staleness_histogram, default=0)
        head = f"{clock(now - self._started_s)} step {status.committed_steps}/{status.steps_total}"
        drafts = [words.partition(",")[0]] if (words := drafting_words(status.last_commit)) else []
        more = [*rates, *drafts, *waits] if moved else [*waits, *rates, *drafts]
        self.message(one_line([f"{head} reward {reward} staleness <= {stale}", *more]))

    def _say_scores(self, status: RunStatus) -> None:
        for version in self._history.take(status):
            within, found = status.reward_range, self._history.scores[version]
            self.message(f"held-out {score_name(within)} of version {version}: {score(found, within)}")

    def message(self, text: str) -> None:
        self._said_s = time.perf_counter()
        say(self._console, text)

    def stopping(self, text: str) -> None:
        """Say what has to end."""
        self.close()
        self.message(text)

    def finished(self, lines: Sequence[str]) -> None:
        """Print what came of the run."""
        self.close()
        for line in lines:
            self.message(line)

    def close(self) -> None:
        """Give the terminal back, where it is held; safe to repeat."""


class LiveView(PlainView):
    """Redraws one panel in place; sentences scroll above it."""

    def __init__(self, console: TurnsConsole) -> None:
        super().__init__(console)
        self._live: Live | None = None

    def started(self, run_id: str, links: Mapping[str, str]) -> None:
        """Name the pages and folders of the run and begin to draw."""
        for name, target in links.items():
            self.message(f"{name}: {target}")
        self._started_s = time.perf_counter()
        with self._console:  # before the panel's own lock, as all who write do
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def status(self, status: RunStatus, planes: Mapping[str, PlaneView]) -> None:
        self._say_scores(status)
        with self._console:
            if self._live is not None:
                elapsed_s = time.perf_counter() - self._started_s
                self._live.update(picture(status, planes, self._history, elapsed_s), refresh=True)

    def close(self) -> None:
        with self._console:
            if self._live is not None:
                self._live.stop()
                self._live = None


def say(console: Console, text: str) -> None:
    """Print a sentence in lines as wide as the terminal, at most WIDTH; what has no blank stays whole."""
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for line in textwrap.wrap(
        plain(text, keep="\n\t"),
        width,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def one_line(parts: Sequence[str]) -> str:
    """Join parts until a line is full; the first one that does not fit is cut, and no more follow.

    >>> one_line(["step 1/2", "rollout 10 tokens/s"])
    'step 1/2; rollout 10 tokens/s'
    """
    joined = "; ".join(parts)
    return joined if len(joined) <= WIDTH else f"{joined[: WIDTH - 3].rstrip(' ;,(')}..."


def make_view(console: TurnsConsole | None = None) -> PlainView:
    """Return the view that suits where the output goes."""
    console = console or TurnsConsole()
    return LiveView(console) if console.is_terminal else PlainView(console)
