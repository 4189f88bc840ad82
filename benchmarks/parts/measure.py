"""Measure: run the main job as a user would and watch its processes."""

import ctypes
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from antiphon.core.loop.group_state import heldout_group_id
from antiphon.system.cpu_time import FamilyTimes
from antiphon.system.processes import PARENT_VARIABLE

DEFAULT_SIGNALS = ("env", "--default-signal=INT,HUP,TERM")
"""Begins the command of a process that these are to end: the one that began this one may have it ignore them.

Not `preexec_fn`: in the forked child gRPC's threads may begin again, and end it before it is another program.
"""
PROJECT = Path(__file__).resolve().parents[2]
PR_SET_CHILD_SUBREAPER = 36
"""From <sys/prctl.h>."""
ORPHAN_S = 30.0
"""Longest wait for processes that outlive the command that started them."""
COMMAND_S = 1200.0
"""Longest command that is no run."""
SAMPLE_S = 1.0
"""Seconds between two looks at memory."""


class Look(NamedTuple):
    """What a job's processes had taken at a moment."""

    at: float
    """`time.perf_counter`."""
    cpu_s: float
    """Of all of them, with those of their children that ended."""
    kinds: Mapping[str, float]
    """CPU seconds by what the processes are for (`system.cpu_time`)."""
    memory: Mapping[str, float]
    """Proportional memory in MiB, likewise."""
    resident: Mapping[str, float]
    """Resident memory in MiB, likewise: what several processes share counts for each of them."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """One finished run of the main job."""

    seconds: float
    """Wall seconds of the whole command."""
    cpu_s: float
    """CPU seconds of all its processes, services and servers included."""
    peak_gb: float
    """Largest sum of the processes' proportional memory, GB."""
    results: Path
    """Folder with metrics.json, timings.json and final.json."""
    looks: tuple[Look, ...] = ()
    """About one a second."""

    def kinds_after(self, moment: float = 0.0) -> dict[str, float]:
        """Return what each kind of process took after a moment of `time.perf_counter`, as far as was seen."""
        before = [look.kinds for look in self.looks if look.at <= moment]
        first, last = before[-1] if before else {}, self.looks[-1].kinds if self.looks else {}
        return {kind: taken - first.get(kind, 0.0) for kind, taken in last.items()}

    def cpu_at(self, moment: float) -> float:
        """Return the CPU seconds that the job had taken at a moment of `time.perf_counter`."""
        return float(np.interp(moment, [look.at for look in self.looks], [look.cpu_s for look in self.looks]))

    def metrics(self) -> dict[str, Any]:
        """Return what the configuration decided."""
        loaded: dict[str, Any] = json.loads((self.results / "metrics.json").read_text())
        return loaded

    def timings(self) -> dict[str, Any]:
        """Return what the clock said."""
        loaded: dict[str, Any] = json.loads((self.results / "timings.json").read_text())
        return loaded


class FamilyWatch:
    """Samples memory and CPU time of a process and all its descendants; shared pages count once."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._over = threading.Event()
        self._times = FamilyTimes(root)
        self.looks: list[Look] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        kinds, cpu = self._times.look(), 0.0
        memory_mib: dict[str, float] = {}
        resident_mib: dict[str, float] = {}
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                times = process.cpu_times()
                memory = process.memory_full_info()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            kind = self._times.kinds.get(process.pid, "flow")
            memory_mib[kind] = memory_mib.get(kind, 0.0) + memory.pss / 2**20
            resident_mib[kind] = resident_mib.get(kind, 0.0) + memory.rss / 2**20
            # What its children that ended took is in it: a process that is replaced is not forgotten.
            cpu += times.user + times.system + times.children_user + times.children_system
        self.looks.append(Look(time.perf_counter(), cpu, kinds, memory_mib, resident_mib))

    def close(self) -> tuple[Look, ...]:
        """Stop watching and return what was seen."""
        self._over.set()
        self._thread.join(10.0)
        return tuple(self.looks)


@contextmanager
def scratch_home() -> Iterator[Path]:
    """Give a fresh ANTIPHON_HOME, a DVC project of its own, that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="antiphon-benchmark-"))
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_job(
    home: Path,
    config: Path,
    overrides: Sequence[str],
    label: str,
    timeout_s: float,
    checkout: Path = PROJECT,
    untaught: bool = False,
) -> JobRun:
    """Run `antiphon run` to its end, with the code and environment of `checkout`.

    With `untaught` it may end as one does whose steps trained nothing, for want of rewards that differ.

    Raises:
        SystemExit: when it failed; its last lines are printed.
    """
    results = home / f"results-{label}"
    words = ["antiphon.cli.app", "run", str(config), *overrides, "--fresh", "--results", str(results)]
    return run_module(home, words, label, timeout_s, results, checkout, untaught)


