"""Who is told to fetch from whom, as reports come in: orderly, and whatever a worker claims."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.dissemination.plan import ORIGIN, Assignment
from antiphon.core.dissemination.reports import (
    MOST_DELIVERIES,
    DeliveryRecord,
    NetworkReport,
    check_address,
    check_report,
)
from antiphon.core.dissemination.requests import Transfer
from antiphon.core.dissemination.transfers import (
    PLANS_KEPT,
    SLOWEST_BYTES_PER_S,
    VERSIONS_KEPT,
    TransferPlans,
)
from antiphon.core.errors import ContractError
from antiphon.core.records import Payload

PAYLOAD = "a" * 64
FLEET = {f"w{i}-1": f"10.0.0.{i}:7000" for i in range(4)}


def _ask(
    plans: TransferPlans, worker: str, peers: dict[str, str] = FLEET, payload: str = PAYLOAD
) -> Assignment:
    return plans.plan(worker, _payload(payload), peers, peers).assignment


def _payload(digest: str, payload_bytes: int = 32_000_000, chunk_bytes: int = 128 << 10) -> Payload:
    return Payload("full", None, "raw", digest, payload_bytes, chunk_bytes, ())


def _measured(source: str, rate: float, version: int = 1) -> NetworkReport:
    return NetworkReport(deliveries=(DeliveryRecord(version, "", best_bytes_per_s={source: rate}),))


def _all(plans: TransferPlans, payload: str, peers: dict[str, str] = FLEET) -> dict[str, Assignment]:
    return {one: _ask(plans, one, peers, payload) for one in peers}


def test_without_measurements_reachable_workers_make_a_chain_and_leaves_hang_below() -> None:
    plans = TransferPlans()
    found = _all(plans, PAYLOAD)
    assert sorted(found[one].depth for one in FLEET) == [1, 2, 3, 4]
    assert all(planned.parents[-1] == ORIGIN for planned in found.values())
    leaves = _all(TransferPlans(), PAYLOAD, dict.fromkeys(FLEET, ""))
    assert all(planned.parents == (ORIGIN,) and not planned.others for planned in leaves.values())


def test_the_slowest_uplink_stands_last_once_it_is_measured() -> None:
    plans = TransferPlans()
    for payload, version in (("a" * 64, 1), ("b" * 64, 2)):
        found = _all(plans, payload)
        for one, planned in found.items():
            parent = planned.parents[0]
            plans.take(one, _measured(parent, 1e6 if parent == "w0-1" else 12e6, version))
    found = _all(plans, "c" * 64)
    assert "w0-1" not in {one for planned in found.values() for one in planned.parents[:1]}


def test_the_rate_of_a_patch_says_nothing_of_a_fast_uplink() -> None:
    """What takes one round trip arrives at a rate that is far below the link's."""
    plans = TransferPlans()
    first, second, *_ = FLEET
    plans.take(first, _measured(ORIGIN, 2.5e6))
    for version in range(2, 20):
        patch = DeliveryRecord(version, "", bytes_from={ORIGIN: 70_000}, best_bytes_per_s={ORIGIN: 5e3})
        plans.take(first, NetworkReport(deliveries=(patch,)))
    assert _ask(plans, second, {second: ""}).bytes_per_s == pytest.approx(2.5e6, rel=0.1)
    slower = DeliveryRecord(20, "", bytes_from={ORIGIN: 5_000_000}, best_bytes_per_s={ORIGIN: 1e6})
    plans.take(first, NetworkReport(deliveries=(slower,)))
    assert _ask(plans, second, {second: ""}, "b" * 64).bytes_per_s < 2.2e6


def test_who_joins_later_hangs_below_those_who_are_there() -> None:
    plans = TransferPlans()
    found = _all(plans, PAYLOAD)
    joined = FLEET | {"late-1": "10.0.0.9:7000", "later-1": ""}
    late = _ask(plans, "late-1", joined)
    assert late.parents[0] in FLEET and late.depth == 1 + found[late.parents[0]].depth
    assert _ask(plans, "later-1", joined).parents[0] in {*FLEET, "late-1"}
    now = _all(plans, PAYLOAD)  # those who were there keep their places
    assert [now[one].parents for one in FLEET] == [found[one].parents for one in FLEET]


