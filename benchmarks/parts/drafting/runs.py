"""Runs of the demo with drafting in several ways: one line of figures each, kept so that none is repeated.

A results file holds one JSON object per finished run, under a label that names everything the run
depends on; whoever calls again with the same file goes on where it stopped.
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home

RUN_TIMEOUT_S = 1800.0

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""0.975 quantiles of Student's t for 1 to 9 degrees of freedom; beyond, the last one is kept."""


def figures_of(label: str, overrides: Sequence[str], results: Path) -> dict[str, Any]:
    """Run the demo's configuration with `overrides`, unless `results` knows it, and return its figures.

    Returns:
        label, overrides, seconds (whole command), loop_s, rewards (training reward by step),
        pass_before, pass_after, and drafting: rates of the run and under by_epoch those of each
        epoch, {} where nothing could be drafted.
    """
    for line in _known(results):
        if line["label"] == label and line["overrides"] == list(overrides):
            return line
    print(f"{time.strftime('%H:%M:%S')} {label}: running", flush=True)
    with scratch_home() as home:
        config = PROJECT / "examples" / "quickstart.yaml"
        job = run_job(home, config, ["record.mlflow=false", *overrides], "run", RUN_TIMEOUT_S)
        metrics, timings = job.metrics(), job.timings()
        found = {
            "label": label,
            "overrides": list(overrides),
            "seconds": round(job.seconds, 1),
            "loop_s": round(timings["loop_s"], 2),
            "rewards": _rewards(home),
            "pass_before": metrics["pass_before"],
            "pass_after": metrics["pass_after"],
            "drafting": timings.get("drafting", {}),
        }
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    print(f"{time.strftime('%H:%M:%S')} {label}: {job.seconds:.0f} s", flush=True)
    return found


def by_epoch(rewards: Sequence[float], steps_per_epoch: int) -> list[float]:
    """Return the mean reward of each whole epoch."""
    whole = len(rewards) // steps_per_epoch
    return [statistics.fmean(rewards[e * steps_per_epoch : (e + 1) * steps_per_epoch]) for e in range(whole)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half of the 95% interval (Student's t); 0 for a single value.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 0.0)
    """
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, 0.0
    return mean, STUDENT[min(n - 1, len(STUDENT)) - 1] * statistics.stdev(values) / math.sqrt(n)


def spell(values: Sequence[float], digits: int = 3) -> str:
    """Return mean and interval as people write them.

    >>> spell([0.5, 0.5])
    '0.500 ± 0.000'
    """
    mean, half = interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def _rewards(home: Path) -> list[float]:
    """Return the mean reward of all rewarded trajectories of each step, filtered groups included."""
    from antiphon.lineage.run_log import read_steps
    from antiphon.runs.directory import find_run

    return [line["batch"]["reward_mean"] for line in read_steps(find_run(home, None)) if line["batch"]]


def _known(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    text = results.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
