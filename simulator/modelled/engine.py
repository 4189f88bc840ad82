"""Engine model: a worker samples its completions side by side, each at the pace that their number allows."""

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from antiphon.simulator.modelled.calibration import Calibration, SeenGroup

_SMALL = 1e-9

Ends = list[tuple[float, int]]
"""(tokens, completions that have so many)."""


@dataclass(slots=True)
class Engine:
    """One worker's engine: ``alpha + beta n`` seconds per token with n completions at once."""

    name: str
    known: Calibration
    speed: float = 1.0
    """Share of the pace that it has where cores are shared."""
    tokens: float = 0.0
    """What a completion has got that ran from the beginning on."""
    at_s: float = 0.0
    sampled: int = 0
    """Tokens of all groups that it handed in."""
    busy_s: float = 0.0
    """With work."""
    running: list[tuple[float, str, int]] = field(default_factory=list)
    """(value of `tokens` at its end, group, completions of the group that end there), a heap."""
    load: int = 0
    groups: int = 0
    planned: int = 0
    """Times that its next end was planned."""
    held: int = 0
    away: bool = False

    def token_s(self, load: int) -> float:
        """Return the seconds per token with so many completions."""
        return max(1e-12, self.known.alpha_s + self.known.beta_s * load)

    def move(self, now: float) -> None:
        """Sample until `now`."""
        if self.load:
            self.tokens += (now - self.at_s) * self.speed / self.token_s(self.load)
            self.busy_s += now - self.at_s
        self.at_s = now

    def next_s(self) -> float:
        """Return when the next completion ends."""
        left = max(0.0, self.running[0][0] - self.tokens)
        return self.at_s + left * self.token_s(self.load) / self.speed

    def begin(self, group_id: str, ends: Ends) -> Ends:
        """Begin a group, and return where its completions end."""
        load = sum(count for _, count in ends)
        first = self.tokens + self.known.start_s / self.token_s(self.load + load)
        absolute = [(first + left, count) for left, count in ends]
        for end, count in absolute:
            heapq.heappush(self.running, (end, group_id, count))
        self.load += load
        self.groups += 1
        return absolute

    def ended(self, now: float) -> Iterator[tuple[str, int]]:
        """Sample until the next end, which is now; yield each group and how many of it ended."""
        self.move(now)
        self.tokens = max(self.tokens, self.running[0][0])
        while self.running and self.running[0][0] <= self.tokens + _SMALL:
            _, group_id, count = heapq.heappop(self.running)
            self.load -= count
            yield group_id, count

    def lose(self) -> None:
        """Forget all."""
        self.running, self.load, self.groups, self.away = [], 0, 0, True
        self.planned += 1


class Lengths:
    """Completions to come, as they were recorded."""

    def __init__(self, known: Calibration, seed: int, exact: bool) -> None:
        """Prepare for a run; `exact` ends each completion apart, otherwise all but the longest together."""
        self._groups, self._seed, self._exact = known.groups, seed, exact
        self._seen = defaultdict[int, list[SeenGroup]](list)
        for group in known.groups:
            self._seen[group.prompt].append(group)

    def draw(self, prompt: int, epoch: int, number: int) -> SeenGroup:
        """Return a recorded group of the prompt, each in its turn; of any prompt where there is none."""
        if known := self._seen.get(prompt):
            return known[(epoch + prompt + self._seed) % len(known)]
        return self._groups[(number + self._seed) % len(self._groups)]

    def ends(self, seen: SeenGroup) -> Ends:
        """Return where the completions of a group end."""
        if self._exact:
            return [(float(tokens), seen.tokens.count(tokens)) for tokens in set(seen.tokens)]
        longest, others = max(seen.tokens), len(seen.tokens) - 1
        mean = (sum(seen.tokens) - longest) / max(1, others)
        return [(float(longest), 1), (mean, others)] if others else [(float(longest), 1)]
