"""Schedules: the overlapped loop in virtual time, by single completions, to hold the capacity model against.

Completions have a place in the line and train in this order. A worker that dies loses what it samples; the
places are offered again. A filtered completion gives its place back. Workers hold versions, which reach them
a broadcast after their commit, one broadcast at a time.
"""

import heapq
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.capacity.model import LoopShape
from antiphon.core.loop.staleness import StalenessBound

_LANDED, _DIED, _JOINED, _SAMPLED, _TRAINED = range(5)
"""Kinds of events; at one moment in this order: a completion that begins as a version lands gets that one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One loop to be walked through."""

    shape: LoopShape
    publish_interval: int
    slots: tuple[int, ...]
    """Completions that each worker samples at once."""
    run_ahead: float = math.inf
    """b: completions queued or in flight are at most this many batches, without the one in training."""
    max_staleness: int | None = None
    """S: completions are admitted by the production gate, with the version that the worker holds."""
    jitter: float = 0.0
    """Completions take between (1 - jitter) L and L, evenly."""
    deaths_per_s: float = 0.0
    """Of each worker."""
    replaced_s: float = 0.0
    steps: int = 30
    counted_from: int = 10
    """Steps before this one do not count for time."""


@dataclass(frozen=True, slots=True)
class Walked:
    """What came of a schedule."""

    steps: int
    """Steps that were trained; fewer than asked for means a deadlock."""
    staleness_max: int
    step_s: float
    """Mean seconds per counted step."""
    lost: int
    """Completions lost with their workers."""


@dataclass(slots=True)
class _Worker:
    slots: int
    held: int = 0
    alive: bool = True
    life: int = 0
    sampling: dict[int, int] = field(default_factory=dict)
    """Place in the line -> version."""


