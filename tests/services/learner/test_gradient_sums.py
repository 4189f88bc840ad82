"""The learner's sum of bfloat16 gradients over many micro-batches: near float64, nearer than a plain sum."""

from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.core.config import build_config
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, pin_numerics
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import make_micro_batches
from antiphon.services.learner.policy import Policy, load_causal_model

pytestmark = pytest.mark.engine

MODEL = Path(__file__).parents[3] / "examples" / "models" / "chain-sum"
MICRO_BATCHES = 48


def make_row(place: int, rng: np.random.Generator, vocabulary: int) -> BatchRow:
    """Advantages with a mean of 1 make a sum that grows."""
    length = int(rng.integers(4, 24))
    return BatchRow(
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


def test_the_engines_sum_is_nearer_to_float64_than_a_sum_in_bfloat16() -> None:
    config = build_config({"model": {"path": str(MODEL)}, "learner": {"dtype": "bfloat16", "zero_stage": 0}})
    pin_numerics(config.learner.threads)
    objective = Objective(config.algorithm, config.sampling.max_tokens, config.sampling.temperature)
    policy = Policy(load_causal_model(config.model.path, torch.bfloat16, False), objective)
    rng, vocabulary = np.random.default_rng(0), policy.causal_model.config.vocab_size
    rows = [make_row(place, rng, vocabulary) for place in range(MICRO_BATCHES)]
    batches = [batch for row in rows for batch in make_micro_batches([row], 0, 64)]
    totals = UpdateTotals(len(batches), sum(batch.completion_tokens for batch in batches))
    parameters = list(policy.parameters())
    exact = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    plain = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in batches:
        loss, _ = policy(batch, totals)
        for total, low, gradient in zip(exact, plain, torch.autograd.grad(loss, parameters), strict=True):
            total.add_(gradient.double())
            low.add_(gradient)
    engine = DeepSpeedEngine(config)
    engine.sum_gradients(batches, totals)
    summed = list(engine.gradients().values())
    engine.close()
    whole, rounded, reference = (
        torch.cat([part.flatten().double() for part in parts]) for parts in (summed, plain, exact)
    )

    def cosine(vector: torch.Tensor) -> float:
        return float(vector @ reference / (vector.norm() * reference.norm()))

    assert cosine(whole) >= 0.999999 and abs(float(whole.norm() / reference.norm()) - 1.0) <= 1e-5
    assert cosine(rounded) < cosine(whole)
