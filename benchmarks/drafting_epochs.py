"""Drafting by epoch: real runs over a fixed set of prompts, with drafting and without, over a few seeds.

Prints acceptance, coverage and tokens per pass of each epoch, and the training reward and the seconds of
the loop with and without drafting (mean and 95% interval over seeds). Drafts decide speed, never tokens
(tests/e2e/test_fixed_mode.py proves it), so rewards differ by what timing changes in elastic mode; a few
seeds cannot tell such a difference from none. The last line is JSON.

    .venv/bin/python benchmarks/drafting_epochs.py [--seeds 0 1 2] [--epochs 6] [--plot FILE]

A run takes about a minute. With `--results FILE` finished runs are kept and not repeated: one JSON
object a line, under a label that names everything the run depends on.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home

RATES = ("acceptance", "coverage", "tokens_per_pass")
PROMPTS_PER_STEP = 32

RUN_TIMEOUT_S = 1800.0

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""0.975 quantiles of Student's t for 1 to 9 degrees of freedom; beyond, the last one is kept."""


def main() -> None:
    """Run, tabulate and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=128, help="size of the prompt set, a multiple of 32")
    parser.add_argument("--results", type=Path, default=None, help="file of finished runs, to continue with")
    parser.add_argument("--plot", type=Path, default=None, help="PNG of the drafting rates by epoch")
    arguments = parser.parse_args()
    if arguments.prompts % PROMPTS_PER_STEP:
        parser.error(f"--prompts={arguments.prompts} must be a multiple of {PROMPTS_PER_STEP}")
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results or Path(folder) / "results.jsonl"
        runs = {
            on: [_run(seed, on, arguments.epochs, arguments.prompts, results) for seed in arguments.seeds]
            for on in (True, False)
        }
    result = summarise(runs, arguments.prompts // PROMPTS_PER_STEP)
    result["seeds"] = arguments.seeds
    print_table(result)
    if arguments.plot is not None:
        plot(result, arguments.plot)
    print(json.dumps(result))


def summarise(runs: dict[bool, list[dict[str, Any]]], steps_per_epoch: int) -> dict[str, Any]:
    """Return rates by epoch over seeds, and rewards with and without drafting."""
    drafted = [run["drafting"].get("by_epoch", []) for run in runs[True]]
    rewards = {on: [by_epoch(run["rewards"], steps_per_epoch) for run in found] for on, found in runs.items()}
    whole = min(len(run) for found in rewards.values() for run in found)
    # Groups sampled ahead begin one more epoch; it is left out, as it is not whole.
    epochs = min(whole, *(len(rates) for rates in drafted))
    rates = {
        name: [interval([run[e][name] for run in drafted]) for e in range(epochs)]
        for name in (*RATES, "history_share")
    }
    by_seed = {name: [[run[e][name] for e in range(epochs)] for run in drafted] for name in RATES}
    last = {on: [run[whole - 1] for run in found] for on, found in rewards.items()}
    difference = [one - other for one, other in zip(last[True], last[False], strict=True)]
    return {
        **rates,
        "by_seed": by_seed,
        "reward_with": [interval([run[e] for run in rewards[True]]) for e in range(whole)],
        "reward_without": [interval([run[e] for run in rewards[False]]) for e in range(whole)],
        "last_epoch_reward_difference": interval(difference),
        "pass_after_with": interval([run["pass_after"] for run in runs[True]]),
        "pass_after_without": interval([run["pass_after"] for run in runs[False]]),
        "loop_s_with": interval([run["loop_s"] for run in runs[True]]),
        "loop_s_without": interval([run["loop_s"] for run in runs[False]]),
        "last_epoch_rewards": {"with": last[True], "without": last[False]},
    }


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


def print_table(result: dict[str, Any]) -> None:
    """Print one line per epoch."""
    print("epoch  acceptance  coverage  tokens/pass  history   reward with   reward without")
    for epoch in range(len(result["reward_with"])):
        cells = [
            f"{result[name][epoch][0]:.3f}" if epoch < len(result[name]) else "-"
            for name in (*RATES, "history_share")
        ]
        with_, without = result["reward_with"][epoch], result["reward_without"][epoch]
        print(
            f"{epoch:5d} {cells[0]:>11s} {cells[1]:>9s} {cells[2]:>12s} {cells[3]:>8s}   "
            f"{with_[0]:.3f} ± {with_[1]:.3f}  {without[0]:.3f} ± {without[1]:.3f}"
        )
    for name in ("loop_s_with", "loop_s_without", "last_epoch_reward_difference"):
        print(f"{name}: {result[name][0]:.3f} ± {result[name][1]:.3f}")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw acceptance and coverage, and tokens per pass, over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.0, 3.2), layout="constrained")
    _lines(left, result, ("acceptance", "coverage"))
    left.set_ylim(0.0, 1.0)
    left.set_ylabel("share")
    left.legend(frameon=False)
    _lines(right, result, ("tokens_per_pass",))
    right.set_ylim(bottom=0.0)
    right.set_ylabel("tokens per forward pass")
    figure.suptitle("Drafts from history in real runs: one thin line a seed, the mean thick", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _lines(axes: Any, result: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        means = [mean for mean, _ in result[name]]
        (line,) = axes.plot(range(len(means)), means, marker="o", linewidth=2.2, label=name)
        for values in result["by_seed"][name]:
            axes.plot(range(len(values)), values, color=line.get_color(), linewidth=0.8, alpha=0.6)
    axes.set_xlabel("epoch")
    axes.set_xticks(range(len(result[names[0]])))
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _run(seed: int, on: bool, epochs: int, prompts: int, results: Path) -> dict[str, Any]:
    overrides = [
        f"run.seed={seed}",
        f"run.steps={epochs * prompts // PROMPTS_PER_STEP}",
        f"environment.train_size={prompts}",
        f"loop.prompts_per_step={PROMPTS_PER_STEP}",
        f"drafting.enabled={str(on).lower()}",
        "evaluation.interval=0",
    ]
    return _finished_run(f"seed {seed}, drafting {'on' if on else 'off'}", overrides, results)


def _finished_run(label: str, overrides: Sequence[str], results: Path) -> dict[str, Any]:
    """Run the demo's configuration with `overrides`, unless `results` knows it, and return its numbers.

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
            "loop_s": round(timings["figures"]["wall_s"], 2),
            "rewards": _rewards(home),
            "pass_before": metrics["pass_before"],
            "pass_after": metrics["pass_after"],
            "drafting": timings.get("drafting", {}),
        }
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    print(f"{time.strftime('%H:%M:%S')} {label}: {job.seconds:.0f} s", flush=True)
    return found


def _rewards(home: Path) -> list[float]:
    """Return the mean reward of all rewarded trajectories of each step, filtered groups included."""
    from antiphon.lineage.run_log import read_steps
    from antiphon.runs.finding import find_run

    return [line["batch"]["reward_mean"] for line in read_steps(find_run(home, None)) if line["batch"]]


def _known(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    text = results.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


if __name__ == "__main__":
    main()
