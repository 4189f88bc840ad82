"""Learning: what each choice of the recipe costs in reward, one choice at a time, over several seeds.

The demo's recipe is trained in one process with the trainer, the objective, the filter and the batch files
of production, where each step trains on what the version `lag` steps before it sampled. So staleness is
exactly what the recipe says, whatever the machine does, and two recipes of one seed differ in nothing else.

Every version that is evaluated answers all held-out prompts several times. For each recipe: `last` is the
held-out reward at the end, `last_min` the lowest of the seeds, `fall_max` the farthest that a seed's last
evaluation lies below its best one, `against` the paired difference to the recipe `on_policy` with its
standard error. With `--keep FILE` finished runs are kept there, and an interrupted measurement goes on.

    .venv/bin/python benchmarks/learning.py --seeds 5
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from antiphon.benchmarks.parts.kept import Kept
from antiphon.benchmarks.parts.measure import PROJECT, end_on_sigterm
from antiphon.benchmarks.parts.results import benchmark_parser, finish

CONFIG = PROJECT / "examples" / "quickstart.yaml"
REFERENCE = "on_policy"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is changed in the demo's recipe."""

    lag: int = 0
    """A step trains on what the version this many steps before it sampled."""
    overrides: tuple[str, ...] = ()


RECIPES: Mapping[str, Recipe] = {
    name: Recipe(one["lag"], tuple(one["overrides"]))
    for name, one in yaml.safe_load((PROJECT / "benchmarks" / "data" / "recipes.yaml").read_text()).items()
}
"""Each is the demo's recipe with what its name says; the rest is said in docs/concepts/recipe.md."""


def main() -> int:
    """Run the recipes with all seeds."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="recipes")
    parser.add_argument("--steps", type=int, default=60, help="learner steps (default 60)")
    parser.add_argument("--interval", type=int, default=10, help="versions between evaluations (default 10)")
    parser.add_argument("--samples", type=int, default=4, help="of each held-out prompt (default 4)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at the same time")
    parser.add_argument("--keep", type=Path, default=None, help="file that keeps finished runs")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all recipes")
    options = parser.parse_args()
    options.seeds = list(range(options.first, options.first + options.seeds))
    end_on_sigterm()
    runs: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in options.only}
    for name, seed, curve in finished_runs(options, {name: RECIPES[name] for name in options.only}):
        runs[name][seed] = curve
        print(f"{name} seed {seed}: {[round(score, 3) for score in curve['scores']]}", flush=True)
    table = {name: described(found, runs.get(REFERENCE, {})) for name, found in runs.items()}
    result = {"seeds": options.seeds, "steps": options.steps, "samples": options.samples, "recipes": table}
    return finish(result, record=options.record)


def finished_runs(
    options: argparse.Namespace, recipes: Mapping[str, Recipe]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield recipe, seed and curve of each run as it ends, those that were kept first.

    Args:
        options: with `seeds`, `steps`, `interval`, `samples`, `processes`, `keep` and `overrides`.
        recipes: by name.
    """
    kept = Kept(options.keep)
    common = (f"run.steps={options.steps}", *options.overrides)
    wanted: list[tuple[str, int, list[Any]]] = []
    for seed in options.seeds:
        for name, recipe in recipes.items():
            key = [asdict(recipe), seed, common, options.interval, options.samples]
            if key in kept:
                yield name, seed, kept.found(key)
            else:
                wanted.append((name, seed, key))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {
            pool.submit(run_one, recipes[name], seed, common, options.interval, options.samples): (
                name,
                seed,
                key,
            )
            for name, seed, key in wanted
        }
        for future in as_completed(futures):
            name, seed, key = futures[future]
            yield name, seed, kept.add(key, future.result())


def run_one(recipe: Recipe, seed: int, common: Sequence[str], interval: int, samples: int) -> dict[str, Any]:
    """Run one recipe with one seed, in a process of its own."""
    from antiphon.benchmarks.parts.learning.experiment import run_recipe
    from antiphon.core.config import load_config

    config = load_config(CONFIG, [f"run.seed={seed}", *common, *recipe.overrides])
    return asdict(run_recipe(config, recipe.lag, samples, interval))


def described(found: Mapping[int, Mapping[str, Any]], reference: Mapping[int, Any]) -> dict[str, float]:
    """Return what a recipe's runs show together."""
    last = {seed: curve["scores"][-1] for seed, curve in found.items()}
    pairs = [score - reference[seed]["scores"][-1] for seed, score in last.items() if seed in reference]
    row = {
        "last": fmean(last.values()),
        "last_min": min(last.values()),
        "mean_after_half": fmean(fmean(c["scores"][len(c["scores"]) // 2 :]) for c in found.values()),
        "fall_max": max(max(c["scores"]) - c["scores"][-1] for c in found.values()),
        "trained_share": fmean(c["trained_share"] for c in found.values()),
        "gradient_norm": fmean(fmean(c["gradient_norms"][-10:]) for c in found.values()),
    }
    if pairs:
        row["against"] = fmean(pairs)
    if len(pairs) > 1:
        row["against_error"] = stdev(pairs) / len(pairs) ** 0.5
    return {name: round(value, 4) for name, value in row.items()}


if __name__ == "__main__":
    sys.exit(main())
