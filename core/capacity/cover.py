"""Cover: the cheapest workers whose supply is enough, with some to spare for those that will be lost.

A worker is there with probability A and then gives rate mu. The supply of a set is enough when

    sum A mu - z sqrt(sum A (1 - A) mu^2)  >=  need            with the chosen confidence (normal quantile z)
    sum A mu outside g                     >=  survives need   for each group g that can vanish at once

A mixed-integer program finds the cheapest set. Its one curved part is the root, the norm of sqrt(A (1 - A))
mu over the set. A norm lies above each of its tangents, so the program begins without it, and each set that
is too small adds the tangent there, which rules it out (outer approximation: Duran and Grossmann 1986).
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
_SLACK = 2e-6
"""Share of the need by which a supply may miss it: more than the solver's tolerance."""
_GAP, _NODES, _TANGENTS = 1e-3, 20_000, 200
"""It ends within this share of the least price, or after this many nodes or tangents."""

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

    def supply(self, chosen: Flags) -> float:
        """Return what a set gives with the confidence that was asked for."""
        return float(self.means[chosen].sum() - self.z * math.sqrt(self.variances[chosen].sum()))

    def survives(self, chosen: Flags) -> float:
        """Return the share of the need that is left of a set when its largest group vanishes."""
        left = self.means[chosen] @ self.outside[chosen]
        return float(left.min(initial=self.means[chosen].sum())) / self.need

    def is_enough(self, chosen: Flags) -> bool:
        return (
            self.supply(chosen) >= (1.0 - _SLACK) * self.need
            and self.survives(chosen) >= self.redundancy.survives - _SLACK
        )


def cover(offers: Sequence[WorkerOffer], need: float, redundancy: Redundancy | None = None) -> Cover:
    """Return the cheapest workers whose supply is enough, within a thousandth; all where it never is.

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
    enough = bool(offers) and fleet.is_enough(everyone)
    chosen = _cheapest(fleet) if enough else everyone
    names = tuple(one.name for one, taken in zip(offers, chosen, strict=True) if taken)
    return Cover(
        tuple(sorted(names)),
        float(fleet.prices[chosen].sum()),
        fleet.supply(chosen),
        enough,
        fleet.survives(chosen),
    )


def _cheapest(fleet: Fleet) -> Flags:
    """Return the cheapest set that is enough; everyone where none was found in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second that few callers need

    need, everyone = fleet.need, np.ones(len(fleet.prices), dtype=np.bool_)
    outside = fleet.outside if fleet.redundancy.survives else fleet.outside[:, :0]
    rows = [fleet.means / need, *(fleet.means[:, None] * outside / need).T]
    least = [1.0, *np.full(outside.shape[1], fleet.redundancy.survives)]
    # Of equal workers the first are taken, so that not each choice of them is tried.
    facts = np.column_stack([fleet.prices, fleet.means, fleet.variances, outside])
    kinds = np.unique(facts, axis=0, return_inverse=True)[1].ravel()
    order = np.argsort(kinds, kind="stable")
    equal = np.flatnonzero(np.diff(kinds[order]) == 0)
    one = np.eye(len(everyone))
    rows += list(one[order[equal]] - one[order[equal + 1]])
    least += [0.0] * len(equal)
    # Of what is free, no more than is needed.
    prices = fleet.prices + 1e-6 * (fleet.prices.max() or 1.0)
    for _ in range(_TANGENTS):
        found = milp(
            prices,
            integrality=np.ones(len(prices)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(np.array(rows), lb=least),
            options={"mip_rel_gap": _GAP, "node_limit": _NODES},
        )
        if found.x is None:
            break
        chosen: Flags = found.x > 0.5
        if fleet.is_enough(chosen):
            return chosen
        deviation = math.sqrt(fleet.variances[chosen].sum())
        rows.append((fleet.means - fleet.z * fleet.variances * chosen / deviation) / need)
        least.append(1.0)
    return everyone
