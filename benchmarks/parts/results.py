"""Results: how every benchmark ends, and the file that keeps what it measured.

A script prints one JSON object as its last line and ends with status 1 when something that it checks
does not hold. With `--record` it also writes `benchmarks/results/NAME.json`, from which
`scripts/benchmarks` makes docs/benchmarks.md and the metrics quoted in README and docs. A result that
breaks what the script checks is never recorded.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import psutil

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "benchmarks" / "results"
GENERATED = ("README.md", "docs", "benchmarks/results")
"""What recording changes by itself: no change of the program that was measured."""
SMOKE_VARIABLE = "ANTIPHON_SMOKE"
"""Set where a benchmark runs in its smallest form."""
UNITS = {
    "_per_second": "1/s",
    "_per_cpu_s": "1/CPU-s",
    "_per_s": "1/s",
    "_cpu_s": "CPU-s",
    "_seconds": "s",
    "_s": "s",
    "_ms": "ms",
    "_gb": "GB",
    "_mb": "MB",
    "_mib": "MiB",
    "_share": "share",
    "_hours": "h",
    "_minutes": "min",
}
"""End of a name -> unit; the first that fits counts."""
_FOLDERS = re.compile(r"(?<![^\s=])/(?:[^\s/]+/)+")
"""Of an absolute path, which says something on this machine alone."""


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """One number of a result."""

    name: str
    value: float
    """Median of the spread when there is one."""
    unit: str
    """Empty for counts and ratios."""
    repetitions: int
    spread: list[float] | None = None
    """Each repetition's value, in order."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark measured."""

    name: str
    command: str
    commit: str
    """First digits; `+changes` when the program had uncommitted ones, `unknown` without git."""
    date: str
    """When it ended, UTC."""
    machine: dict[str, Any]
    """Kind of machine, never its name."""
    took_s: float
    figures: list[MeasuredFigure]
    result: dict[str, Any]
    """The JSON object of the last line."""

    def figure(self, name: str) -> MeasuredFigure | None:
        """Return one figure, or None when the benchmark has none of this name."""
        return next((figure for figure in self.figures if figure.name == name), None)


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/results/")
    return parser


