"""Versus TRL: wall and CPU seconds to the same held-out reward, here and with TRL's GRPOTrainer.

Both sides train the demo's base model on the same prompts in the same order, with the same rewards, groups,
token budget, learning rate and loss, in turns for each seed: this project as shipped, with Prefect and
MLflow, and TRL on-policy in one process, once with two threads and once with one, which wait passively; of
all settings of TRL the best one counts for each figure. The filter of this side leaves out groups that give
no gradient and divides by all, so updates are those of TRL, which trains on all.

`--dtypes` are the precisions of the engine here (`model.dtype`; the learner stays float32, and so does TRL).
The first one gives the figures, and each further one gives the same below its own name. On a processor that
multiplies bfloat16 by itself (AMX) `antiphon tune` finds it faster.

TRL samples with transformers' generate: it supports vLLM up to 0.31, and its coupling fails beside the vLLM
0.32 of this project.

One evaluator samples the held-out prompts with recorded weights of every few versions. The moment at which a
side reaches a level lies on a straight line between two evaluations. Seconds count from the loop's begin:
start-up stands apart (`start_s`), and evaluations cost neither side anything. CPU seconds are those of all
processes of a side.

`wall_seconds_ratio` and `cpu_seconds_ratio` are TRL over this project, the median of the seeds, at the level
where it is smallest; `..._by_level` has each, and a level has none where a seed never reached it with TRL.
`generation_ratio` and `training_ratio` compare completion tokens per second: sampled, over the seconds in
which anything was sampled; trained on, over the seconds of training. Here both happen at once on the same
cores.

Fails when this project does not reach a level that TRL reaches. TRL is installed into an environment of its
own; where that cannot be done, the ratios are null and `without_trl` says why. With `--keep FILE` finished
runs are kept, and an interrupted measurement goes on.

    .venv/bin/python benchmarks/versus_trl.py --seeds 3
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from antiphon.benchmarks.parts.kept import Kept
from antiphon.benchmarks.parts.measure import PROJECT, scratch_home
from antiphon.benchmarks.parts.own_environment import MissingToolError
from antiphon.benchmarks.parts.race.runs import reached_at, seconds_at
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.reward_parity import Run, make_model, run_here, run_trl, scored
from antiphon.core.config import load_config
from antiphon.models.codec import resolve_model_path

CONFIG = PROJECT / "examples" / "quickstart.yaml"
LEVELS = (0.7, 0.8, 0.85)
KINDS = {"wall": "seconds", "cpu": "cpu_seconds"}
"""Name of a ratio -> the seconds of a run that it compares."""


def main() -> int:
    """Run both sides with all seeds and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[2, 1], help="the best counts")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--interval", type=int, default=3, help="versions between evaluations (default 3)")
    parser.add_argument("--samples", type=int, default=4, help="of each held-out prompt (default 4)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="the recipe (default: the demo's)")
    parser.add_argument("--keep", type=Path, default=None, help="file that keeps finished runs")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for both sides")
    options = parser.parse_args()
    make_model(Path(load_config(options.config, options.overrides).model.path))
    kept, missing = Kept(options.keep), ""
    here = [Side(0, dtype) for dtype in options.dtypes]
    there = [Side(threads, "float32") for threads in options.trl_threads]
    runs: dict[Side, dict[int, Run]] = {side: {} for side in (*here, *there)}
    seeds = list(range(options.seeds))
    for seed in seeds:
        for side in sorted(runs, reverse=bool(seed % 2)):
            key = [*side, seed, str(options.config), options.interval, options.samples, options.overrides]
            try:
                run = Run(**kept.get(key, partial(run_side, side, seed, options)))
            except MissingToolError as reason:
                missing = str(reason)
                continue
            runs[side][seed] = run
            scores, took = [round(score, 3) for score in run.scores], (run.seconds[-1], run.cpu_seconds[-1])
            print(f"{side}, seed {seed}: {scores}, {took[0]:.1f} s, {took[1]:.1f} CPU-s", flush=True)
    theirs = {
        seed: found for seed in seeds if (found := [runs[side][seed] for side in there if seed in runs[side]])
    }
    ours = {side.dtype: runs[side] for side in here}
    result, samples, violated = compare_each(ours, theirs, LEVELS)
    result |= {"seeds": seeds, "trl_threads": options.trl_threads, "without_trl": missing}
    result["dtype"] = options.dtypes[0]
    return finish(result, record=options.record, samples=samples, at_size=violated)


class Side(NamedTuple):
    """Who trains, and how."""

    threads: int
    """Of TRL; 0 stands for this project, whose configuration says them."""
    dtype: str

    def __str__(self) -> str:
        who = f"TRL, {self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else "Antiphon"
        return f"{who}, {self.dtype}"


def run_side(side: Side, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side once and evaluate its versions.

    Raises:
        MissingToolError: when TRL cannot be had.
    """
    words = [f"run.seed={seed}", *options.overrides]
    config = load_config(options.config, words)
    last = config.run.steps
    versions = sorted({*range(options.interval, last, options.interval), last})
    with scratch_home() as home:
        if side.threads:
            words.append(f"evaluation.interval={options.interval}")
            found, weights = run_trl(home, options.config, words, side.threads)
        else:
            words += ["evaluation.interval=0", "evaluation.prompts=1", f"model.dtype={side.dtype}"]
            found, weights = run_here(home, options.config, words, "antiphon", versions)
        weights[0] = Path(resolve_model_path(config.model.path)) / "model.safetensors"
        return {**scored(config, weights, options.samples), **found}


def compare_each(
    ours: Mapping[str, Mapping[int, Run]], theirs: Mapping[int, Sequence[Run]], levels: Sequence[float]
) -> tuple[dict[str, Any], dict[str, list[float]], list[str]]:
    """Return what `compare` does of the first precision, and of the others below their names."""
    first, *others = ours
    result, samples, violated = compare(ours[first], theirs, levels)
    for dtype in others:
        figures, values, broken = compare(ours[dtype], theirs, levels)
        result |= {f"{dtype}.{name}": value for name, value in figures.items()}
        samples |= {f"{dtype}.{name}": value for name, value in values.items() if not name.startswith("trl_")}
        violated += [f"{dtype}: {sentence}" for sentence in broken]
    return result, samples, violated


def compare(
    ours: Mapping[int, Run], theirs: Mapping[int, Sequence[Run]], levels: Sequence[float]
) -> tuple[dict[str, Any], dict[str, list[float]], list[str]]:
    """Return result, samples and violated promises; runs are by seed, those of TRL with all its settings."""
    samples: dict[str, list[float]] = {}
    violated: list[str] = []
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    for level in levels:
        for name, kind in KINDS.items():
            reached = [(time_to(level, [one], kind), time_to(level, others, kind)) for one, others in pairs]
            both = [(here, there) for here, there in reached if here is not None and there is not None]
            if name == "wall" and any(here is None and there is not None for here, there in reached):
                violated.append(f"held-out reward {level:g} was reached by TRL and not here")
            if both:
                samples[f"antiphon_{name}_seconds_to.{level:g}"] = [here for here, _ in both]
                samples[f"trl_{name}_seconds_to.{level:g}"] = [there for _, there in both]
            if both and len(both) == len(pairs):
                samples[f"{name}_seconds_ratio_by_level.{level:g}"] = [there / here for here, there in both]
    for side, found in (("antiphon", [[run] for run in ours.values()]), ("trl", list(theirs.values()))):
        if found:
            samples |= {
                f"{side}_generation_tokens_per_s": [max(r.generation_tokens_per_s for r in s) for s in found],
                f"{side}_training_tokens_per_s": [max(r.training_tokens_per_s for r in s) for s in found],
                f"{side}_start_s": [min(r.start_s for r in s) for s in found],
                f"{side}_last_reward": [max(r.scores[-1] for r in s) for s in found],
                f"{side}_loop_s": [min(r.seconds[-1] for r in s) for s in found],
                f"{side}_loop_cpu_s": [min(r.cpu_seconds[-1] for r in s) for s in found],
            }
    samples = {name: [round(value, 4) for value in values] for name, values in samples.items()}
    result: dict[str, Any] = {}
    for name in KINDS:
        ratios = [samples.get(f"{name}_seconds_ratio_by_level.{level:g}") for level in levels]
        result[f"{name}_seconds_ratio"] = min((median(found) for found in ratios if found), default=None)
    for name in ("generation", "training"):
        here, there = (samples.get(f"{side}_{name}_tokens_per_s") for side in ("antiphon", "trl"))
        result[f"{name}_ratio"] = round(median(here) / median(there), 4) if here and there else None
    return result, samples, violated


def time_to(level: float, runs: Sequence[Run], kind: str) -> float | None:
    """Return the least seconds of a kind until one of the runs reached a level.

    None when none ever did, or began above it.
    """
    versions = [(reached_at(level, run.versions, run.scores), run) for run in runs]
    return min((seconds_at(at, getattr(run, kind)) for at, run in versions if at), default=None)


if __name__ == "__main__":
    execute(main)
