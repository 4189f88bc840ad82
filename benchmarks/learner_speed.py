"""The learner's step against its first form: trained tokens per CPU-second, and the gradient's difference.

Both sides are DeepSpeed engines in one process and take the same batches in turn, in pairs whose order
alternates. The first form (`parts/learner_speed/reference.py`) pads rows, computes each whole, and works out
every token's logits three times. A side's work is what a step does with a batch: micro-batches, passes,
optimizer. Batches are those of the demo, on its real model as it learns (`learner_ratio_demo`), and some
with the same prompts and log-normal lengths, whose completions have nothing in common
(`learner_ratio_long_tails`). Ratios are medians over all pairs. `gradient_error` is the distance of the two
gradients over the norm of the reference's, the largest of all batches. Asks for ratios of at least 1.5 and
an error of at most 1e-5.

`kl_step_ratio_*`: CPU-seconds of the learner's step with a KL to a reference model in the loss (k3), whose
log-probabilities are a column of the batch, over those without; in pairs as above. Asks for at most 1.15. The
last line is JSON.

    .venv/bin/python benchmarks/learner_speed.py [--steps 0 20 40] [--pairs N] [--record] [OVERRIDES...]
"""

import math
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.benchmarks.parts.learner_speed.reference import ReferencePolicy, padded_batches
from antiphon.benchmarks.parts.learning.experiment import Experiment
from antiphon.benchmarks.parts.results import PROJECT, above, benchmark_parser, execute, finish, medians
from antiphon.core.config import RunConfig, load_config
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.core.reference_config import ReferenceSection
from antiphon.lineage.rollout_table import decode_batch
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, pin_numerics
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import make_micro_batches
from antiphon.services.learner.policy import Policy, load_causal_model

KL = ReferenceSection(kl=0.05)
"""In the loss, k3."""
MEDIAN_TOKENS, SIGMA = 40, 1.0
"""Long-tailed completions: median, tokens, and deviation of the lengths' logarithm."""


def demo_batches(config: RunConfig, steps: Collection[int]) -> list[list[BatchRow]]:
    """Run a recipe on its real model until the last of `steps`, and return the batches of these steps."""
    found = []
    with tempfile.TemporaryDirectory(prefix="antiphon-learner-speed-") as folder:
        experiment = Experiment(config, config.loop.max_staleness, Path(folder))
        for step in range(max(steps) + 1):
            experiment.train(step)
            if step in steps:
                found.append(decode_batch(experiment.payload))
        experiment.close()
    return found


