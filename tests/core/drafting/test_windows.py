"""Windows: a request's own record moves its limit, apart from others', and never beyond its bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.drafting.forest import DraftWindows
from antiphon.core.errors import ContractError


def learn_one(windows: DraftWindows, slot: int, drafted: int, accepted: int) -> int:
    slots = np.array([slot])
    windows.learn(slots, np.array([drafted]), np.array([accepted]))
    return int(windows.limits(slots)[0])


def test_a_request_has_full_room_then_follows_its_own_record() -> None:
    windows = DraftWindows(1, 16)
    windows.open(0)
    assert windows.limits(np.array([0]))[0] == 16
    falling = [learn_one(windows, 0, 8, 0) for _ in range(30)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] >= 4, "one rejection is no proof"
    assert falling[-1] == 1, "lasting rejection leaves one token, by which a request recovers"
    rising = [learn_one(windows, 0, 1, 1) for _ in range(40)]
    assert rising == sorted(rising)
    assert rising[-1] == 16


@pytest.mark.parametrize(("acceptance", "low", "high"), [(0.5, 2, 7), (0.65, 4, 11), (0.9, 12, 16)])
def test_the_limit_comes_near_the_reach_of_the_acceptance(acceptance, low, high) -> None:
    chance = np.random.default_rng(7)
    windows = DraftWindows(200, 16)
    slots = np.arange(200)
    for slot in slots:
        windows.open(int(slot))
    for _ in range(60):
        drafted = windows.limits(slots)
        windows.learn(slots, drafted, np.minimum(chance.geometric(1 - acceptance, 200) - 1, drafted))
    assert low <= np.median(windows.limits(slots)) <= high


def test_slots_are_apart_grow_on_demand_and_start_anew() -> None:
    windows = DraftWindows(2, 16)
    for slot in (0, 1, 40):
        windows.open(slot)
    moved = learn_one(windows, 40, 8, 0)
    assert moved != 16
    assert windows.limits(np.array([0, 1])).tolist() == [16, 16]
    windows.open(90)
    assert windows.limits(np.array([40, 90])).tolist() == [moved, 16], "growing keeps what was learned"
    windows.open(40)
    assert windows.limits(np.array([40]))[0] == 16


DRAFTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)), max_size=60)


@given(drafts=DRAFTS, most=st.integers(1, 20))
def test_limits_stay_in_bounds_and_undrafted_rows_change_nothing(drafts, most) -> None:
    windows = DraftWindows(4, most)
    slots = np.arange(4)
    for slot in slots:
        windows.open(int(slot))
    for slot, drafted, accepted in drafts:
        before = windows.limits(slots)
        counts = np.zeros(4, np.int64)
        counts[slot] = min(drafted, most)
        hits = np.zeros(4, np.int64)
        hits[slot] = min(accepted, counts[slot])
        windows.learn(slots, counts, hits)
        after = windows.limits(slots)
        assert after.dtype == np.int64
        assert after.min() >= 1 and after.max() <= most
        idle = counts == 0
        assert (after[idle] == before[idle]).all()


@given(drafts=DRAFTS)
def test_a_batch_is_learned_from_as_its_rows_would_be(drafts) -> None:
    together, apart = DraftWindows(4, 16), DraftWindows(4, 16)
    slots = np.array([2, 0, 3, 1])
    for slot in slots:
        together.open(int(slot))
        apart.open(int(slot))
    for shift, drafted, accepted in drafts:
        counts = (drafted + shift * slots) % 17
        hits = np.minimum(accepted, counts)
        together.learn(slots, counts, hits)
        for row in range(4):
            apart.learn(slots[row : row + 1], counts[row : row + 1], hits[row : row + 1])
        assert (together.limits(slots) == apart.limits(slots)).all()


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ContractError, match="max_window=0"):
        DraftWindows(4, 0)
