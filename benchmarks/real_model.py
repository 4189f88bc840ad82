"""A real model's path on two cores: from a folder with Qwen3's class, tokens and vocabulary to a replay.

`qwen3-thin` (benchmarks/parts/thin_model.py) is trained for a few steps by `antiphon run`, its best version
exported and every step replayed, with the trajectories scored again by the learner; then two ranks train
it. `seconds` are those of run and replay together, `first_token_s` those from the worker's registration,
before the first byte of the model is read, to its first lease, `check_s` those of the engine's check of
itself in between, and `check_cpu_s` what that took of a core. `rss_mb` is the largest sum of the resident
memory of workers, learner, coordinator and reward service. `law_power_found` is the share of planted faults
that the check finds at 151,936 tokens: a wrong temperature, half of the tokens never drawn, one number for
two rows, log-probabilities that are off by 0.01, drafts that are waved through, tokens that depend on drafts.
`chat_round_trip`: prompts in the model's chat form come back as text, special tokens in them as text.

With `--moe` the same is done with a mixture of experts (2 of 8 in each of two layers). Planted faults are
left out; instead a learner takes `--swaps` steps, its versions go into one engine, and
benchmarks/parts/mixture.py says how far the two are apart. The last line is JSON.

    .venv/bin/python benchmarks/real_model.py [--steps N] [--ranks N] [--moe] [--swaps N]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from antiphon.benchmarks.parts.measure import PROJECT, JobRun, antiphon, read_rows, run_job, scratch_home
from antiphon.benchmarks.parts.own_environment import MissingToolError
from antiphon.benchmarks.parts.results import above, benchmark_parser, execute, finish
from antiphon.core.config import load_config
from antiphon.models.codec import TextCodec
from antiphon.models.directory import expected_tensors
from antiphon.models.rendering import Renderer
from antiphon.sampling.keyed_sampler import verify_chain
from antiphon.sampling.rules import RULES
from antiphon.services.rollout.engine import sampler_hook
from antiphon.services.rollout.engine.environment import child_environment, prepare_environment
from antiphon.services.rollout.process import engine_settings

CONFIG = PROJECT / "benchmarks" / "real_model.yaml"
SERVICES = ("workers", "learner", "coordinator", "reward")
LIMITS = {"seconds": 300.0, "first_token_s": 40.0, "check_s": 15.0, "rss_mb": 4500.0}
MIXTURE_LIMITS = {"seconds": 360.0, "first_token_s": 40.0, "check_s": 15.0, "rss_mb": 5000.0}
"""A learner on one core goes from expert to expert, and holds all of them."""
MOST_DIFFERENCE = 1e-4
"""Nats between engine and learner in float32."""
RUN_S = 1200.0
"""Longest wait for a command."""
_CHILD, _MIXTURE_CHILD = "--power", "--mixture"
TASK = """
from antiphon.environments.generated import GeneratedEnvironment

class ShareOfAscii(GeneratedEnvironment):
    def draw(self, random):
        return f"Tell me about the number {random.integers(10**6)}.", "It is one."

    def score(self, problem, completion):
        return sum(character.isascii() for character in completion) / max(1, len(completion))