def long_tailed_batch(like: list[BatchRow], vocabulary: int, longest: int, seed: int) -> list[BatchRow]:
    """Return a batch with the groups, prompts and advantages of another one, and log-normal lengths.

    Its tokens are drawn at random, so that completions have nothing in common but the prompt.

    Args:
        like: the other batch.
        vocabulary: token ids are below it.
        longest: no completion is longer, tokens.
        seed: of lengths and tokens.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for row in like:
        length = int(np.clip(rng.lognormal(math.log(MEDIAN_TOKENS), SIGMA), 2, longest))
        rows.append(
            BatchRow(
                rng.integers(0, vocabulary, length).astype(np.int32),
                rng.uniform(-1.5, -0.5, length).astype(np.float32),
                (VersionSpan(row.spans[0].version, 0, length),),
                FinishReason.STOP,
                group_id=row.group_id,
                prompt_key=row.prompt_key,
                sample_index=row.sample_index,
                prompt_token_ids=row.prompt_token_ids,
                reward=row.reward,
                advantage=row.advantage,
            )
        )
    return rows


RATIO, ERROR, KL_RATIO = 1.5, 1e-5, 1.15
"""What is asked for."""
Cut = Callable[[Sequence[BatchRow], int, int], list[Any]]


class Side:
    """One way of making a step, on an engine of its own."""

    def __init__(self, config: RunConfig, policy: Any, cut: Cut) -> None:
        self._engine, self._cut = DeepSpeedEngine(config, policy), cut
        self._budget = config.learner.micro_batch_tokens

    def step(self, rows: Sequence[BatchRow]) -> float:
        """Make an update from a batch and return its CPU-seconds."""
        begun = time.process_time()
        totals = UpdateTotals(len(rows), sum(row.sampled_tokens for row in rows))
        self._engine.update(self._cut(rows, 0, self._budget), totals)
        return time.process_time() - begun

    def close(self) -> None:
        self._engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 20, 40], help="steps whose batches count")
    parser.add_argument("--groups", type=int, help="groups of a step, if not those of the configuration")
    parser.add_argument("--pairs", type=int, default=8, help="of each batch; 0 compares gradients alone")
    parser.add_argument("overrides", nargs="*", help="key=value pairs, such as learner.compiled=true")
    options = parser.parse_args(arguments)
    groups = [f"loop.prompts_per_step={options.groups}"] if options.groups else []
    config = load_config(PROJECT / "examples" / "quickstart.yaml", [*groups, *options.overrides])
    result, samples = measure(config, options.steps, options.pairs)
    error = result["gradient_error"]
    violated = [f"gradient_error is {error:.1e}, more than {ERROR:.0e}"] if error > ERROR else []
    at_size = [
        f"{name} is {ratio:.2f}, less than {RATIO}"
        for name, ratio in medians(samples).items()
        if name.startswith("learner_ratio") and ratio < RATIO
    ]
    most = {name: KL_RATIO for name in samples if name.startswith("kl_step_ratio")}
    at_size += above(medians(samples), most)
    return finish(result, record=options.record, samples=samples, violated=violated, at_size=at_size)


def measure(
    config: RunConfig, steps: Sequence[int], pairs: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the error of the gradient, and each pair's figures by name."""
    pin_numerics(config.learner.threads)
    first = config.model_copy(update={"learner": config.learner.model_copy(update={"compiled": False})})
    demo = demo_batches(config, steps)
    vocabulary = load_causal_model(config.model.path, torch.float32, False).config.vocab_size
    longest = 2 * config.sampling.max_tokens
    tails = [long_tailed_batch(batch, vocabulary, longest, seed) for seed, batch in enumerate(demo) if batch]
    kinds = {"demo": [batch for batch in demo if batch], "long_tails": tails}
    error = max(gradient_error(config, rows) for batches in kinds.values() for rows in batches)
    samples: dict[str, list[float]] = {}
    if pairs:
        sides = [Side(first, ReferencePolicy, padded_batches), Side(config, Policy, make_micro_batches)]
        for name, batches in kinds.items():
            ratios = samples[f"learner_ratio_{name}"] = []
            rates = samples[f"tokens_{name}_per_cpu_s"] = []
            for rows in batches:
                tokens = sum(len(row.prompt_token_ids) + len(row.token_ids) for row in rows)
                took = _pairs(sides, (rows, rows), pairs)
                ratios += [reference / now for reference, now in took]
                rates += [tokens / now for _, now in took]
            print(f"{name}: {min(ratios):.2f} to {max(ratios):.2f} times the tokens per CPU-second")
        sides[0].close()
        learner, referred = (
            sides[1],
            Side(config.model_copy(update={"reference": KL}), Policy, make_micro_batches),
        )
        for name, batches in kinds.items():
            took = [
                one for rows in batches for one in _pairs((learner, referred), (rows, with_kl(rows)), pairs)
            ]
            samples[f"kl_step_ratio_{name}"] = [with_kl_s / without_s for without_s, with_kl_s in took]
        for side in (learner, referred):
            side.close()
    return {"gradient_error": error}, samples


def _pairs(
    sides: Sequence[Side], rows: Sequence[Sequence[BatchRow]], pairs: int
) -> list[tuple[float, float]]:
    """Return the CPU-seconds of two sides, each with its rows, in pairs after one to warm up."""
    found = []
    for place in range(-1, pairs):
        took = {side: sides[side].step(rows[side]) for side in ((1, 0) if place % 2 else (0, 1))}
        found.append((took[0], took[1]))
    return found[1:]


def with_kl(rows: Sequence[BatchRow]) -> list[BatchRow]:
    """Return a batch with a column of a reference's logprobs, some way from the behaviour policy's."""
    rng = np.random.default_rng(0)
    apart = [rng.normal(0.0, 0.3, len(row.logprobs)).astype(np.float32) for row in rows]
    return [replace(row, reference_logprobs=row.logprobs + one) for row, one in zip(rows, apart, strict=True)]


def gradient_error(config: RunConfig, rows: Sequence[BatchRow]) -> float:
    """Return how far the learner's gradient of a batch is from the reference's, over that one's norm."""
    found = []
    sides: tuple[tuple[Any, Cut], ...] = ((ReferencePolicy, padded_batches), (Policy, make_micro_batches))
    for make, cut in sides:
        objective = Objective(config.algorithm, config.sampling.max_tokens, config.sampling.temperature)
        policy = make(load_causal_model(config.model.path, torch.float32, False), objective)
        batches = cut(rows, 0, config.learner.micro_batch_tokens)
        totals = UpdateTotals(len(rows), sum(batch.completion_tokens for batch in batches))
        for batch in batches:
            policy(batch, totals)[0].backward()
        found.append(torch.cat([parameter.grad.flatten().double() for parameter in policy.parameters()]))
    return float((found[1] - found[0]).norm() / found[0].norm())


if __name__ == "__main__":
    execute(main)
