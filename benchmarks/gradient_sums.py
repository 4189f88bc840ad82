"""Gradient sums of a bfloat16 learner against float64, over as many micro-batches as a large step has.

The real engine adds up the gradients of one micro-batch after the other, at every ZeRO stage; the same
bfloat16 gradients are added up in float64 beside it, and in bfloat16 for comparison. Asks for a cosine of at
least 0.9999 and a norm within 1%. The last line is JSON.

    .venv/bin/python benchmarks/gradient_sums.py [--micro-batches N] [--stages 0 1 2 3]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from antiphon.core.config import RunConfig, build_config
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, pin_numerics
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import MicroBatch, make_micro_batches
from antiphon.services.learner.policy import Policy, load_causal_model

MODEL = Path(__file__).parents[1] / "examples" / "models" / "chain-sum"
COSINE, NORM_ERROR = 0.9999, 0.01
"""What is asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether every stage holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=2048)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    result = measure(options.model, options.micro_batches, options.stages, options.seed)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


def measure(model: Path, micro_batches: int, stages: Sequence[int], seed: int) -> dict[str, object]:
    """Return cosine and relative error of the norm of each stage's sum, and of a plain sum in bfloat16."""
    configs = [
        build_config({"model": {"path": str(model)}, "learner": {"dtype": "bfloat16", "zero_stage": stage}})
        for stage in stages
    ]
    pin_numerics(configs[0].learner.threads)
    policy = _policy(configs[0])
    batches = _batches(policy, micro_batches, seed)
    totals = UpdateTotals(micro_batches, sum(batch.completion_tokens for batch in batches))
    exact, plain = _sums(policy, batches, totals)
    result: dict[str, object] = {"micro_batches": micro_batches, "parameters": exact.numel()}
    result |= _compared("plain", plain, exact)
    holds = True
    for stage, config in zip(stages, configs, strict=True):
        engine = DeepSpeedEngine(config)
        engine.sum_gradients(batches, totals)
        found = torch.cat([gradient.flatten().double() for gradient in engine.gradients().values()])
        engine.close()
        figures = _compared(f"stage_{stage}", found, exact)
        cosine, error = figures.values()
        print(f"stage {stage}: cosine {cosine:.8f}, norm off by {error:.2e}", flush=True)
        holds &= cosine >= COSINE and error <= NORM_ERROR
        result |= figures
    return result | {"holds": holds}


def _policy(config: RunConfig) -> Policy:
    objective = Objective(config.algorithm, config.sampling.max_tokens, config.sampling.temperature)
    return Policy(load_causal_model(config.model.path, torch.bfloat16, False), objective)


def _batches(policy: Policy, count: int, seed: int) -> list[MicroBatch]:
    """Make micro-batches of one trajectory each; advantages with a mean of 1 make a sum that grows."""
    rng = np.random.default_rng(seed)
    vocabulary = policy.causal_model.config.vocab_size
    rows = []
    for place in range(count):
        length = int(rng.integers(4, 24))
        rows.append(
            BatchRow(
                rng.integers(0, vocabulary, length).astype(np.int32),
                np.full(length, -2.0, dtype=np.float32),
                (VersionSpan(0, 0, length),),
                FinishReason.STOP,
                group_id=f"g{place:07d}",
                prompt_key="p",
                sample_index=0,
                prompt_token_ids=rng.integers(0, vocabulary, 8).astype(np.int32),
                reward=1.0,
                advantage=float(rng.normal(1.0, 1.0)),
            )
        )
    return [batch for row in rows for batch in make_micro_batches([row], 0, 64)]


def _sums(
    policy: Policy, batches: Sequence[MicroBatch], totals: UpdateTotals
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of the same bfloat16 gradients [parameters]: in float64, and in bfloat16."""
    parameters = list(policy.parameters())
    exact = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    plain = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in batches:
        loss, _ = policy(batch, totals)
        for total, low, gradient in zip(exact, plain, torch.autograd.grad(loss, parameters), strict=True):
            total.add_(gradient.double())
            low.add_(gradient)
    return (
        torch.cat([total.flatten() for total in exact]),
        torch.cat([low.flatten().double() for low in plain]),
    )


def _compared(name: str, found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    cosine = float(found @ exact / (found.norm() * exact.norm()))
    return {f"{name}_cosine": cosine, f"{name}_norm_error": abs(float(found.norm() / exact.norm()) - 1.0)}


if __name__ == "__main__":
    sys.exit(main())
