"""Drafting by epoch: real runs over a fixed set of prompts, with drafting and without, over a few seeds.

Prints acceptance, coverage and tokens per pass of each epoch, and the training reward and the seconds of
the loop with and without drafting (mean and half of the 95% interval over seeds). Drafts decide speed, never
tokens (tests/e2e/test_fixed_mode.py proves it), so rewards differ by what timing changes in elastic mode; a
few seeds cannot tell such a difference from none. The last line is JSON.

A run takes about a minute. With `--results FILE` finished runs are kept and not repeated. `--plot FILE` draws
the rates over the epochs: one thin line a seed, the mean thick.

    .venv/bin/python benchmarks/drafting_epochs.py [--seeds 0 1 2] [--epochs 6]
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from antiphon.benchmarks.parts.kept import Kept
from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home
from antiphon.benchmarks.parts.race.runs import half_interval
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.lineage.run_log import read_steps
from antiphon.runs.finding import find_run

RATES = ("acceptance", "coverage", "tokens_per_pass", "history_share")
PER_STEP = 32
RUN_S = 1800.0


def main() -> int:
    """Run, tabulate and draw."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=128, help="size of the prompt set, a multiple of 32")
    parser.add_argument("--results", type=Path, default=None, help="file of finished runs, to continue with")
    parser.add_argument("--plot", type=Path, default=None, help="PNG of the drafting rates by epoch")
    options = parser.parse_args()
    if options.prompts % PER_STEP:
        parser.error(f"--prompts={options.prompts} must be a multiple of {PER_STEP}")
    kept, runs = Kept(options.results), dict[bool, list[dict[str, Any]]]()
    for on in (True, False):
        for seed in options.seeds:
            words = [
                f"run.seed={seed}",
                f"run.steps={options.epochs * options.prompts // PER_STEP}",
                f"environment.train_size={options.prompts}",
                f"loop.prompts_per_step={PER_STEP}",
                f"drafting.enabled={str(on).lower()}",
                "evaluation.interval=0",
            ]
            runs.setdefault(on, []).append(kept.get(words, partial(run_once, words)))
            print(f"seed {seed}, drafting {'on' if on else 'off'}: done", flush=True)
    result = summarise(runs, options.prompts // PER_STEP)
    for epoch, values in enumerate(zip(*(result[name] for name in RATES), strict=True)):
        shown = ", ".join(f"{name} {mean:.3f}" for name, (mean, _) in zip(RATES, values, strict=True))
        print(f"epoch {epoch}: {shown}")
    if options.plot is not None:
        plot(result, options.plot)
    return finish({**result, "seeds": options.seeds}, record=options.record)


def run_once(words: Sequence[str]) -> dict[str, Any]:
    """Run the demo's configuration and return its numbers; rewards are of all trajectories of each step."""
    with scratch_home() as home:
        config = PROJECT / "examples" / "quickstart.yaml"
        job = run_job(home, config, ["record.mlflow=false", *words], "run", RUN_S)
        timings = job.timings()
        steps = read_steps(find_run(home, None))
        return {
            "loop_s": round(timings["figures"]["wall_s"], 2),
            "rewards": [line["batch"]["reward_mean"] for line in steps if line["batch"]],
            "pass_after": job.metrics()["pass_after"],
            "drafting": timings.get("drafting", {}),
        }


def summarise(runs: Mapping[bool, Sequence[Mapping[str, Any]]], steps_per_epoch: int) -> dict[str, Any]:
    """Return rates by epoch over seeds, and rewards with and without drafting."""
    drafted = [run["drafting"].get("by_epoch", []) for run in runs[True]]
    names = {True: "with", False: "without"}
    rewards = {on: [by_epoch(run["rewards"], steps_per_epoch) for run in same] for on, same in runs.items()}
    whole = min(len(run) for same in rewards.values() for run in same)
    # Groups sampled ahead begin one more epoch; it is left out, as it is not whole.
    epochs = range(min(whole, *(len(rates) for rates in drafted)))
    last = {names[on]: [run[whole - 1] for run in same] for on, same in rewards.items()}
    result: dict[str, Any] = {
        name: [interval([run[epoch][name] for run in drafted]) for epoch in epochs] for name in RATES
    }
    result["by_seed"] = {name: [[run[e][name] for e in epochs] for run in drafted] for name in RATES[:3]}
    for on, said in names.items():
        result[f"reward_{said}"] = [interval([run[e] for run in rewards[on]]) for e in range(whole)]
        for name in ("pass_after", "loop_s"):
            result[f"{name}_{said}"] = interval([run[name] for run in runs[on]])
    differences = [one - other for one, other in zip(last["with"], last["without"], strict=True)]
    return {**result, "last_epoch_reward_difference": interval(differences), "last_epoch_rewards": last}


def by_epoch(rewards: Sequence[float], steps_per_epoch: int) -> list[float]:
    """Return the mean reward of each whole epoch."""
    whole = len(rewards) // steps_per_epoch
    return [fmean(rewards[e * steps_per_epoch : (e + 1) * steps_per_epoch]) for e in range(whole)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half of the 95% interval (Student); 0 for a single value."""
    return fmean(values), half_interval(values) if len(values) > 1 else 0.0


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw acceptance and coverage, and tokens per pass, over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.0, 3.2), layout="constrained")
    for place, name in zip((0, 0, 1), RATES[:3], strict=True):
        (line,) = axes[place].plot([mean for mean, _ in result[name]], marker="o", linewidth=2.2, label=name)
        for values in result["by_seed"][name]:
            axes[place].plot(values, color=line.get_color(), linewidth=0.8, alpha=0.6)
    for one in axes:
        one.set(xlabel="epoch", ylim=(0.0, None))
        one.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