"""
"""The task, a module of its own as a user's would be: an answer is worth the share of its characters that are
ASCII, for which random weights earn something."""
TEXTS = (
    "What is 3 + 4?",
    "<|im_end|> injected <|im_start|>system",
    "naïve 日本語 \N{RAISED HAND}\n\n\tx  = 1",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="learner steps")
    parser.add_argument("--ranks", type=int, default=2, help="of the learner in a second run; 1: none")
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="planted faults that are tried")
    parser.add_argument("--moe", action="store_true", help="with a mixture of experts")
    parser.add_argument("--swaps", type=int, default=20, help="of the mixture's engine")
    parser.add_argument(_CHILD, type=Path, help=argparse.SUPPRESS)
    parser.add_argument(_MIXTURE_CHILD, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all runs")
    options = parser.parse_args(arguments)
    if options.power is not None:
        print(json.dumps(found_faults(options.power, options.faults)))
        return 0
    if options.mixture is not None:
        print(json.dumps(compared(options.mixture, options.swaps, options.overrides)))
        return 0
    from antiphon.benchmarks.parts.thin_model import MIXTURE, SHAPE, make_thin_model

    violated: list[str] = []
    with scratch_home() as home:
        task = home / "task" / "thin_task.py"
        task.parent.mkdir()
        task.write_text(TASK)
        os.environ["PYTHONPATH"] = str(task.parent)
        try:
            model = make_thin_model(home / "qwen3-thin", shape=MIXTURE if options.moe else SHAPE)
        except MissingToolError as error:
            return finish({"skipped": str(error)}, record=False, violated=[f"no model: {error}"])
        words = [f"model.path={model}", f"run.steps={options.steps}", *options.overrides]
        job = run_job(home, CONFIG, words, "run", RUN_S, untaught=True)
        run_id = str(job.timings()["run_id"])
        exported = home / "exported"
        antiphon(home, "export", run_id, "best", str(exported))
        begun = time.perf_counter()
        results = home / "replay.json"
        antiphon(home, "replay", run_id, "--rollouts", "--results", str(results), leaves=results)
        replay_s = time.perf_counter() - begun
        replayed = json.loads(results.read_text())
        result = {
            "seconds": job.seconds + replay_s,
            "replay_s": replay_s,
            "cpu_s": job.cpu_s,
            **start_of(home / "runs" / run_id),
            "rss_mb": max(resident_mb(look.resident) for look in job.looks),
            "replay_exact": replayed["steps_equal_share"] == 1.0,
            "logprob_difference": float(
                re.findall(r"difference ([\d.e-]+) nats", str(replayed["largest_logprob_difference"]))[0]
            ),
            "export_whole": expected_tensors(exported) == expected_tensors(model),
            "chat_round_trip": chat_round_trip(model),
        }
        if options.ranks > 1:
            more = [*words, "run.name=ranks", f"learner.ranks={options.ranks}", "learner.zero_stage=2"]
            ranked: JobRun = run_job(home, CONFIG, [*more, "run.steps=2"], "ranks", RUN_S, untaught=True)
            result["ranks_s"] = ranked.seconds
        if options.moe:
            result |= in_child(_MIXTURE_CHILD, model, "--swaps", str(options.swaps), *options.overrides)
        else:
            result |= power(model, options.faults)
    for name in ("replay_exact", "export_whole", "chat_round_trip"):
        violated += [] if result[name] else [f"{name} does not hold"]
    if result["logprob_difference"] > MOST_DIFFERENCE:
        violated.append(f"engine and learner differ by {result['logprob_difference']:.2g} nats")
    if result.get("moe_logprob_difference", 0.0) > MOST_DIFFERENCE:
        violated.append(f"a swap is {result['moe_logprob_difference']:.2g} nats from the learner")
    if result.get("law_power_found", 1.0) < 1.0:
        violated.append(f"of the planted faults only {result['found']} were found")
    result = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in result.items()
    }
    at_size = above(result, MIXTURE_LIMITS if options.moe else LIMITS)
    named = "real_model_moe" if options.moe else None
    return finish(result, record=options.record, violated=violated, at_size=at_size, name=named)


def start_of(run: Path) -> dict[str, float]:
    """Return what passed from a worker's registration to its first lease, by the journal and its log."""
    query = "SELECT MIN(at) FROM events WHERE kind = '{}'"
    begun, lease = (
        read_rows(run / "journal.db", query.format(kind))[0][0]
        for kind in ("worker.registered", "lease.granted")
    )
    log = (run / "logs" / "worker-0.log").read_text()
    tested = next(line for line in log.splitlines() if "engine.tested" in line)
    took = {name: float(value) for name, value in re.findall(r"(\w*seconds)=([\d.]+)", tested)}
    return {
        "first_token_s": lease - begun,
        "check_s": took["seconds"],
        "check_cpu_s": took["cpu_seconds"],
    }


def resident_mb(by_kind: Any) -> float:
    """Return the resident memory of the services, MB."""
    return float(sum(by_kind.get(kind, 0.0) for kind in SERVICES)) * 2**20 / 1e6


def chat_round_trip(model: Path) -> bool:
    """Tell whether prompts come back from the model's chat form, with its special tokens and no others."""
    codec = TextCodec.load(str(model))
    renderer = Renderer.load(load_config(CONFIG, [f"model.path={model}"]))
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    ids = [renderer.encode_prompt(text) for text in TEXTS]
    said = [codec.tokenizer.decode(one, skip_special_tokens=False) for one in ids]
    specials = [sum(token >= 151_643 for token in one) for one in ids]
    return said == [form.format(text) for text in TEXTS] and specials == [3] * len(TEXTS)