def run_module(
    home: Path,
    words: Sequence[str],
    label: str,
    timeout_s: float,
    results: Path,
    checkout: Path = PROJECT,
    untaught: bool = False,
) -> JobRun:
    """Run a module that writes a run's results, to its end, with all processes that it starts.

    Args:
        home: the home directory of its runs.
        words: the module and its arguments.
        label: name of its log.
        timeout_s: longest time it may take.
        results: the folder that it writes metrics.json and timings.json to.
        checkout: whose code runs; another one than this must have been set up.
        untaught: status 1 counts as well, where the results are there.

    Raises:
        SystemExit: when it failed; its last lines are printed.
    """
    log = home / f"{label}.log"
    environment = {**os.environ, "ANTIPHON_HOME": str(home)}
    python = sys.executable if checkout == PROJECT else str(checkout / ".venv" / "bin" / "python")
    adopt_orphans()
    before, started = cpu_of_ended_children(), time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, "-P", "-m", *words], cwd=checkout, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        watch = FamilyWatch(psutil.Process(process.pid))
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{label}: took longer than {timeout_s:g} s\n{tail(log)}") from None
        finally:
            looks = watch.close()
            if process.poll() is None:  # the one that stops the benchmark stops its run
                process.terminate()
                process.wait(60)
    seconds = time.perf_counter() - started
    if status != 0 and not (untaught and status == 1 and (results / "timings.json").is_file()):
        raise SystemExit(f"{label}: ended with status {status}\n{tail(log)}")
    wait_for_orphans(home, label)
    cpu = cpu_of_ended_children() - before
    peak_gb = max((sum(look.memory.values()) for look in looks), default=0.0) * 2**20 / 1e9
    return JobRun(seconds, cpu, peak_gb, results, looks)


