"""RandomStream: uniform numbers of a named stream, drawn in blocks so that one costs next to nothing."""

from collections.abc import Sequence
from typing import TypeVar

from antiphon.core.seeds import generator

_BLOCK = 256
_T = TypeVar("_T")


class RandomStream:
    """A stream of random numbers; streams of other names never shift this one."""

    def __init__(self, *name: str | int) -> None:
        """Name the stream, as for `core.seeds.generator`."""
        self._generator = generator(*name)
        self._numbers: list[float] = []

    def number(self) -> float:
        """Return the next number in [0, 1)."""
        if not self._numbers:
            self._numbers = self._generator.random(_BLOCK).tolist()
            self._numbers.reverse()
        return self._numbers.pop()

    def happens(self, probability: float) -> bool:
        """Return whether something of this probability happens; draws nothing when it cannot."""
        return probability > 0.0 and self.number() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.number()

    def index(self, count: int) -> int:
        """Return one of 0 .. count - 1."""
        return min(int(self.number() * count), count - 1)

    def choose(self, options: Sequence[_T]) -> _T:
        return options[self.index(len(options))]
