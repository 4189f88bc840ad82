"""Which workers to activate: how far from the cheapest possible set, and how steady when rates are noisy.

Random fleets of 5 to 30 workers are covered, and the exact optimum is found by scipy's mixed-integer solver
(HiGHS). Fleets of up to 12 workers that are lost at times, in zones that vanish at once, are compared with
all their subsets. Then an activator runs for hours on rates with 20% of noise; a flip is a change of
direction: a worker is drained and fetched back, or the other way round. The last line is one JSON object.

    .venv/bin/python benchmarks/activation.py
"""

import sys
from statistics import fmean

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.capacity.activation import Activator, Hysteresis
from antiphon.core.capacity.cover import Fleet, Redundancy, WorkerOffer, cover


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


PLAIN = Redundancy(confidence=0.5)
SPARE = Redundancy(confidence=0.95, survives=0.5)
SMALL = 12
TICK_S = 15.0
MOST_GAP = 0.015


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--fleets", type=int, default=400)
    parser.add_argument("--noisy", type=int, default=40, help="fleets that run with noise")
    parser.add_argument("--hours", type=float, default=4.0, help="of virtual time, each of them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    gaps, broken = gaps_of(arguments.fleets, arguments.seed)
    print(f"{len(gaps)} fleets: {fmean(gaps):.2%} above the optimum on average, {max(gaps):.1%} at most")
    spare, spare_broken = gaps_with_losses(max(1, arguments.fleets // 4), arguments.seed)
    print(
        f"{len(spare)} fleets with losses and zones: {fmean(spare):.2%} on average, {max(spare):.1%} at most"
    )
    flips = max(
        most_flips(np.random.default_rng([arguments.seed, 2, n]), arguments.hours)
        for n in range(arguments.noisy)
    )
    print(f"with 20% of noise: at most {flips} flips within a hold time")
    result = {
        "mean_gap": round(fmean(gaps), 5),
        "worst_gap": round(max(gaps), 5),
        "bound_broken": broken,
        "flips": flips,
        "mean_gap_with_losses": round(fmean(spare), 5),
        "bound_broken_with_losses": spare_broken,
        "fleets": arguments.fleets,
        "seed": arguments.seed,
    }
    violated, at_size = [], []
    if fmean(gaps) > MOST_GAP:
        at_size.append(f"covers cost {fmean(gaps):.2%} more than the optimum; at most {MOST_GAP:.1%}")
    if broken or spare_broken:
        violated.append(f"{broken + spare_broken} covers cost more than the optimum and one worker")
    if flips > 1:
        violated.append(f"{flips} flips within a hold time; at most 1")
    return finish(result, record=arguments.record, violated=violated, at_size=at_size)


def gaps_of(fleets: int, seed: int) -> tuple[list[float], int]:
    """Return how far above the optimum each cover costs, and how many exceed it by more than one worker."""
    gaps, broken = [], 0
    for number in range(fleets):
        offers, need = random_fleet(np.random.default_rng([seed, 0, number]))
        found, least = cover(offers, need, PLAIN), least_price(offers, need)
        gaps.append(found.usd_per_hour / least - 1.0)
        broken += found.usd_per_hour > least + max(one.usd_per_hour for one in offers) + 1e-6
    return gaps, broken


def gaps_with_losses(fleets: int, seed: int) -> tuple[list[float], int]:
    """Return the same for fleets that lose workers and zones."""
    gaps, broken = [], 0
    for number in range(fleets):
        offers, _ = random_fleet(np.random.default_rng([seed, 1, number]), lost=True)
        offers = offers[:SMALL]
        need = 0.45 * sum(one.rate * one.availability for one in offers)
        found, least = cover(offers, need, SPARE), least_price_with_losses(offers, need, SPARE)
        if found.enough:
            gaps.append(found.usd_per_hour / least - 1.0)
            broken += found.usd_per_hour > least + max(one.usd_per_hour for one in offers) + 1e-6
    return gaps, broken


def most_flips(source: np.random.Generator, hours: float) -> int:
    """Run an activator on noisy rates and return the most flips of all workers within one hold time."""
    count = int(source.integers(8, 20))
    offers = [
        WorkerOffer(f"w{n:02d}", float(source.uniform(0.5, 2.0)), float(source.uniform(0.5, 3.0)))
        for n in range(count)
    ]
    need = float(source.uniform(0.3, 0.7)) * sum(one.rate for one in offers)
    hysteresis = Hysteresis()
    activator = Activator(PLAIN, hysteresis)
    active: set[str] = set()
    direction: dict[str, int] = {}
    flips: list[float] = []
    for tick in range(int(hours * 3600.0 / TICK_S)):
        now = tick * TICK_S
        for one in offers:
            if one.name in active:
                activator.measured(one.name, one.rate * max(0.0, float(source.normal(1.0, 0.2))), now)
        orders = activator.decide(now, offers, active, need)
        for names, sign in ((orders.activate, 1), (orders.drain, -1)):
            for name in names:
                if direction.get(name, sign) != sign:
                    flips.append(now)
                direction[name] = sign
        active = (active | set(orders.activate)) - set(orders.drain)
    return max((sum(at <= t < at + hysteresis.hold_s for t in flips) for at in flips), default=0)


if __name__ == "__main__":
    sys.exit(main())
