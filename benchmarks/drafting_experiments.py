"""Two experiments that are off by default: seeds shared between epochs, and lock-step siblings.

seeds: short real runs with `drafting.shared_seeds` at 0, 0.5 and 1 over several seeds. A sample
whose seed stays the same follows its earlier response until the policy's change moves a boundary
across its uniform number; drafts are accepted more often, and responses repeat. Printed with 95%
intervals: acceptance, tokens per pass, seconds, training reward of the last epoch, held-out pass@1.

siblings: one epoch without history under a policy of a real run, groups of eight: drafts from
nobody (none), from siblings that finished, or from siblings while they are sampled (lockstep);
tokens per CPU-second against vLLM's own undrafted sampler.

    .venv/bin/python benchmarks/drafting_experiments.py seeds [--seeds 0 1 2 3 4] [--results FILE]
    .venv/bin/python benchmarks/drafting_experiments.py siblings [--home DIR] [--pairs N]

The last line is JSON. A run takes about a minute; with --results finished ones are not repeated.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.drafting.runs import by_epoch, figures_of, interval, spell
from antiphon.benchmarks.parts.measure import print_result, scratch_home
from antiphon.services.rollout.engine.environment import child_environment

PROMPTS_PER_STEP = 32
FRACTIONS = (0.0, 0.5, 1.0)
SIBLINGS = ("none", "finished", "lockstep")
SIBLING_PROMPTS = {8: 8, 16: 12, 64: 32}
"""Concurrency -> groups of eight in one run of the load."""


def main() -> None:
    """Run the experiment that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    seeds = kinds.add_parser("seeds")
    seeds.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds.add_argument("--epochs", type=int, default=5)
    seeds.add_argument("--prompts", type=int, default=128, help="size of the prompt set, a multiple of 32")
    seeds.add_argument("--fractions", type=float, nargs="+", default=list(FRACTIONS))
    seeds.add_argument("--results", type=Path, default=None)
    siblings = kinds.add_parser("siblings")
    siblings.add_argument("--home", type=Path, help="ANTIPHON_HOME of a finished run; else one is made")
    siblings.add_argument("--run", help="id of the run (default: the newest)")
    siblings.add_argument("--steps", type=int, default=16, help="learner steps of the run that is made")
    siblings.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.kind == "seeds":
        print_result(shared_seeds(arguments))
        return
    if "ANTIPHON_BENCHMARK_CHILD" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            {**child_environment(1), "ANTIPHON_BENCHMARK_CHILD": "1"},
        )
    print_result(lockstep(arguments))


def shared_seeds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return figures by fraction of shared seeds: mean and half of the 95% interval."""
    steps_per_epoch = arguments.prompts // PROMPTS_PER_STEP
    found: dict[str, Any] = {"seeds": arguments.seeds, "epochs": arguments.epochs}
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results or Path(folder) / "results.jsonl"
        for fraction in arguments.fractions:
            runs = [
                figures_of(
                    f"shared_seeds {fraction}, seed {seed}",
                    [
                        f"run.seed={seed}",
                        f"run.steps={arguments.epochs * steps_per_epoch}",
                        f"environment.train_size={arguments.prompts}",
                        f"loop.prompts_per_step={PROMPTS_PER_STEP}",
                        f"drafting.shared_seeds={fraction}",
                        "evaluation.interval=0",
                    ],
                    results,
                )
                for seed in arguments.seeds
            ]
            later = [run["drafting"]["by_epoch"][1:] for run in runs]
            figures = {
                "acceptance": [_mean(epochs, "acceptance") for epochs in later],
                "coverage": [_mean(epochs, "coverage") for epochs in later],
                "tokens_per_pass": [_mean(epochs, "tokens_per_pass") for epochs in later],
                "gain": [run["drafting"]["gain"] for run in runs],
                "loop_s": [run["loop_s"] for run in runs],
                "last_epoch_reward": [by_epoch(run["rewards"], steps_per_epoch)[-1] for run in runs],
                "pass_after": [run["pass_after"] for run in runs],
            }
            found[f"shared_{fraction:g}"] = {name: interval(values) for name, values in figures.items()}
            told = ", ".join(f"{name} {spell(values)}" for name, values in figures.items())
            print(f"shared seeds {fraction:g}, epochs after the first: {told}", flush=True)
    return found


def lockstep(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return ratios to vLLM's own undrafted sampler by source of drafts and concurrency."""
    from antiphon.benchmarks.drafting import train
    from antiphon.benchmarks.parts.drafting.bench import (
        drafting_engine,
        open_bench,
        policy_directory,
        sampled_work,
    )
    from antiphon.benchmarks.parts.drafting.load import compare, identical
    from antiphon.benchmarks.parts.recorded_run import RecordedRun
    from antiphon.core.config_sections import DraftingSection
    from antiphon.core.drafting.statistics import drafting_rates

    result: dict[str, Any] = {"pairs": arguments.pairs}
    with scratch_home() as scratch, tempfile.TemporaryDirectory() as folder:
        run = RecordedRun(arguments.home or train(scratch, arguments.steps), arguments.run)
        version = run.middle_version(run.epochs - 1)
        tensors = run.weights(version)
        model_dir = policy_directory(run, tensors, Path(folder) / "policy")
        longest = run.config.rollout.max_model_tokens
        bench = open_bench(model_dir, tensors, longest, DraftingSection())
        for kind in SIBLINGS:
            section = DraftingSection.model_validate({"siblings": kind})
            bench.others[kind] = drafting_engine(model_dir, tensors, longest, section)
        for concurrency, prompts in SIBLING_PROMPTS.items():
            work = sampled_work(run, {}, prompts)
            found = compare(bench.sides(("native", "keyed", *SIBLINGS), work, concurrency), arguments.pairs)
            for kind in SIBLINGS:
                rates = drafting_rates(found.figures(kind))
                same = identical(found.warm_up[kind].outputs, found.warm_up["keyed"].outputs)
                line = {
                    "ratio": round(found.ratio(kind, "native"), 3),
                    "to_keyed": round(found.ratio(kind, "keyed"), 3),
                    "acceptance": round(rates["acceptance"], 3),
                    "coverage": round(rates["coverage"], 3),
                    "tokens_per_pass": round(rates["tokens_per_pass"], 3),
                    "identical_share": same / len(found.warm_up[kind].outputs),
                }
                result.setdefault(kind, {})[f"c{concurrency}"] = line
                print(f"concurrency {concurrency:3d}, siblings {kind:9s}: {line}", flush=True)
        bench.close()
    return result


def _mean(epochs: list[dict[str, float]], name: str) -> float:
    return sum(epoch[name] for epoch in epochs) / max(1, len(epochs))


if __name__ == "__main__":
    main()
