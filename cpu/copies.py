"""Copies: values taken several times each, and the sums of what comes back; parts that are filled up alike.

Legend: V values, K copies, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional


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

    def sum(self, copies: torch.Tensor) -> torch.Tensor:
        """Return for each value the sum [V, D] of its copies among those [K, D], in their order."""
        # Sums of gathered rows, many times faster on a CPU than index_add, and always in one order.
        summed: torch.Tensor = functional.embedding_bag(
            self.places, copies.contiguous(), self.offsets, mode="sum", include_last_offset=True
        )
        return summed

    def to(self, device: torch.device) -> "Copies":
        return Copies(self.index.to(device), self.places.to(device), self.offsets.to(device))


def padded_parts(lengths: Sequence[int], most_padding: int) -> list[list[int]]:
    """Return places in parts of like length, the longest first; one ends before it holds more padding.

    >>> padded_parts([3, 9, 8, 4], most_padding=1)
    [[1, 2], [3, 0]]
    """
    parts: list[list[int]] = []
    padding = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        padding += lengths[parts[-1][0]] - lengths[place] if parts else 0
        if parts and padding <= most_padding:
            parts[-1].append(place)
        else:
            parts.append([place])
            padding = 0
    return parts


def copies_of(index: npt.NDArray[np.int64], values: int, real: npt.NDArray[np.bool_] | None = None) -> Copies:
    """Return the copies of this many values that `index` [K] names; those not `real` get no gradient."""
    places = np.arange(len(index)) if real is None else np.flatnonzero(real)
    owners = index[places]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=values))])
    ordered = places[np.argsort(owners, kind="stable")]
    return Copies(torch.from_numpy(index), torch.from_numpy(ordered), torch.from_numpy(offsets))


class _Take(torch.autograd.Function):  # type: ignore[misc]
    """Copies of values; the gradient of a value is the sum of its copies', in their order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies = copies
        return values.index_select(0, copies.index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        copies: Copies = ctx.copies
        return copies.sum(gradient), None
