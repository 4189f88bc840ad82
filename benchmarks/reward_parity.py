"""Reward parity: the same recipe in TRL, and here without and with overlap.

For each seed four runs in turns, each with the demo's model, prompts in the same order, and the settings of
the configuration: TRL's GRPOTrainer (on-policy, one process with two threads), and this project at S=0, at
S=2 in fixed mode and at S=2 in elastic mode, as shipped. One evaluator then samples the held-out prompts
with the recorded weights of each, several times a prompt.

`s0_minus_trl` and `s2_minus_s0` are means over seeds of the paired differences at the last version, the
latter of elastic mode (`fixed_minus_s0` of fixed mode); `s2_minus_s0_low` is the lower end of its 95%
interval (Student). `best_minus_last_max` is the farthest that the last evaluation of any run of this project
lies below its best one. TRL is installed into an environment of its own; where that cannot be done, its side
is left out with the reason. With `--keep FILE` finished runs are kept there, and an interrupted measurement
goes on.

    .venv/bin/python benchmarks/reward_parity.py --seeds 5
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from antiphon.benchmarks.parts.kept import Kept
from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home, step_ends, step_spans
from antiphon.benchmarks.parts.own_environment import MissingToolError, python_with
from antiphon.benchmarks.parts.race.runs import covered, lower_end
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.warmstart.recipe import RECIPES
from antiphon.core.config import RunConfig, load_config

CONFIG = PROJECT / "examples" / "quickstart.yaml"
TRL = "trl"
TRL_PACKAGES = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "multiprocess", "xxhash")
"""Without what they depend on in turn: the project's environment has that."""
SIDES: Mapping[str, tuple[str, ...]] = {
    TRL: (),
    "s0": ("loop.max_staleness=0",),
    "s2_fixed": ("loop.max_staleness=2", "loop.mode=fixed"),
    "s2_elastic": ("loop.max_staleness=2", "loop.mode=elastic"),
}
RUN_S = 5400.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side."""

    versions: list[int]
    scores: list[float]
    """Held-out reward at these versions."""
    seconds: list[float]
    """Of the loop, until each step ended."""
    cpu_seconds: list[float]
    """Of all processes, from the loop's begin until each step ended."""
    start_s: float
    """Until the loop began."""
    generation_tokens_per_s: float = 0.0
    """Completion tokens over the seconds in which anything was sampled."""
    training_tokens_per_s: float = 0.0
    """Completion tokens trained on over the seconds of training."""


def main() -> int:
    """Run all sides with all seeds and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--samples", type=int, default=8, help="of each held-out prompt (default 8)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="the recipe (default: the demo's)")
    parser.add_argument("--keep", type=Path, default=None, help="file that keeps finished runs")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all sides")
    options = parser.parse_args()
    options.seeds = list(range(options.seeds))
    make_model(Path(load_config(options.config, options.overrides).model.path))
    kept = Kept(options.keep)
    runs: dict[str, dict[int, Run]] = {side: {} for side in options.sides}
    missing = ""
    for place, seed in enumerate(options.seeds):
        turn = place % len(options.sides)
        for side in (*options.sides[turn:], *options.sides[:turn]):
            key = [side, seed, str(options.config), options.samples, options.overrides]
            try:
                runs[side][seed] = Run(**kept.get(key, partial(run_side, side, seed, options)))
            except MissingToolError as reason:
                missing = str(reason)
                continue
            print(f"{side} seed {seed}: {[round(score, 3) for score in runs[side][seed].scores]}", flush=True)
    if missing:
        print(f"without TRL: {missing}", file=sys.stderr, flush=True)
    result = {"seeds": options.seeds, "samples_per_prompt": options.samples, "without_trl": missing}
    name = None if options.config.resolve() == CONFIG else f"reward_parity_{options.config.stem}"
    return finish(result | compare(runs), record=options.record, name=name)


def make_model(path: Path) -> None:
    """Make a base model by the recipe of its folder's name, unless it is there or no recipe has that name."""
    if not path.exists() and path.name in RECIPES:
        from antiphon.benchmarks.parts.warmstart.build import warmstart  # heavy

        print(f"making {path} first; it takes minutes", flush=True)
        warmstart(RECIPES[path.name], path, lambda done, steps, loss: None)


