"""Covers: near the exact optimum, whatever is lost; what is no number is refused."""

from statistics import fmean

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from antiphon.core.capacity.cover import Fleet, Redundancy, WorkerOffer, cover
from antiphon.core.errors import InfeasibleError


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
    supply = subsets @ fleet.means - fleet.z * np.sqrt(subsets @ fleet.variances)
    left = (subsets @ (fleet.means[:, None] * fleet.outside)).min(axis=1)
    enough = (supply >= need * (1.0 - 1e-9)) & (left >= redundancy.survives * need * (1.0 - 1e-9))
    return float((subsets @ fleet.prices)[enough].min()) if enough.any() else float("inf")


def test_a_cover_costs_little_more_than_the_optimum() -> None:
    gaps = []
    for number in range(40):
        offers, need = random_fleet(np.random.default_rng([0, 0, number]))
        found, least = cover(offers, need, Redundancy(0.5)), least_price(offers, need)
        assert found.enough and found.usd_per_hour >= least - 1e-6
        assert found.usd_per_hour <= least + max(one.usd_per_hour for one in offers) + 1e-6
        gaps.append(found.usd_per_hour / least - 1.0)
    assert fmean(gaps) <= 0.015


def test_with_losses_and_zones_too() -> None:
    redundancy, gaps = Redundancy(0.95, 0.5), []
    for number in range(15):
        offers, _ = random_fleet(np.random.default_rng([1, number]), lost=True)
        offers = offers[:11]
        need = 0.45 * sum(one.rate * one.availability for one in offers)
        found, least = cover(offers, need, redundancy), least_price_with_losses(offers, need, redundancy)
        assert found.enough == np.isfinite(least)
        if found.enough:
            gaps.append(found.usd_per_hour / least - 1.0)
    assert gaps and fmean(gaps) <= 0.05


def test_a_zone_can_go() -> None:
    offers = [WorkerOffer(f"e{n}", 1.0, 1.0, group="east") for n in range(20)]
    offers += [WorkerOffer(f"w{n}", 2.0, 1.0, group="west") for n in range(20)]
    assert cover(offers, 10.0, Redundancy(0.5)).survives == 0.0
    spread = cover(offers, 10.0, Redundancy(0.5, survives=0.6))
    assert spread.enough and spread.survives >= 0.6


def test_the_order_of_the_offers_does_not_matter() -> None:
    offers, need = random_fleet(np.random.default_rng(4))
    assert cover(offers, need) == cover(offers[::-1], need)


def test_too_little_is_all_of_it_and_said() -> None:
    found = cover([WorkerOffer("a", 1.0, 1.0)], 3.0)
    assert found.names == ("a",) and not found.enough


@pytest.mark.parametrize(
    ("price", "rate", "there", "words"),
    [
        (-1.0, 1.0, 1.0, "costs -1 US dollars"),
        (float("nan"), 1.0, 1.0, "costs nan"),
        (5e6, 1.0, 1.0, "costs 5e"),
        (1.0, 0.0, 1.0, "a rate of 0"),
        (1.0, float("inf"), 1.0, "a rate of inf"),
        (1.0, 1.0, 0.0, "a share of 0"),
    ],
)
def test_nonsense_is_refused(price: float, rate: float, there: float, words: str) -> None:
    with pytest.raises(InfeasibleError, match=words) as caught:
        WorkerOffer("a", price, rate, there)
    assert caught.value.exit_code == 3