def execute(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark. SIGTERM ends it as an exit does: what it started is stopped, its folders go."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())


def finish(
    result: Mapping[str, Any],
    *,
    record: bool,
    samples: Mapping[str, Sequence[float]] | None = None,
    violated: Sequence[str] = (),
    at_size: Sequence[str] = (),
    name: str | None = None,
) -> int:
    """End a benchmark: print its JSON object, keep it if asked, and return the exit status.

    Args:
        result: name -> value, objects may be nested.
        record: write the result file.
        samples: name -> each repetition's value; their medians become values of the result.
        violated: sentences about what was checked and does not hold; any makes the status 1.
        at_size: the same of what holds only at the size of a whole measurement, such as speeds; in a
            smallest form (`scripts/benchmarks --smoke`) they are printed and do not count.
        name: of the result file; by default the script's.
    """
    whole = {**result, **medians(samples or {})}
    if samples:
        whole["samples"] = {key: list(values) for key, values in samples.items()}
    if os.environ.get(SMOKE_VARIABLE):
        print("\n".join(f"at this size: {sentence}" for sentence in at_size), file=sys.stderr, flush=True)
        record = False
    else:
        violated = [*violated, *at_size]
    if violated:
        whole["violated"] = list(violated)
        print("\n".join(f"violated: {sentence}" for sentence in violated), file=sys.stderr, flush=True)
    elif record:
        script = Path(sys.argv[0])
        words = [word for word in sys.argv[1:] if word != "--record"]
        took_s = time.time() - psutil.Process().create_time()
        write(make(name or script.stem, f"benchmarks/{script.name} {shlex.join(words)}", whole, took_s))
    print(json.dumps(whole), flush=True)
    return 1 if violated else 0


def add(samples: dict[str, list[float]], found: Mapping[str, float]) -> None:
    """Add the figures of one more repetition to the samples, rounded to four digits."""
    for name, value in found.items():
        samples.setdefault(name, []).append(round(value, 4))


def above(report: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for every figure of a report that is above its limit."""
    return [
        f"{name} is {report[name]:.3f}, above {most}" for name, most in limits.items() if report[name] > most
    ]


def last_object(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the JSON object that the last line of a benchmark holds; None when that is none."""
    try:
        found = json.loads(next(line for line in reversed(lines) if line.strip()))
    except (StopIteration, ValueError):
        return None
    return found if isinstance(found, dict) else None


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return name -> median of its samples, without the digits that rounded samples do not have."""
    return {name: round(median(values), 6) for name, values in samples.items() if values}


def make(name: str, arguments: str, result: dict[str, Any], took_s: float) -> Result:
    """Return the result of a benchmark that just ended.

    Args:
        name: of the result.
        arguments: script and arguments, as on the command line; folders of this machine are left out.
        result: the JSON object of its last line.
        took_s: seconds that the whole script took.
    """
    samples = result.get("samples") or {}
    plain = flatten({key: value for key, value in result.items() if key not in {"samples", "violated"}})
    figures = [
        MeasuredFigure(key, value, unit_of(key), len(samples.get(key, (0,))), samples.get(key))
        for key, value in plain.items()
    ]
    command = f".venv/bin/python {re.sub(_FOLDERS, '', arguments)}".strip()
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return Result(name, command, commit_now(), date, machine_now(), round(took_s, 1), figures, result)


def flatten(nested: Mapping[str, Any]) -> dict[str, float]:
    """Return every finite number of nested objects under its path; truth values and lists are none.

    >>> flatten({"ratio": {"4": 0.97, "64": 1.2}, "pairs": 7, "equal": True, "each": [1, 2]})
    {'ratio.4': 0.97, 'ratio.64': 1.2, 'pairs': 7.0}
    """
    found: dict[str, float] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": number for inner, number in flatten(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            found[name] = float(value)
    return found


def unit_of(name: str) -> str:
    """Return the unit that a figure's name ends with; empty for counts and ratios.

    >>> unit_of("loop_s"), unit_of("pairs_per_s"), unit_of("ratio.64")
    ('s', '1/s', '')
    """
    last = name.rpartition(".")[2]
    return next((unit for end, unit in UNITS.items() if last.endswith(end)), "")


def write(result: Result, folder: Path = RESULTS) -> Path:
    """Write a result's file and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return path


def read(folder: Path = RESULTS) -> dict[str, Result]:
    """Return name -> result of all files of a folder.

    Raises:
        SystemExit: when a file is no result; it is named.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            plain["figures"] = [MeasuredFigure(**figure) for figure in plain["figures"]]
            found[path.stem] = Result(**plain)
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} is no benchmark result ({error}); measure it again") from error
        if found[path.stem].name != path.stem:
            raise SystemExit(f"{path} holds the result of {found[path.stem].name}; measure it again")
    return found


def commit_now() -> str:
    """Return the commit that is checked out, `+changes` after it when files other than results changed."""
    revision = git("rev-parse", "--short=12", "HEAD")
    if revision is None:
        return "unknown"
    excluded = [f":(exclude){path}" for path in GENERATED]
    changes = git("status", "--porcelain", "--", ".", *excluded)
    return f"{revision}+changes" if changes else revision


def git(*arguments: str) -> str | None:
    """Return what a git command prints; None when it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=60.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine_now() -> dict[str, Any]:
    """Return the kind of this machine: CPU model, cores, memory, GPUs."""
    from antiphon.lineage.documents.manifest import hardware

    found = hardware()
    memory_gb = round(psutil.virtual_memory().total / 1e9, 1)
    return {"cpu": found["cpu"], "cores": found["cores"], "memory_gb": memory_gb, "gpus": found["gpus"]}
