"""Predicted times follow the formulas, and the plan takes what is fastest."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.dissemination.plan import (
    CHUNK_OVERHEAD_S,
    FALLBACKS,
    ORIGIN,
    WEIGHED_HOPS,
    Link,
    Plan,
    Size,
    Tree,
    delay_s,
    fastest_first,
    plan_tree,
    tree_seconds,
)
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport
from antiphon.core.dissemination.transfers import TransferPlans
from antiphon.core.errors import ContractError
from antiphon.core.records import Payload

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


class _TreeByScan:
    """The same rule as `Tree`, which looks at every place for every worker."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.parents: dict[str, str] = {}
        self.arrives = {ORIGIN: (0.0, 0.0)}

    def below(self, name: str) -> int:
        layer, count = {name}, 0
        for _ in range(WEIGHED_HOPS):
            layer = {one for one, parent in self.parents.items() if parent in layer}
            count += len(layer)
        return count

    def costs(self, name: str, above: str, links: Mapping[str, Link], holders: Collection[str]) -> Any:
        here, chunk = links[name], min(self.size.chunk_bytes, self.size.payload_bytes)
        chunks = self.size.payload_bytes / chunk
        busy = [one for one, parent in self.parents.items() if parent == above and one not in holders]
        shared_s = chunk * (len(busy) + 1) / links[above].up_bytes_per_s + CHUNK_OVERHEAD_S
        first_s, pace_s = (0.0, 0.0) if above in holders else self.arrives[above]
        hop_s = max(shared_s, chunk / here.down_bytes_per_s + CHUNK_OVERHEAD_S)
        first_s += hop_s + delay_s(links[above], here, above == ORIGIN)
        pace_s = max(pace_s, hop_s)
        slower_s = [max(0.0, shared_s - self.arrives[one][1]) * (1 + self.below(one)) for one in busy]
        return first_s + (chunks - 1) * pace_s + chunks * sum(slower_s), (first_s, pace_s)

    def choices(self, name: str, links: Mapping[str, Link], holders: Collection[str]) -> dict[str, Any]:
        """Return where a worker may be placed: party -> (seconds that this costs, when chunks arrive)."""
        parties = [one for one in (ORIGIN, *self.parents) if one in links and links[one].reachable]
        return {above: self.costs(name, above, links, holders) for above in parties}


_FEW_LINKS = st.builds(
    Link,
    st.sampled_from([1e5, 3e5, 1e6]) | st.floats(1e4, 1e7),
    st.sampled_from([1e5, 3e5, 1e6]) | st.floats(1e4, 1e7),
    st.sampled_from([0.0, 0.2]) | st.floats(0.0, 2.0),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(_FEW_LINKS, min_size=1, max_size=40),
    st.sampled_from([Size(1000, 1000), Size(300_000, 100_000), Size(10_000_000, 100_000)]),
    st.floats(1e4, 1e7),
    st.sets(st.integers(0, 39), max_size=4),
    st.integers(0, 40),
)
def test_every_worker_gets_the_cheapest_of_all_places(
    known: list[Link], size: Size, uplink: float, holding: set[int], late: int
) -> None:
    links = {f"w{at:02}": link for at, link in enumerate(known)}
    holders = {f"w{at:02}" for at in holding} & links.keys()
    links[ORIGIN] = Link(uplink, 1e9)
    names = list(fastest_first({name: link for name, link in links.items() if name != ORIGIN}))
    tree, scanned, holds = Tree(size), _TreeByScan(size), {}
    tree.add(names[:late], links, holders)
    holds = dict.fromkeys(names[:late], holders)
    for name in names[
        late:
    ]:  # those who come later are placed one by one, and the first ones hold it by then
        holds[name] = {*holders, *names[: len(holds) // 2]}
        tree.add([name], links, holds[name])
    for name, parent in tree.parents.items():
        choices = scanned.choices(name, links, holds[name])
        costs_s, arrives = choices[parent]
        assert costs_s == pytest.approx(min(choices.values())[0], rel=1e-9)
        assert tree.arrives[name] == pytest.approx(arrives, rel=1e-12)
        scanned.parents[name], scanned.arrives[name] = parent, arrives


@pytest.mark.parametrize("kind", ["equal", "far", "measured", "small", "leaves"])
def test_the_first_plan_of_a_payload_takes_little_more_per_worker_where_there_are_many(kind: str) -> None:
    few, many = (_lines_of_first_plan(kind, workers) for workers in (400, 1600))
    assert many < 8 * few  # four times as many workers; looking at every place for each takes 16


def _lines_of_first_plan(kind: str, workers: int) -> int:
    """Return how many lines of the planning are executed."""
    plans = TransferPlans()
    peers = {
        f"w{at:03}-1": "" if kind == "leaves" and at % 8 else f"10.0.0.1:{at + 1}" for at in range(workers)
    }
    payload_bytes = 1000 if kind in ("far", "small") else 32_000_000
    payload = Payload("full", None, "raw", "a" * 64, payload_bytes, min(payload_bytes, 128 << 10), ())
    for at, one in enumerate(peers):
        rate = 1e6 * (1 + at * 7919 % 97)
        far = NetworkReport(round_trip_s=0.2 if kind == "far" else 0.001 * (at % 13), down_bytes_per_s=rate)
        own = DeliveryRecord(1, "", best_bytes_per_s={ORIGIN: rate})
        if kind != "equal":
            plans.take(one, replace(far, deliveries=(own,)))
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if "core/dissemination" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plans.plan("w000-1", payload, peers, peers)
    finally:
        sys.settrace(before)
    return lines