def run_side(side: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side once and evaluate its versions.

    Raises:
        MissingToolError: when TRL cannot be had.
    """
    words = [f"run.seed={seed}", *options.overrides]
    config = load_config(options.config, words)
    with scratch_home() as home:
        if side == TRL:
            found, weights = run_trl(home, options.config, words)
        else:
            found, weights = run_here(home, options.config, [*words, *SIDES[side]], side)
        return {**scored(config, weights, options.samples), **found}


def scored(config: RunConfig, weights: Mapping[int, Path], samples: int) -> dict[str, Any]:
    """Return versions, and the held-out reward of each."""
    from antiphon.benchmarks.parts.learning.experiment import heldout_score  # heavy

    versions = sorted(weights)
    context = multiprocessing.get_context("spawn")
    count = len(versions)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        paths = [weights[version] for version in versions]
        scores = list(pool.map(heldout_score, [config] * count, paths, [samples] * count, versions))
    return {"versions": versions, "scores": scores}


def run_here(
    home: Path, config: Path, words: Sequence[str], side: str, versions: Sequence[int] = ()
) -> tuple[dict[str, Any], dict[int, Path]]:
    """Run this project's job; return its times, and the weights of versions.

    Args:
        home: of the run.
        config: the recipe.
        words: `section.field=value` for it.
        side: label of the run.
        versions: whose weights are returned; by default those that the run evaluated.
    """
    begun = time.perf_counter()
    job = run_job(home, config, words, side, RUN_S)
    timings = job.timings()
    loop_begun = min(span["started_s"] for span in timings["stages"])
    ended = step_ends(timings)
    figures = timings["figures"]
    sampled = [(one["started_s"], one["ended_s"]) for one in timings["stages"] if one["stage"] == "reward"]
    trained_s = sum(span["ended_s"] - span["started_s"] for span in step_spans(timings))
    found = {
        "seconds": [moment - loop_begun for moment in ended],
        "cpu_seconds": [job.cpu_at(moment) - job.cpu_at(loop_begun) for moment in ended],
        "start_s": loop_begun - begun,
        "generation_tokens_per_s": figures["tokens_sampled"] / covered(sampled),
        "training_tokens_per_s": figures["tokens_trained"] / trained_s,
    }
    ledger = next((home / load_config(config, list(words)).record.ledger).glob("*/versions"))
    evaluated = versions or [entry["version"] for entry in job.metrics()["evaluations"]]
    return found, {version: ledger / f"v{version:06d}.safetensors" for version in evaluated}


def run_trl(
    home: Path, config: Path, words: Sequence[str], threads: int = 2
) -> tuple[dict[str, Any], dict[int, Path]]:
    """Run TRL; return its times, and the weights of the evaluated versions.

    Args:
        home: of the run.
        config: the recipe.
        words: `section.field=value` for it.
        threads: of TRL.

    Raises:
        MissingToolError: when it cannot be installed.
    """
    folder = home / TRL
    folder.mkdir()
    python = python_with(TRL_PACKAGES, beside_project=True)
    module = "antiphon.benchmarks.parts.parity.trl_run"
    done = subprocess.run(
        [str(python), "-P", "-m", module, str(config), str(folder), str(threads), *words],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=PROJECT,
    )
    if done.returncode != 0:
        raise SystemExit(f"TRL ended with status {done.returncode}\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    weights = {int(path.stem[1:]): path for path in folder.glob("v*.safetensors")}
    return found, weights


def compare(runs: Mapping[str, Mapping[int, Run]]) -> dict[str, Any]:
    """Return what the sides show together."""
    last = {side: {seed: run.scores[-1] for seed, run in found.items()} for side, found in runs.items()}
    found: dict[str, Any] = {
        "last": {
            side: [round(score, 4) for score in scores.values()] for side, scores in last.items() if scores
        }
    }
    for name, side, other in (
        ("s0_minus_trl", "s0", TRL),
        ("s2_minus_s0", "s2_elastic", "s0"),
        ("fixed_minus_s0", "s2_fixed", "s0"),
    ):
        pairs = [
            score - last[other][seed]
            for seed, score in last.get(side, {}).items()
            if seed in last.get(other, {})
        ]
        if pairs:
            found[name] = round(fmean(pairs), 4)
        if (low := lower_end(pairs)) is not None:
            found[f"{name}_low"] = round(low, 4)
    falls = [
        max(r.scores) - r.scores[-1] for side, seeds in runs.items() if side != TRL for r in seeds.values()
    ]
    if falls:
        found["best_minus_last_max"] = round(max(falls), 4)
    return found


if __name__ == "__main__":
    execute(main)
