"""Length pipeline in virtual time: the seconds per step of each order of leasing, for fleets of any size.

The orders are production's (`core.lengths.order`); completions are drawn from a recorded
distribution of lengths. Workers that take a step's groups at a time are compared apart from those that ask
whenever they have places, as production's do.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from antiphon.benchmarks.parts.lengths.makespan import Loop, WorkerPace, seconds_per_step
from antiphon.core.lengths.memory import ComparedGroup
from antiphon.core.lengths.order import LeaseOrder

RECORDED = (
    0.16, 0.42, 0.49, 0.59, 0.71, 0.75, 0.82, 0.91, 1.0, 1.1, 1.16, 1.32, 1.46, 1.69, 2.25, 3.08, 3.92,
)  # fmt: skip
"""Quantiles 0, 1/16 .. 1 of recorded completion lengths of mathematics problems, over their median."""
WITHIN = 0.15
"""Standard deviation of the logarithm of lengths within a group, as recorded."""
BETWEEN_EPOCHS = 0.25
"""Of a prompt's lengths from one epoch to the next, assumed: their rank correlation is then about 0.9.
Between two models far apart in training 0.44 and 0.78 were recorded, on mathematics problems."""
ALPHA_S, BETA_S = 0.01, 0.0005
"""Seconds per token of a completion alone, and what each further one adds."""
LEARNER_SHARE = 0.3
"""A learner step takes this share of what the workers need for a step's tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds per step of each order, of one fleet under one bound."""

    workers: int
    max_staleness: int
    step_scoped: bool
    shuffled: bool
    seconds: dict[str, float]
    """Order -> seconds per step."""

    @property
    def gains(self) -> dict[str, float]:
        """Return how many times as fast as arrival each order is."""
        return {name: self.seconds["arrival"] / seconds for name, seconds in self.seconds.items()}


def recorded_quantile(share: float) -> float:
    """Return the recorded length, over the median, that this share of completions does not exceed.

    >>> recorded_quantile(0.5), recorded_quantile(1.0)
    (1.0, 3.92)
    """
    return float(np.interp(share, np.linspace(0.0, 1.0, len(RECORDED)), RECORDED))


def draw_groups(
    count: int, samples: int, median_tokens: float, seed: int, shuffled: bool = False
) -> list[ComparedGroup]:
    """Return groups of recorded lengths as remembered lengths would predict them, or by chance."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        base = median_tokens * recorded_quantile(random.random())
        counts = tuple(max(1, round(base * math.exp(WITHIN * x))) for x in random.standard_normal(samples))
        predicted = max(counts) * math.exp(BETWEEN_EPOCHS * random.standard_normal())
        found.append(ComparedGroup(predicted, counts))
    if shuffled:
        order = random.permutation(count)
        found = [replace(group, predicted=found[i].predicted) for i, group in zip(order, found, strict=True)]
    return found


def walk_fleet(
    workers: int,
    max_staleness: int,
    *,
    step_scoped: bool,
    shuffled: bool = False,
    groups_each: int = 8,
    places: int = 4,
    samples: int = 8,
    steps: int = 8,
    seed: int = 0,
) -> Row:
    """Walk one fleet under every order.

    Args:
        workers: alike.
        max_staleness: S.
        step_scoped: workers ask only when they sample nothing.
        shuffled: predictions are exchanged among the groups.
        groups_each: groups of a step for each worker.
        places: groups that a worker samples at once.
        samples: of a group.
        steps: that count.
        seed: of the lengths.
    """
    pace = WorkerPace(ALPHA_S, BETA_S, places * samples)
    size = workers * groups_each
    groups = draw_groups(size * 4, samples, 300.0, seed, shuffled)
    work_s = sum(sum(group.counts) for group in groups) / 4 / (workers * pace.tokens_per_s)
    loop = Loop((pace,) * workers, max_staleness, size, LEARNER_SHARE * work_s, step_scoped=step_scoped)
    seconds = {order.value: seconds_per_step(loop, order, groups, steps) for order in LeaseOrder}
    return Row(workers, max_staleness, step_scoped, shuffled, seconds)


def walk_fleets(fleets: Sequence[int], bounds: Sequence[int], steps: int = 8) -> Iterator[Row]:
    """Walk fleets of so many workers under each bound, step-scoped and as production's workers ask."""
    for workers in fleets:
        for max_staleness in bounds:
            for step_scoped in (True, False):
                yield walk_fleet(workers, max_staleness, step_scoped=step_scoped, steps=steps)
