"""Leases end by the time they are told; advantages are those of a group."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.coordinator.fleet import Fleet
from antiphon.core.loop.leases import LeaseTable
from antiphon.core.requests import WorkerHeartbeat


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


def test_the_age_of_a_lease_counts_from_its_grant_however_often_it_was_extended() -> None:
    leases = LeaseTable(duration_s=10.0)
    leases.grant("l1", "g1", "w-1", now=4.0)
    leases.grant("l2", "g2", "w-1", now=6.0)
    leases.extend(["l1"], "w-1", now=8.0)
    assert leases.ages_s(now=9.0) == {"l1": 5.0, "l2": 3.0}


def test_silence_counts_from_the_last_sign_of_life() -> None:
    leases = LeaseTable(duration_s=10.0)
    leases.grant("l1", "g1", "w-1", now=4.0)
    held = leases.get("l1")
    assert held is not None and leases.silent_s(held, now=7.5) == 3.5
    leases.extend(["l1"], "w-1", now=8.0)
    held = leases.get("l1")
    assert held is not None and leases.silent_s(held, now=21.0) == 13.0


def test_extension_moves_a_lease_to_the_workers_new_name() -> None:
    leases = LeaseTable(duration_s=10.0)
    leases.grant("l1", "g1", "w-1", now=0.0)
    leases.extend(["l1"], "w-2", now=1.0)
    assert leases.of_worker("w-1") == []
    assert [held.group_id for held in leases.of_worker("w-2")] == ["g1"]


@given(st.lists(st.tuples(st.sampled_from("geG"), st.integers(0, 9), st.integers(0, 3)), max_size=60))
def test_the_leases_of_a_worker_are_those_that_name_it(acts: list[tuple[str, int, int]]) -> None:
    leases = LeaseTable(duration_s=10.0)
    held: dict[str, str] = {}
    for act, lease, worker in acts:
        lease_id, worker_id = f"l{lease}", f"w{worker // 2}-{worker % 2}"
        if act == "g":
            leases.grant(lease_id, "g", worker_id, now=0.0)
            held[lease_id] = worker_id
        elif act == "e":
            leases.extend([lease_id], worker_id, now=0.0)
            own = lease_id in held and held[lease_id].partition("-")[0] == f"w{worker // 2}"
            held |= {lease_id: worker_id} if own else {}
        else:
            leases.end(lease_id)
            held.pop(lease_id, None)
        for name in ("w0-0", "w0-1", "w1-0", "w1-1", "w2-0"):
            found = {lease.lease_id for lease in leases.of_worker(name)}
            assert found == {lease_id for lease_id, by in held.items() if by == name}


def test_no_one_extends_the_lease_of_another() -> None:
    leases = LeaseTable(duration_s=10.0)
    leases.grant("l1", "g1", "w-1", now=0.0)
    for other in ("v-1", "w", "w-1-1", ""):
        assert leases.extend(["l1"], other, now=5.0) == ("l1",)
        assert list(leases.foreign(["l1", "l2"], other)) == ["l1"]
    assert leases.foreign(["l1"], "w-7") == {}
    held = leases.get("l1")
    assert held is not None and (held.worker_id, held.deadline_s) == ("w-1", 10.0)


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
