"""Activation: short supply is filled, what is superfluous goes after its hold time, noise moves nothing."""

import numpy as np
import pytest

from antiphon.core.capacity.activation import Activator
from antiphon.core.capacity.cover import Redundancy, WorkerOffer
from antiphon.core.errors import InfeasibleError

FLEET = [WorkerOffer(f"w{n}", 1.0 + n / 10, 1.0) for n in range(6)]
HOLD_S = 600.0


def most_flips(source: np.random.Generator, hours: float) -> int:
    """Run an activator on noisy rates and return the most flips of all workers within one hold time."""
    count = int(source.integers(8, 20))
    offers = [
        WorkerOffer(f"w{n:02d}", float(source.uniform(0.5, 2.0)), float(source.uniform(0.5, 3.0)))
        for n in range(count)
    ]
    need = float(source.uniform(0.3, 0.7)) * sum(one.rate for one in offers)
    activator = Activator(Redundancy(0.5), hold_s=HOLD_S)
    active: set[str] = set()
    direction: dict[str, int] = {}
    flips: list[float] = []
    for tick in range(int(hours * 3600.0 / 15.0)):
        now = tick * 15.0
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
    return max((sum(at <= t < at + HOLD_S for t in flips) for at in flips), default=0)


def activator() -> Activator:
    return Activator(Redundancy(0.5), hold_s=HOLD_S)


def test_a_shortage_that_lasts_is_filled_with_the_cheapest() -> None:
    one = activator()
    assert one.decide(0.0, FLEET, [], 3.0).activate == ()
    orders = one.decide(30.0, FLEET, [], 2.8)
    assert orders.activate == ("w0", "w1", "w2") and "2.8 are needed" in orders.reason


def test_the_dearest_goes_after_its_hold_time() -> None:
    one = activator()
    names = [offer.name for offer in FLEET]
    assert one.decide(0.0, FLEET, names, 3.0).drain == ()
    assert one.decide(HOLD_S - 1.0, FLEET, names, 3.0).drain == ()
    assert one.decide(HOLD_S, FLEET, names, 3.0, left_s=7200.0).drain == ("w5",)
    assert one.decide(HOLD_S + 1.0, FLEET, names[:5], 3.0).drain == ()


def test_a_relay_is_not_drained() -> None:
    one = activator()
    names = [offer.name for offer in FLEET]
    one.decide(0.0, FLEET, names, 3.0, relays=["w5"])
    assert one.decide(HOLD_S, FLEET, names, 3.0, relays=["w5"]).drain == ("w4",)


def test_near_the_end_it_stays() -> None:
    one = activator()
    names = [offer.name for offer in FLEET]
    one.decide(0.0, FLEET, names, 3.0)
    assert one.decide(HOLD_S, FLEET, names, 3.0, left_s=100.0, join_s=120.0).drain == ()


def test_noise_moves_no_worker_back_and_forth() -> None:
    assert max(most_flips(np.random.default_rng([7, n]), 1.0) for n in range(4)) <= 1


def test_a_rate_that_is_none_is_refused_and_changes_nothing() -> None:
    one = activator()
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InfeasibleError, match="w0 reports a rate"):
            one.measured("w0", rate, 0.0)
    assert one.decide(0.0, FLEET, ["w0", "w1", "w2"], 3.0) == one.decide(60.0, FLEET, ["w0", "w1", "w2"], 3.0)


def test_a_worker_that_samples_nothing_is_replaced() -> None:
    one = activator()
    one.measured("w0", 0.0, 0.0)
    one.decide(0.0, FLEET, ["w0", "w1", "w2"], 3.0)
    assert "w3" in one.decide(40.0, FLEET, ["w0", "w1", "w2"], 3.0).activate
