"""The main job in a process of its own, as a user starts it, and what can be seen of it from outside.

Moments in a run are told by its journal, never by a clock; every wait has a deadline and ends
early when the job is over.
"""

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS
from antiphon.cli.app import execute
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore

PROJECT = Path(__file__).resolve().parents[2]
QUICKSTART = PROJECT / "examples" / "quickstart.yaml"
LOOK_S = 0.1
"""Pause between two looks at a run; a look at all processes takes some hundredths of a second of CPU."""
DEADLINE_S = 240.0
"""Longest wait for anything."""
SMALL = (
    "loop.prompts_per_step=8",
    "loop.group_size=4",
    "sampling.max_tokens=96",
    "evaluation.prompts=16",
    "evaluation.interval=0",
    "rollout.kv_cache_mib=128",
)
"""Overrides under which a step takes about a second."""
MAIN_STEPS = 6
MAIN_STALENESS = 2
"""Steps and bound of the run that many tests look at."""

_T = TypeVar("_T")


def make_home(folder: Path) -> Path:
    """Return a fresh home directory that is a DVC project of its own."""
    home = folder / "home"
    (home / ".dvc").mkdir(parents=True)
    (home / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    return home


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a command that belongs to `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return kept | {"ANTIPHON_HOME": str(home)}


def command(home: Path, *arguments: str, timeout_s: float = 240.0) -> "subprocess.CompletedProcess[str]":
    """Run one antiphon command to its end, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "antiphon.cli.app", *arguments],
        cwd=PROJECT,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def typed(home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run one antiphon command in this process, which has loaded what a new one would load first."""
    said, complained = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.chdir(PROJECT)
        patch.setenv("ANTIPHON_HOME", str(home))
        code = execute(arguments)
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())


def processes_of(home: Path) -> list[str]:
    """Return what still runs for `home`, by its command line or its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = process.cmdline()
            known = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(home) in word for word in words) or known.get("ANTIPHON_HOME") == str(home):
            found.append(f"{process.pid}: {' '.join(words)[:200]}")
    return found


def all_gone(home: Path) -> bool:
    """Tell whether every process of `home` ends within a minute and a half, naming those that do not."""
    until(lambda: not processes_of(home), 90.0, lambda: "\n".join(processes_of(home)))
    return True


def until(
    look: Callable[[], _T], deadline_s: float, excuse: Callable[[], str], pause_s: float = LOOK_S
) -> _T:
    """Look until something true is seen and return it, with a pause between two looks.

    Raises:
        AssertionError: with the excuse, when the deadline passed.
    """
    ends = time.perf_counter() + deadline_s
    while not (seen := look()):
        if time.perf_counter() > ends:
            raise AssertionError(f"waited for {deadline_s:g} s: {excuse()}")
        time.sleep(pause_s)
    return seen


class Journal:
    """A run's journal, read from outside while its coordinator writes it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "journal.db"

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the bodies of events, in order; all kinds when none is named."""
        if not self._path.exists():
            return []
        connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10.0)
        try:
            wanted = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
            query = f"SELECT kind, body FROM events {wanted} ORDER BY seq"
            rows = connection.execute(query, kinds).fetchall()
        except sqlite3.OperationalError:  # the tables are being made
            return []
        finally:
            connection.close()
        return [{"kind": kind, **json.loads(body)} for kind, body in rows]

    @property
    def committed(self) -> int:
        """Steps committed so far."""
        return len(self.events("step.committed"))


class Job:
    """One `antiphon run` process."""

    def __init__(
        self,
        home: Path,
        overrides: Sequence[str],
        config: Path = QUICKSTART,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, with further variables; its output goes to a log beside the home directory."""
        self.home = home
        self.results = home.parent / "results"
        self.log = home.parent / "job.log"
        arguments = ["run", str(config), *overrides, "--results", str(self.results)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*DEFAULT_SIGNALS, sys.executable, "-P", "-m", "antiphon.cli.app", *arguments],
                cwd=PROJECT,
                env=environment(home) | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def run_dir(self) -> Path:
        """The only run of this home."""
        (found,) = (self.home / "runs").iterdir()
        return found

    @property
    def journal(self) -> Journal:
        return Journal(self.run_dir)

    @property
    def said(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def complaints(self) -> list[str]:
        """Return the lines in which the command said what went wrong."""
        return [line for line in self.said.splitlines() if line.startswith("antiphon: ")]

    def when(self, look: Callable[[], _T]) -> _T:
        """Look until something true is seen; fail when the job ends before."""

        def guarded() -> _T:
            seen = look()
            assert seen or self.process.poll() is None, f"the job is over\n{self.everything()}"
            return seen

        return until(guarded, DEADLINE_S, self.everything)

    def reach(self, committed: int) -> None:
        """Wait until this many steps are committed."""
        self.when(lambda: (self.home / "runs").exists() and any((self.home / "runs").iterdir()))
        self.when(lambda: self.journal.committed >= committed)

    def ready_pid(self, name: str) -> int | None:
        """Return the process id of a service that is ready, or None while there is none."""
        try:
            told = (self.run_dir / "services" / f"{name}.json").read_text()
        except FileNotFoundError:
            return None
        return int(json.loads(told)["pid"])

    def kill_service(self, name: str) -> None:
        """SIGKILL a service and wait until another process took its place."""
        pid = self.when(lambda: self.ready_pid(name))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.when(lambda: self.ready_pid(name) not in (None, pid))

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stop a service meanwhile (SIGSTOP), so that the run gets no further than the staleness bound."""
        pid = self.when(lambda: self.ready_pid(name))
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def wait(self) -> int:
        """Return the exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.everything()}") from None

    def close(self) -> None:
        """Leave nothing behind, whatever a test found."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10.0)

    def everything(self) -> str:
        """Return all logs, the ends of them, for a failing test."""
        parts = [self.log, *sorted(self.home.glob("runs/*/logs/*.log"))]
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in parts)

    def batches(self) -> list[list[Any]]:
        """Return the rows of every committed batch, read back from the store."""
        store = ArtifactStore(self.home / "store")
        digests = [event["batch_digest"] for event in self.journal.events("step.committed")]
        return [decode_batch(store.get(digest)) for digest in digests]


def check_batches(batches: Sequence[Sequence[Any]], max_staleness: int) -> None:
    """Nothing trained twice, nothing older than the bound."""
    seen: set[str] = set()
    for step, rows in enumerate(batches):
        groups = {row.group_id for row in rows}
        assert not groups & seen, f"step {step} trained {groups & seen} again"
        seen |= groups
        for row in rows:
            oldest = row.oldest_version
            assert 0 <= step - oldest <= max_staleness


def flow_run_states(job: Job) -> list[str]:
    """Return the states of the home's flow runs, oldest first."""
    database = job.home / "prefect" / "prefect.db"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        query = "SELECT state_type FROM flow_run ORDER BY start_time"
        return [state for (state,) in connection.execute(query)]
