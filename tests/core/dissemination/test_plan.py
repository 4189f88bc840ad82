"""Predicted times follow the formulas, and the plan takes what is fastest."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.dissemination.plan import (
    FALLBACKS,
    ORIGIN,
    Link,
    Plan,
    Size,
    plan_tree,
    tree_seconds,
)
from antiphon.core.errors import ContractError

MBIT = 1e6 / 8
LINK = Link(100 * MBIT, 1e9, 0.0)
SIZE = Size(32_000_000, 125_000)
COPY_S = 2.56


def _chain(workers: int) -> dict[str, str]:
    return {f"w{at}": f"w{at - 1}" if at else ORIGIN for at in range(workers)}


def _last(parents: dict[str, str], link: Link = LINK) -> float:
    links = {ORIGIN: replace(link, round_trip_s=0.0), **dict.fromkeys(parents, link)}
    return max(seconds for seconds, _ in tree_seconds(SIZE, parents, links, 0.0).values())


@pytest.mark.parametrize("workers", [1, 7, 31])
def test_equal_links_give_the_formulas(workers: int) -> None:
    chunks = SIZE.chunks
    assert _last(_chain(workers)) == pytest.approx(COPY_S * (1 + (workers - 1) / chunks))
    assert _last({f"w{at}": ORIGIN for at in range(workers)}) == pytest.approx(workers * COPY_S)
    far = replace(LINK, round_trip_s=0.08)
    # Between workers a packet may pass the origin: 40 ms on the first hop, 80 ms on each other.
    delays_s = 0.04 + 0.08 * (workers - 1)
    assert _last(_chain(workers), far) == pytest.approx(COPY_S * (1 + (workers - 1) / chunks) + delays_s)


def test_a_binary_tree_of_depth_three_takes_twice_a_copy() -> None:
    parents = {f"w{at}": f"w{at // 2 - 1}" if at >= 2 else ORIGIN for at in range(14)}
    assert _last(parents) == pytest.approx(COPY_S * 2 * (1 + 2 / SIZE.chunks))


def _plan(uplinks: dict[str, float], **changes: object) -> Plan:
    links = {name: replace(LINK, up_bytes_per_s=up, **changes) for name, up in uplinks.items()}
    return plan_tree(SIZE, LINK, links)


def test_equal_workers_make_one_chain_whose_time_hardly_depends_on_their_number() -> None:
    few, many = (_plan({f"w{at:02}": LINK.up_bytes_per_s for at in range(n)}) for n in (2, 15))
    for plan in (few, many):
        depths = sorted(assignment.depth for assignment in plan.assignments.values())
        assert depths == list(range(1, len(depths) + 1))
    assert many.seconds < 1.1 * few.seconds


def test_a_slow_uplink_is_last_and_unreachable_workers_serve_no_one() -> None:
    uplinks = {f"w{at}": LINK.up_bytes_per_s for at in range(7)} | {"w3": LINK.up_bytes_per_s / 10}
    plan = _plan(uplinks)
    assert all("w3" not in assignment.parents for assignment in plan.assignments.values())
    links = {name: replace(LINK, reachable=name != "w5") for name in uplinks}
    for assignment in plan_tree(SIZE, LINK, links).assignments.values():
        assert "w5" not in (*assignment.parents, *assignment.others)


def test_one_slow_downlink_leaves_the_others_their_chain() -> None:
    links = {f"w{at}": LINK for at in range(8)} | {"w3": replace(LINK, down_bytes_per_s=1e4)}
    plan = plan_tree(SIZE, LINK, links)
    assert sorted(plan.assignments[name].depth for name in links if name != "w3") == list(range(1, 8))
    assert all("w3" not in assignment.parents for assignment in plan.assignments.values())


def test_a_small_payload_over_long_ways_goes_to_everyone_directly() -> None:
    links = dict.fromkeys([f"w{at}" for at in range(4)], Link(1e9, 1e9, 0.2))
    plan = plan_tree(Size(10_000, 10_000), Link(1e9, 1e9), links)
    assert all(assignment.depth == 1 for assignment in plan.assignments.values())


def test_a_fast_origin_feeds_more_than_one() -> None:
    links = {f"w{at:02}": LINK for at in range(40)}
    plan = plan_tree(Size(32_000_000, 1 << 20), Link(1e9, 1e9), links)
    assert sum(assignment.depth == 1 for assignment in plan.assignments.values()) > 1


def test_bad_links_and_names_are_refused_with_a_sentence() -> None:
    with pytest.raises(ContractError, match="up_bytes_per_s=0 of a link is not above 0; measure it again"):
        Link(0, 1.0)
    with pytest.raises(ContractError, match="round_trip_s=nan"):
        Link(1.0, 1.0, float("nan"))
    with pytest.raises(ContractError, match="empty name"):
        plan_tree(SIZE, LINK, {ORIGIN: LINK})


_LINKS = st.dictionaries(
    st.sampled_from([f"w{at:02}" for at in range(24)]),
    st.builds(Link, st.floats(1e3, 1e9), st.floats(1e3, 1e9), st.floats(0.0, 0.5), st.booleans()),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(_LINKS, st.floats(1e3, 1e9))
def test_every_plan_leads_to_the_origin_without_circles(links: dict[str, Link], uplink: float) -> None:
    origin = Link(uplink, 1e9)
    plan = plan_tree(SIZE, origin, links)
    assert plan.assignments.keys() == links.keys()
    assert plan == plan_tree(SIZE, origin, dict(reversed(links.items())))
    for name, assignment in plan.assignments.items():
        assert assignment.parents[-1] == ORIGIN
        assert len(assignment.parents) <= 2 + FALLBACKS
        named = (*assignment.parents, *assignment.others)
        assert name not in named and len(set(named)) == len(named)
        for parent in assignment.parents[:-1]:
            assert links[parent].reachable
            assert plan.assignments[parent].depth < assignment.depth
