"""Provisioning: the supply at which a learner really stops waiting, against the rule of the capacity model.

Real processes: production's coordinator, reward service, learner loop and two workers over gRPC. Engines and
trainer are stand-ins that take the seconds that are imposed on them, so that nothing depends on how fast the
machine is. First some runs measure what the model is given, as a plan does: T, the seconds of a learner step
with its commit, where completions abound; and, for each rate, how long a place of a worker is empty between
two groups where the learner never holds it up. Then each cell, a time of a broadcast, an acceptance and a
mode (workers pause for a broadcast, or sample on while it arrives), is run with several supplies, as shares
of the rule's.

Below the knee the seconds per step are fitted by A / supply + B, and the observed knee is where that line
meets T. `median_error` and `worst_error` are |rule / knee - 1|; `idle_at_rule` is the learner's largest idle
share over the cells with the rule's own supply, `rows` has every cell.

Then runs of production's decisions in virtual time are planned again by their own records (`parts.capacity.
planned_again`): of each filter, and with S from kappa - 1 to 2 kappa - 2 near the supply's edge.
`filter_error_worst` and `small_s_error_worst` are |planned / own seconds per step - 1|, `planned` has every
run. The exit status is 1 when a limit of `LIMITS` is exceeded.

    .venv/bin/python benchmarks/provisioning.py
    .venv/bin/python benchmarks/provisioning.py --cells 2 --steps 12
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.capacity.planned_again import FILTERS, SMALL, PlannedRun
from antiphon.benchmarks.parts.capacity.site import (
    GROUP_SIZE,
    GROUPS,
    PLACES,
    WORKERS,
    SupplyRun,
    seconds_per_step,
)
from antiphon.benchmarks.parts.measure import end_on_sigterm
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.capacity.model import LoopShape, required_supply
from antiphon.simulator.campaign import mute_logs

COMPLETIONS = GROUPS * GROUP_SIZE
PLACES_IN_ALL = WORKERS * PLACES * GROUP_SIZE
"""Completions that are sampled at once."""
CELLS = [
    (broadcast, interval, acceptance, pauses)
    for broadcast, interval in ((0.25, 1), (0.75, 2))
    for acceptance in (1.0, 0.5)
    for pauses in (False, True)
]
"""Broadcast over training, publish interval, acceptance, whether workers pause."""
BELOW = (0.6, 0.9)
"""Supplies at which the learner waits, as shares of the rule's: far apart, and one of them near the knee, so
that a line through both says where that is."""
ABUNDANT = 3.0
LIMITS = {
    "median_error": 0.05,
    "worst_error": 0.10,
    "idle_at_rule": 0.02,
    "planned_error_median": 0.05,
    "filter_error_worst": 0.10,
    "small_s_error_worst": 0.10,
}


def main() -> int:
    """Measure every cell and check the limits."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--train", type=float, default=1.2, help="seconds that the learner sleeps in a step")
    parser.add_argument("--steps", type=int, default=30, help="learner steps that count")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="how many of the cells")
    parser.add_argument("--skip", type=int, default=0, help="cells that are left out before them")
    parser.add_argument("--planned", type=int, help="how many runs of each kind are planned again")
    parser.add_argument("--at-once", type=int, default=2, help="cells that run side by side; they sleep")
    args = parser.parse_args()
    mute_logs()
    with tempfile.TemporaryDirectory(prefix="antiphon-provisioning-") as folder:
        report, problems = measure(args, Path(folder))
    return finish(report, record=args.record, at_size=problems)


