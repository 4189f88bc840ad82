"""Staleness: held-out reward for each bound S and objective, against samples and against wall clock.

Against samples: the demo's recipe is trained in one process with production's trainer, objective, filter and
batch files, where each step trains on what the version exactly S steps before it sampled (see
benchmarks/learning.py), so nothing but S and the objective differ within a seed. `decoupled` clips against
the policy at the start of a step and weighs old samples; `clipped` clips against the policy that sampled.

Against wall clock: a real run of the main job for each S, with `loop.run_ahead=bound` so that it uses all of
its bound, measures seconds per step; the objective changes nothing of these. Version v of a curve is then
placed at v times that. `--clock none` leaves it out. A real elastic run is less stale than its bound, so its
reward lies between the rows of its bound and of S=0.

`rows` has for each S and objective `reward_mean`, `low` and `high` (95% interval over seeds, Student) of the
last version, the same of the paired difference to S=0 with the same objective (`against_s0`,
`against_s0_low`), the curve (`samples`, `seconds`, `rewards`: means over seeds), and
`reward_at_equal_seconds`: the curve where the fastest S ends. `falls` names the rows whose interval of
differences lies below 0 as a whole. With `--keep FILE` finished runs are kept, and an interrupted
measurement goes on.

Fails when the default S of `loop.max_staleness` falls with the default objective.

    .venv/bin/python benchmarks/staleness.py --seeds 5
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from antiphon.benchmarks.learning import CONFIG, Recipe, finished_runs
from antiphon.benchmarks.parts.kept import Kept
from antiphon.benchmarks.parts.measure import end_on_sigterm
from antiphon.benchmarks.parts.race.runs import mean_interval, run_here
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.config import RunConfig, load_config

BOUNDS = (0, 1, 2, 4, 8, 16)
OBJECTIVES = {"decoupled": "algorithm.decoupled=true", "clipped": "algorithm.decoupled=false"}
CLOCK_STEPS = 24
BY_ROW = ("reward_mean", "against_s0", "against_s0_low", "against_s0_high", "reward_at_equal_seconds")
"""Figures of a row that also stand by its name, for pages that quote them."""
RUN_S = 1800.0


def main() -> int:
    """Run every S and objective with all seeds."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=list(BOUNDS), help="S (default 0 1 2 4 8 16)"
    )
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--steps", type=int, default=60, help="learner steps (default 60)")
    parser.add_argument("--interval", type=int, default=10, help="versions between evaluations (default 10)")
    parser.add_argument("--samples", type=int, default=4, help="of each held-out prompt (default 4)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at the same time")
    parser.add_argument(
        "--clock", choices=("real", "none"), default="real", help="whether seconds are measured"
    )
    parser.add_argument("--keep", type=Path, default=None, help="file that keeps finished runs")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all")
    options = parser.parse_args()
    options.seeds = list(range(options.first, options.first + options.seeds))
    end_on_sigterm()
    names = {f"s{s}_{objective}": (s, objective) for s in options.bounds for objective in options.objectives}
    recipes = {name: Recipe(s, (OBJECTIVES[objective],)) for name, (s, objective) in names.items()}
    curves: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in names}
    for name, seed, curve in finished_runs(options, recipes):
        curves[name][seed] = curve
        print(f"{name} seed {seed}: {[round(score, 3) for score in curve['scores']]}", flush=True)
    config = load_config(CONFIG, [f"run.steps={options.steps}", *options.overrides])
    clock = {s: seconds_per_step(s, options) for s in options.bounds} if options.clock == "real" else {}
    rows = [row(s, objective, curves, clock, config) for s, objective in names.values()]
    equal_seconds(rows)
    falls = [r["name"] for r in rows if r["against_s0_high"] is not None and r["against_s0_high"] < 0]
    shipped = load_config(CONFIG)
    default = f"s{shipped.loop.max_staleness}_{'decoupled' if shipped.algorithm.decoupled else 'clipped'}"
    result = {
        "seeds": options.seeds,
        "steps": options.steps,
        "rows": rows,
        **{name: {r["name"]: r.get(name) for r in rows} for name in BY_ROW},
        "seconds_per_step": {f"s{s}": value for s, value in clock.items()},
        "falls": falls,
        "default": default,
    }
    at_size = [f"the default, {default}, falls below S=0"] if default in falls else []
    return finish(result, record=options.record, at_size=at_size)


def seconds_per_step(bound: int, options: Any) -> float:
    """Return what a step of a real run takes that uses all of its bound, seconds."""
    words = [f"run.steps={CLOCK_STEPS}", f"loop.max_staleness={bound}", "loop.run_ahead=bound"]
    words += ["evaluation.interval=0", "evaluation.prompts=1"]
    if bound + 2 > load_config(CONFIG).broadcast.snapshots_kept:
        words.append(f"broadcast.snapshots_kept={bound + 2}")
    words += options.overrides
    found = Kept(options.keep).get(["clock", words], partial(run_here, CONFIG, words, "clock", 0, RUN_S))
    print(
        f"S={bound}: {found['seconds_per_step']:.3f} s a step, staleness {found['staleness_mean']:.2f}",
        flush=True,
    )
    return round(float(found["seconds_per_step"]), 4)


def row(
    bound: int,
    objective: str,
    curves: Mapping[str, Mapping[int, Mapping[str, Any]]],
    clock: Mapping[int, float],
    config: RunConfig,
) -> dict[str, Any]:
    """Return what the runs of one S and objective show.

    Args:
        bound: S.
        objective: its name.
        curves: S and objective -> seed -> curve.
        clock: S -> seconds of a step; empty without a clock.
        config: of the runs.
    """
    name, found = f"s{bound}_{objective}", curves[f"s{bound}_{objective}"]
    reference = curves.get(f"s0_{objective}", {})
    mean, low, high = mean_interval([curve["scores"][-1] for curve in found.values()])
    pairs = [found[seed]["scores"][-1] - reference[seed]["scores"][-1] for seed in found if seed in reference]
    against, against_low, against_high = mean_interval(pairs) if pairs else (None, None, None)
    versions = next(iter(found.values()))["versions"]
    per_step = config.loop.prompts_per_step * config.loop.group_size
    line: dict[str, Any] = {
        "name": name,
        "s": bound,
        "objective": objective,
        **rounded(reward_mean=mean, low=low, high=high),
        **rounded(against_s0=against, against_s0_low=against_low, against_s0_high=against_high),
        "samples": [version * per_step for version in versions],
        "rewards": [round(fmean(c["scores"][at] for c in found.values()), 4) for at in range(len(versions))],
    }
    if bound in clock:
        line["seconds"] = [round(version * clock[bound], 2) for version in versions]
    return line


def rounded(**values: float | None) -> dict[str, float | None]:
    """Return values with four decimals; None stays."""
    return {name: None if value is None else round(value, 4) for name, value in values.items()}


def equal_seconds(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row that has a clock its reward at the moment when the fastest one ends.

    >>> rows = [{"seconds": [0, 10], "rewards": [0.0, 1.0]}, {"seconds": [0, 5], "rewards": [0.0, 0.8]}]
    >>> equal_seconds(rows); [row["reward_at_equal_seconds"] for row in rows]
    [0.5, 0.8]
    """
    timed = [row for row in rows if "seconds" in row]
    end = min((row["seconds"][-1] for row in timed), default=0.0)
    for one in timed:
        one["reward_at_equal_seconds"] = round(float(np.interp(end, one["seconds"], one["rewards"])), 4)


if __name__ == "__main__":
    sys.exit(main())
