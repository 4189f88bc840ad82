"""A worker that is drained gets no further group, hands over what it has, and is let go in order."""

from pathlib import Path

from antiphon.core.loop.events import WorkerRegistered, load_event
from antiphon.services.coordinator.api import LeaseRequest
from tests.services.coordinator.test_answers import Story, play


def test_a_drained_worker_is_told_to_leave_and_gets_no_more(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        lease = await story.begin()
        assert not (await story.beat(lease.lease_id)).leave
        await story.client.drain("first")
        await story.client.drain("first")
        assert (await story.beat(lease.lease_id)).leave
        reply = await story.client.lease_group(LeaseRequest(story.worker_id, 0, 1, 0.0))
        assert not reply.leases
        await story.beat(lease.lease_id, released_leases=(lease.lease_id,), leaving=True)
        assert not story.state_machine.fleet.named("first")
        await story.lease_again(lease)

    play(tmp_path, act)


def test_one_that_is_not_there_is_no_error_and_others_stay(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        lease = await story.begin()
        await story.client.drain("nobody")
        assert not (await story.beat(lease.lease_id)).leave

    play(tmp_path, act)


def test_a_registration_says_what_the_worker_costs(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        await story.begin()
        rows = await story.state_machine.journal.read(0, 1000)
        events = [load_event(row.kind, row.body) for row in rows]
        (registered,) = [event for event in events if isinstance(event, WorkerRegistered)]
        assert (registered.worker_class, registered.usd_per_hour) == ("", 0.0)
        status = await story.client.status()
        assert status.dollars_by_use["transfer"] == status.dollars_by_use["learner"] == 0.0
        assert set(status.seconds_by_class) == {""} and status.capacity is None

    play(tmp_path, act)
