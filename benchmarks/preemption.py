"""Preemption: what a fleet of reclaimed workers loses against one that is left alone.

Eight workers sample groups of 120 s on average, two at once, for steps of 32 groups. The learner trains
as long as the undisturbed fleet needs for a batch, so demand equals supply. In the disturbed fleet each
worker is killed without notice with probability 0.4 an hour and replaced by a new machine after 600 s;
its workers are faster than the learner needs by the headroom.

Two hours of such a fleet pass in seconds of the simulator's virtual time: coordinator, worker loop,
reward service and learner loop are the production ones, engines and trainer are stand-ins, and the witness
checks every token, bound and acknowledgement. `--real-processes` compares one schedule with real worker
processes over gRPC in scaled time, and `--curves` the rewards of real runs with vLLM.

The last line is one JSON object. `lost_throughput` is the mean over the schedules of seeds 0 to 7 of the
learner steps per hour that the disturbed fleet loses, with hand-over, 10% headroom and S=2. `table` has
this case and the others: S=2 and S=6, with and without headroom, with and without hand-over. The last one
is the first again with `stragglers`: one worker's link is so slow that a snapshot takes as long as a
learner step, and of two workers more one joins and never loads and the other one's engine hangs. Wasted
shares are of the worker seconds under leases, as the work account books them.

The exit code is 1 when `lost_throughput`, also with stragglers, is above 0.12 or anything was violated, 2
for wrong arguments.
The bar can fail: `--no-replacement --headroom 0 --one-case` loses about half and exits with 1.

    .venv/bin/python benchmarks/preemption.py
    .venv/bin/python benchmarks/preemption.py --mode moment
    .venv/bin/python benchmarks/preemption.py --mode trace --trace benchmarks/data/spot_p3.csv
    .venv/bin/python benchmarks/preemption.py --real-processes
    .venv/bin/python benchmarks/preemption.py --curves
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.measure import end_on_sigterm
from antiphon.benchmarks.parts.preemption.fleet import FleetRun, Site
from antiphon.benchmarks.parts.preemption.schedule import (
    Stay,
    at_one_moment,
    by_chance,
    by_trace,
    read_trace,
    reclaimed,
    undisturbed,
    worker_hours,
)
from antiphon.benchmarks.parts.preemption.simulated import simulate_fleet
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.errors import ConfigError
from antiphon.simulator.campaign import mute_logs

MOST_LOST = 0.12
"""Bar of `lost_throughput` where workers are reclaimed by chance."""
MOST_APART = 0.05
"""Bar of the difference between real processes and virtual time."""


def plan(arguments: argparse.Namespace, seed: int) -> list[Stay]:
    """Return the disturbed fleet's schedule.

    Raises:
        ConfigError: when there is no such trace.
    """
    span_s = 3600.0 * arguments.hours
    replacement_s = np.inf if arguments.no_replacement else arguments.replacement
    if arguments.mode == "moment":
        return at_one_moment(arguments.workers, span_s, arguments.share, replacement_s)
    if arguments.mode == "trace":
        if arguments.trace is None:
            raise ConfigError("--mode trace needs --trace FILE, such as benchmarks/data/spot_p3.csv")
        return by_trace(read_trace(arguments.trace), arguments.workers, span_s)
    return by_chance(arguments.workers, span_s, arguments.share, replacement_s, seed)


def lost(calm: FleetRun, disturbed: FleetRun) -> float:
    """Return the share of the undisturbed fleet's steps per hour that the other one lacks.

    Raises:
        ConfigError: when there are too few steps to tell.
    """
    if not calm.steps_per_hour:
        raise ConfigError("--hours is too short for the learner's steps; give more")
    return 1.0 - disturbed.steps_per_hour / calm.steps_per_hour


def summary(values: Iterable[float]) -> dict[str, Any]:
    """Return mean, worst (largest) and all values, rounded."""
    rounded = [round(value, 4) for value in values]
    return {"mean": round(mean(rounded), 4), "worst": max(rounded), "values": rounded}


def cases(arguments: argparse.Namespace) -> list[Site]:
    """Return the disturbed fleets; the first is the one of `lost_throughput`."""
    headrooms = dict.fromkeys((arguments.headroom, 0.0))
    found = [
        Site(bound, headroom, handover, arguments.workers)
        for bound in (2, 6)
        for headroom in headrooms
        for handover in (True, False)
    ]
    troubled = replace(found[0], stragglers=True)
    return found[:1] if arguments.one_case else [*found, troubled]


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[str]]:
    """Simulate every case with every schedule; return the result, what was violated and what was lost."""
    span_s = 3600.0 * arguments.hours
    table: list[dict[str, Any]] = []
    schedules = {
        seed: plan(arguments, seed) for seed in range(arguments.seed, arguments.seed + arguments.seeds)
    }
    calm: dict[int, list[FleetRun]] = {}
    violations: list[str] = []

    def run(site: Site, stays: Sequence[Stay], seed: int) -> FleetRun:
        done = simulate_fleet(site, stays, span_s, seed)
        violations.extend(f"S={site.max_staleness} seed {seed}: {found}" for found in done.violations)
        return done

    for site in cases(arguments):
        bound = site.max_staleness
        if bound not in calm:
            alone = replace(site, headroom=0.0)
            calm[bound] = [run(alone, undisturbed(site.workers), seed) for seed in schedules]
        runs = [run(site, stays, seed) for seed, stays in schedules.items()]
        row: dict[str, Any] = {
            "max_staleness": bound,
            "headroom": site.headroom,
            "handover": site.handover,
            "stragglers": site.stragglers,
            "lost_throughput": summary(map(lost, calm[bound], runs)),
            "wasted_share": summary(run.wasted_share for run in runs),
            "preempted_share": summary(run.preempted_share for run in runs),
            "steps_per_hour": round(mean(run.steps_per_hour for run in runs), 3),
            "steps_per_hour_undisturbed": round(mean(run.steps_per_hour for run in calm[bound]), 3),
            "continued_leases": sum(run.continued for run in runs),
            "hung_leases": sum(run.hung_leases for run in runs),
        }
        table.append(row)
        print(row, flush=True)
    kills = sum(reclaimed(stays, span_s) for stays in schedules.values())
    hours = sum(worker_hours(stays, span_s) for stays in schedules.values())
    share = table[0]["lost_throughput"]["mean"]
    result = {
        "lost_throughput": share,
        "table": table,
        "violations": len(violations),
        "mode": arguments.mode,
        "seeds": list(schedules),
        "hours": arguments.hours,
        "reclaimed": kills,
        "reclaimed_share": round(1.0 - float(np.exp(-kills / hours)), 3),
        "replacement_s": None if arguments.no_replacement else arguments.replacement,
        "steps_per_hour_wanted": round(3600.0 / Site(workers=arguments.workers).train_s, 3),
    }
    slow: list[str] = []
    for row in table:
        bound_row = row is table[0] or row["stragglers"]
        if arguments.mode == "chance" and bound_row and row["lost_throughput"]["mean"] > MOST_LOST:
            where = " with stragglers" if row["stragglers"] else ""
            slow.append(f"lost_throughput{where} is {row['lost_throughput']['mean']:g}, above {MOST_LOST:g}")
    return result, violations, slow


def compare_processes(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run one schedule with real processes and in virtual time; return the result and what was violated."""
    from antiphon.benchmarks.parts.preemption.processes import run_fleet

    span_s, seed = 3600.0 * arguments.hours, arguments.seed
    site = cases(arguments)[0]
    fleets = [(replace(site, headroom=0.0), undisturbed(site.workers)), (site, plan(arguments, seed))]
    virtual = [simulate_fleet(fleet, stays, span_s, seed) for fleet, stays in fleets]
    real = []
    with tempfile.TemporaryDirectory(prefix="antiphon-preemption-") as folder:
        for number, (fleet, stays) in enumerate(fleets):
            work = run_fleet(fleet, stays, span_s, seed, arguments.scale, Path(folder) / str(number))
            real.append(asyncio.run(work))
            print(f"real: {real[-1]}\nvirtual: {virtual[number]}", flush=True)
    violations = [found for run in (*real, *virtual) for found in run.violations]
    apart = abs(lost(*real) - lost(*virtual))
    result = {
        "lost_throughput": round(lost(*real), 4),
        "lost_throughput_virtual": round(lost(*virtual), 4),
        "steps_per_hour": [round(run.steps_per_hour, 3) for run in real],
        "steps_per_hour_virtual": [round(run.steps_per_hour, 3) for run in virtual],
        "wasted_share": round(real[1].wasted_share, 4),
        "wasted_share_virtual": round(virtual[1].wasted_share, 4),
        "continued_leases": real[1].continued,
        "reclaimed": reclaimed(fleets[1][1], span_s),
        "violations": len(violations),
    }
    if apart > MOST_APART:
        violations.append(f"lost_throughput is {apart:.3f} apart from virtual time, above {MOST_APART:g}")
    return result, violations


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, or `words` instead."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--mode",
        choices=["chance", "moment", "trace"],
        default="chance",
        help="chance: each worker by itself; moment: --share of the fleet at once; trace: as recorded",
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--hours", type=float, default=2.0, help="hours of each fleet (default 2)")
    parser.add_argument(
        "--share", type=float, default=0.4, help="reclaimed per hour, or at once (default 0.4)"
    )
    parser.add_argument("--replacement", type=float, default=600.0, help="seconds (default 600)")
    parser.add_argument("--no-replacement", action="store_true", help="a reclaimed worker is never replaced")
    parser.add_argument("--headroom", type=float, default=0.1, help="of the disturbed fleet (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="first schedule, or first pair (default 0)")
    parser.add_argument("--seeds", type=int, default=8, help="schedules (default 8)")
    parser.add_argument("--one-case", action="store_true", help="only the case of lost_throughput")
    parser.add_argument("--trace", type=Path, help="CSV file with lines seconds,instances")
    parser.add_argument("--real-processes", action="store_true", help="check one schedule with processes")
    parser.add_argument(
        "--scale", type=float, default=60.0, help="seconds per real second of --real-processes (default 60)"
    )
    parser.add_argument("--curves", action="store_true", help="reward curves of real runs instead; hours")
    parser.add_argument("--pairs", type=int, default=5, help="seeds of --curves (default 5)")
    parser.add_argument("--steps", type=int, default=40, help="learner steps of --curves (default 40)")
    parser.add_argument(
        "--every", type=float, default=20.0, help="seconds between kills of --curves (default 20)"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, and tell by the exit code whether every bar held."""
    arguments = parse(words)
    mute_logs()
    try:
        if arguments.curves:
            from antiphon.benchmarks.parts.preemption.curves import compare_curves

            seeds = range(arguments.seed, arguments.seed + arguments.pairs)
            result = compare_curves(seeds, arguments.steps, arguments.every)
            return finish(result, record=arguments.record, name="preemption_curves")
        if arguments.real_processes:
            result, violated = compare_processes(arguments)
            return finish(result, record=arguments.record, violated=violated, name="preemption_processes")
        result, violated, slow = measure(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    name = None if arguments.mode == "chance" else f"preemption_{arguments.mode}"
    return finish(result, record=arguments.record, violated=violated, at_size=slow, name=name)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
