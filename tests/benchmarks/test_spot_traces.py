"""Spot traces: prices are cleaned, a pool is walked, and real traces give what the page says."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from antiphon.benchmarks.spot_traces import (
    FILES,
    Pool,
    SpotPolicy,
    clean_prices,
    read_pools,
    walk,
)
from antiphon.core.capacity.cover import Redundancy, WorkerOffer
from antiphon.core.errors import InfeasibleError

OFFERS = tuple(WorkerOffer(f"w{n}", 1.0 + n / 10, 1.0, group="east" if n < 4 else "west") for n in range(8))


def pool(there: npt.NDArray[np.bool_]) -> Pool:
    return Pool("made up", OFFERS, 60.0, there, 2.0)


def test_where_nothing_is_lost_half_of_the_workers_are_enough() -> None:
    quiet = pool(np.ones((600, 8), dtype=np.bool_))
    everything, greedy = walk(quiet, SpotPolicy("all")), walk(quiet, SpotPolicy("greedy", Redundancy(0.5)))
    assert everything.starts == 8 and greedy.starts <= 5
    assert greedy.lost_share < 0.02
    assert greedy.usd_per_accepted < everything.usd_per_accepted


def test_a_zone_that_goes_is_replaced() -> None:
    there = np.ones((600, 8), dtype=np.bool_)
    there[200:400, :4] = False
    found = walk(pool(there), SpotPolicy("greedy", Redundancy(0.5)))
    assert found.starts > 4 and found.lost_share < 0.05


def test_prices_that_are_missing_are_said() -> None:
    with pytest.raises(InfeasibleError, match="no spot price of A100"):
        clean_prices([], "A100", "spot")


def test_real_traces_are_read() -> None:
    folder = Path(os.environ.get("ANTIPHON_TRACES", "/nonexistent"))
    if not all((folder / name).is_file() for name in FILES):
        pytest.skip("the traces are not here: name their folder with ANTIPHON_TRACES")
    pools = read_pools(folder)
    assert len(pools) >= 7
    for one in pools:
        assert one.there.shape[1] == len(one.offers) and one.need > 0.0
        assert all(0.2 < offer.usd_per_hour / offer.rate < 5.0 for offer in one.offers)
