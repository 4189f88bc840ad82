"""The wheel as a user meets it: an empty virtual environment outside of a clone, and the package index.

    python -m antiphon.benchmarks.parts.fleets.wheel

builds the wheel, installs what its file of pinned versions names, and has the demo take its first four
steps. Then a run without workers of its own waits for one that joins by the line which the run prints. It
takes the index that pip is configured for; nothing comes from the checkout's environment or pip's cache.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS, PROJECT, tail

INSTALL_S = 900.0
"""Longest time for the installation."""
RUN_S = 300.0
"""Longest time for the demo, and for the run that a worker joins."""
FEW = ("evaluation.prompts=16",)
"""Overrides that keep a run short."""
JOINING = re.compile(r"\S*antiphon worker --coordinator \S+ --run \S+")
"""The line that a run without workers prints."""


def measure_wheel() -> dict[str, Any]:
    """Install the wheel and use it; return the wall seconds of the whole and of each part.

    `seconds` is from the empty folder to the end of the run that a worker joined; the wheel is there before.

    Raises:
        SystemExit: when a part fails, takes too long, or came from the checkout; its last lines are printed.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-wheel-") as name:
        folder, dist = Path(name) / "work", Path(name) / "dist"
        folder.mkdir()
        parts = {"build_s": _call((PROJECT / "scripts" / "wheel", dist), folder, 60.0)}
        python = folder / "venv" / "bin" / "python"
        options = "--quiet --no-cache-dir --no-compile --no-deps --require-hashes"
        pip: tuple[str | Path, ...] = (python, "-m", "pip", "install", *options.split())
        antiphon = python.with_name("antiphon")
        parts["install_s"] = _call([sys.executable, "-m", "venv", "venv"], folder, 60.0) + _call(
            (*pip, "--find-links", dist, "--requirement", dist / "cpu.txt"), folder, INSTALL_S
        )
        where = "import antiphon.cli.app as a; print(a.__file__)"
        found = subprocess.check_output(
            [python, "-P", "-c", where], cwd=folder, env=_environment(), text=True
        )
        if not Path(found).is_relative_to(folder):
            raise SystemExit(f"the command runs from {found.strip()}, not from the wheel")
        parts["demo_s"] = _call([antiphon, "demo", "run.steps=4", *FEW], folder, RUN_S)
        parts["join_s"] = _join(antiphon, folder)
        bytes_ = next(dist.glob("*.whl")).stat().st_size
    seconds = sum(value for part, value in parts.items() if part != "build_s")
    rounded = {part: round(value, 1) for part, value in parts.items()}
    return {"seconds": round(seconds, 1), **rounded, "wheel_bytes": bytes_}


def _join(antiphon: Path, folder: Path) -> float:
    """Start a run that has no workers, and the worker that it asks for; return the seconds until both end."""
    begun, log = time.perf_counter(), folder / "run.log"
    overrides = ("run.name=joined", "run.steps=3", "rollout.workers=0", *FEW)
    words = (*DEFAULT_SIGNALS, antiphon, "run", "examples/quickstart.yaml", *overrides)
    with log.open("wb") as out:
        run = subprocess.Popen(words, cwd=folder, env=_environment(), stdout=out, stderr=out)
    try:
        while (asked := JOINING.search(log.read_text())) is None:
            if run.poll() is not None or time.perf_counter() - begun > RUN_S:
                raise SystemExit(f"the run asked for no worker\n{tail(log)}")
            time.sleep(0.05)
        _call([antiphon, *shlex.split(asked[0])[1:], "--name", "joins"], folder, RUN_S)
        if run.wait(RUN_S) != 0:
            raise SystemExit(f"the run ended with status {run.returncode}\n{tail(log)}")
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60.0)
    return time.perf_counter() - begun


def _call(words: Sequence[str | Path], folder: Path, limit_s: float) -> float:
    """Run a command in a folder to its end; return its wall seconds."""
    begun, log = time.perf_counter(), folder / "command.log"
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                words, cwd=folder, env=_environment(), stdout=out, stderr=out, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{words[0]} took longer than {limit_s:g} s\n{tail(log)}") from None
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} ended with status {done.returncode}\n{tail(log)}")
    return time.perf_counter() - begun


def _environment() -> dict[str, str]:
    """Return this environment without what would lead back to the checkout."""
    ours = ("PYTHONPATH", "PYTHON", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "ANTIPHON_HOME")
    return {name: value for name, value in os.environ.items() if name not in ours}


if __name__ == "__main__":
    print(json.dumps(measure_wheel()))
