"""A worker that is drained gets no further group, hands over what it has, and is let go in order."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from antiphon.core.capacity.provisioning_config import PoolClass, PriceFrom
from antiphon.core.loop.events import WorkerPriced, WorkerRegistered, load_event
from antiphon.core.requests import LeaseRequest
from tests.services.coordinator.test_answers import CONFIG, Story, play
from tests.support.light_parties import hello
from tests.support.loop_model import light_manifest


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
        assert not story.state_machine.loop.fleet.named("first")
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


def test_a_price_that_changes_counts_from_that_moment_on(tmp_path: Path) -> None:
    eight, nine = (datetime(2026, 11, 24, hour, tzinfo=UTC) for hour in (8, 9))
    later = (PriceFrom(since=eight, usd_per_hour=7.2), PriceFrom(since=nine, usd_per_hour=1.0))
    spot = PoolClass(name="spot", usd_per_hour=3.6, prices=later)
    pool = CONFIG.provisioning.model_copy(update={"pool": (spot,)})

    async def act(story: Story) -> None:
        at = eight.timestamp() - 1.0
        story.state_machine.journal.wall_clock = lambda: at
        await story.client.announce_snapshot(light_manifest(0))
        story.worker_id = (await story.client.register(hello("spot-0"))).worker_id
        await story.beat()
        at = eight.timestamp()
        await story.beat()
        await story.beat()
        await story.state_machine.written()  # what was noted is on the disk
        rows = await story.state_machine.journal.read(0, 1000)
        events = [load_event(row.kind, row.body) for row in rows]
        (registered,) = [event for event in events if isinstance(event, WorkerRegistered)]
        (priced,) = [event for event in events if isinstance(event, WorkerPriced)]
        assert (registered.usd_per_hour, priced.usd_per_hour) == (3.6, 7.2)
        assert registered.at_s is not None
        before = priced.at_s - registered.at_s
        account = story.state_machine.state.work_accounts.account(priced.at_s + 10.0)
        assert account.classes["spot"].dollars == pytest.approx((3.6 * before + 7.2 * 10.0) / 3600.0)
        assert sum(account.dollars.values()) == pytest.approx(account.classes["spot"].dollars)

    play(tmp_path, act, CONFIG.model_copy(update={"provisioning": pool}))


def test_prices_stand_in_the_order_of_their_beginnings() -> None:
    eight, nine = (datetime(2026, 11, 24, hour, tzinfo=UTC) for hour in (8, 9))
    later = (PriceFrom(since=nine, usd_per_hour=1.0), PriceFrom(since=eight, usd_per_hour=2.0))
    with pytest.raises(ValueError, match="give prices in the order of their beginnings"):
        PoolClass(name="spot", usd_per_hour=3.0, prices=later)
