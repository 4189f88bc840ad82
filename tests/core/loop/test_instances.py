"""Instances that a run ordered cost from when they are up until they are gone, whatever their workers do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.loop import events as e
from antiphon.core.loop.work_account import Use, WorkAccount, WorkAccounts

USD = 3.6
"""A dollar is 1,000 seconds."""


def ordered(at_s: float, state: str, up_s: float = 0.0) -> e.WorkerOrdered:
    return e.WorkerOrdered("spot-0", state, "i-1", "", up_s, 0.0, at_s, USD, "spot")


def registered(at_s: float, number: int = 1) -> e.WorkerRegistered:
    return e.WorkerRegistered(f"spot-0-{number}", "spot-0", 4, at_s, "", USD, "spot")


def lost(at_s: float, number: int = 1) -> e.WorkerLost:
    return e.WorkerLost(f"spot-0-{number}", "", at_s)


def lease(at_s: float) -> e.LeaseGranted:
    return e.LeaseGranted("g1", "l1", "spot-0-1", 1, 0, at_s)


def account(now: float, *events: e.JournalEvent) -> WorkAccount:
    accounts = WorkAccounts()
    for event in events:
        accounts.apply(event)
    return accounts.account(now)


def seconds(found: WorkAccount) -> dict[str, float]:
    return {use: value for use, value in found.seconds.items() if value}


def test_what_no_worker_fills_is_its_start_and_idle_after_it_left() -> None:
    told = [
        ordered(10.0, "asked"),
        ordered(12.0, "up", up_s=1.0),
        registered(20.0),
        lease(22.0),
        e.LeaseExpired("g1", "l1", "spot-0-1", "it left", 30.0),
        lost(30.0),
        ordered(31.0, "stopping"),
        ordered(34.0, "gone"),
    ]
    found = account(100.0, *told)
    assert seconds(found) == pytest.approx({Use.STARTING: 11.0, Use.PREEMPTED: 8.0, Use.IDLE: 4.0})
    assert found.classes["spot"].seconds == pytest.approx(23.0)
    assert found.classes["spot"].dollars == pytest.approx(0.023)


def test_a_worker_that_was_quicker_than_the_look_counts_once() -> None:
    found = account(40.0, ordered(10.0, "asked"), registered(15.0), ordered(16.0, "up", up_s=5.0))
    assert seconds(found) == pytest.approx({Use.STARTING: 4.0 + 25.0})


def test_what_waits_in_a_queue_costs_nothing() -> None:
    assert seconds(account(500.0, ordered(1.0, "asked"), ordered(2.0, "pending"))) == {}
    requeued = [ordered(2.0, "up"), ordered(10.0, "pending"), ordered(20.0, "up"), ordered(25.0, "gone")]
    assert sum(seconds(account(500.0, *requeued)).values()) == pytest.approx(13.0)


def test_instances_cost_while_no_coordinator_runs() -> None:
    told = [ordered(10.0, "up"), registered(14.0), lost(20.0), e.RunResumed(at_s=-500.0, break_s=60.0)]
    found = account(-490.0, *told)
    assert sum(found.seconds.values()) == pytest.approx(10.0 + 60.0 + 10.0)
    again = account(-480.0, *told, registered(-490.0, 2))
    assert again.classes["spot"].seconds == pytest.approx(90.0)


def test_after_the_end_nothing_counts() -> None:
    found = account(99.0, ordered(10.0, "up"), ordered(15.0, "stopping"), e.RunFinished())
    assert sum(found.seconds.values()) == pytest.approx(5.0)


@given(st.lists(st.floats(0.0, 10.0), min_size=8, max_size=8), st.booleans())
def test_the_seconds_of_a_class_are_those_of_its_instances(steps: list[float], twice: bool) -> None:
    at, now = [], 100.0
    for step in steps:
        at.append(now := now + step)
    told = [ordered(at[0], "asked"), ordered(at[1], "up"), registered(at[2]), lost(at[3])]
    told += [registered(at[4], 2), lost(at[5], 2)] if twice else []
    told += [ordered(at[6], "stopping"), ordered(at[7], "gone")]
    found = account(at[7] + 50.0, *told)
    assert found.classes["spot"].seconds == pytest.approx(at[7] - at[1])
    assert found.total_s == pytest.approx(at[7] - at[1])


def test_an_instance_ends_when_its_engine_says_and_not_when_that_was_seen() -> None:
    told = [ordered(10.0, "up"), registered(12.0), lost(40.0), ordered(60.0, "gone", up_s=33.0)]
    assert sum(seconds(account(99.0, *told)).values()) == pytest.approx(33.0)


def test_nothing_lives_longer_without_a_coordinator_than_an_orphan() -> None:
    accounts = WorkAccounts(orphan_s=30.0)
    for event in (ordered(10.0, "up"), e.RunResumed(at_s=0.0, break_s=86_400.0), ordered(1.0, "gone")):
        accounts.apply(event)
    assert accounts.account(5.0).total_s == pytest.approx(31.0)


def test_a_process_of_the_runs_own_machine_is_no_instance() -> None:
    own = e.WorkerOrdered("spot-0", "up", "", "", 0.0, 0.0, 10.0, USD, "spot")
    assert seconds(account(99.0, own)) == {}


@given(st.booleans(), st.booleans(), st.floats(20.0, 40.0))
def test_silence_that_is_told_late_costs_nothing_after_the_end(
    late: bool, again: bool, died_s: float
) -> None:
    silent = e.LeaseExpired("g1", "l1", "spot-0-1", "silent", 50.0, 0, 5, 50.0 - died_s)
    gone = [ordered(45.0 if not late else 60.0, "gone", up_s=died_s - 10.0)]
    loss = [lost(50.0), silent]
    told = [ordered(10.0, "up"), registered(12.0), lease(15.0), *(loss + gone if late else gone + loss)]
    if again:
        told += [ordered(70.0, "up"), registered(75.0, 2), lost(80.0, 2), ordered(80.0, "gone")]
    found = account(99.0, *told)
    assert found.classes["spot"].seconds == pytest.approx(died_s - 10.0 + (10.0 if again else 0.0))
    assert found.total_s == pytest.approx(found.classes["spot"].seconds)
    assert found.classes["spot"].dollars == pytest.approx(found.classes["spot"].seconds / 1000.0)
