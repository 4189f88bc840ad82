"""Fleets: workers drawn at random, and the exact cheapest cover of a need, by a solver."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from antiphon.core.capacity.cover import Fleet, Redundancy, WorkerOffer


def random_fleet(source: np.random.Generator, *, lost: bool = False) -> tuple[list[WorkerOffer], float]:
    """Draw 5 to 30 workers whose price per unit of supply spreads over a factor of 4, and a need.

    Args:
        source: of all chance.
        lost: workers are there for a part of the time only, and stand in up to four zones.
    """
    count = int(source.integers(5, 31))
    rates = source.uniform(0.5, 4.0, count)
    prices = rates * source.uniform(0.5, 2.0, count)
    there = source.uniform(0.6, 1.0, count) if lost else np.ones(count)
    offers = [
        WorkerOffer(f"w{n:02d}", float(p), float(r), float(a), f"zone-{n % 4}" if lost else "")
        for n, (p, r, a) in enumerate(zip(prices, rates, there, strict=True))
    ]
    return offers, float(source.uniform(0.2, 0.6 if lost else 0.8) * (rates * there).sum())


def least_price(offers: list[WorkerOffer], need: float) -> float:
    """Return the least price of workers that cover a need, all of them always there; exact."""
    prices = np.array([one.usd_per_hour for one in offers])
    rates = np.array([one.rate for one in offers])
    found = milp(
        prices,
        integrality=np.ones(len(offers)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rates[None, :], lb=need),
        options={"mip_rel_gap": 0.0},
    )
    return float(found.fun)


def least_price_with_losses(offers: list[WorkerOffer], need: float, redundancy: Redundancy) -> float:
    """Return the same for workers that may be lost, by trying every subset of at most 16 offers."""
    fleet = Fleet(offers, need, redundancy)
    subsets = (np.arange(1 << len(offers))[:, None] >> np.arange(len(offers))) & 1
    lacking = fleet.lacking(
        subsets @ fleet.means, subsets @ fleet.variances, subsets @ (fleet.means[:, None] * fleet.outside)
    )
    enough = lacking <= 1e-9 * need
    return float((subsets @ fleet.prices)[enough].min()) if enough.any() else float("inf")