class _Loop:
    def __init__(self, schedule: Schedule, source: np.random.Generator) -> None:
        self.plan, self.source = schedule, source
        self.workers = [_Worker(slots) for slots in schedule.slots]
        self.events: list[tuple[float, int, int, tuple[int, ...]]] = []
        self.counter = itertools.count()
        self.line: dict[int, int | None] = {}
        """Place -> version of the completion that waits for training; None while it is not sampled yet."""
        self.again: list[int] = []
        """Places whose completion was lost."""
        self.places = itertools.count()
        self.now = self.paused_until = 0.0
        self.version = self.newest = 0
        self.sending: list[int] = []
        """Versions that are sent, one after the other."""
        self.training = False
        self.trained = self.lost = self.staleness_max = 0
        self.ended: list[float] = []

    def walk(self) -> Walked:
        for number, _ in enumerate(self.workers):
            self._draw_death(number)
        self._admit()
        while self.events and self.version < self.plan.steps:
            self.now, kind, _, what = heapq.heappop(self.events)
            (self._land, self._die, self._join, self._sample, self._train)[kind](*what)
            self._begin_training()
            self._admit()
        counted = self.ended[self.plan.counted_from :]
        step_s = (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else math.nan
        return Walked(self.version, self.staleness_max, step_s, self.lost)

    def _at(self, when: float, kind: int, *what: int) -> None:
        heapq.heappush(self.events, (when, kind, next(self.counter), what))

    def _admit(self) -> None:
        size = self.plan.shape.completions
        room = math.inf if math.isinf(self.plan.run_ahead) else math.floor(self.plan.run_ahead * size + 1e-9)
        # The freest worker first, so that load is even.
        for number, worker in sorted(
            enumerate(self.workers), key=lambda one: len(one[1].sampling) - one[1].slots
        ):
            while worker.alive and len(worker.sampling) < worker.slots and self.now >= self.paused_until:
                if self.again:
                    place = heapq.heappop(self.again)
                elif len(self.line) < room and self._gate(worker):
                    place = next(self.places)
                    self.line[place] = None
                else:
                    break
                worker.sampling[place] = worker.held
                takes = self.plan.shape.group_s * (1.0 - self.plan.jitter * self.source.random())
                self._at(self.now + takes, _SAMPLED, number, worker.life, place)

    def _gate(self, worker: _Worker) -> bool:
        if self.plan.max_staleness is None:
            return True
        issued = self.trained + len(self.line)
        bound = StalenessBound(self.plan.max_staleness)
        return bound.room(worker.held, issued, self.plan.shape.completions) > 0

    def _sample(self, number: int, life: int, place: int) -> None:
        worker = self.workers[number]
        if worker.life != life:
            return
        version = worker.sampling.pop(place)
        if self.source.random() < self.plan.shape.acceptance:
            self.line[place] = version
        else:
            del self.line[place]

    def _begin_training(self) -> None:
        size = self.plan.shape.completions
        if self.training or len(self.line) < size:
            return
        batch = list(itertools.islice(self.line.items(), size))
        if any(version is None for _, version in batch):
            return
        for place, version in batch:
            assert version is not None
            self.staleness_max = max(self.staleness_max, self.version - version)
            del self.line[place]
        self.trained += size
        self.training = True
        self._at(self.now + self.plan.shape.train_s, _TRAINED)

    def _train(self) -> None:
        self.version += 1
        self.training = False
        self.ended.append(self.now)
        if self.version % self.plan.publish_interval == 0:
            self.sending.append(self.version)
            if len(self.sending) == 1:
                self._send(self.version)

    def _send(self, version: int) -> None:
        self._at(self.now + self.plan.shape.broadcast_s, _LANDED, version)
        if self.plan.shape.pauses:
            self.paused_until = self.now + self.plan.shape.broadcast_s
            late = self.plan.shape.broadcast_s
            self.events = [(t + late * (kind == _SAMPLED), kind, n, what) for t, kind, n, what in self.events]
            heapq.heapify(self.events)

    def _land(self, version: int) -> None:
        self.newest = version
        for worker in self.workers:
            worker.held = version
        self.sending.pop(0)
        if self.sending:
            self._send(self.sending[0])

    def _draw_death(self, number: int) -> None:
        if self.plan.deaths_per_s > 0.0:
            life = self.source.exponential(1.0 / self.plan.deaths_per_s)
            self._at(self.now + life, _DIED, number)

    def _die(self, number: int) -> None:
        worker = self.workers[number]
        worker.alive = False
        worker.life += 1
        self.lost += len(worker.sampling)
        for place in worker.sampling:
            heapq.heappush(self.again, place)
        worker.sampling.clear()
        self._at(self.now + self.plan.replaced_s, _JOINED, number)

    def _join(self, number: int) -> None:
        worker = self.workers[number]
        worker.alive, worker.held = True, self.newest
        self._draw_death(number)


def walk(schedule: Schedule, source: np.random.Generator) -> Walked:
    """Walk through a loop until all its steps are trained, or nothing can happen any more."""
    return _Loop(schedule, source).walk()


def random_schedule(source: np.random.Generator, *, gated: bool = False) -> Schedule:
    """Draw a loop with deaths and filtering, whose broadcasts do not overlap (5) and run-ahead suffices (4b).

    Args:
        source: of all chance.
        gated: admit by the production gate with a bound S, instead of by a number of batches in flight.
    """
    train_s, size = 10.0, int(source.integers(3, 9))
    interval = int(source.integers(1, 7))
    broadcast_s = train_s * min(float(source.uniform(0.05, 3.5)), float(interval))
    shape = LoopShape(
        completions=size,
        train_s=train_s,
        broadcast_s=broadcast_s,
        group_s=train_s * float(source.uniform(0.05, 2.5)),
        acceptance=float(source.choice([1.0, source.uniform(0.4, 1.0)])),
        pauses=bool(source.random() < 0.5),
    )
    run_ahead = max(shape.run_ahead, float(source.uniform(1.0, 4.2)))
    deaths = float(source.choice([0.0, source.uniform(0.1, 1.0)])) / (20.0 * train_s)
    return Schedule(
        shape,
        interval,
        tuple(int(n) for n in source.integers(1, 2 * size, int(source.integers(1, 4)))),
        run_ahead=math.inf if gated else run_ahead,
        max_staleness=interval - 1 + int(source.integers(0, 5)) if gated else None,
        jitter=float(source.choice([0.0, source.uniform(0.0, 0.9)])),
        deaths_per_s=deaths,
        replaced_s=float(source.uniform(0.0, 5.0)) * train_s,
        steps=24,
    )
