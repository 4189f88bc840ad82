"""A worker whose heartbeats come without tokens loses its leases; others continue its groups."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from antiphon.core.errors import UnavailableError
from antiphon.core.loop.events import GroupSubmitted, LeaseExpired, load_event
from antiphon.core.loop.leases import PAUSES_NEEDED
from antiphon.core.records import Lease, LeaseProgress, SubmitVerdict
from antiphon.core.requests import LeaseReply, LeaseRequest, WorkerHeartbeat
from tests.services.coordinator.test_answers import Story, piece
from tests.support.light_parties import hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(mode="fixed", steps=4, max_staleness=1, filter_="none", prompts_per_step=4)
HEARTBEAT_S = CONFIG.coordinator.heartbeat_s
BEATS = round(CONFIG.coordinator.hung_factor)
"""Heartbeats of silence after which an engine hangs."""


class Hang(Story):
    """A story whose clock goes on by one heartbeat at a time."""

    now = 1000.0
    tokens_generated = 0
    busy_s = 1.0

    async def start(self) -> Lease:
        self.state_machine.clock = lambda: self.now
        for _ in range(PAUSES_NEEDED):
            self.state_machine.loop.leases.engines.usual.add(HEARTBEAT_S)
        return await self.begin()

    async def later(self, *leases: str, progress: tuple[LeaseProgress, ...] = ()) -> tuple[str, ...]:
        """Send the next heartbeat and return the leases that it has to give up."""
        self.now += HEARTBEAT_S
        digest = light_manifest(0).weights_digest
        said = WorkerHeartbeat(
            self.worker_id,
            0,
            digest,
            leases,
            self.tokens_generated,
            self.busy_s,
            1.0,
            progress,
            sampling=bool(leases),
        )
        return (await self.client.heartbeat(said)).cancelled_leases

    async def until_hung(self, *leases: str) -> tuple[str, ...]:
        for _ in range(BEATS * BEATS):  # the pauses that were heard before count as usual
            if gone := await self.later(*leases):
                return gone
        raise AssertionError("no heartbeat ended the leases")

    async def ask(self, groups: int = 4) -> LeaseReply:
        return await self.client.lease_group(LeaseRequest(self.worker_id, 0, groups, 0.0))

    async def expired(self) -> list[LeaseExpired]:
        await self.state_machine.written()
        rows = await self.state_machine.journal.read(0, 1000)
        events = [load_event(row.kind, row.body) for row in rows]
        return [event for event in events if isinstance(event, LeaseExpired)]


def play(tmp_path: Path, act: Callable[[Hang], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            await act(Hang(site.service, site.client()))

    asyncio.run(run())


def test_leases_without_tokens_end_although_heartbeats_come(tmp_path: Path) -> None:
    async def act(story: Hang) -> None:
        lease = await story.start()
        other = (await story.ask(1)).leases[0]
        ids = (lease.lease_id, other.lease_id)
        # While tokens come for one of them, none is ended.
        for count in range(4):
            told = (LeaseProgress(lease.lease_id, (piece(0, 2 + count),)),)
            assert not await story.later(*ids, progress=told)
            for _ in range(BEATS - 2):
                assert not await story.later(*ids, progress=told)  # repeated: these are not new
        assert await story.until_hung(*ids) == ids
        events = await story.expired()
        assert [(event.group_id, event.hung) for event in events] == [
            (lease.group_id, True),
            (other.group_id, True),
        ]
        assert "its engine brought no token for" in events[0].reason
        assert (events[0].tokens, events[0].kept, events[1].kept) == (5, 5, 0)
        assert events[0].silent_s == events[1].silent_s >= BEATS * HEARTBEAT_S
        account = story.state_machine.state.work_accounts.account(story.now)
        assert account.seconds["preempted"] >= events[0].silent_s and account.tokens["preempted"] == 0
        again = await story.lease_again(lease)
        assert [p.stop for p in again.prefix] == [5]

    play(tmp_path, act)


def test_a_hung_engine_gets_no_lease_before_it_moves(tmp_path: Path) -> None:
    async def act(story: Hang) -> None:
        lease = await story.start()
        await story.until_hung(lease.lease_id)
        assert not await story.later()
        status = await story.client.status()
        assert status.workers[0].stands_still_s == (BEATS + 1) * HEARTBEAT_S
        assert (
            f"the engine of first-1 stands still for {status.workers[0].stands_still_s:.0f} s"
            in status.waiting
        )
        refused = await story.ask()
        assert not refused.leases and "the engine of first-1 has brought no token for" in refused.reason
        story.busy_s += 1.0  # a long step ended
        await story.later()
        probe = (await story.ask()).leases
        assert len(probe) == 1 and not (await story.ask()).leases
        story.tokens_generated += 5
        await story.later(probe[0].lease_id)
        assert len((await story.ask()).leases) == 3
        assert (await story.client.status()).workers[0].stands_still_s == 0.0
        # A process that starts again is as good as any.
        await story.until_hung(probe[0].lease_id)
        story.worker_id = (await story.client.register(hello("first"))).worker_id
        assert (await story.ask()).leases

    play(tmp_path, act)


def test_nothing_is_ended_while_nothing_can_be_recorded(tmp_path: Path) -> None:
    async def act(story: Hang) -> None:
        lease = await story.start()
        await story.later(lease.lease_id)
        story.state_machine._store_blocked = UnavailableError("the disk is full")
        for _ in range(3 * BEATS):
            assert not await story.later(lease.lease_id)
        story.state_machine._store_blocked = None
        assert not await story.later(lease.lease_id)
        assert await story.until_hung(lease.lease_id)

    play(tmp_path, act)


def test_the_first_submission_wins_although_its_lease_was_given_away(tmp_path: Path) -> None:
    async def act(story: Hang) -> None:
        lease = await story.start()
        told = (LeaseProgress(lease.lease_id, (piece(0, 2),)),)
        await story.later(lease.lease_id, progress=told)
        await story.until_hung(lease.lease_id)
        again = await story.lease_again(lease)
        assert await story.submit(lease) is SubmitVerdict.ACCEPTED
        assert story.state_machine.loop.leases.get(again.lease_id) is None
        assert await story.submit(again, "second-1") is SubmitVerdict.ALREADY_ACCEPTED
        first, second = await story.expired()
        assert (first.hung, second.hung) == (True, False)
        assert (second.lease_id, second.waste) == (again.lease_id, "duplicate")
        status = await story.client.status()
        assert status.groups_requeued == 1 and status.groups_to_reward == 1 and status.groups_open == 3
        rows = await story.state_machine.journal.read(0, 1000)
        events = [load_event(row.kind, row.body) for row in rows]
        taken = next(event for event in events if isinstance(event, GroupSubmitted))
        assert taken.lease_id == lease.lease_id and taken.attempt == 1 and taken.authors == ()
        account = story.state_machine.state.work_accounts.account(story.now)
        assert account.tokens["open"] == sum(taken.token_counts)

    play(tmp_path, act)


def test_what_is_too_old_for_its_place_ends_no_other_lease(tmp_path: Path) -> None:
    config = make_config(steps=4, max_staleness=0, filter_="none", prompts_per_step=1)

    async def run() -> None:
        async with served(config, tmp_path) as site, asyncio.timeout(60.0):
            story = Story(site.service, site.client())
            lease = await story.begin()
            await story.expire(lease)
            again = await story.lease_again(lease)
            state = story.state_machine.state
            stale = sample_lease(lease, story.worker_id, 0)
            state.sealed.append(None)  # type: ignore[arg-type]  # as if step 0 had been trained without it
            try:
                assert await story.client.submit_group(stale) is SubmitVerdict.LATE
            finally:
                state.sealed.pop()
            assert story.state_machine.loop.leases.get(again.lease_id) is not None

    asyncio.run(run())
