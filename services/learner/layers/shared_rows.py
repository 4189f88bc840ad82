"""Shared rows: sequences with common beginnings, each distinct position computed once.

A causal model's state at a position depends on the tokens up to it alone. So sequences that begin alike have
the same states there: the prompt of a group is computed once, and so is what its completions have in common.
The layers work on the distinct positions without padding. Attention alone sees whole sequences: it gathers
them into blocks of like length, padded on the right, where a causal query never looks.

Legend: N distinct positions, B blocks of R sequences and S positions each, K slots: the sum of R*S over the
blocks; D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "antiphon_shared_rows"
"""Name under which models find `attend`."""
BLOCK_PADDING = 64
"""Slots. A block of attention ends before it holds more padding: about what another block costs on a CPU."""

_WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions"}
"""What models pass to attention besides, and rotary embeddings or caches alone look at."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Values taken several times each, and the way back for their gradients; V values, K copies."""

    index: torch.Tensor
    """[K] int64: the value that each copy is of."""
    places: torch.Tensor
    """[at most K] int64: the copies of value 0, then those of value 1, ...; others get no gradient."""
    offsets: torch.Tensor
    """[V+1] int64: where the copies of each value begin in `places`."""

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the copies [K, D] of `values` [V, D]."""
        taken: torch.Tensor = _Take.apply(values, self)
        return taken

    def to(self, device: torch.device) -> "Copies":
        return Copies(self.index.to(device), self.places.to(device), self.offsets.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Where the positions of some sequences are computed, and how attention sees them."""

    input_ids: torch.Tensor
    """[N] int64."""
    position_ids: torch.Tensor
    """[N] int64: how many tokens of the sequence stand before."""
    blocks: tuple[tuple[int, int], ...]
    """R and S of each block."""
    slots: Copies
    """The position in each of the K slots; 0 in padding."""
    first: torch.Tensor
    """[N] int64: the first slot that holds each position."""

    @property
    def real_slots(self) -> int:
        """Return the slots that hold a token: the length of all sequences together."""
        return len(self.slots.places)

    def collect(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the values [N, D] of the positions among those [K, D] of the slots."""
        collected: torch.Tensor = _Collect.apply(slots, self.first)
        return collected

    def to(self, device: torch.device) -> "SharedRows":
        ids, positions = self.input_ids.to(device), self.position_ids.to(device)
        return SharedRows(ids, positions, self.blocks, self.slots.to(device), self.first.to(device))


def copies_of(index: npt.NDArray[np.int64], values: int, real: npt.NDArray[np.bool_] | None = None) -> Copies:
    """Return the copies of so many values that `index` [K] names; those not `real` get no gradient."""
    places = np.arange(len(index)) if real is None else np.flatnonzero(real)
    owners = index[places]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=values))])
    ordered = places[np.argsort(owners, kind="stable")]
    return Copies(torch.from_numpy(index), torch.from_numpy(ordered), torch.from_numpy(offsets))


def common_length(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter


def share_rows(sequences: Sequence[npt.NDArray[np.int64]]) -> tuple[SharedRows, list[npt.NDArray[np.int64]]]:
    """Lay out sequences, and return with it the positions of the tokens of each.

    Args:
        sequences: token ids, none empty, in lexicographic order: what two have in common at their
            beginning, those between them have too.
    """
    ids, depths = [], []
    positions: list[npt.NDArray[np.int64]] = []
    count, before = 0, np.zeros(0, dtype=np.int64)
    for sequence in sequences:
        shared = common_length(before, sequence)
        own = np.arange(count, count + len(sequence) - shared)
        positions.append(np.concatenate([positions[-1][:shared], own]) if shared else own)
        ids.append(sequence[shared:])
        depths.append(np.arange(shared, len(sequence)))
        count += len(own)
        before = sequence
    blocks, slots = _blocks(positions)
    copies = copies_of(np.maximum(slots, 0), count, slots >= 0)
    return SharedRows(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(depths)),
        blocks,
        copies,
        copies.places[copies.offsets[:-1]],
    ), positions


def _blocks(
    positions: Sequence[npt.NDArray[np.int64]],
) -> tuple[tuple[tuple[int, int], ...], npt.NDArray[np.int64]]:
    """Return R and S of each block, and the position in each slot [K], -1 in padding."""
    parts: list[list[npt.NDArray[np.int64]]] = []
    padding = 0
    for row in sorted(positions, key=len, reverse=True):
        padding += len(parts[-1][0]) - len(row) if parts else 0
        if parts and padding <= BLOCK_PADDING:
            parts[-1].append(row)
        else:
            parts.append([row])
            padding = 0
    slots = []
    for part in parts:
        block = np.full((len(part), len(part[0])), -1, dtype=np.int64)
        for place, row in enumerate(part):
            block[place, : len(row)] = row
        slots.append(block.reshape(-1))
    return tuple((len(part), len(part[0])) for part in parts), np.concatenate(slots)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    shared_rows: SharedRows,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Let every position attend to its own sequence; transformers' interface of attention.

    Args:
        module: unused.
        query: [1, heads, N, width], key and value: [1, fewer or as many heads, N, width].
        attention_mask: unused.
        shared_rows: the layout of the N positions.
        scaling: of the scores; None is 1 / sqrt(width).
        dropout: share of the weights that are set to 0.

    Returns:
        [1, N, heads, width], and no weights.

    Raises:
        NotImplementedError: when the model's attention has a term that this one lacks.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
    if unknown or others.get("is_causal") is False:
        raise NotImplementedError(f"attention over shared rows knows no {', '.join(unknown) or 'other side'}")
    sizes = [rows * length for rows, length in shared_rows.blocks]
    slots = [
        shared_rows.slots.take(part[0].transpose(0, 1).flatten(1))
        .unflatten(1, (part.shape[1], -1))
        .split(sizes)
        for part in (query, key, value)
    ]
    grouped = query.shape[1] != key.shape[1]
    found = []
    for (rows, _), *parts in zip(shared_rows.blocks, *slots, strict=True):
        queries, keys, values = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in parts)
        out = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
        found.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
    return shared_rows.collect(torch.cat(found)).unflatten(1, (query.shape[1], -1))[None], None


class _Take(torch.autograd.Function):  # type: ignore[misc]
    """Copies of values; the gradient of a value is the sum of its copies', in their order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies = copies
        return values.index_select(0, copies.index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        copies: Copies = ctx.copies
        # Sums of gathered rows, many times faster on a CPU than index_add, and always in one order.
        summed = functional.embedding_bag(
            copies.places, gradient.contiguous(), copies.offsets, mode="sum", include_last_offset=True
        )
        return summed, None


class _Collect(torch.autograd.Function):  # type: ignore[misc]
    """Some rows [N] of [K, D], none of them twice."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.index, ctx.rows = index, len(values)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient.new_zeros((ctx.rows, gradient.shape[1]))
        return whole.index_copy_(0, ctx.index, gradient), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
