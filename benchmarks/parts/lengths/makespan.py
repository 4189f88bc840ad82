"""Makespan: the seconds per step that an order of leasing gives, walked for a fleet of single workers.

Each worker samples all of its completions side by side, ``alpha + beta * n`` seconds per token with n of them
at once, and asks for a group whenever it has places for a whole one: the completions of a group leave their
places as they end. Groups keep their places in the line, a batch waits for all of its own, the learner takes
the batches in turn, and a group is leased to whoever holds a version within S of its step. Groups are taken
from the line by `core.lengths.order`, the code that leases them in a run. Swaps, losses and filtered groups
are left out: orders are compared, not forecast.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression

from antiphon.core.lengths.memory import ComparedGroup
from antiphon.core.lengths.order import AskingWorker, LeaseOrder, WaitingGroup, WaitingGroups

WARM_UP_STEPS = 3
"""Steps after the S + 1 first ones that do not count: the loop fills."""


@dataclass(frozen=True, slots=True)
class WorkerPace:
    """How fast one worker is."""

    alpha: float
    """Seconds per token of a completion that runs alone."""
    beta: float
    """Seconds per token that each completion at once adds."""
    places: int
    """Completions that it samples at once."""

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second with all places used."""
        return self.places / (self.alpha + self.beta * self.places)


@dataclass(frozen=True, slots=True)
class Loop:
    """What does not depend on the order."""

    workers: tuple[WorkerPace, ...]
    max_staleness: int
    prompts_per_step: int
    learner_s: float
    """Of a learner step, with its commit."""
    broadcast_s: float = 0.0
    """From a commit until the workers hold its version."""
    reward_s: float = 0.0
    """From a group's last token until it is rewarded."""
    step_scoped: bool = False
    """A worker asks for groups only when it has none, as where batches are scoped to a step; otherwise
    whenever it has places for one."""


@dataclass(slots=True)
class _Worker:
    pace: WorkerPace
    asking: AskingWorker
    tokens: float = 0.0
    """What a completion has got that ran from the beginning on."""
    at_s: float = 0.0
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """(value of `tokens` at its end, group, completions of the group that end there)."""
    load: int = 0
    asks: int = 0

    @property
    def rate(self) -> float:
        return 1.0 / max(1e-12, self.pace.alpha + self.pace.beta * self.load)

    def move_to(self, now: float) -> None:
        self.tokens += (now - self.at_s) * self.rate if self.load else 0.0
        self.at_s = now

    def next_s(self) -> float:
        return self.at_s + max(0.0, self.running[0][0] - self.tokens) / self.rate


def seconds_per_step(loop: Loop, order: LeaseOrder, groups: Sequence[ComparedGroup], steps: int) -> float:
    """Walk `steps` steps, after those in which the loop fills, and return the seconds of one: the slope of
    their commits.

    Args:
        loop: the fleet and the bound.
        order: how groups are leased.
        groups: predicted and true lengths of one group after another, in the order of opening; they are
            repeated as often as needed.
        steps: that count.
    """
    return Walk(loop, order, groups).run(loop.max_staleness + WARM_UP_STEPS, steps)