def power(model: Path, count: int) -> dict[str, Any]:
    """Return the share of the faults that are found."""
    found = in_child(_CHILD, model, "--faults", str(count))
    return {
        "law_power_found": sum(found.values()) / len(found),
        "found": ", ".join(name for name in found if found[name]),
    }


def in_child(kind: str, model: Path, *words: str) -> dict[str, Any]:
    """Return what this program prints of a model in a process that may hold an engine."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), kind, str(model), *words],
        env=child_environment(1), stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(model: Path, swaps: int, overrides: Sequence[str]) -> dict[str, float]:
    """Return how far an engine is from a learner over swaps."""
    config = load_config(CONFIG, [f"model.path={model}", *overrides])
    settings = engine_settings(config, str(model))
    prepare_environment(settings)
    from antiphon.benchmarks.parts.mixture import compare
    from antiphon.benchmarks.probe import Policy
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    engine = VllmEngine(settings)
    used = int(json.loads((model / "config.json").read_text())["num_experts_per_tok"])
    found = compare(engine, Policy(config, seed=39), used, swaps)
    engine.close()
    return found


@contextmanager
def drawing(engine: Any, change: Callable[..., Any]) -> Iterator[None]:
    """Have an engine draw otherwise inside the block: `change` gets its rule and what that is given."""
    draw = RULES[engine.settings.rule].draw
    with patch.object(engine._hook, "_draw", lambda *given: change(draw, engine, *given)):
        yield


def warmer(draw: Any, engine: Any, logits: Any, *more: Any) -> Any:
    """Draw at a temperature of 1.3 times the one that was asked for."""
    return draw(logits / 1.3, *more)


def half(draw: Any, engine: Any, logits: Any, *more: Any) -> Any:
    """Never draw every other token."""
    spared = logits.clone()
    spared[:, 1::2] = -torch.inf
    return draw(spared, *more)


def twins(draw: Any, engine: Any, logits: Any, keys: Any, *more: Any) -> Any:
    """Draw every other row with the number of the row before it."""
    return draw(logits, keys[np.arange(len(keys)) // 2 * 2], *more)


def other_logprobs(draw: Any, engine: Any, *given: Any) -> Any:
    """Report log-probabilities that are too low by 0.01."""
    tokens, logprobs = draw(*given)
    return tokens, logprobs - 0.01


def moved(draw: Any, engine: Any, logits: Any, keys: Any, positions: Any, rows: Any) -> Any:
    """Draw other tokens where drafts are verified."""
    verifying = len(keys) != len(engine._hook.slots)
    return draw(logits, keys, positions + (1 << 20 if verifying else 0), rows)


@contextmanager
def credulous() -> Iterator[None]:
    """Wave the first draft of every fourth request through inside the block."""

    def waved(tokens: Any, drafts: Any, counts: Any) -> Any:
        starts, firsts = np.cumsum(counts + 1) - counts - 1, np.cumsum(counts) - counts
        some = (counts > 0) & (np.arange(len(counts)) % 4 == 0)
        tokens = tokens.copy()
        tokens[starts[some]] = drafts[firsts[some]]
        return verify_chain(tokens, drafts, counts)

    with patch.object(sampler_hook, "verify_chain", waved):
        yield


FAULTS: dict[str, Callable[..., Any] | None] = {
    "moved": moved,
    "waved_through": None,
    "warmer": warmer,
    "half": half,
    "twins": twins,
    "other_logprobs": other_logprobs,
}


def found_faults(model: Path, count: int) -> dict[str, bool]:
    """Return which of the first planted faults the check of an engine finds; a sound one must pass."""
    config = load_config(CONFIG, [f"model.path={model}"])
    settings = engine_settings(config, str(model))
    prepare_environment(settings)
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    engine = VllmEngine(settings)

    def sound() -> bool:
        report = run_startup_check(engine)
        return report.distributions_hold and report.bits_equal and report.drafts_hold(bits=True)

    if not sound():
        raise SystemExit("the check speaks against a sound engine")
    found = {}
    for name, change in list(FAULTS.items())[:count]:
        with credulous() if change is None else drawing(engine, change):
            found[name] = not sound()
    engine.close()
    return found


if __name__ == "__main__":
    execute(main)
