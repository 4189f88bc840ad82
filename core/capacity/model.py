"""Capacity model: how long a learner step takes with so much rollout, and what keeps the learner busy.

A loop is described by a few seconds and rates (`LoopShape`). Of a step's lower bounds the largest one holds:

    training      T
    sampling      R / (a mu), and when workers pause for a broadcast also T_b / kappa
    broadcast     T_b / kappa                             one broadcast at a time
    staleness     the longest way round the graph of collect, step and broadcast that the bound S closes

The last one follows from the schedule (`core.loop.schedule`): the batch of step t is sampled with the oldest
published version that is at least t - S, so a later step waits for an earlier one. docs/concepts/capacity.md
derives all of it, and what predicts seconds asks `pace`. Overlap, publish interval and provisioning:
ECHO-2, arXiv 2602.02192; the equations are reconstructed and extended here, as the paper's are not public.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from antiphon.core.config_sections import LoopSection
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
    """R: completions that take up the places of one batch: P groups of G."""
    train_s: float
    """T: one learner step, with its checkpoint and commit."""
    broadcast_s: float
    """T_b: from a commit until the workers hold its version."""
    group_s: float
    """L: from a group's lease to its rewards, of the slowest group of a batch, which waits for it."""
    acceptance: float = 1.0
    """a: share of the sampled completions that take up places, 0 < a <= 1; below 1 where others replace those
    that are left out (`shape_of`)."""
    place_s: float = 0.0
    """L_0: from the lease of the first group of a place to the rewards of the last, of the slowest place of a
    batch: what a batch takes behind which no group is sampled that could replace one that is left out."""
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


def shape_of(
    loop: LoopSection,
    train_s: float,
    broadcast_s: float,
    group_s: float,
    place_s: float,
    acceptance: float,
) -> LoopShape:
    """Return the shape of a configured loop; here, and in `trained_share`, acceptance enters by the filter.

    With refill, another group is sampled in place of one that is left out, up to `refill_limit`: R / a. With
    none and drop a group has used its place, whatever its rewards: R.

    Args:
        loop: the configured loop.
        train_s, broadcast_s, group_s, place_s: as in `LoopShape`.
        acceptance: share of the rewarded groups whose rewards differ.
    """
    taken = max(acceptance, 1.0 / loop.refill_limit) if loop.filter == "refill" else 1.0
    return LoopShape(loop.prompts_per_step * loop.group_size, train_s, broadcast_s, group_s, taken, place_s)


def trained_share(loop: LoopSection, acceptance: float) -> float:
    """Return the share of a batch's places whose completions are trained on.

    >>> [trained_share(LoopSection(filter=name), 0.4) for name in ("none", "drop", "refill")]
    [1.0, 0.4, 0.8]
    """
    if loop.filter == "refill":
        return min(1.0, acceptance * loop.refill_limit)
    return acceptance if loop.filter == "drop" else 1.0


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
    under_way = math.floor(shape.broadcast_s / shape.train_s + _SMALL)
    return publish_interval + under_way + _ceil(run_ahead)


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
    sampling = shape.raw_completions / supply
    paused = shape.broadcast_s / publish_interval if shape.pauses else 0.0
    bounds = {
        Regime.TRAINING: shape.train_s,
        Regime.SAMPLING: sampling + paused,
        Regime.BROADCAST: shape.broadcast_s / publish_interval,
        Regime.STALENESS: _round_trip_s(shape, sampling, max_staleness, publish_interval),
    }
    longest = max(bounds.values())
    regime = next(name for name, seconds in bounds.items() if seconds >= longest * (1.0 - _SMALL))
    return Pace(longest, publish_interval, regime, shape.train_s)


def _round_trip_s(shape: LoopShape, sampling_s: float, max_staleness: int, publish_interval: int) -> float:
    """Return the seconds per step of the slowest way round: version, broadcast, collect, step, version.

    A batch may be sampled with a version that is 0 to kappa - 1 steps newer than the oldest allowed one, as
    the next published one is. So kappa batches in a row wait for the same version, and the last of them is
    collected when all have been sampled, in `sampling_s` each. Such a way covers d steps and ends at a step
    whose version is not published unless further steps follow; these only train.
    """
    slowest = 0.0
    # With this bound nothing is sampled behind the batches of one version.
    held_s = max(shape.held_s, shape.place_s if max_staleness < publish_interval else 0.0)
    for newer in range(publish_interval):
        collect_s = max(held_s, (publish_interval - newer) * sampling_s)
        covered = max_staleness - newer + 1
        whole = publish_interval * -(-covered // publish_interval)
        once = shape.broadcast_s + collect_s + shape.train_s
        slowest = max(slowest, (once + (whole - covered) * shape.train_s) / whole)
    return slowest


def best_pace(shape: LoopShape, max_staleness: int, supply: float) -> Pace:
    """Return the pace with the publish interval that gives the least seconds per step.

    Of intervals that are as fast the shortest one is taken, as its data is the freshest.

    Args:
        shape: the loop.
        max_staleness: S.
        supply: completions per second.
    """
    most = min(max_staleness + 1, MOST_INTERVAL)
    found = [pace(shape, max_staleness, k, supply) for k in range(1, most + 1)]
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