def antiphon(home: Path, *words: str, leaves: Path | None = None) -> None:
    """Run a command in a home.

    Raises:
        SystemExit: when it fails, with what it said, and does not leave what it is to leave.
    """
    command = [sys.executable, "-P", "-m", "antiphon.cli.app", *words]
    environment = {**os.environ, "ANTIPHON_HOME": str(home)}
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if done.returncode and not (leaves is not None and leaves.is_file()):
        raise SystemExit(f"antiphon {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def adopt_orphans() -> None:
    """Have processes whose parent ends become this process's children, so that their CPU time is counted.

    Linux adds a child's CPU seconds, and those of the children it waited for, to its parent's when the
    parent waits for it. A process that outlives its parent would be waited for by init instead.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this system cannot adopt orphaned processes")


def wait_for_orphans(home: Path, label: str) -> None:
    """Wait for what a job left to this process.

    Raises:
        SystemExit: when something of the job still runs after `ORPHAN_S` seconds.
    """
    deadline = time.monotonic() + ORPHAN_S
    while True:
        left = [child for child in psutil.Process().children() if _belongs(child, home)]
        for child in left:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        if not left:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"{label}: left processes behind: {', '.join(str(c.pid) for c in left)}")
        time.sleep(0.02)


def _belongs(child: psutil.Process, home: Path) -> bool:
    try:
        if child.status() == psutil.STATUS_ZOMBIE:
            return True
        environment = child.environ()
        # Between fork and exec it has none yet: whose it is shows at the next look.
        return not environment or environment.get("ANTIPHON_HOME") == str(home)
    except psutil.Error:
        # A child cannot go before it is waited for: one that says "no such process" has given up its
        # memory and is about to end, and what ends is root's, which others may not read.
        return True


def cpu_of_ended_children() -> float:
    """Return the CPU seconds of all children, grandchildren and so on that ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def started(
    words: Sequence[str], ready: Path, log: Path, environment: Mapping[str, str], start_s: float = 120.0
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a process until the end of the block, which begins once the process has written its ready file.

    Args:
        words: its command.
        ready: the file.
        log: gets its output.
        environment: what its environment has besides this one's.
        start_s: longest time until it is ready.

    Raises:
        SystemExit: when it does not start, or ended before the block did; its last lines are shown.
    """
    ready.unlink(missing_ok=True)
    known = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=known)
    try:
        deadline = time.monotonic() + start_s
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{log.stem} did not start ({process.poll()})\n{tail(log)}")
            time.sleep(0.02)
        yield process
        if process.poll() is not None:
            raise SystemExit(f"{log.stem} ended with {process.returncode}\n{tail(log)}")
    finally:
        process.terminate()
        process.wait(30.0)


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What became of the groups of a run, from its journal."""

    stale_token_share: float
    """Tokens of dropped groups and of leases that were given up without being continued, of all tokens."""
    length_by_staleness: dict[int, float]
    """Staleness -> mean completion tokens, relative to those of the same batches: lengths change with the
    policy, so only groups that trained together are compared."""
    staleness_shares: dict[int, float]
    """Staleness -> share of the groups that used up a place in a batch."""
    evaluation_exact_share: float
    """Held-out answers of which the evaluated version sampled every token, of all."""


def count_groups(home: Path, run_id: str) -> GroupCounts:
    """Count the groups of a finished run."""
    tokens_trained = tokens_lost = 0
    tokens: dict[str, int] = {}
    submitted: dict[str, tuple[int, float]] = {}
    found: dict[int, list[float]] = {}
    expected: dict[int, float] = {}
    prompts: dict[str, int] = {}
    answers = exact = 0
    for kind, event in journal_events(home / "runs" / run_id / "journal.db"):
        if kind == "group.submitted":
            counts = event["token_counts"]
            submitted[event["group_id"]] = (event["oldest_version"], sum(counts) / len(counts))
            tokens[event["group_id"]] = sum(counts)
            tokens_trained += sum(counts)
            if (version := prompts.get(event["group_id"])) is not None:
                answers += 1
                exact += event["oldest_version"] == event["newest_version"] == version
        elif kind == "evaluation.opened":
            version = event["version"]
            prompts |= {heldout_group_id(version, index): version for index in range(event["prompts"])}
        elif kind == "batch.sealed":
            batch = [submitted[group_id] for group_id in (*event["group_ids"], *event["filtered_ids"])]
            for version, length in batch:
                age = event["step"] - version
                found.setdefault(age, []).append(length)
                expected[age] = expected.get(age, 0.0) + sum(other for _, other in batch) / len(batch)
        elif kind == "group.dropped":
            if event["reason"] != "filtered":
                lost = tokens[event["group_id"]]
                tokens_trained, tokens_lost = tokens_trained - lost, tokens_lost + lost
        elif kind == "lease.expired":
            tokens_lost += max(0, event["tokens"] - event["kept"])
    groups = max(1, sum(map(len, found.values())))
    return GroupCounts(
        tokens_lost / max(1, tokens_trained + tokens_lost),
        {age: sum(lengths) / expected[age] for age, lengths in sorted(found.items())},
        {age: len(lengths) / groups for age, lengths in sorted(found.items())},
        exact / answers if answers else 1.0,
    )


def journal_events(journal: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and body of every event, in order; none while the tables are being made."""
    try:
        rows = read_rows(journal, "SELECT kind, body FROM events ORDER BY seq")
    except sqlite3.OperationalError:
        return []
    return [(kind, json.loads(body)) for kind, body in rows]


def read_rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    """Read from a database that another process may be writing to."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30.0)) as connection:
        return connection.execute(query).fetchall()


def step_spans(timings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the spans of the learner's steps, in their order."""
    return sorted((s for s in timings["stages"] if s["stage"] == "step"), key=lambda s: int(s["number"]))


def step_ends(timings: Mapping[str, Any]) -> list[float]:
    """Return when each learner step ended, seconds, in step order."""
    return [span["ended_s"] for span in step_spans(timings)]
