"""Capacity model: how long a learner step takes with so much rollout, and what keeps the learner busy.

A loop is described by a few seconds and rates (`LoopShape`). Of a step's lower bounds the largest one holds:

    training      T
    sampling      R / (a mu), and when workers pause for a broadcast also T_b / kappa
    broadcast     T_b / kappa                             one broadcast at a time
    staleness     the longest way round the graph of collect, step and broadcast that the bound S closes

The last one follows from the schedule (`core.loop.schedule`): the batch of step t is sampled with the oldest
published version that is at least t - S, so a later step waits for an earlier one. docs/concepts/capacity.md
derives all of it. Overlap, publish interval and provisioning: ECHO-2, arXiv 2602.02192; the equations are
reconstructed and extended here, since the paper's own are not public.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from antiphon.core.errors import InfeasibleError

MOST_INTERVAL = 64
"""Longest publish interval, as in the configuration."""
_SMALL = 1e-9


class Regime(StrEnum):
    """What the learner waits for."""

    TRAINING = "training"
    """Nothing: it always has a batch."""
    SAMPLING = "sampling"
    """Too few completions per second."""
    BROADCAST = "broadcast"
    """The next broadcast can only begin when the one before has ended."""
    STALENESS = "staleness"
    """The bound: workers may not sample for a step before they hold a version that is new enough."""


@dataclass(frozen=True, slots=True)
class LoopShape:
    """What a loop is made of; seconds, and completions counted one by one."""

    completions: int
    """R: completions that one learner step trains on."""
    train_s: float
    """T: one learner step, with its checkpoint and commit."""
    broadcast_s: float
    """T_b: from a commit until the workers hold its version."""
    group_s: float
    """L: from a group's lease to its rewards: its longest completion, and the reward."""
    acceptance: float = 1.0
    """a: share of the completions that is trained on, after filtering and losses, 0 < a <= 1."""
    pauses: bool = False
    """Workers sample nothing while a version is on its way to them."""

    def __post_init__(self) -> None:
        if self.completions < 1:
            raise InfeasibleError(
                f"a step of {self.completions} completions trains on nothing; give 1 or more"
            )
        for name, least in (("train_s", _SMALL), ("broadcast_s", 0.0), ("group_s", _SMALL)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise InfeasibleError(
                    f"{name}={value:g} is no number of seconds to plan with; measure or estimate it again"
                )
        if not 0.0 < self.acceptance <= 1.0:
            raise InfeasibleError(
                f"an acceptance of {self.acceptance:g} is not above 0 and at most 1: no supply would ever "
                "fill a batch; look at the rewards, or give another value"
            )

    @property
    def raw_completions(self) -> float:
        """R / a: completions sampled for one step."""
        return self.completions / self.acceptance

    @property
    def held_s(self) -> float:
        """L': seconds of the places that a batch takes up, L / a + (1 - a) T.

        Until it is rewarded a group that will be filtered has a place as any other. The second term is for
        filtered ones that come in a row: without it loops that were walked still waited at S_min.
        """
        return self.group_s / self.acceptance + (1.0 - self.acceptance) * self.train_s

    @property
    def run_ahead(self) -> float:
        """b: batches that must be allowed in flight, by Little's law (4b)."""
        return max(1.0, self.held_s / self.train_s)

    @property
    def least_interval(self) -> int:
        """(5): steps between two versions, so that one broadcast has ended before the next begins."""
        return max(1, _ceil(self.broadcast_s / self.train_s))


@dataclass(frozen=True, slots=True)
class Pace:
    """What a loop does with a supply of completions."""

    step_s: float
    """Seconds from one learner step to the next."""
    publish_interval: int
    regime: Regime
    train_s: float

    @property
    def wait_s(self) -> float:
        """Seconds of each step in which the learner has nothing to train on."""
        return max(0.0, self.step_s - self.train_s)

    @property
    def idle_share(self) -> float:
        return self.wait_s / self.step_s


def required_supply(shape: LoopShape, publish_interval: int = 1) -> float:
    """Return the completions per second that keep the learner busy, (2) and (3); infinity where none do.

    (3), workers that sample while a version arrives: R / (a T). (2), workers that pause for it:
    kappa R / (a (kappa T - T_b)).

    >>> shape = LoopShape(2048, train_s=120.0, broadcast_s=840.0, group_s=60.0)
    >>> round(required_supply(shape), 2)
    17.07
    >>> paused = LoopShape(2048, 120.0, 840.0, 60.0, pauses=True)
    >>> [round(required_supply(paused, interval), 1) for interval in (7, 8, 10)]
    [inf, 136.5, 56.9]
    """
    pause = shape.broadcast_s if shape.pauses else 0.0
    left = publish_interval * shape.train_s - pause
    return publish_interval * shape.raw_completions / left if left > 0.0 else math.inf


def largest_staleness(shape: LoopShape, publish_interval: int, run_ahead: float) -> int:
    """Return the staleness that is never exceeded, (4): kappa + floor(T_b / T) + ceil(b).

    >>> largest_staleness(LoopShape(64, 10.0, 25.0, 10.0), publish_interval=3, run_ahead=1.0)
    6
    """
    return publish_interval + _floor(shape.broadcast_s / shape.train_s) + _ceil(run_ahead)


def least_staleness(shape: LoopShape) -> int:
    """Return S_min, (5): the bound from which on the learner never waits, given `required_supply`.

    >>> [least_staleness(LoopShape(2048, 120.0, seconds, 60.0)) for seconds in (840.0, 60.0)]
    [15, 2]
    """
    return largest_staleness(shape, shape.least_interval, shape.run_ahead)


def pace(shape: LoopShape, max_staleness: int, publish_interval: int, supply: float) -> Pace:
    """Return the seconds per step with a supply of completions.

    Args:
        shape: the loop.
        max_staleness: S; at least `publish_interval` - 1.
        publish_interval: kappa.
        supply: mu, completions per second of all workers, losses taken off.

    Raises:
        InfeasibleError: for no supply, or an interval that no version would ever be new enough with.

    Where a broadcast takes longer than the interval, versions in between are never sent, which is as good as
    a longer interval.

    >>> shape = LoopShape(64, train_s=10.0, broadcast_s=5.0, group_s=20.0)
    >>> [round(pace(shape, bound, 1, 100.0).step_s, 2) for bound in range(5)]
    [35.0, 17.5, 11.67, 10.0, 10.0]
    """
    if not supply > 0.0:
        raise InfeasibleError(
            f"a supply of {supply:g} completions per second never fills a batch; add workers"
        )
    if max_staleness < publish_interval - 1:
        raise InfeasibleError(
            f"a publish interval of {publish_interval} needs a staleness bound of {publish_interval - 1}, "
            f"but it is {max_staleness}; publish more often, or raise the bound"
        )
    most = max(publish_interval, min(max_staleness + 1, MOST_INTERVAL))
    sent = [
        _pace(shape, max_staleness, k, supply) for k in range(publish_interval, most + 1, publish_interval)
    ]
    return replace(min(sent, key=lambda one: one.step_s), publish_interval=publish_interval)


def _pace(shape: LoopShape, max_staleness: int, publish_interval: int, supply: float) -> Pace:
    """Return the pace when every published version is sent."""
    sampling = shape.raw_completions / supply
    collect = max(shape.held_s, sampling)
    paused = shape.broadcast_s / publish_interval if shape.pauses else 0.0
    bounds = {
        Regime.TRAINING: shape.train_s,
        Regime.SAMPLING: sampling + paused,
        Regime.BROADCAST: shape.broadcast_s / publish_interval,
        Regime.STALENESS: _round_trip_s(shape, collect, max_staleness, publish_interval),
    }
    longest = max(bounds.values())
    regime = next(name for name, seconds in bounds.items() if seconds >= longest * (1.0 - _SMALL))
    return Pace(longest, publish_interval, regime, shape.train_s)


def _round_trip_s(shape: LoopShape, collect_s: float, max_staleness: int, publish_interval: int) -> float:
    """Return the seconds per step of the slowest way round: version, broadcast, collect, step, version.

    A batch may be sampled with a version that is 0 to kappa - 1 steps newer than the oldest allowed one, as
    the next published one is. Such a way covers d steps and ends at a step whose version is not published
    unless further steps follow; these only train.
    """
    once = shape.broadcast_s + collect_s + shape.train_s
    slowest = 0.0
    for newer in range(publish_interval):
        covered = max_staleness - newer + 1
        whole = publish_interval * -(-covered // publish_interval)
        slowest = max(slowest, (once + (whole - covered) * shape.train_s) / whole)
    return slowest


def best_pace(shape: LoopShape, max_staleness: int, supply: float, interval: int | None = None) -> Pace:
    """Return the pace with the publish interval that gives the least seconds per step.

    Of intervals that are as fast the shortest one is taken, as its data is the freshest.

    Args:
        shape: the loop.
        max_staleness: S.
        supply: completions per second.
        interval: the interval to take instead.
    """
    if interval is not None:
        return pace(shape, max_staleness, interval, supply)
    most = min(max_staleness + 1, MOST_INTERVAL)
    found = [_pace(shape, max_staleness, k, supply) for k in range(1, most + 1)]
    fastest = min(one.step_s for one in found)
    return next(one for one in found if one.step_s <= fastest * (1.0 + _SMALL))


def preemption_efficiency(losses_per_s: float, unsafe_s: float) -> float:
    """Return the share of a worker's sampling that is not lost: e = x / (exp(x) - 1), x = lambda l.

    Args:
        losses_per_s: lambda, sudden ends of one worker per second of its life.
        unsafe_s: l, seconds of work that one end destroys at most: a whole group where nothing of it is kept,
            the time between two heartbeats where another worker continues it.

    >>> [round(preemption_efficiency(x, 1.0), 3) for x in (0.0, 0.1, 0.5, 1.0)]
    [1.0, 0.951, 0.771, 0.582]
    """
    x = losses_per_s * unsafe_s
    return x / math.expm1(x) if x > 1e-12 else 1.0


def availability(losses_per_s: float, replaced_s: float) -> float:
    """Return the share of time a worker is there: A = 1 / (1 + lambda (T_replace + T_join)).

    >>> round(availability(0.511 / 3600, 600.0), 3)
    0.922
    """
    return 1.0 / (1.0 + losses_per_s * replaced_s)


def _ceil(value: float) -> int:
    return math.ceil(value - _SMALL)


def _floor(value: float) -> int:
    return math.floor(value + _SMALL)
