"""Cover: the cheapest workers whose supply is enough, with some to spare for those that will be lost.

A worker is there with probability A and then gives rate mu. The supply of a set is enough when

    sum A mu - z sqrt(sum A (1 - A) mu^2)  >=  need            with the chosen confidence (normal quantile z)
    sum A mu outside g                     >=  survives need   for each group g that can vanish at once

The set is found greedily, by price per unit of what still lacks; after each worker taken this way it is also
completed by the one worker that makes it enough most cheaply. What is superfluous is dropped, dearest first,
and workers are exchanged for cheaper ones while the supply stays enough; the cheapest set found is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import InfeasibleError

MOST_USD_PER_HOUR = 100_000.0
"""Nobody asks more for one worker."""
MOST_EXCHANGED = 48
"""Offers up to which exchanges are tried: with more of them the greedy set is within a percent anyway."""
_SLACK = 1e-9

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """One worker that runs or could."""

    name: str
    usd_per_hour: float
    rate: float
    """mu: what it gives while it is there, such as completions per second."""
    availability: float = 1.0
    """A: share of time that it is there, 0 < A <= 1."""
    group: str = ""
    """What may be reclaimed at once: its zone or class; empty where it depends on no other worker."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.usd_per_hour <= MOST_USD_PER_HOUR:
            raise InfeasibleError(
                f"worker {self.name} costs {self.usd_per_hour:g} US dollars per hour; a price is from 0 to "
                f"{MOST_USD_PER_HOUR:g}, so look at its unit and its source"
            )
        if not 0.0 < self.rate < math.inf:
            raise InfeasibleError(
                f"worker {self.name} reports a rate of {self.rate:g}; leave it out until it gives something "
                "that can be counted"
            )
        if not 0.0 < self.availability <= 1.0:
            raise InfeasibleError(
                f"worker {self.name} is said to be there for a share of {self.availability:g} of the time; "
                "that is above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True)
class Redundancy:
    """What the supply survives."""

    confidence: float = 0.95
    """Probability with which the supply is enough at a random moment; 0.5 plans with the mean."""
    survives: float = 0.0
    """Share of the need that is left when any one group vanishes; 0 ignores groups."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1.0:
            raise InfeasibleError(
                f"a confidence of {self.confidence:g} cannot be planned for; give 0.5 or more, below 1"
            )
        if not 0.0 <= self.survives <= 1.0:
            raise InfeasibleError(f"a surviving share of {self.survives:g} is not from 0 to 1")


@dataclass(frozen=True, slots=True)
class Cover:
    """The workers to have."""

    names: tuple[str, ...]
    usd_per_hour: float
    supply: float
    """With the confidence that was asked for."""
    enough: bool
    """Whether the need is met; otherwise these are all workers."""
    survives: float
    """Share of the need that is left when the largest group vanishes."""


class Fleet:
    """Offers as arrays, and what any subset of them gives."""

    def __init__(self, offers: Sequence[WorkerOffer], need: float, redundancy: Redundancy) -> None:
        self.need, self.redundancy = need, redundancy
        self.prices: Numbers = np.array([one.usd_per_hour for one in offers], dtype=np.float64)
        rates = np.array([one.rate for one in offers], dtype=np.float64)
        there = np.array([one.availability for one in offers], dtype=np.float64)
        self.means: Numbers = there * rates
        self.variances: Numbers = there * (1.0 - there) * rates * rates
        self.z = NormalDist().inv_cdf(redundancy.confidence)
        names = sorted({one.group or f"\0{one.name}" for one in offers})
        place = {name: at for at, name in enumerate(names)}
        groups = [place[one.group or f"\0{one.name}"] for one in offers]
        self.outside: Numbers = np.ones((len(offers), len(names)))
        """1 where a worker is outside a group."""
        self.outside[np.arange(len(offers)), groups] = 0.0
        if not redundancy.survives:
            self.outside = self.outside[:, :0]

    def supply(self, means: Numbers, variances: Numbers) -> Numbers:
        return np.asarray(means - self.z * np.sqrt(np.maximum(0.0, variances)))

    def lacking(self, means: Numbers, variances: Numbers, outside: Numbers) -> Numbers:
        """Return what lacks to be enough, of sets given by sums (...), (...), (..., groups)."""
        first = np.maximum(0.0, self.need - self.supply(means, variances))
        others = np.maximum(0.0, self.redundancy.survives * self.need - outside).sum(axis=-1)
        return np.asarray(first + others)

    def sums(self, chosen: Flags) -> tuple[Numbers, Numbers, Numbers]:
        return (
            self.means[chosen].sum(),
            self.variances[chosen].sum(),
            (self.means[:, None] * self.outside)[chosen].sum(axis=0),
        )

    def with_each(self, chosen: Flags, sign: float = 1.0) -> Numbers:
        """Return what lacks when each worker is added to a set, or with sign -1 taken from it."""
        mean, variance, outside = self.sums(chosen)
        return self.lacking(
            mean + sign * self.means,
            variance + sign * self.variances,
            outside + sign * self.means[:, None] * self.outside,
        )

    def is_enough(self, chosen: Flags) -> bool:
        return bool(self.lacking(*self.sums(chosen)) <= _SLACK * self.need)


def cover(offers: Sequence[WorkerOffer], need: float, redundancy: Redundancy | None = None) -> Cover:
    """Return the cheapest workers found whose supply is enough; all of them where it never is.

    Equal input gives an equal set, whatever its order.

    Args:
        offers: workers that run or could, each name once.
        need: the supply wanted, in the unit of the rates.
        redundancy: what it survives; by default the confidence of `Redundancy`.

    >>> fleet = [WorkerOffer("a", 3.0, 10.0), WorkerOffer("b", 1.0, 5.0), WorkerOffer("c", 1.2, 5.0)]
    >>> cover(fleet, 10.0).names, cover(fleet, 12.0).names
    (('b', 'c'), ('a', 'b'))
    """
    if not 0.0 < need < math.inf:
        raise InfeasibleError(f"a need of {need:g} cannot be covered; measure or estimate it again")
    offers = sorted(offers, key=lambda one: (one.usd_per_hour / (one.rate * one.availability), one.name))
    fleet = Fleet(offers, need, redundancy or Redundancy())
    everyone = np.ones(len(offers), dtype=np.bool_)
    chosen = _cheapest(fleet) if offers and fleet.is_enough(everyone) else None
    enough = chosen is not None
    chosen = everyone if chosen is None else chosen
    mean, variance, _ = fleet.sums(chosen)
    names = tuple(one.name for one, taken in zip(offers, chosen, strict=True) if taken)
    return Cover(
        tuple(sorted(names)),
        float(fleet.prices[chosen].sum()),
        float(fleet.supply(mean, variance)),
        enough,
        _left(offers, chosen, need),
    )


def _cheapest(fleet: Fleet) -> Flags:
    chosen = np.zeros(len(fleet.prices), dtype=np.bool_)
    best: Flags | None = None
    while not fleet.is_enough(chosen):
        lacks = fleet.with_each(chosen)
        for finisher in np.flatnonzero(~chosen & (lacks <= _SLACK * fleet.need)):
            if best is None or fleet.prices[chosen].sum() + fleet.prices[finisher] < fleet.prices[best].sum():
                best = chosen.copy()
                best[finisher] = True
        gain = np.where(chosen, 0.0, fleet.lacking(*fleet.sums(chosen)) - lacks)
        if not gain.max() > 0.0:  # a worker so rarely there that it adds more doubt than supply
            chosen[:] = True
            break
        ratio = np.where(gain > 0.0, (fleet.prices + _SLACK) / np.maximum(gain, 1e-300), np.inf)
        chosen[int(ratio.argmin())] = True
    found = [_improved(fleet, _trimmed(fleet, one)) for one in (chosen, best) if one is not None]
    return min(found, key=lambda one: float(fleet.prices[one].sum()))


def _trimmed(fleet: Fleet, chosen: Flags) -> Flags:
    """Drop workers that are not needed, dearest first."""
    chosen = chosen.copy()
    while True:
        spare = chosen & (fleet.with_each(chosen, -1.0) <= _SLACK * fleet.need)
        if not spare.any():
            return chosen
        chosen[int(np.where(spare, fleet.prices, -1.0).argmax())] = False


def _improved(fleet: Fleet, chosen: Flags) -> Flags:
    """Exchange one worker for a cheaper one, as long as that is enough; the largest saving first."""
    while len(fleet.prices) <= MOST_EXCHANGED:
        saved, exchange = _SLACK, None
        for leaving in np.flatnonzero(chosen):
            rest = chosen.copy()
            rest[leaving] = False
            fits = ~chosen & (fleet.with_each(rest) <= _SLACK * fleet.need)
            coming = int(np.where(fits, fleet.prices, np.inf).argmin())
            if fits[coming] and fleet.prices[leaving] - fleet.prices[coming] > saved:
                saved, exchange = fleet.prices[leaving] - fleet.prices[coming], (leaving, coming)
        if exchange is None:
            break
        chosen = chosen.copy()
        chosen[exchange[0]], chosen[exchange[1]] = False, True
        chosen = _trimmed(fleet, chosen)
    return chosen


def _left(offers: Sequence[WorkerOffer], chosen: Flags, need: float) -> float:
    means: dict[str, float] = {}
    for one, taken in zip(offers, chosen, strict=True):
        if taken:
            means[one.group or f"\0{one.name}"] = means.get(one.group or f"\0{one.name}", 0.0) + (
                one.rate * one.availability
            )
    return (sum(means.values()) - max(means.values(), default=0.0)) / need
