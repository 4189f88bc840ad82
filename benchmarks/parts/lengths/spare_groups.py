"""Spare groups in virtual time: what a batch of the first groups that end would gain, and what it would be.

A loop that opens `spare` groups more than its batches need, and trains the first P that end, never waits for
its longest. What ended too late goes into the next batch while the staleness bound allows, and is given up
then, finished or not. So the longest are given up most often: the bias, and the tokens that are lost, are
returned beside the seconds. Production opens no spare groups; see docs/concepts/lengths.md.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from antiphon.benchmarks.parts.lengths.pipeline import ALPHA_S, BETA_S, LEARNER_SHARE, draw_groups
from antiphon.core.lengths.makespan import WARM_UP_STEPS, Loop, Walk, WorkerPace, seconds_per_step
from antiphon.core.lengths.memory import ComparedGroup
from antiphon.core.lengths.order import ARRIVAL


@dataclass(frozen=True, slots=True)
class SpareRow:
    """One fleet with so many spare groups, by order of arrival."""

    workers: int
    max_staleness: int
    spare: float
    """Spare groups as a share of a step's groups."""
    gain: float
    """Seconds per step without spare groups over those with them."""
    length_bias: float
    """Mean tokens of trained groups over those of opened ones, - 1."""
    first_bias: float
    """The same, for the groups of the first batches alone: those before any group can be given up."""
    given_up: float
    """Share of the groups."""


class _SpareWalk(Walk):
    def __init__(self, loop: Loop, groups: Sequence[ComparedGroup], spare: int) -> None:
        super().__init__(loop, ARRIVAL, groups)
        self._spare, self._step = spare, 0
        self._versions: dict[int, int] = {}
        """Running or rewarded group -> version that its lease began with."""
        self._ready: list[int] = []
        """Rewarded groups, the first first."""
        self.trained: list[int] = []
        self.given_up: list[int] = []

    def _most_opened(self) -> int:
        return super()._most_opened() + self._spare + len(self.given_up)

    def _lease(self) -> None:
        super()._lease()
        for group in self._left:
            self._versions.setdefault(group, self._held)

    def _rewarded(self, group: int) -> None:
        if group in self._versions:
            self._ready.append(group)

    def _begins(self, step: int) -> bool:
        self._give_up(step)
        size = self._loop.prompts_per_step
        if len(self._ready) < size:
            return False
        self.trained += self._ready[:size]
        for group in self._ready[:size]:
            del self._versions[group]
        self._ready = self._ready[size:]
        self._give_up(step + 1)
        return True

    def _give_up(self, step: int) -> None:
        """Give up what is too old for a step."""
        late = {
            group for group, version in self._versions.items() if version + self._loop.max_staleness < step
        }
        if not late:
            return
        self.given_up += late
        self._ready = [group for group in self._ready if group not in late]
        for group in late:
            del self._versions[group]
        for number, worker in enumerate(self._workers):
            gone = [entry for entry in worker.running if entry[1] in late]
            if gone:
                worker.move_to(self._now)
                worker.running = [entry for entry in worker.running if entry[1] not in late]
                heapq.heapify(worker.running)
                worker.load -= sum(count for _, _, count in gone)
                for group in {entry[1] for entry in gone}:
                    del self._left[group]
                    self._held_by[number] -= 1
                self._asking.setdefault(number)
                self._plan(worker, number)


def walk_spare(
    workers: int, max_staleness: int, spare: float, *, groups_each: int = 8, steps: int = 16, seed: int = 0
) -> SpareRow:
    """Walk a fleet that opens `spare` of a step's groups more than its batches need."""
    pace, samples = WorkerPace(ALPHA_S, BETA_S, 32), 8
    size = workers * groups_each
    groups = draw_groups(size * 8, samples, 300.0, seed)
    work_s = fsum(sum(group.counts) for group in groups) / 8 / (workers * pace.tokens_per_s)
    loop = Loop((pace,) * workers, max_staleness, size, LEARNER_SHARE * work_s)
    walk = _SpareWalk(loop, groups, round(spare * size))
    seconds = walk.run(max_staleness + WARM_UP_STEPS, steps)

    def mean(numbers: Sequence[int]) -> float:
        return fsum(sum(groups[number % len(groups)].counts) for number in numbers) / max(1, len(numbers))

    first, usual = walk.trained[:size], mean(range(len(groups)))
    return SpareRow(
        workers,
        max_staleness,
        spare,
        seconds_per_step(loop, ARRIVAL, groups, steps) / seconds,
        mean(walk.trained) / mean([*walk.trained, *walk.given_up]) - 1.0,
        mean(first) / usual - 1.0,
        len(walk.given_up) / (len(walk.trained) + len(walk.given_up)),
    )
