"""Packing: rows of a batch become micro-batches under a token budget, in one canonical order.

Two layouts, one result. `bucket` sorts by length and pads on the right, which is fast on a
CPU; `pack` lays sequences end to end without padding, positions starting again at 0. In both,
`token_index` names the hidden states that predict completion tokens, so that neither prompts
nor padding reach the output head. The order depends on the rows alone, never on arrival.

Legend: N rows and S positions of the model's input, R trajectories of the micro-batch,
T completion tokens of the longest of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from antiphon.core.errors import ContractError
from antiphon.core.records import BatchRow
from antiphon.core.spans import check_cover, token_versions


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass works on."""

    input_ids: torch.Tensor
    """[N, S] int64; padding is 0 and stands on the right."""
    position_ids: torch.Tensor | None
    """[N, S] int64 when packed, else None: each row then counts from 0."""
    token_index: torch.Tensor
    """[R, T] int64 into the N*S positions: the one whose hidden state predicts the token."""
    token_ids: torch.Tensor
    """[R, T] int64 completion tokens; 0 where the mask is 0."""
    mask: torch.Tensor
    """[R, T] float32, 1 for completion tokens."""
    behaviour_logprobs: torch.Tensor
    """[R, T] float32, nats; 0 where the mask is 0."""
    advantages: torch.Tensor
    """[R] float32."""
    staleness: torch.Tensor
    """[R, T] int64: step minus the version that sampled the token, versions."""
    real_tokens: int
    """Prompt and completion tokens among the N*S positions."""
    rows: tuple[tuple[str, int], ...] = ()
    """Group id and sample index of each of the R trajectories."""

    @property
    def positions(self) -> int:
        """Return the positions the model computes, N*S."""
        return int(self.input_ids.numel())

    @property
    def completion_tokens(self) -> int:
        return int(self.mask.sum())


def make_micro_batches(
    rows: Sequence[BatchRow], step: int, token_budget: int, layout: Literal["bucket", "pack"] = "bucket"
) -> list[MicroBatch]:
    """Cut rows into micro-batches of at most `token_budget` positions each.

    A row longer than the budget gets a micro-batch of its own.

    Args:
        rows: any order.
        step: the learner step that trains on them; staleness counts from it.
        token_budget: positions the model may compute at once.
        layout: padded buckets or packed sequences.

    Raises:
        ContractError: when a row has no prompt, no completion or arrays of different lengths.
    """
    for row in rows:
        _check_row(row)
    ordered = sorted(rows, key=lambda row: (_length(row), row.group_id, row.sample_index))
    parts: list[list[BatchRow]] = []
    for row in ordered:
        # Sorted by length: this row would be the longest of the part it joins.
        if parts and _cost(parts[-1], row, layout) <= token_budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [_bucket(part, step) if layout == "bucket" else _pack(part, step) for part in parts]


def split_updates(rows: Sequence[BatchRow], updates: int) -> list[list[BatchRow]]:
    """Deal whole groups to the step's updates, in the order of their ids; empty parts vanish."""
    groups: dict[str, list[BatchRow]] = {}
    for row in sorted(rows, key=lambda row: (row.group_id, row.sample_index)):
        groups.setdefault(row.group_id, []).append(row)
    dealt = [list(groups.values())[start::updates] for start in range(updates)]
    return [[row for group in part for row in group] for part in dealt if part]


def _length(row: BatchRow) -> int:
    return len(row.prompt_token_ids) + len(row.token_ids)


def _cost(part: list[BatchRow], row: BatchRow, layout: str) -> int:
    if layout == "bucket":
        return (len(part) + 1) * _length(row)
    return sum(map(_length, part)) + _length(row)


def _check_row(row: BatchRow) -> None:
    where = f"sample {row.sample_index} of group {row.group_id}"
    if not len(row.prompt_token_ids) or not len(row.token_ids):
        raise ContractError(
            f"{where} has {len(row.prompt_token_ids)} prompt and {len(row.token_ids)} completion tokens; "
            "both must be at least 1"
        )
    if len(row.logprobs) != len(row.token_ids):
        raise ContractError(
            f"{where} has {len(row.logprobs)} behaviour logprobs for {len(row.token_ids)} tokens"
        )
    check_cover(row.spans, 0, len(row.token_ids), where)


def _bucket(part: list[BatchRow], step: int) -> MicroBatch:
    width = max(map(_length, part))
    inputs = np.zeros((len(part), width), dtype=np.int64)
    for place, row in enumerate(part):
        inputs[place, : _length(row)] = np.concatenate([row.prompt_token_ids, row.token_ids])
    starts = [place * width for place in range(len(part))]
    return _micro_batch(part, step, torch.from_numpy(inputs), None, starts)


def _pack(part: list[BatchRow], step: int) -> MicroBatch:
    inputs = np.concatenate([ids for row in part for ids in (row.prompt_token_ids, row.token_ids)])
    positions = np.concatenate([np.arange(_length(row)) for row in part])
    starts = np.cumsum([0, *map(_length, part)])[:-1].tolist()
    return _micro_batch(
        part,
        step,
        torch.from_numpy(inputs.astype(np.int64))[None],
        torch.from_numpy(positions.astype(np.int64))[None],
        starts,
    )


def _micro_batch(
    part: list[BatchRow],
    step: int,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    starts: list[int],
) -> MicroBatch:
    shape = (len(part), max(len(row.token_ids) for row in part))
    index = np.zeros(shape, dtype=np.int64)
    tokens = np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.float32)
    behaviour = np.zeros(shape, dtype=np.float32)
    staleness = np.zeros(shape, dtype=np.int64)
    for place, (row, start) in enumerate(zip(part, starts, strict=True)):
        count = len(row.token_ids)
        first = start + len(row.prompt_token_ids) - 1
        index[place, :count] = np.arange(first, first + count)
        tokens[place, :count] = row.token_ids
        mask[place, :count] = 1.0
        behaviour[place, :count] = row.logprobs
        staleness[place, :count] = step - token_versions(row)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        token_index=torch.from_numpy(index),
        token_ids=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        behaviour_logprobs=torch.from_numpy(behaviour),
        advantages=torch.tensor([row.advantage for row in part], dtype=torch.float32),
        staleness=torch.from_numpy(staleness),
        real_tokens=sum(map(_length, part)),
        rows=tuple((row.group_id, row.sample_index) for row in part),
    )