def test_who_left_or_cannot_be_reached_is_in_no_answer() -> None:
    plans = TransferPlans()
    found = _all(plans, PAYLOAD)
    last = max(FLEET, key=lambda one: found[one].depth)
    gone = found[last].parents[0]
    plans.forget(gone)
    left = {one: address for one, address in FLEET.items() if one != gone}
    now = _ask(plans, last, left)
    assert now.parents == found[last].parents[1:] and gone not in now.others


def test_an_accusation_counts_for_its_accuser_and_for_all_when_two_agree() -> None:
    plans = TransferPlans()
    for one in FLEET:
        _ask(plans, one)
    accused = "w0-1"
    plans.take("w1-1", NetworkReport(culprits={accused: "sent chunk 3 altered"}))
    mine = _ask(plans, "w1-1")
    assert accused not in (*mine.parents, *mine.others)
    assert not plans.excluded()
    plans.take("w1-1", NetworkReport(culprits={accused: "again"}))
    plans.take("w1-2", NetworkReport(culprits={accused: "the same worker under another id"}))
    assert not plans.excluded()
    plans.take("w2-1", NetworkReport(culprits={accused: "sent chunk 9 altered"}))
    assert plans.excluded() == {"w0": "sent chunk 3 altered"}
    later = _all(plans, "b" * 64)
    assert not any(accused in (*planned.parents, *planned.others) for planned in later.values())


def test_whom_the_accuser_was_not_sent_to_it_cannot_accuse() -> None:
    plans = TransferPlans()
    for liar in ("w1-1", "w2-1"):
        plans.take(
            liar, NetworkReport(culprits={"w3-1": "nothing", ORIGIN: "nothing", "nobody-1": "nothing"})
        )
    assert not plans.excluded()
    assert _ask(plans, "w1-1").parents[-1] == ORIGIN


def test_a_delivery_is_news_once() -> None:
    plans = TransferPlans()
    told = NetworkReport(deliveries=(DeliveryRecord(3, "someone else"),))
    assert plans.take("w0-1", told) == (DeliveryRecord(3, "w0-1"),)
    assert plans.take("w0-1", told) == ()
    plans.take("w0-1", NetworkReport(deliveries=(DeliveryRecord(3 + VERSIONS_KEPT + 1, ""),)))
    assert plans.take("w0-1", told) == ()
    assert [one.version for one in plans.deliveries] == [3, 3 + VERSIONS_KEPT + 1]


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (NetworkReport(round_trip_s=math.nan), "round_trip_s"),
        (NetworkReport(down_bytes_per_s=-1.0), "down_bytes_per_s"),
        (NetworkReport(held_payloads=("../x",)), "digest"),
        (NetworkReport(held_payloads=("a" * 64,) * 1000), "held_payloads"),
        (NetworkReport(culprits={"w": "x" * 10_000}), "culprits"),
        (NetworkReport(culprits={f"w{i}": "" for i in range(1000)}), "culprits"),
        (NetworkReport(deliveries=(DeliveryRecord(-1, ""),)), "version"),
        (NetworkReport(deliveries=(DeliveryRecord(1, "", load_s=math.inf),)), "load_s"),
        (NetworkReport(deliveries=(DeliveryRecord(1, "", bytes_from={"": -5}),)), "bytes_from"),
        (NetworkReport(deliveries=(DeliveryRecord(1, ""),) * (MOST_DELIVERIES + 1)), "deliveries"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_its_field(report: NetworkReport, field: str) -> None:
    with pytest.raises(ContractError, match=field):
        check_report(report)


@pytest.mark.parametrize(
    "address", ["host", "host:0", "host:70000", "a b:1", ":1", "h" * 300 + ":1", "x:1\n"]
)
def test_an_address_that_cannot_be_dialled_is_refused(address: str) -> None:
    with pytest.raises(ContractError, match="HOST:PORT"):
        check_address(address)


def test_addresses_are_names_or_numbers() -> None:
    for address in ("a.example:1", "10.0.0.1:65535", "[::1]:7000"):
        check_address(address)


_numbers = st.floats(0, 1e15)
_names = st.sampled_from([ORIGIN, *FLEET, "nobody-1"])
_reports = st.builds(
    NetworkReport,
    round_trip_s=_numbers,
    down_bytes_per_s=_numbers,
    held_payloads=st.lists(st.sampled_from([PAYLOAD, "b" * 64]), max_size=2).map(tuple),
    deliveries=st.lists(
        st.builds(
            DeliveryRecord,
            st.integers(0, 200),
            st.just(""),
            best_bytes_per_s=st.dictionaries(_names, _numbers, max_size=4),
        ),
        max_size=3,
    ).map(tuple),
    culprits=st.dictionaries(_names, st.just("lied"), max_size=6),
)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["report", "ask", "leave"]), st.sampled_from(sorted(FLEET)), _reports),
        max_size=15,
    ),
    st.sets(st.sampled_from(sorted(FLEET))),
)
def test_whatever_is_reported_every_plan_leads_to_the_origin_without_circles(
    story: list[tuple[str, str, NetworkReport]], leaves: set[str]
) -> None:
    plans = TransferPlans()
    peers = {one: "" if one in leaves else address for one, address in FLEET.items()}
    found: dict[str, Assignment] = {}
    for what, worker, report in story:
        if what == "leave" and len(peers) > 1:
            peers.pop(worker, None)
            plans.forget(worker)
        if worker not in peers:
            continue
        if what == "report":
            check_report(report)
            plans.take(worker, report)
        else:
            planned = found[worker] = _ask(plans, worker, peers)
            assert planned.parents[-1] == ORIGIN and planned.bytes_per_s > 0
            for one in (*planned.parents[:-1], *planned.others):
                assert one in peers and peers[one] and one != worker
    for worker in found:  # upstream of upstream never comes back
        seen, due = set(), [worker]
        while due:
            above = found.get(due.pop())
            for parent in () if above is None else above.parents[:-1]:
                assert parent != worker
                due += [] if parent in seen else [parent]
                seen.add(parent)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.dictionaries(_names, st.just("lied"), max_size=6), max_size=5))
