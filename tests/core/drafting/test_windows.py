"""Windows: each rule moves as its table says, per slot, and never beyond its bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.drafting.windows import WindowController, make_window
from antiphon.core.errors import ContractError

KINDS = ("gain", "doubling", "additive")


def settle_one(window: WindowController, slot: int, drafted: int, accepted: int) -> int:
    slots = np.array([slot])
    window.settle(slots, np.array([drafted]), np.array([accepted]))
    return int(window.limits(slots)[0])


@pytest.mark.parametrize(
    ("kind", "most", "drafts", "limits"),
    [
        ("additive", 8, [(2, 2), (4, 4), (6, 6), (8, 8), (8, 7), (2, 0)], [4, 6, 8, 8, 2, 2]),
        ("additive", 1, [(1, 1), (1, 0)], [1, 1]),
        ("additive", 7, [(2, 2), (4, 4), (6, 6)], [4, 6, 7]),
        ("doubling", 16, [(2, 2), (4, 4), (8, 8), (16, 16), (16, 15), (8, 3)], [4, 8, 16, 16, 8, 4]),
        ("doubling", 16, [(2, 1), (2, 0), (2, 2), (4, 0)], [2, 2, 4, 2]),
        ("doubling", 1, [(1, 1), (1, 0)], [1, 1]),
        # A draft shorter than the window still counts as fully accepted.
        ("doubling", 16, [(1, 1), (3, 3)], [4, 8]),
    ],
)
def test_published_rules(kind, most, drafts, limits) -> None:
    window = make_window(kind, 1, most)
    window.open(0)
    assert int(window.limits(np.array([0]))[0]) == min(2, most)
    assert [settle_one(window, 0, *draft) for draft in drafts] == limits


def test_gain_gives_full_room_then_follows_the_requests_own_record() -> None:
    window = make_window("gain", 1, 16)
    window.open(0)
    assert window.limits(np.array([0]))[0] == 16
    falling = [settle_one(window, 0, 8, 0) for _ in range(30)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] >= 4, "one rejection is no proof"
    assert falling[-1] == 1, "lasting rejection leaves one token, by which a request recovers"
    rising = [settle_one(window, 0, 1, 1) for _ in range(40)]
    assert rising == sorted(rising)
    assert rising[-1] == 16


@pytest.mark.parametrize(("acceptance", "low", "high"), [(0.5, 2, 7), (0.65, 4, 11), (0.9, 12, 16)])
def test_gain_settles_near_the_reach_of_its_acceptance(acceptance, low, high) -> None:
    chance = np.random.default_rng(7)
    window = make_window("gain", 200, 16)
    slots = np.arange(200)
    for slot in slots:
        window.open(int(slot))
    for _ in range(60):
        drafted = window.limits(slots)
        window.settle(slots, drafted, np.minimum(chance.geometric(1 - acceptance, 200) - 1, drafted))
    assert low <= np.median(window.limits(slots)) <= high


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_apart_grow_on_demand_and_start_anew(kind) -> None:
    window = make_window(kind, 2, 16)
    for slot in (0, 1, 40):
        window.open(slot)
    fresh = window.limits(np.array([0]))[0]
    moved = settle_one(window, 40, 2, 2) if kind != "gain" else settle_one(window, 40, 8, 0)
    assert moved != fresh
    assert window.limits(np.array([0, 1])).tolist() == [fresh, fresh]
    window.open(90)
    assert window.limits(np.array([40, 90])).tolist() == [moved, fresh], "growing keeps what was learned"
    window.open(40)
    assert window.limits(np.array([40]))[0] == fresh


DRAFTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)), max_size=60)


@pytest.mark.parametrize("kind", KINDS)
@given(drafts=DRAFTS, most=st.integers(1, 20))
def test_limits_stay_in_bounds_and_undrafted_rows_change_nothing(kind, drafts, most) -> None:
    window = make_window(kind, 4, most)
    slots = np.arange(4)
    for slot in slots:
        window.open(int(slot))
    for slot, drafted, accepted in drafts:
        before = window.limits(slots)
        counts = np.zeros(4, np.int64)
        counts[slot] = min(drafted, most)
        hits = np.zeros(4, np.int64)
        hits[slot] = min(accepted, counts[slot])
        window.settle(slots, counts, hits)
        after = window.limits(slots)
        assert after.dtype == np.int64
        assert after.min() >= 1 and after.max() <= most
        idle = counts == 0
        assert (after[idle] == before[idle]).all()


@pytest.mark.parametrize("kind", KINDS)
@given(drafts=DRAFTS)
def test_a_batch_is_settled_as_its_rows_would_be(kind, drafts) -> None:
    together, apart = make_window(kind, 4, 16), make_window(kind, 4, 16)
    slots = np.array([2, 0, 3, 1])
    for slot in slots:
        together.open(int(slot))
        apart.open(int(slot))
    for shift, drafted, accepted in drafts:
        counts = (drafted + shift * slots) % 17
        hits = np.minimum(accepted, counts)
        together.settle(slots, counts, hits)
        for row in range(4):
            apart.settle(slots[row : row + 1], counts[row : row + 1], hits[row : row + 1])
        assert (together.limits(slots) == apart.limits(slots)).all()


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ContractError, match="max_window=0"):
        make_window("gain", 4, 0)
    with pytest.raises(ContractError, match="'triple' is not known"):
        make_window("triple", 4, 8)  # type: ignore[arg-type]
