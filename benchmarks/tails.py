"""Tails: what long-tailed lengths do to the loop, with its production decisions in virtual time.

Completions are log-normal between prompts (`--sigma-prompt`) and within a group (`--sigma-sample`), cut at
`--cap` times the median; four workers, whose completions get slower the more of them run at once. The cells
cross S = 1, 2, 4, 8 with room for 1, 2 and S + 1 steps of groups at once, with a learner that is slower
or faster than the workers, and with quick and slow rewards. In each cell the production rule (groups keep
their places, run-ahead is measured) is compared with the best constant plan.

That best policy takes groups in the order of opening, as every policy must whose batches are to have the
distribution of what was opened; among those it is the fastest of all constant windows (steps ahead) and
shares of the workers' places, found by walking each of them through the same run. What run-ahead needs is
the least mean staleness of the constant plans within 2% of it. `floor_s` is what no policy can undercut: the
learner's step, or the tokens of a step at the workers' highest throughput.

The last line is one JSON object: shares and errors are fractions; `first_batches_worst` and
`length_bias_worst` are |mean length of the first three batches, of all trained / of all opened - 1|. The exit
status is 1 when a limit of `LIMITS` is exceeded in a cell.

    .venv/bin/python benchmarks/tails.py
    .venv/bin/python benchmarks/tails.py --sigma-prompt 0.4 --sigma-sample 0.25 --cap 4
"""

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.benchmarks.parts.tails.world import TOKENS, WORKERS, Lengths, Setting, Walked, World
from antiphon.core.loop.run_ahead import RunAhead

