"""Experts: where the tensors of a file lie in a model that holds the experts of a layer together.

transformers 5 computes a layer's experts from two fused tensors, `gate_up_proj` [E, 2I, H] and `down_proj`
[E, H, I]. The files of Qwen's mixtures have three matrices for each expert instead, and so has what workers
are handed: `gate_proj` and `up_proj` [I, H], one below the other, and `down_proj` [H, I]. Each is a run of
whole rows of a fused tensor, so a view of it, without a copy.

Legend: E experts, I width of an expert, H width of the model.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a file, as a part of one that the model holds."""

    tensor: str
    """Name of the model's tensor."""
    shape: tuple[int, ...]
    """Of the piece."""
    offset: int = 0
    """First of its elements in that tensor; the others follow it."""
    rows: tuple[int, slice] | None = None
    """Its expert and rows in that tensor; None for all of it."""

    @property
    def experts(self) -> str:
        """Name of the layer's experts that it is a part of; empty for a tensor of its own."""
        return "" if self.rows is None else self.tensor.rpartition(".")[0]

    def of(self, tensor: Any) -> Any:
        """Return its values, a view of the model's tensor."""
        return tensor if self.rows is None else tensor[self.rows]


def pieces_in_files(
    shapes: Mapping[str, Sequence[int]], have: Collection[str] | None = None
) -> dict[str, Piece]:
    """Return where each tensor of the files lies in the model.

    Args:
        shapes: name -> shape of the model's tensors.
        have: names in the files. A fused tensor is taken apart where they have its parts and not itself;
            each is without this.

    >>> found = pieces_in_files({"mlp.experts.down_proj": (2, 8, 4)})
    >>> for name, piece in found.items():
    ...     print(name, piece.shape, piece.offset, piece.rows)
    mlp.experts.0.down_proj.weight (8, 4) 0 (0, slice(0, 8, None))
    mlp.experts.1.down_proj.weight (8, 4) 32 (1, slice(0, 8, None))
    """
    found: dict[str, Piece] = {}
    for name, shape in shapes.items():
        parts = dict(_parts(name, tuple(shape)))
        if parts and (have is None or (name not in have and parts.keys() & have)):
            found |= parts
        else:
            found[name] = Piece(name, tuple(shape))
    return found


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Piece]]:
    """Give a fused tensor's parts by their names in files, in the order of its elements."""
    fused = _FUSED.fullmatch(name)
    if fused is None or len(shape) != 3:
        return
    experts, kinds = fused[1], _PARTS[fused[2]]
    rows, columns = shape[1] // len(kinds), shape[2]
    for expert in range(shape[0]):
        for place, kind in enumerate(kinds):
            own, start = slice(place * rows, (place + 1) * rows), expert * prod(shape[1:])
            yield (
                f"{experts}.{expert}.{kind}.weight",
                Piece(name, (rows, columns), start + own.start * columns, (expert, own)),
            )
