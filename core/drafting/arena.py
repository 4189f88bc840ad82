"""Draft arena: the arrays behind the draft tree, lent out in blocks that never move and are lent again.

Positions are offsets in the arena and stay valid when its arrays grow. Legend: see `core.drafting.kernels`.
"""

from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.drafting.kernels import Texts, link

_FIRST_CELLS = 1 << 12


class BlockMap:
    """Which cells of an array are lent: first fit among the holes, else the end.

    The caller owns the array and makes it at least `top` long. Holes that touch are merged, so the
    number of holes is at most the number of blocks; lending and freeing cost time linear in it.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.top = 0
        """Cells below this were lent at some time; the array must be as long."""

    def lend(self, cells: int) -> int:
        """Return the first cell of a block of `cells` >= 1 cells.

        >>> blocks = BlockMap()
        >>> [blocks.lend(4), blocks.lend(2)]
        [0, 4]
        >>> blocks.free(0, 4)
        >>> [blocks.lend(3), blocks.lend(3), blocks.top]
        [0, 6, 9]
        """
        for k, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            if stop - start >= cells:
                self._starts[k] = start + cells
                if self._starts[k] == stop:
                    del self._starts[k], self._stops[k]
                return start
        start = self.top
        self.top += cells
        return start

    def free(self, start: int, cells: int) -> None:
        """Take back `cells` cells from `start` on, a whole block or the end of one."""
        if cells <= 0:
            return
        stop = start + cells
        k = bisect_left(self._starts, start)
        if k < len(self._starts) and self._starts[k] == stop:
            stop = self._stops[k]
            del self._starts[k], self._stops[k]
        if k > 0 and self._stops[k - 1] == start:
            k -= 1
            start = self._starts[k]
            del self._starts[k], self._stops[k]
        if stop == self.top:
            self.top = start
        else:
            self._starts.insert(k, start)
            self._stops.insert(k, stop)


class DraftArena:
    """Texts and head tables of a forest."""

    def __init__(self, gram: int) -> None:
        """Start small; `gram` is the length of the short contexts, in tokens."""
        self._gram = gram
        self._cells = BlockMap()
        self._entries = BlockMap()
        self.texts = Texts(
            tokens=np.full(_FIRST_CELLS, -1, dtype=np.int32),
            previous=np.full((_FIRST_CELLS, 2), -1, dtype=np.int32),
            weights=np.zeros(_FIRST_CELLS, dtype=np.float32),
            heads=np.full(_FIRST_CELLS, -1, dtype=np.int32),
        )
        """The arrays now; growing replaces them."""

    @property
    def bytes_used(self) -> int:
        """Bytes of the arrays, room for growth included."""
        return sum(array.nbytes for array in self.texts)

    def lend_text(self, cells: int, weight: float) -> int:
        """Return the first of `cells` positions, all separators, whose text votes with `weight`."""
        block = self._cells.lend(cells)
        if self._cells.top > len(self.texts.tokens):
            self.texts = Texts(
                tokens=grown(self.texts.tokens, self._cells.top, -1),
                previous=grown(self.texts.previous, self._cells.top, -1),
                weights=grown(self.texts.weights, self._cells.top, 0),
                heads=self.texts.heads,
            )
        self.texts.tokens[block : block + cells] = -1
        self.texts.previous[block : block + cells] = -1
        self.texts.weights[block : block + cells] = weight
        return block

    def free_text(self, block: int, cells: int) -> None:
        """Take back positions that no chain in use leads to."""
        self._cells.free(block, cells)

    def lend_table(self, positions: int) -> tuple[int, int]:
        """Return (first entry, mask) of empty head tables for about that many positions."""
        size = power_of_two(positions)
        head = self._entries.lend(2 * size)
        if self._entries.top > len(self.texts.heads):
            self.texts = self.texts._replace(heads=grown(self.texts.heads, self._entries.top, -1))
        self.texts.heads[head : head + 2 * size] = -1
        return head, size - 1

    def free_table(self, head: int, mask: int) -> None:
        """Take back what `lend_table` returned."""
        self._entries.free(head, 2 * (mask + 1))

    def write(self, start: int, tokens: npt.NDArray[np.int32], weight: float) -> None:
        """Put a text into lent positions."""
        self.texts.tokens[start : start + len(tokens)] = tokens
        self.texts.weights[start : start + len(tokens)] = weight

    def index(self, start: int, length: int, head: int, mask: int) -> None:
        """Put a text of `length` tokens into the chains of a table, the position after its end too."""
        link(self.texts, start, start + length + 1, self._gram, head, mask)


def power_of_two(cells: int) -> int:
    """Return the smallest power of two that holds `cells`, at least 16.

    >>> [power_of_two(n) for n in (1, 16, 17)]
    [16, 16, 32]
    """
    return 1 << max(4, (cells - 1).bit_length())


def grown(array: npt.NDArray[Any], rows: int, fill: int) -> npt.NDArray[Any]:
    """Return a copy of at least `rows` rows and half as many again as before, the new ones filled.

    >>> grown(np.array([1, 2]), 3, 7).tolist()
    [1, 2, 7]
    """
    larger = np.full((max(rows, len(array) * 3 // 2), *array.shape[1:]), fill, dtype=array.dtype)
    larger[: len(array)] = array
    return larger
