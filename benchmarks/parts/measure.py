"""Measure: run the main job as a user would and watch its processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parents[2]
SAMPLE_S = 1.0
"""Seconds between two looks at memory."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """One finished run of the main job."""

    seconds: float
    """Wall seconds of the whole command."""
    peak_gb: float
    """Largest sum of the processes' proportional memory, GB."""
    results: Path
    """Folder with metrics.json, timings.json and final.json."""

    def metrics(self) -> dict[str, Any]:
        """Return what the configuration decided."""
        loaded: dict[str, Any] = json.loads((self.results / "metrics.json").read_text())
        return loaded

    def timings(self) -> dict[str, Any]:
        """Return what the clock said."""
        loaded: dict[str, Any] = json.loads((self.results / "timings.json").read_text())
        return loaded


class MemoryWatch:
    """Samples the memory of a process and all its descendants; shared pages count once."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._over = threading.Event()
        self.peak_bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, self._now())

    def _now(self) -> int:
        total = 0
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for process in family:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return total

    def close(self) -> int:
        """Stop watching and return the peak in bytes."""
        self._over.set()
        self._thread.join(10.0)
        return self.peak_bytes


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


def end_on_sigterm() -> None:
    """Have SIGTERM end this process as an exit does: what it started is stopped, its folders go."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def run_job(home: Path, config: Path, overrides: Sequence[str], label: str, timeout_s: float) -> JobRun:
    """Run `antiphon run` to its end.

    Raises:
        SystemExit: when it failed; its last lines are printed.
    """
    results = home / f"results-{label}"
    command = [sys.executable, "-P", "-m", "antiphon.cli.app", "run", str(config), *overrides]
    command += ["--fresh", "--results", str(results)]
    log = home / f"{label}.log"
    environment = {**os.environ, "ANTIPHON_HOME": str(home)}
    started = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        watch = MemoryWatch(psutil.Process(process.pid))
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{label}: took longer than {timeout_s:g} s\n{tail(log)}") from None
        finally:
            peak = watch.close()
            if process.poll() is None:  # whoever stops the benchmark stops its run
                process.terminate()
                process.wait(60)
    seconds = time.perf_counter() - started
    if status != 0:
        raise SystemExit(f"{label}: ended with status {status}\n{tail(log)}")
    return JobRun(seconds, peak / 1e9, results)


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def step_ends(timings: dict[str, Any]) -> list[float]:
    """Return when each learner step ended, seconds, in step order."""
    spans = [s for s in timings["stages"] if s["stage"] == "step"]
    return [s["ended_s"] for s in sorted(spans, key=lambda s: s["number"])]


def print_result(result: dict[str, Any]) -> None:
    """Print the one JSON object that ends a benchmark."""
    print(json.dumps(result))