BOUNDS = (1, 2, 4, 8)
GROUP_SIZE = 8
ALPHA_S = 0.01
"""Seconds per token of a completion that runs alone."""
CONTENTION = 0.02
"""Share of it that each further completion at the same worker adds."""
LEARNER_BOUND, ROLLOUT_BOUND = 2.0, 0.3
"""Seconds of a learner step, in those that the workers need for a step's tokens at least."""
BROADCAST, SLOW_REWARD = 0.1, 1.0
"""Seconds of a broadcast, of a slow reward; in the same unit."""
SHARES = (1.0, 0.5, 0.25)
NEEDED = 0.02
"""What run-ahead needs is measured at plans that are within this share of the fastest."""
LIMITS = {
    "wasted_worst": 0.01,
    "restarts_worst": 1,
    "length_bias_worst": 0.02,
    "first_batches_worst": 0.10,
    "staleness_excess_worst": 0.3,
    "over_best_worst": 1.05,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    max_staleness: int
    steps_at_once: int
    """Groups that the workers have room for, in steps."""
    learner_bound: bool
    slow_reward: bool


def main() -> int:
    """Walk every cell and check the limits."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--sigma-prompt", type=float, default=0.8, help="of log lengths between prompts")
    parser.add_argument("--sigma-sample", type=float, default=0.6, help="of log lengths within a group")
    parser.add_argument("--cap", type=float, default=16.0, help="longest completion, in medians")
    parser.add_argument("--steps", type=int, default=100, help="learner steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--bounds", type=int, nargs="+", default=list(BOUNDS), help="values of S")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cells = [
        Cell(bound, at_once, learner_bound, slow)
        for bound in args.bounds
        for at_once in sorted({1, 2, bound + 1})
        for learner_bound in (True, False)
        for slow in (False, True)
    ]
    found = []
    with ProcessPoolExecutor(args.processes) as pool:
        for row in pool.map(_measure, cells, [args] * len(cells)):
            print(_line(row), flush=True)
            found.append(row)
    report: dict[str, Any] = {
        "wasted_worst": max(row["wasted"] for row in found),
        "restarts_worst": max(row["restarts"] for row in found),
        "length_bias_worst": max(row["length_bias"] for row in found),
        "first_batches_worst": max(row["first_batches"] for row in found),
        "staleness_excess_worst": max(row["staleness_excess"] for row in found),
        "over_best_worst": max(row["over_best"] for row in found),
        "cells": found,
    }
    problems = [
        f"{name} is {report[name]:.3f}, above {limit}"
        for name, limit in LIMITS.items()
        if report[name] > limit
    ]
    return finish(report, record=args.record, at_size=problems)


def _measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    lengths = Lengths(args.sigma_prompt, args.sigma_sample, args.cap, args.seed)
    places = args.prompts_per_step * cell.steps_at_once
    beta = ALPHA_S * CONTENTION
    mean = sum(float(lengths.draw(n, 64, GROUP_SIZE).mean()) for n in range(1024)) / 1024
    tokens = args.prompts_per_step * GROUP_SIZE * mean
    at_worker = places * GROUP_SIZE / WORKERS
    unit_s = tokens * (ALPHA_S + beta * at_worker) / (WORKERS * at_worker)
    setting = Setting(
        max_staleness=cell.max_staleness,
        prompts_per_step=args.prompts_per_step,
        group_size=GROUP_SIZE,
        steps=args.steps,
        places=places,
        learner_s=unit_s * (LEARNER_BOUND if cell.learner_bound else ROLLOUT_BOUND),
        reward_s=unit_s * SLOW_REWARD * cell.slow_reward,
        broadcast_s=unit_s * BROADCAST,
        alpha=ALPHA_S,
        beta=beta,
    )
    ours = World(setting, lengths, None, measured=True, seed=args.seed).run()
    constant = [
        (plan, World(setting, lengths, plan, measured=False, seed=args.seed).run())
        for plan in _constant_plans(cell, places, args.prompts_per_step)
    ]
    best_plan, best = min(constant, key=lambda pair: pair[1].seconds_per_step)
    needed = min(
        walked.staleness_mean
        for _, walked in constant
        if walked.seconds_per_step <= (1.0 + NEEDED) * best.seconds_per_step
    )
    gate = World(setting, lengths, None, measured=False, seed=args.seed).run()
    return {
        "max_staleness": cell.max_staleness,
        "steps_at_once": cell.steps_at_once,
        "learner_bound": cell.learner_bound,
        "slow_reward": cell.slow_reward,
        "wasted": ours.wasted_share,
        "restarts": ours.restarts_worst,
        "length_bias": abs(ours.trained_mean / ours.opened_mean - 1.0),
        "first_batches": abs(ours.first_batches_mean / (mean or math.nan) - 1.0),
        "staleness": ours.staleness_mean,
        "staleness_needed": needed,
        "staleness_excess": ours.staleness_mean - needed,
        "staleness_worst": ours.staleness_worst,
        "seconds_per_step": ours.seconds_per_step,
        "over_best": ours.seconds_per_step / best.seconds_per_step,
        "best_window": best_plan.window,
        "best_share": best_plan.share,
        "over_gate_alone": ours.seconds_per_step / gate.seconds_per_step,
        "window": None if ours.plan is None else ours.plan.window,
        "share": None if ours.plan is None else ours.plan.share,
        "floor_s": max(setting.learner_s, tokens * beta / WORKERS),
        "lengths_by_staleness": _by_age(ours),
    }


def _constant_plans(cell: Cell, places: int, size: int) -> list[RunAhead]:
    ahead = sorted({step for step in (1, 2, 3, 4, 6, 8) if step <= cell.max_staleness})
    shares = [share for share in SHARES if share * places >= size / 4]
    return [RunAhead((steps + 1) * size, share) for steps in ahead for share in shares]


def _by_age(walked: Walked) -> dict[str, float]:
    return {str(age): round(mean / TOKENS, 3) for age, mean in walked.lengths_by_staleness.items()}


def _line(row: dict[str, Any]) -> str:
    return (
        f"S={row['max_staleness']} room={row['steps_at_once']} "
        f"{'learner' if row['learner_bound'] else 'rollout'}-bound "
        f"{'slow' if row['slow_reward'] else 'quick'} rewards: x{row['over_best']:.3f} of the best, "
        f"staleness {row['staleness']:.2f} (needed {row['staleness_needed']:.2f}), "
        f"wasted {row['wasted']:.3f}, first batches {row['first_batches']:.3f}, "
        f"plan {row['window']}/{row['share']}, best {row['best_window']}/{row['best_share']}"
    )


if __name__ == "__main__":
    sys.exit(main())