class Walk:
    """One walk of a loop, from its first group on."""

    def __init__(self, loop: Loop, order: LeaseOrder, groups: Sequence[ComparedGroup]) -> None:
        self._loop, self._groups = loop, groups
        fastest = max(pace.tokens_per_s for pace in loop.workers)
        paces = sorted(loop.workers, key=lambda pace: -pace.tokens_per_s)
        self._workers = [
            _Worker(pace, AskingWorker(len(paces), pace.tokens_per_s / fastest)) for pace in paces
        ]
        self._waiting = WaitingGroups(order)
        self._left: dict[int, int] = {}
        """Group -> completions that are not ended."""
        self._events: list[tuple[float, int, int, int]] = []
        """(second, kind, number, how often the worker had changed by then)."""
        self._missing: dict[int, int] = {}
        self._asking: dict[int, None] = dict.fromkeys(range(len(paces)))
        """Workers with places for a whole group, the one that asked longest ago first."""

    def run(self, begin: int, steps: int) -> float:
        """Walk `begin` and then `steps` steps, and return the seconds of one of the latter."""
        loop, size = self._loop, self._loop.prompts_per_step
        commits = 0
        opened, training, committed_s = 0, False, list[float]()
        while commits < begin + steps:
            while opened < self._most_opened():
                group = self._groups[opened % len(self._groups)]
                self._waiting.add(WaitingGroup(opened, opened // size, group.predicted))
                self._missing[opened // size] = self._missing.get(opened // size, 0) + 1
                opened += 1
            if not training and self._begins(commits):
                training = True
                heapq.heappush(self._events, (self._now + loop.learner_s, _COMMIT, 0, 0))
            self._lease()
            second, kind, number, change = heapq.heappop(self._events)
            if kind == _WORKER and change != self._workers[number].asks:
                continue
            self._now = second
            if kind == _WORKER:
                for group_number in self._ended(self._workers[number], number):
                    heapq.heappush(self._events, (second + loop.reward_s, _REWARD, group_number, 0))
            elif kind == _REWARD:
                self._rewarded(number)
            elif kind == _COMMIT:
                commits, training = commits + 1, False
                self._missing.pop(commits - 1)
                heapq.heappush(self._events, (second + loop.broadcast_s, _HELD, commits, 0))
                if commits >= begin:
                    committed_s.append(second)
            else:
                self._held = number
        # Steps end two by two; of a span between two commits a good part would be chance.
        return linear_regression(range(steps + 1), committed_s).slope

    _now = 0.0
    _held = 0
    """Version that the workers hold."""

    def _most_opened(self) -> int:
        """Return how many groups may have been opened by now."""
        return (self._held + self._loop.max_staleness + 1) * self._loop.prompts_per_step

    def _rewarded(self, group: int) -> None:
        self._missing[group // self._loop.prompts_per_step] -= 1

    def _begins(self, step: int) -> bool:
        """Return whether a step's batch is complete; it is trained then."""
        return self._missing.get(step) == 0

    def _ended(self, worker: _Worker, number: int) -> Iterator[int]:
        """Yield the groups whose last completion a worker has just ended."""
        worker.move_to(self._now)
        worker.tokens = max(worker.tokens, worker.running[0][0])
        while worker.running and worker.running[0][0] <= worker.tokens:
            _, group, count = heapq.heappop(worker.running)
            worker.load -= count
            self._left[group] -= count
            if not self._left[group]:
                del self._left[group]
                yield group
        if self._may_ask(worker):
            self._asking.setdefault(number)
        self._plan(worker, number)

    def _may_ask(self, worker: _Worker) -> bool:
        if self._loop.step_scoped and worker.load:
            return False
        return worker.pace.places - worker.load >= len(self._groups[0].counts)

    def _plan(self, worker: _Worker, number: int) -> None:
        worker.asks += 1
        if worker.running:
            heapq.heappush(self._events, (worker.next_s(), _WORKER, number, worker.asks))

    def _lease(self) -> None:
        if not len(self._waiting):
            return
        size = len(self._groups[0].counts)
        for number in list(self._asking):
            worker = self._workers[number]
            room = (worker.pace.places - worker.load) // size
            if not (taken := self._waiting.take(worker.asking, room)):
                continue
            worker.move_to(self._now)
            for group in taken:
                counts = self._groups[group % len(self._groups)].counts
                for count in set(counts):
                    heapq.heappush(worker.running, (worker.tokens + count, group, counts.count(count)))
                self._left[group] = len(counts)
                worker.load += len(counts)
            self._plan(worker, number)
            if not self._may_ask(worker):
                del self._asking[number]
            if not len(self._waiting):
                return


_REWARD, _COMMIT, _HELD, _WORKER = range(4)