@dataclass(frozen=True, slots=True)
class Site:
    """What the runs of all cells have in common."""

    train: float
    """Seconds that the learner sleeps in a step."""
    steps: int
    folder: Path

    def step_s(self, label: str, run: SupplyRun) -> float:
        """Run once, in a folder of its own, and return the seconds per step."""
        limit_s = 60.0 + 10.0 * self.train * run.steps
        return asyncio.run(seconds_per_step(run, self.folder / label, limit_s))

    def shape(self, **fields: Any) -> LoopShape:
        """Return a step that is broadcast at once, with some fields replaced."""
        return replace(LoopShape(COMPLETIONS, self.train, 0.0, self.train), **fields)


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the report, and what is above its limit."""
    site = Site(args.train, args.steps, folder)
    abundant = ABUNDANT * COMPLETIONS / args.train
    train_s = site.step_s("train", SupplyRun(site.shape(), 1, abundant, args.steps, headroom=1))
    print(f"a learner step takes {train_s:.3f} s", flush=True)
    numbers = range(len(CELLS))[args.skip : args.skip + args.cells]
    with ProcessPoolExecutor(
        args.at_once, multiprocessing.get_context("spawn"), initializer=mute_logs
    ) as pool:
        rows = list(pool.map(partial(measure_cell, site, train_s), numbers))
        filters, small = (list(pool.map(plan_again, runs[: args.planned])) for runs in (FILTERS, SMALL))
    errors = [abs(row["error"]) for row in rows]
    report: dict[str, Any] = {
        "median_error": round(median(errors), 4),
        "worst_error": max(errors),
        "idle_at_rule": max(row["idle_at_rule"] for row in rows),
        "train_seconds": round(train_s, 4),
        "planned_error_median": median(abs(row["error"]) for row in (*filters, *small)),
        "filter_error_worst": max(abs(row["error"]) for row in filters),
        "small_s_error_worst": max(abs(row["error"]) for row in small),
        "rows": rows,
        "planned": [*filters, *small],
    }
    problems = [
        f"{name} is {report[name]:.3f}, above {limit}"
        for name, limit in LIMITS.items()
        if report[name] > limit
    ]
    return report, problems


def measure_cell(site: Site, train_s: float, number: int) -> dict[str, Any]:
    """Run a cell at every supply and return its row; all processes of it sleep most of the time."""
    broadcast, interval, acceptance, pauses = CELLS[number]
    known = site.shape(
        train_s=train_s,
        broadcast_s=broadcast * site.train,
        group_s=1.0,
        acceptance=acceptance,
        pauses=pauses,
    )
    rule = required_supply(known, interval)
    # Little's law: what all places sample at once, at this rate.
    known = replace(known, group_s=PLACES_IN_ALL / rule)
    idle_learner = site.shape(train_s=site.train / 50.0, group_s=site.train / 50.0)
    alone = SupplyRun(idle_learner, 1, rule, site.steps, headroom=3)
    group_s = PLACES_IN_ALL * site.step_s(f"{number}-alone", alone) / COMPLETIONS
    between_s = max(0.0, group_s - PLACES_IN_ALL / rule)
    imposed = replace(known, train_s=site.train)
    measured = {
        share: site.step_s(
            f"{number}-{share}", SupplyRun(imposed, interval, share * rule, site.steps, between_s)
        )
        for share in (*BELOW, 1.0)
    }
    slope, rest = np.polyfit([1.0 / (share * rule) for share in BELOW], [measured[s] for s in BELOW], 1)
    knee = slope / (train_s - rest)
    row: dict[str, Any] = {
        "broadcast_s": known.broadcast_s,
        "publish_interval": interval,
        "acceptance": acceptance,
        "pauses": pauses,
        "between_groups_seconds": round(between_s, 4),
        "rule": round(rule, 2),
        "knee": round(float(knee), 2),
        "error": round(float(rule / knee - 1.0), 4),
        "idle_at_rule": round(max(0.0, 1.0 - train_s / measured[1.0]), 4),
        "step_seconds": {str(share): round(seconds, 4) for share, seconds in measured.items()},
    }
    print(row, flush=True)
    return row


def plan_again(run: PlannedRun) -> dict[str, Any]:
    """Walk a run, plan it by its record, and return the row."""
    recorded = run.walk()
    row = {
        **asdict(run),
        "step_seconds": round(recorded.step_s, 4),
        "planned_seconds": round(recorded.planned().pace.step_s, 4),
        "error": round(recorded.error, 4),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
