"""Reference: the learner's forward and backward pass as it was first, slow and easy to follow.

Rows are sorted by length and padded on the right; every row is computed whole, its prompt too. The loss is
liger-kernel's fused one, after a pass of the output head that gives the logprobs the weights need. Tests and
benchmarks compare the learner with it; nothing else uses it.

Legend: N rows and S positions of the model's input, R = N trajectories, T completion tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

from antiphon.core.records import BatchRow
from antiphon.core.spans import token_versions
from antiphon.services.learner.objective import Objective, TokenMetrics, UpdateTotals


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """What one forward and backward pass works on; fields of the same names are those of `MicroBatch`."""

    input_ids: torch.Tensor
    """[N, S] int64; padding is 0 and stands on the right."""
    states: torch.Tensor
    """[R, T] int64 into the N*S positions: the one whose hidden state predicts the token."""
    token_ids: torch.Tensor
    """[R, T] int64; 0 where the mask is 0."""
    mask: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    staleness: torch.Tensor
    rows: tuple[tuple[str, int], ...]

    @property
    def completion_tokens(self) -> int:
        return int(self.mask.sum())

    def to(self, device: torch.device) -> "PaddedBatch":
        """Return this: the reference runs on the CPU alone."""
        return self


def padded_batches(rows: Sequence[BatchRow], step: int, token_budget: int) -> list[PaddedBatch]:
    """Cut rows, sorted by length, into batches of at most `token_budget` positions, padding included."""
    parts: list[list[BatchRow]] = []
    for row in sorted(rows, key=lambda row: (_length(row), row.group_id, row.sample_index)):
        if parts and (len(parts[-1]) + 1) * _length(row) <= token_budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [_pad(part, step) for part in parts]


def _length(row: BatchRow) -> int:
    return len(row.prompt_token_ids) + len(row.token_ids)


def _pad(part: list[BatchRow], step: int) -> PaddedBatch:
    width = max(map(_length, part))
    inputs = np.zeros((len(part), width), dtype=np.int64)
    shape = (len(part), max(len(row.token_ids) for row in part))
    states, tokens, staleness = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    mask, behaviour = (np.zeros(shape, dtype=np.float32) for _ in range(2))
    for place, row in enumerate(part):
        count, first = len(row.token_ids), place * width + len(row.prompt_token_ids) - 1
        inputs[place, : _length(row)] = np.concatenate([row.prompt_token_ids, row.token_ids])
        states[place, :count] = np.arange(first, first + count)
        tokens[place, :count] = row.token_ids
        mask[place, :count] = 1.0
        behaviour[place, :count] = row.logprobs
        staleness[place, :count] = step - token_versions(row)
    return PaddedBatch(
        input_ids=torch.from_numpy(inputs),
        states=torch.from_numpy(states),
        token_ids=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        behaviour_logprobs=torch.from_numpy(behaviour),
        advantages=torch.tensor([row.advantage for row in part], dtype=torch.float32),
        staleness=torch.from_numpy(staleness),
        rows=tuple((row.group_id, row.sample_index) for row in part),
    )


class ReferencePolicy(torch.nn.Module):  # type: ignore[misc]
    """Model and loss in one module, for `DeepSpeedEngine(config, ReferencePolicy)`."""

    def __init__(self, causal_model: Any, objective: Objective) -> None:
        super().__init__()
        self.causal_model = causal_model
        self._objective = objective

    def forward(
        self,
        batch: PaddedBatch,
        totals: UpdateTotals | None = None,
        proximal_logprobs: torch.Tensor | None = None,
    ) -> Any:
        """Return (loss, token metrics) of a batch, or its logprobs [R, T] without `totals`."""
        found = self.causal_model.get_decoder()(input_ids=batch.input_ids, use_cache=False)
        flat = found.last_hidden_state.flatten(0, 1)
        hidden = flat.index_select(0, batch.states.flatten()).view(*batch.states.shape, -1)
        head = self.causal_model.get_output_embeddings().weight
        with torch.no_grad():
            learner = LigerFusedLinearPPOBase.chunk_forward(
                hidden.detach(), head.detach(), batch.token_ids, temperature=self._objective.temperature
            )
        if totals is None:
            return learner
        return self._loss(hidden, head, batch, totals, proximal_logprobs, learner)

    def _loss(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        batch: PaddedBatch,
        totals: UpdateTotals,
        proximal: torch.Tensor | None,
        learner: torch.Tensor,
    ) -> tuple[torch.Tensor, TokenMetrics]:
        old, weight, metrics = self._objective.ingredients(learner, batch, proximal)
        criterion = LigerFusedLinearGRPOLoss(
            chunk_size=len(batch.advantages),
            compiled=False,
            use_ref_model=False,
            temperature=self._objective.temperature,
            **self._objective.options,
        )
        loss, _ = criterion(
            hidden,
            head,
            batch.token_ids,
            batch.mask,
            batch.advantages,
            old_per_token_logps=old,
            vllm_is_ratio=weight,
            num_items_in_batch=totals.tokens,
        )
        return self._objective.share(loss, len(batch.advantages), totals), metrics
