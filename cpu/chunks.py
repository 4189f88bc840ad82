"""Chunks: attention over shared rows in few large products, for float32 on a CPU.

Positions stand as a tree is walked: every beginning before its continuations, and whatever continues it in
one piece. So a chunk of consecutive positions looks at no others than the chunk itself and the path to its
first position. A chunk's scores are one matrix with a mask, and chunks with about as many keys are computed
together. What rows have in common asks its questions once; in whole rows each row would repeat them.

Legend: C positions of a chunk, B chunks of a group, K keys of the longest of them; G key heads, each with Q
query heads; W width of a head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.cpu.copies import Copies, copies_of, padded_parts

CHUNK = 64
"""C: small chunks copy more keys, large ones have more scores that the mask hides."""
SCORES_AT_ONCE = 2**19
"""Scores of one head that are held until the backward pass; where there are more, rows are seen whole."""
_KEY_PADDING = 128
"""Keys. A group ends before it holds more padding: about what another group costs."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkGroup:
    """Chunks that are computed together."""

    places: torch.Tensor
    """[B] int64: which chunks."""
    hidden: torch.Tensor
    """[B, 1, 1, C, K] float32: 0 where a position looks at a key, else minus infinity."""

    @property
    def key_slots(self) -> int:
        """Return the keys of all its chunks, padding included: B*K."""
        return len(self.places) * int(self.hidden.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """All chunks of some positions."""

    groups: tuple[ChunkGroup, ...]
    keys: Copies
    """The position of each key, B*K of the first group, then those of the next, ..."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Return what each position takes from the values that it looks at, [N, G*Q, W].

        Args:
            query: [N, G*Q, W]; N is a multiple of C.
            key: [N, G, W], and value too.
            scaling: of the scores.
        """
        attended: torch.Tensor = _Attention.apply(query, key, value, self, scaling)
        return attended


def make_chunks(ends: npt.NDArray[np.int64], paths: Sequence[npt.NDArray[np.int64]]) -> Chunks | None:
    """Return the chunks of some positions, or None when their scores are too many to be held.

    Args:
        ends: [a multiple of C]: of each position, the one after the last that continues it.
        paths: of each chunk, the positions before its first one in that one's row.
    """
    if CHUNK * sum(len(path) + CHUNK for path in paths) > SCORES_AT_ONCE:
        return None
    parts = padded_parts([len(path) for path in paths], _KEY_PADDING)
    groups, keys, real = zip(*(_group(ends, paths, part) for part in parts), strict=True)
    return Chunks(groups, copies_of(np.concatenate(keys), len(ends), np.concatenate(real)))


def _group(
    ends: npt.NDArray[np.int64], paths: Sequence[npt.NDArray[np.int64]], part: list[int]
) -> tuple[ChunkGroup, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return a group, the position of each of its keys, and which of them are no padding."""
    places = np.array(part)
    own = places[:, None] * CHUNK + np.arange(CHUNK)
    keys = np.zeros((len(part), len(paths[part[0]]) + CHUNK), dtype=np.int64)
    until = np.zeros_like(keys)  # nothing looks at padding
    keys[:, :CHUNK], until[:, :CHUNK] = own, ends[own]
    for row, place in enumerate(part):
        stop = CHUNK + len(paths[place])
        keys[row, CHUNK:stop], until[row, CHUNK:stop] = paths[place], ends[paths[place]]
    seen = (keys[:, None] <= own[..., None]) & (own[..., None] < until[:, None])
    hidden = np.where(seen, np.float32(0.0), np.float32(-np.inf))[:, None, None]
    group = ChunkGroup(torch.from_numpy(places), torch.from_numpy(hidden))
    return group, keys.reshape(-1), until.reshape(-1) > 0


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """softmax(query x key) x value, chunk by chunk; the weights are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunks: Chunks, scaling: float
    ) -> torch.Tensor:
        heads = key.shape[1]
        found = torch.empty_like(query, memory_format=torch.contiguous_format)
        saved: list[torch.Tensor] = []
        for group, keys, values in _with_keys(chunks, key, value):
            queries = _of_chunks(query, group, heads).mul_(scaling)
            weights = torch.bmm(queries, keys.transpose(1, 2))
            weights.view(len(group.places), heads, -1, CHUNK, keys.shape[1]).add_(group.hidden)
            weights = weights.softmax(-1)
            _put(found, group, torch.bmm(weights, values), heads)
            saved += [queries, keys, values, weights]
        ctx.chunks, ctx.scaling, ctx.heads = chunks, scaling, heads
        ctx.save_for_backward(*saved)
        return found

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        chunks, heads = ctx.chunks, ctx.heads
        saved = ctx.saved_tensors
        query = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for place, group in enumerate(chunks.groups):
            queries, keys, values, weights = saved[4 * place : 4 * place + 4]
            above = _of_chunks(gradient, group, heads)
            scores = torch._softmax_backward_data(
                torch.bmm(above, values.transpose(1, 2)), weights, -1, weights.dtype
            )
            _put(query, group, torch.bmm(scores, keys).mul_(ctx.scaling), heads)
            for kind, made in zip(copies, ((scores, queries), (weights, above)), strict=True):
                summed = torch.bmm(made[0].transpose(1, 2), made[1]).unflatten(0, (-1, heads))
                kind.append(summed.transpose(1, 2).reshape(group.key_slots, -1))
        key, value = (chunks.keys.sum(torch.cat(kind)).unflatten(1, (heads, -1)) for kind in copies)
        return query, key, value, None, None


def _with_keys(
    chunks: Chunks, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[ChunkGroup, torch.Tensor, torch.Tensor]]:
    """Yield each group with its keys and values, [B*G, K, W]."""
    sizes = [group.key_slots for group in chunks.groups]
    taken = (part.index_select(0, chunks.keys.index).split(sizes) for part in (key, value))
    for group, *parts in zip(chunks.groups, *taken, strict=True):
        keys, values = (part.unflatten(0, (len(group.places), -1)).transpose(1, 2) for part in parts)
        yield group, keys.flatten(0, 1), values.flatten(0, 1)


def _of_chunks(values: torch.Tensor, group: ChunkGroup, heads: int) -> torch.Tensor:
    """Return the values [N, G*Q, W] of a group's chunks, computed again as [B*G, Q*C, W]."""
    taken = values.unflatten(0, (-1, CHUNK)).index_select(0, group.places).unflatten(2, (heads, -1))
    return taken.permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1).contiguous()


def _put(into: torch.Tensor, group: ChunkGroup, values: torch.Tensor, heads: int) -> None:
    """Put values [B*G, Q*C, W] of a group's chunks where they belong among those [N, G*Q, W]."""
    given = values.unflatten(0, (-1, heads)).unflatten(2, (-1, CHUNK)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    into.unflatten(0, (-1, CHUNK)).index_copy_(0, group.places, given)
