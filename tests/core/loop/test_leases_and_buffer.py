"""Leases end by the time they are told; a rewarded group leaves the buffer once."""

import numpy as np
import pytest

from antiphon.core.errors import IntegrityError
from antiphon.core.loop.advantages import group_advantages, has_variance
from antiphon.core.loop.group_buffer import BufferedGroup, GroupBuffer, Verdict
from antiphon.core.loop.leases import LeaseTable
from antiphon.core.loop.staleness import StalenessBound
from antiphon.services.coordinator.api import WorkerHeartbeat
from antiphon.services.coordinator.fleet import Fleet


def test_lease_expires_unless_extended() -> None:
    leases = LeaseTable(duration_s=10.0)
    leases.grant("l1", "g1", "w", now=0.0)
    leases.grant("l2", "g2", "w", now=1.0)
    assert leases.next_deadline() == 10.0
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
        fleet.beat(member, idle_beat(member.worker_id), now=0.0)
    fleet.beat(crew[1], idle_beat("w1-1", ("lease",)), now=0.0)
    assert [member.pause_s for member in crew[:3]] == [20.0, 2.0, 20.0]
    assert fleet.silent(now=10.0) == [] and fleet.silent(now=10.1) == [crew[1]]
    assert len(fleet.silent(now=100.1)) == 1000
    for member in crew[100:]:
        fleet.lose(member)
        fleet.lose(member)
    assert fleet.size == 100 == len(fleet.living())
    fleet.beat(crew[0], idle_beat("w0-1"), now=60.0)
    assert crew[0].pause_s == 2.0


def group(number: int, oldest: int = 0, varied: bool = True) -> BufferedGroup:
    return BufferedGroup(f"g{number}", number, oldest, varied)


def test_oldest_groups_leave_first_and_only_once() -> None:
    buffer = GroupBuffer(StalenessBound(2), "none")
    for member in (group(3, oldest=0), group(1, oldest=1), group(2, oldest=1), group(0, oldest=2)):
        buffer.offer(member)
    selection = buffer.select(step=2, places=2)
    assert selection is not None and selection.used == ("g1", "g3")  # in the order of opening
    buffer.remove(selection.used)
    second = buffer.select(step=3, places=2)
    assert second is not None and second.used == ("g0", "g2")
    buffer.remove(second.used)
    assert buffer.select(step=4, places=1) is None and len(buffer) == 0


def test_offering_twice_contradicts_the_journal() -> None:
    buffer = GroupBuffer(StalenessBound(2), "none")
    buffer.offer(group(1))
    with pytest.raises(IntegrityError, match="g1 was offered"):
        buffer.offer(group(1))


@pytest.mark.parametrize(
    ("filter_", "used", "filtered"),
    [("none", ("g0", "g1", "g2"), ()), ("drop", ("g0", "g2"), ("g1",)), ("refill", ("g0", "g2"), ("g1",))],
)
def test_groups_without_variance(filter_: str, used: tuple[str, ...], filtered: tuple[str, ...]) -> None:
    buffer = GroupBuffer(StalenessBound(2), filter_)  # type: ignore[arg-type]
    for number in range(3):
        buffer.offer(group(number, varied=number != 1))
    selection = buffer.select(step=0, places=3)
    assert selection is not None
    assert (selection.used, selection.filtered) == (used, filtered)


def test_verdicts_and_staleness() -> None:
    buffer = GroupBuffer(StalenessBound(1), "refill")
    assert buffer.verdict(group(0, oldest=0), next_step=2) is Verdict.STALE
    assert buffer.verdict(group(0, oldest=1, varied=False), next_step=2) is Verdict.FILTERED
    assert buffer.verdict(group(0, oldest=1), next_step=2) is Verdict.KEPT
    buffer.offer(group(0, oldest=1))
    assert buffer.stale(next_step=2) == [] and buffer.stale(next_step=3) == ["g0"]
    assert buffer.select(step=3, places=1) is None


def test_advantages() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    assert not has_variance(np.ones(4)) and not has_variance(np.zeros(0)) and has_variance(rewards)
    assert group_advantages(np.full(4, 0.1), normalise=True).tolist() == [0.0] * 4
    plain = group_advantages(rewards, normalise=False)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25]
    scaled = group_advantages(rewards, normalise=True)
    assert scaled.sum() == pytest.approx(0.0) and scaled.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