def test_one_liar_excludes_nobody(lies: list[dict[str, str]]) -> None:
    plans = TransferPlans()
    _all(plans, PAYLOAD)
    for lie in lies:
        plans.take("w3-1", NetworkReport(culprits=lie))
    assert not plans.excluded()
    honest = _all(plans, "b" * 64, {one: address for one, address in FLEET.items() if one != "w3-1"})
    assert max(planned.depth for planned in honest.values()) == 3  # they still hand on to each other


@pytest.mark.parametrize("chunk_bytes", [128 << 10, 4 << 20])
def test_a_worker_that_claims_a_slow_link_makes_no_one_wait_long(chunk_bytes: int) -> None:
    plans, payload = TransferPlans(), _payload(PAYLOAD, 200_000_000, chunk_bytes)
    plans.take("w1-1", NetworkReport(down_bytes_per_s=1e-9))
    for one in FLEET:
        plans.plan(one, payload, FLEET, FLEET)
    joined = FLEET | {"late-1": "10.0.0.9:7000"}
    late = plans.plan("late-1", payload, joined, joined).assignment
    assert late.parents[0] != "w1-1" and late.bytes_per_s > 1e6
    slowest = Assignment(("w1-1", ORIGIN), (), 5, SLOWEST_BYTES_PER_S)
    for planned in (late, slowest):
        transfer = Transfer(
            np.zeros(-(-payload.payload_bytes // chunk_bytes), np.bool_), chunk_bytes, planned, {}, 0.0
        )
        (request, *_) = transfer.next_requests(0.0)
        assert transfer.stalled(121.0) == [request.source]


def test_asking_for_many_payloads_drives_out_no_plan_of_others_and_none_is_made_again() -> None:
    plans = TransferPlans()
    first = _ask(plans, "w0-1")
    foreign = [f"{number:064x}" for number in range(2 * PLANS_KEPT)]
    for digest in foreign:
        _ask(plans, "w3-1", payload=digest)
    plans.take("w0-1", NetworkReport(down_bytes_per_s=1e5))  # made now, the plan would be another one
    found = _all(plans, PAYLOAD)
    assert found["w0-1"] == first
    assert sorted(planned.depth for planned in found.values()) == [1, 2, 3, 4]
    assert _ask(plans, "w2-1", payload=foreign[0]).parents == (ORIGIN,)
    assert _ask(plans, "w2-1", payload=foreign[-1]).depth >= 1


def test_what_a_worker_told_before_it_registered_again_is_no_news() -> None:
    plans = TransferPlans()
    told = NetworkReport(deliveries=(DeliveryRecord(3, ""),))
    assert plans.take("w0-1", told)
    plans.forget("w0-1")
    assert not plans.take("w0-2", told)
