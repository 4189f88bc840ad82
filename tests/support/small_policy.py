"""Small policy: a transformer of two layers, rows to train it on, and the gradient of all its batches."""

from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.services.learner.objective import UpdateTotals

VOCABULARY, MAX_TOKENS = 8, 32


def make_model(**changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
        attn_implementation="sdpa",
        **changes,
    )
    return Qwen3ForCausalLM(shape).train()


def make_rows(seed: int, groups: int = 3, tail: float = 1.0) -> list[BatchRow]:
    """Rows of groups of four; the first half of each group begins alike, beyond the prompt too."""
    rng = np.random.default_rng(seed)
    rows = []
    for place in range(4 * groups):
        if place % 4 == 0:
            prompt = rng.integers(0, VOCABULARY, rng.integers(1, 9)).astype(np.int32)
            common = rng.integers(0, VOCABULARY, 6).astype(np.int32)
        length = int(np.clip(rng.lognormal(2.0, tail), 1, 60))
        ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
        if place % 4 < 2:
            ids[:6] = common[:length]
        rows.append(
            BatchRow(
                ids,
                (-2.0 + 0.5 * rng.standard_normal(length)).astype(np.float32),
                (VersionSpan(0, 0, length),),
                FinishReason.STOP,
                group_id=f"g{place // 4}",
                prompt_key="p",
                sample_index=place % 4,
                prompt_token_ids=prompt,
                reward=0.0,
                advantage=float(rng.standard_normal()),
            )
        )
    return rows


def summed(policy: torch.nn.Module, batches: list[Any], proximal: bool) -> tuple[float, torch.Tensor]:
    """Return the loss of an update and its gradient [parameters]."""
    totals = UpdateTotals(
        sum(len(batch.advantages) for batch in batches), sum(batch.completion_tokens for batch in batches)
    )
    policy.zero_grad()
    loss = 0.0
    for batch in batches:
        with torch.no_grad():
            old = policy(batch) + 0.3 * batch.advantages[:, None].sign() if proximal else None
        share, _ = policy(batch, totals, old)
        share.backward()
        loss += float(share.detach())
    return loss, torch.cat([parameter.grad.flatten().double() for parameter in policy.parameters()])
