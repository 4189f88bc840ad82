"""Draft arena: one growing array, lent out in blocks; a block never moves and a freed one is lent again."""

from bisect import bisect_left


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
        self.lent = 0
        """Cells lent now."""

    def lend(self, cells: int) -> int:
        """Return the first cell of a block of `cells` >= 1 cells.

        >>> blocks = BlockMap()
        >>> [blocks.lend(4), blocks.lend(2)]
        [0, 4]
        >>> blocks.free(0, 4)
        >>> [blocks.lend(3), blocks.lend(3), blocks.top]
        [0, 6, 9]
        """
        self.lent += cells
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
        self.lent -= cells
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
