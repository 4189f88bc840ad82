"""Leases end by the time they are told; a step takes the oldest rewarded groups."""

from collections.abc import Iterable

import numpy as np
import pytest

from antiphon.core.loop.advantages import group_advantages, has_variance
from antiphon.core.loop.assembly import reason_to_drop, select
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.leases import LeaseTable
from antiphon.core.loop.staleness import StalenessBound
from antiphon.services.coordinator.api import WorkerHeartbeat
from antiphon.services.coordinator.fleet import Fleet


def test_lease_expires_unless_extended() -> None:
    leases = LeaseTable(duration_s=10.0)
    leases.grant("l1", "g1", "w", now=0.0)
    leases.grant("l2", "g2", "w", now=1.0)
    assert leases.extend(["l1", "l9"], "w", now=5.0) == ("l9",)
    assert [held.lease_id for held in leases.expired(now=11.0)] == ["l2"]
    leases.end("l2")
    assert leases.expired(now=14.9) == []
    assert [held.lease_id for held in leases.expired(now=15.0)] == ["l1"]
    assert leases.get("l1") is not None and len(leases) == 1


def test_extension_moves_a_lease_to_the_workers_new_name() -> None:
    leases = LeaseTable(duration_s=10.0)
    leases.grant("l1", "g1", "w-1", now=0.0)
    leases.extend(["l1"], "w-2", now=1.0)
    assert leases.of_worker("w-1") == []
    assert [held.group_id for held in leases.of_worker("w-2")] == ["g1"]


def idle_beat(worker_id: str, leases: tuple[str, ...] = ()) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id, None, None, leases, 0, 0.0, 1.0)


def test_a_large_fleet_beats_less_often_and_its_silence_is_noticed_later() -> None:
    fleet = Fleet(heartbeat_s=2.0)
    crew = [fleet.add(f"w{n}-1", f"w{n}", 4, now=0.0) for n in range(1000)]
    for member in crew:
        fleet.take_heartbeat(member, idle_beat(member.worker_id), now=0.0)
    fleet.take_heartbeat(crew[1], idle_beat("w1-1", ("lease",)), now=0.0)
    assert [member.pause_s for member in crew[:3]] == [20.0, 2.0, 20.0]
    assert fleet.silent(now=10.0) == [] and fleet.silent(now=10.1) == [crew[1]]
    assert len(fleet.silent(now=100.1)) == 1000
    for member in crew[100:]:
        fleet.lose(member)
        fleet.lose(member)
    assert fleet.size == 100 == len(fleet.living())
    fleet.take_heartbeat(crew[0], idle_beat("w0-1"), now=60.0)
    assert crew[0].pause_s == 2.0


def group(number: int, oldest: int = 0, varied: bool = True) -> GroupState:
    rewards = (0.0, 1.0) if varied else (1.0, 1.0)
    return GroupState(f"g{number}", number, "train", number, 0, 2, oldest_version=oldest, rewards=rewards)


def names(groups: Iterable[GroupState]) -> tuple[str, ...]:
    return tuple(group.group_id for group in groups)


def test_oldest_groups_leave_first_and_only_once() -> None:
    bound = StalenessBound(2)
    groups = [group(3, oldest=0), group(1, oldest=1), group(2, oldest=1), group(0, oldest=2)]
    first = select(groups, bound, "none", step=2, places=2)
    assert first is not None and names(first.used) == ("g1", "g3")  # in the order of opening
    left = [group for group in groups if group not in first.used]
    second = select(left, bound, "none", step=3, places=2)
    assert second is not None and names(second.used) == ("g0", "g2")
    assert select([], bound, "none", step=4, places=1) is None


@pytest.mark.parametrize(
    ("filter_", "used", "filtered"),
    [("none", ("g0", "g1", "g2"), ()), ("drop", ("g0", "g2"), ("g1",)), ("refill", ("g0", "g2"), ("g1",))],
)
def test_groups_without_variance(filter_: str, used: tuple[str, ...], filtered: tuple[str, ...]) -> None:
    groups = [group(number, varied=number != 1) for number in range(3)]
    plan = select(groups, StalenessBound(2), filter_, step=0, places=3)  # type: ignore[arg-type]
    assert plan is not None
    assert (names(plan.used), names(plan.filtered)) == (used, filtered)


def test_why_groups_never_train() -> None:
    bound = StalenessBound(1)
    assert reason_to_drop(group(0, oldest=0), bound, "refill", next_step=2) == "stale"
    assert reason_to_drop(group(0, oldest=1, varied=False), bound, "refill", next_step=2) == "filtered"
    assert reason_to_drop(group(0, oldest=1, varied=False), bound, "drop", next_step=2) is None
    assert reason_to_drop(group(0, oldest=1), bound, "refill", next_step=2) is None
    assert select([group(0, oldest=1)], bound, "refill", step=3, places=1) is None


def test_advantages() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    assert not has_variance(np.ones(4)) and not has_variance(np.zeros(0)) and has_variance(rewards)
    assert group_advantages(np.full(4, 0.1), normalise=True).tolist() == [0.0] * 4
    plain = group_advantages(rewards, normalise=False)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25]
    scaled = group_advantages(rewards, normalise=True)
    assert scaled.sum() == pytest.approx(0.0) and scaled.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
