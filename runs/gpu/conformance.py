"""Conformance: the checks of what only a GPU can show, each in a process of its own with a deadline.

One that fails or hangs stops no other, and what did not run is named with the reason. What they found is one
JSON object; `scripts/docs` makes docs/gpu.md of the one that is kept.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from antiphon.runs.gpu.checks import CHECKS, SIZES, Device, Found, short

LIMIT_S = 480.0
"""Of all checks together."""
ENGINE = "needs vLLM on CUDA, which no check starts"


def tell(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def run_one(name: str, kind: str) -> int:
    """Run a check in this process; its last line is what it found."""
    found, work = Found(), CHECKS[name].work
    assert work is not None
    warnings.simplefilter("ignore")  # torch says at length why a kernel was not taken
    try:
        work(Device(kind, SIZES[kind]), found)
    except Exception as error:  # noqa: BLE001 - the other checks run all the same, and this one's figures stay
        traceback.print_exc()
        found.expect(False, short(error))
    print(json.dumps(vars(found)), flush=True)
    return bool(found.failures)


def run_apart(name: str, kind: str, limit_s: float, say: Callable[[str], object] = tell) -> dict[str, Any]:
    """Run a check in a process of its own, and return what it found.

    Args:
        name: one of `CHECKS`.
        kind: cuda or cpu.
        limit_s: after which it is ended, and what it started too.
        say: takes each line that it prints.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "antiphon.runs.gpu.conformance",
        "--device",
        kind,
        "--inside",
        name,
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(child.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    said = [""]
    try:
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line)
            if not line.startswith("{"):
                say(line.rstrip("\n"))
        code = child.wait()
    finally:
        timer.cancel()
        if child.poll() is None:  # Ctrl-C does not reach its session
            os.killpg(child.pid, signal.SIGKILL)
    try:
        found: dict[str, Any] = json.loads(said[-1])
    except ValueError:
        reason = f"it took more than {limit_s:.0f} s" if late.is_set() else f"it ended with code {code}"
        heard = [line.strip() for line in said[1:] if line.startswith("  ")]
        found = {"figures": {"printed": heard}, "failures": [reason], "skipped": []}
    return found


def describe(kind: str) -> dict[str, Any]:
    """Return what this machine's device and libraries are called."""
    import torch

    told: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "device": "CPU"}
    if kind == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            done = subprocess.run(query, capture_output=True, text=True, timeout=30)
            told["device"], _, told["driver"] = done.stdout.strip().splitlines()[0].partition(", ")
        told |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    for package in ("triton", "transformers", "deepspeed", "liger-kernel", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            told[package] = version(package)
    return told


def why_not(kind: str) -> str | None:
    """Return why no check can run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch; name another in PYTHON"
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU here"
    return None


def conform(
    kind: str = "cuda",
    only: Collection[str] = tuple(CHECKS),
    seconds: float = LIMIT_S,
    say: Callable[[str], object] = tell,
) -> dict[str, Any]:
    """Run the checks that can run here, and return the record of them.

    Args:
        kind: cuda or cpu.
        only: names of the checks.
        seconds: no check starts or goes on after them.
        say: takes each line of what happens.

    Returns:
        Device and versions by name; `seconds`; `checks`, of each that ran its figures, failures and seconds;
        `failed`, the names of those that did; `skipped`, what did not run, and why.
    """
    begun = time.monotonic()
    nowhere = why_not(kind)
    told: dict[str, Any] = {} if nowhere else describe(kind)
    if told:
        say(" ".join(f"{name} {value}" for name, value in told.items()))
    checks: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in (name for name in CHECKS if name in only):
        check, left = CHECKS[name], seconds - (time.monotonic() - begun)
        lacking = [module for module in check.needs if importlib.util.find_spec(module) is None]
        reason = (
            (ENGINE if check.work is None else nowhere)
            or (f"this Python has no {', '.join(lacking)}" if lacking else None)
            or ("no time is left" if left < 5 else None)
        )
        if reason:
            skipped[name] = reason
            say(f"{name}: skipped, {reason}")
            continue
        say(f"{name}: {check.shows} ({time.monotonic() - begun:.0f} s)")
        at = time.monotonic()
        found = checks[name] = run_apart(name, kind, min(left, check.limit_s), say)
        found["seconds"] = round(time.monotonic() - at, 1)
        skipped |= {f"{name}: {number}": part for number, part in enumerate(found.pop("skipped"))}
        say(f"{name}: {'FAILED' if found['failures'] else 'passed'}, {found['seconds']} s")
    failed = [name for name, found in checks.items() if found["failures"]]
    whole = round(time.monotonic() - begun, 1)
    return {**told, "seconds": whole, "failed": failed, "skipped": skipped, "checks": checks}


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write what `conform` returned, as JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that are asked for and can be run."""
    listed = "\n".join(f"    {name:13}{check.shows}" for name, check in CHECKS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=f"{__doc__}\n{listed}",
        epilog="The last line is that object; the exit code is 1 when a check failed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT_S, help="no check starts or goes on after them"
    )
    parser.add_argument("--out", type=Path, help="write the record here too")
    parser.add_argument("--inside", choices=list(CHECKS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the learner takes a GPU where there is one
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if given.inside:
        return run_one(given.inside, given.device)
    if nowhere := why_not(given.device):
        print(f"scripts/gpu: {nowhere}; --device cpu tries the program itself", file=sys.stderr)
        return 2
    record = conform(given.device, given.only, given.seconds)
    if given.out:
        write_record(given.out, record)
    print(json.dumps(record))
    return bool(record["failed"])


if __name__ == "__main__":
    sys.exit(main())
