"""Shared rows: sequences with common beginnings, each distinct position computed once.

A causal model's state at a position depends on the tokens up to it alone. So sequences that begin alike have
the same states there: the prompt of a group is computed once, and so is what its completions have in common.
The layers work on the distinct positions. Attention alone needs more. In float32 on a CPU it works in
`chunks`; elsewhere, and where those would be too large, it sees whole sequences, gathered into blocks of like
length and padded on the right, where a causal query never looks.

Legend: N distinct positions, B blocks of R sequences and S positions each, K slots: the sum of R*S over the
blocks; D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from antiphon.cpu.chunks import CHUNK, Chunks, make_chunks
from antiphon.cpu.copies import Copies, copies_of, padded_parts

ATTENTION = "antiphon_shared_rows"
"""Name under which models find `attend`."""
BLOCK_PADDING = 64
"""Slots. A block of attention ends before it holds more padding: about what another block costs on a CPU."""
SCORES_ON_GPU = 2**26
"""Scores of a float32 block, 1 GiB with all copies, above which a GPU takes a slower kernel."""

_WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions"}
"""What models pass to attention besides, and rotary embeddings or caches alone look at."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Where the positions of some sequences are computed, and how attention sees them."""

    position_ids: torch.Tensor
    """[N] int64: how many tokens of the sequence stand before."""
    blocks: tuple[tuple[int, int], ...]
    """R and S of each block."""
    slots: Copies
    """The position in each of the K slots; 0 in padding."""
    first: torch.Tensor
    """[N] int64: the first slot that holds each position."""
    ends: torch.Tensor
    """[sequences + 1] int32: where the slots of each sequence begin, and those of the last one end."""
    chunks: Chunks | None
    """How attention works without whole sequences; None where that takes too much memory, and off the CPU."""

    @property
    def padding(self) -> int:
        """Return how many positions the layers compute besides, so that they get whole chunks."""
        return -len(self.position_ids) % CHUNK

    @property
    def real_slots(self) -> int:
        """Return the slots that hold a token: the length of all sequences together."""
        return len(self.slots.places)

    def collect(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the values [N, D] of the positions among those [K, D] of the slots."""
        collected: torch.Tensor = _Collect.apply(slots, self.first)
        return collected

    def to(self, device: torch.device) -> "SharedRows":
        positions, chunks = self.position_ids.to(device), self.chunks if device.type == "cpu" else None
        slots, first, ends = self.slots.to(device), self.first.to(device), self.ends.to(device)
        return SharedRows(positions, self.blocks, slots, first, ends, chunks)


def common_lengths(sequences: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """Return how many tokens each sequence has in common with the one before, at its beginning; first a 0."""
    common = [0] if sequences else []
    for one, other in pairwise(sequences):
        shorter = min(len(one), len(other))
        differing = np.flatnonzero(one[:shorter] != other[:shorter])
        common.append(int(differing[0]) if len(differing) else shorter)
    return common


def share_rows(
    lengths: Sequence[int], common: Sequence[int]
) -> tuple[SharedRows, list[npt.NDArray[np.int64]]]:
    """Lay out sequences, and return with it the positions of the tokens of each.

    Args:
        lengths: of the sequences, none 0. They stand in lexicographic order: what two have in common at
            their beginning, those between them have too.
        common: their `common_lengths`; the first one's plays no part.
    """
    depths = []
    positions: list[npt.NDArray[np.int64]] = []
    count = 0
    for length, alike in zip(lengths, common, strict=True):
        shared = alike if positions else 0
        own = np.arange(count, count + length - shared)
        positions.append(np.concatenate([positions[-1][:shared], own]) if shared else own)
        depths.append(np.arange(shared, length))
        count += len(own)
    blocks, slots = _blocks(positions)
    copies = copies_of(np.maximum(slots, 0), count, slots >= 0)
    return SharedRows(
        torch.from_numpy(np.concatenate(depths)),
        blocks,
        copies,
        copies.places[copies.offsets[:-1]],
        torch.tensor([0] + [length for rows, length in blocks for _ in range(rows)]).cumsum(0).int(),
        _chunks(positions, count),
    ), positions


def _chunks(positions: Sequence[npt.NDArray[np.int64]], count: int) -> Chunks | None:
    """Return the chunks of this many positions, those of the sequences, and of padding after them."""
    # Padding continues nothing, and nothing continues it.
    ends = np.arange(1, count + -count % CHUNK + 1)
    paths: list[npt.NDArray[np.int64]] = []
    for row in positions:
        ends[row] = row[-1] + 1
        while len(paths) * CHUNK <= row[-1]:
            paths.append(row[: np.searchsorted(row, len(paths) * CHUNK)])
    return make_chunks(ends, paths)


def _blocks(
    positions: Sequence[npt.NDArray[np.int64]],
) -> tuple[tuple[tuple[int, int], ...], npt.NDArray[np.int64]]:
    """Return R and S of each block, and the position in each slot [K], -1 in padding."""
    lengths = [len(row) for row in positions]
    parts = [[positions[place] for place in part] for part in padded_parts(lengths, BLOCK_PADDING)]
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
        query: [1, heads, N and the padding, width], key and value: the same of fewer or as many heads.
        attention_mask: unused.
        shared_rows: the layout of the N positions.
        scaling: of the scores; None is 1 / sqrt(width).
        dropout: share of the weights that are set to 0.

    Returns:
        [1, N and the padding, heads, width], and no weights.

    Raises:
        NotImplementedError: when the model's attention has a term that this one lacks.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
    if unknown or others.get("is_causal") is False:
        raise NotImplementedError(f"attention over shared rows knows no {', '.join(unknown) or 'other side'}")
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    if shared_rows.chunks is not None and not dropout and query.dtype == torch.float32:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return shared_rows.chunks.attend(query, key, value, scaling)[None], None
    queries, keys, values = (
        shared_rows.slots.take(part[: len(shared_rows.position_ids)].flatten(1)).unflatten(1, part.shape[1:])
        for part in (query, key, value)
    )
    if _packs(query) and not dropout:
        found = _attend_packed(shared_rows, queries, keys, values, scaling)
    else:
        found = _attend_blocks(shared_rows, queries, keys, values, scaling, dropout)
    attended = functional.pad(shared_rows.collect(found), (0, 0, 0, shared_rows.padding))
    return attended.unflatten(1, (query.shape[1], -1))[None], None


def _packs(query: torch.Tensor) -> bool:
    """Tell whether torch has a kernel that attends over sequences of any lengths at once."""
    if not query.is_cuda or query.dtype == torch.float32:
        return False
    width = query.shape[-1]
    return width <= 256 and width % 8 == 0 and bool(torch.cuda.get_device_capability() >= (8, 0))


def _too_many_scores(query: torch.Tensor) -> bool:
    """Tell whether the scores of queries [R, heads, S, width] fill too much of a GPU."""
    scores: int = query.shape[:3].numel() * query.shape[2]
    return bool(query.is_cuda) and query.dtype == torch.float32 and scores > SCORES_ON_GPU


def _attend_packed(
    shared_rows: SharedRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Return what the slots take, [K, heads * width], from one call for all sequences."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(length for _, length in shared_rows.blocks)
    keys, values = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    bounds, causal = (shared_rows.ends, shared_rows.ends, longest, longest), (-1, 0)
    found: torch.Tensor = varlen_attn(query, keys, values, *bounds, scale=scaling, window_size=causal)
    return found.flatten(1)


def _attend_blocks(
    shared_rows: SharedRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Return the same from one call for each block."""
    sizes = [rows * length for rows, length in shared_rows.blocks]
    parts = (part.split(sizes) for part in (query, key, value))
    found = []
    for (rows, _), *block in zip(shared_rows.blocks, *parts, strict=True):
        queries, keys, values = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in block)
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1 and _too_many_scores(queries):
            # Of float32 torch has a kernel that does not hold them for as many key heads as query heads only.
            keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
            groups = 1
        out = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=groups > 1
        )
        found.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(found)


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
