"""Drafting, measured: tokens per CPU-second with drafts against the same model without.

Both sides run in one process, an engine each, and take turns of a tenth of a second until both have
done the same work: they sample the same number of tokens for each request, or the benchmark fails. A
figure is the median over rounds of the ratio within a round, after one round that is not counted (the
warm-up, in which gate and windows get to know the load; its ratio is printed too). Unless said
otherwise the other side is vLLM's own sampler in an engine built without drafting; like ours it keeps
log-probabilities and draws each request from its own seed.

- greedy: chain model, greedy, history holds the same outputs: every draft is right, an upper bound.
- sampled: the demo's policy at temperature 1, groups of 8 with fresh seeds under the weights of one
  epoch of a real run, history = the 8 responses of the epoch before.
- unhelpful: least of (a) the chain model at temperature 1 with a scale at which chains break off,
  (b) unseen prompts of the policy, no history, groups of one; against vLLM's own sampler, as
  keyed_undrafted is. The gate has learned in the warm-up round, which is not counted, that these loads do
  not pay. unhelpful_to_keyed: the same against the keyed sampler of an engine without drafting.
- no_history: as (b), drafting engine against the undrafted one with the same keyed sampler.
- keyed_undrafted: the keyed sampler without drafts on (b).

    .venv/bin/python benchmarks/drafting.py [--pairs N]

It first trains the demo for `--steps` steps, two epochs or more, in a scratch folder; no group is left out of
its batches, so they are all of the history. The last line is JSON. The exit status is 1 when a request got
other tokens with drafts than without.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from antiphon.benchmarks.parts.drafting.bench import (
    Bench,
    Comparison,
    GroupWork,
    LoadResult,
    RecordedRun,
    compare,
    greedy_work,
    identical,
    open_bench,
    run_load,
    sampled_work,
    unseen_work,
    wandering_work,
    with_lengths,
)
from antiphon.benchmarks.parts.drafting.chain_model import build_chain_model
from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.drafting.statistics import drafting_rates
from antiphon.services.rollout.engine.environment import child_environment

SAMPLED_PROMPTS = {4: 6, 16: 16, 64: 32}
"""Concurrency -> groups of eight in one run of the load; about a second undrafted."""
UNSEEN_PROMPTS = {1: 24, 4: 64, 16: 96, 64: 192}
WANDERING_PROMPTS = {1: 16, 4: 48, 16: 64, 64: 128}
"""Concurrency -> requests in one run of the load; with fewer, a run is over before it can be timed."""
WANDERING_SCALE = 9.0
"""The next token of a chain has probability 0.5, so what was said before hardly recurs."""
WANDERING_TOKENS = 48
GREEDY = {4: (1, 16), 64: (4, 32)}
"""Concurrency -> (times each prompt is asked, prompts)."""
GREEDY_PROMPTS, GREEDY_MEDIAN = 32, 180.0
"""Chains of the greedy load and their median length, tokens: about a worked answer to a school problem."""


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=24, help="learner steps of the run that is made")
    parser.add_argument("--prompts", type=int, default=256, help="of an epoch of that run (default 256)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=("greedy", "sampled", "unhelpful"), default=None)
    arguments = parser.parse_args()
    if "ANTIPHON_BENCHMARK_CHILD" not in os.environ:
        # OpenMP reads its settings when a process starts.
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            {**child_environment(1), "ANTIPHON_BENCHMARK_CHILD": "1"},
        )
    with scratch_home() as scratch:
        train(scratch, arguments.steps, arguments.prompts)
        result = Report(scratch, arguments).measure()
    share = result["identical_share"]
    violated = [] if share == 1 else [f"{share:.4%} of the requests got the same tokens with drafts, not all"]
    return finish(result, record=arguments.record, violated=violated)


def train(home: Path, steps: int, prompts: int) -> None:
    """Train the demo for `steps` steps: 8 are an epoch of 256 prompts."""
    overrides = [f"run.steps={steps}", f"environment.train_size={prompts}"]
    overrides += ["evaluation.interval=0", "evaluation.prompts=32", "loop.filter=none"]
    job = run_job(home, PROJECT / "examples" / "quickstart.yaml", overrides, "run", 1200)
    print(f"a run of {steps} steps took {job.seconds:.0f} s")


class Report:
    """Everything one call measures."""

    def __init__(self, home: Path, arguments: argparse.Namespace) -> None:
        self._home = home
        self._pairs = arguments.pairs
        self._wanted = arguments.only or ["greedy", "sampled", "unhelpful"]
        self._same = self._asked = 0
        self.result: dict[str, Any] = {"pairs": arguments.pairs}

    def measure(self) -> dict[str, Any]:
        """Run all loads and return what was measured."""
        with tempfile.TemporaryDirectory() as folder:
            if "greedy" in self._wanted:
                self._greedy(Path(folder) / "chain")
            if "unhelpful" in self._wanted:
                self._wandering(Path(folder) / "wandering")
            if {"sampled", "unhelpful"} & set(self._wanted):
                self._policy()
        if self._asked:
            self.result["identical_share"] = self._same / self._asked
            self.result["identical_requests"] = self._asked
        return self.result

    def _greedy(self, folder: Path) -> None:
        model = build_chain_model(prompts=GREEDY_PROMPTS, median_length=GREEDY_MEDIAN)
        bench = self._chain_bench(model.save(folder))
        for concurrency, (repeats, prompts) in GREEDY.items():
            work = greedy_work(model, repeats, prompts)
            self._load("greedy", bench, work, concurrency, native_alike=True)
        bench.close()

    def _wandering(self, folder: Path) -> None:
        model = build_chain_model(scale=WANDERING_SCALE)
        bench = self._chain_bench(model.save(folder))
        for concurrency, requests in WANDERING_PROMPTS.items():
            work = wandering_work(model, bench, requests, WANDERING_TOKENS)
            self._unhelpful("unhelpful_chain", bench, work, concurrency)
        bench.close()

    def _policy(self) -> None:
        run = RecordedRun(self._home)
        epoch = run.epochs - 1
        version = int((epoch + 0.5) * len(run.prompts) / run.config.loop.prompts_per_step)
        tensors = run.weights(version)
        bench = open_bench(run.model_dir, tensors, run.config.rollout.max_model_tokens)
        if "sampled" in self._wanted:
            histories = run.histories(epoch - 1)
            self.result["history"] = {"epoch": epoch - 1, "version": version, "groups": len(histories)}
            for concurrency, prompts in SAMPLED_PROMPTS.items():
                self._load("sampled", bench, sampled_work(run, histories, prompts), concurrency)
        if "unhelpful" in self._wanted:
            for concurrency, prompts in UNSEEN_PROMPTS.items():
                work = unseen_work(run, prompts)
                self._unhelpful("unhelpful_unseen", bench, work, concurrency, keyed=True)
        bench.close()

    def _chain_bench(self, folder: Path) -> Bench:
        return open_bench(folder, load_file(folder / "model.safetensors"), 640)

    def _load(
        self, name: str, bench: Bench, work: Sequence[GroupWork], concurrency: int, native_alike: bool = False
    ) -> None:
        """Measure a load where drafts should help."""
        work = with_lengths(bench.ending, work, concurrency)
        found = compare(bench.sides(("native", "drafted"), work, concurrency), self._pairs)
        # Greedy tokens need no seeds, so vLLM's own sampler must agree as well.
        reference = found.warm_up["native"] if native_alike else run_load(bench.keyed, work, concurrency)
        self._identity(found.warm_up["drafted"], reference)
        key, ratio = f"c{concurrency}", found.ratio("drafted", "native")
        self.result.setdefault(name, {})[key] = round(ratio, 3)
        self._detail(f"{name}.{key}", found)

    def _unhelpful(
        self, name: str, bench: Bench, work: Sequence[GroupWork], concurrency: int, keyed: bool = False
    ) -> None:
        """Measure a load where drafts cannot help."""
        work = with_lengths(bench.ending, work, concurrency)
        found = compare(bench.sides(("native", "keyed", "drafted"), work, concurrency), self._pairs)
        self._identity(found.warm_up["drafted"], found.warm_up["keyed"])
        key = f"c{concurrency}"
        against = {base: found.ratio("drafted", base) for base in ("native", "keyed")}
        for least, base in (("unhelpful", "native"), ("unhelpful_to_keyed", "keyed")):
            table = self.result.setdefault(least, {})
            table[key] = round(min(table.get(key, 9.0), against[base]), 3)
        parts = self.result.setdefault(name, {})
        parts[key] = {base: round(ratio, 3) for base, ratio in against.items()}
        if keyed:
            self.result.setdefault("no_history", {})[key] = round(against["keyed"], 3)
            self.result.setdefault("keyed_undrafted", {})[key] = round(found.ratio("keyed", "native"), 3)
        self._detail(f"{name}.{key}", found)

    def _identity(self, drafted: LoadResult, reference: LoadResult) -> None:
        self._same += identical(drafted.outputs, reference.outputs)
        self._asked += len(drafted.outputs)

    def _detail(self, name: str, found: Comparison) -> None:
        """Print a line on one load and keep its numbers."""
        drafting, warm = found.drafting("drafted"), found.warm_up
        rates: Mapping[str, float] = drafting_rates(drafting)
        steps, ratios = sum(run.steps for run in found.runs["drafted"]), found.ratios("drafted", "native")
        detail = {
            "native_tokens_per_cpu_s": round(found.rate("native")),
            "drafted_tokens_per_cpu_s": round(found.rate("drafted")),
            "ratio_least": round(min(ratios), 3),
            "ratio_most": round(max(ratios), 3),
            "ratio_warm_up": round(warm["drafted"].rate / warm["native"].rate, 3),
            "acceptance": round(rates["acceptance"], 4),
            "coverage": round(rates["coverage"], 4),
            "tokens_per_pass": round(rates["tokens_per_pass"], 3),
            "drafter_ms_per_step": round(1e3 * drafting.drafter_s / steps, 4),
            "tokens": warm["drafted"].tokens,
        }
        self.result.setdefault("loads", {})[name] = detail
        if name == "sampled.c64":
            self.result |= {key: detail[key] for key in ("acceptance", "coverage", "tokens_per_pass")}
            self.result["drafter_ms_c64"] = detail["drafter_ms_per_step"]
        print(f"{name}: {found.ratio('drafted', 'native'):.3f} of native; {detail}", flush=True)


if __name__ == "__main__":
    execute(main)
