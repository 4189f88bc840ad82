"""A slow last group is sampled twice; the first to hand it in wins, and the other is told and billed."""

import asyncio
from pathlib import Path

import pytest

from antiphon.core.coordinator import consequences
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.loop.speculation import LEASES_NEEDED
from antiphon.core.records import LeaseProgress, SubmitVerdict
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat
from tests.services.coordinator.test_answers import Story, piece
from tests.support.light_parties import hello, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(mode="fixed", steps=4, max_staleness=1, filter_="none", prompts_per_step=1)


async def join(story: Story, name: str, numerics: str = "same") -> str:
    worker_id = (await story.client.register(hello(name))).worker_id
    digest = light_manifest(0).weights_digest
    await story.client.heartbeat(WorkerHeartbeat(worker_id, 0, digest, (), 0, 0.0, 1.0, numerics=numerics))
    return worker_id


@pytest.mark.parametrize("winner", ["first", "second"])
def test_the_first_submission_wins_and_the_other_is_cancelled_and_billed(tmp_path: Path, winner: str) -> None:
    async def act(story: Story) -> None:
        state_machine = story.state_machine
        lease = await story.begin()
        told = (LeaseProgress(lease.lease_id, (piece(0, 3), piece(0, 2, sample=1))),)
        await story.beat(lease.lease_id, progress=told, numerics="same")
        other = await join(story, "second")
        none = await story.client.lease_group(LeaseRequest(other, 0, 1, 0.0))
        assert not none.leases  # nobody knows yet what is slow
        for _ in range(LEASES_NEEDED):
            state_machine.loop.leases.times.add(0.0)
        stranger = await join(story, "stranger", "other")
        assert not (await story.client.lease_group(LeaseRequest(stranger, 0, 1, 0.0))).leases
        twin = await story.lease(other)
        assert (twin.group_id, twin.attempt, twin.version) == (lease.group_id, 2, 0)
        assert twin.lease_id != lease.lease_id and [p.stop for p in twin.prefix] == [3, 2]
        assert twin.seeds == lease.seeds
        third = await join(story, "third")
        assert not (await story.client.lease_group(LeaseRequest(third, 0, 1, 0.0))).leases  # two are enough
        assert (await story.beat(lease.lease_id)).cancelled_leases == ()

        fast, slow = (lease, twin) if winner == "first" else (twin, lease)
        assert await story.submit(fast, f"{winner}-1") is SubmitVerdict.ACCEPTED
        group = state_machine.state.groups[lease.group_id]
        assert group.phase is GroupPhase.SUBMITTED and group.lease_id == fast.lease_id
        assert (await story.beat(slow.lease_id)).cancelled_leases == (slow.lease_id,)
        assert len(state_machine.loop.leases) == 0 and state_machine.loop.leases.partial_groups.tokens == 0
        # The same tokens, which its holder may forget.
        loser = "second-1" if winner == "first" else "first-1"
        assert await story.submit(slow, loser) is SubmitVerdict.ALREADY_ACCEPTED
        account = state_machine.state.work_accounts.account(state_machine.clock())
        assert account.seconds["duplicate"] > 0
        # What the duplicate went on from was sampled once and is no waste, the one that wins.
        assert account.tokens["duplicate"] == 0
        assert account.tokens["open"] == sum(group.token_counts)
        status = await story.client.status()
        assert status.tokens_by_use == account.tokens
        assert set(status.worker_seconds) == set(account.seconds)

    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            await act(Story(site.service, site.client()))

    asyncio.run(run())


def test_both_leases_outlive_the_coordinator(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            story = Story(site.service, site.client())
            lease = await story.begin()
            for _ in range(LEASES_NEEDED):
                story.state_machine.loop.leases.times.add(0.0)
            await story.beat(lease.lease_id, numerics="same")
            other = await join(story, "second")
            twin = await story.lease(other)
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            story = Story(site.service, site.client())
            assert len(story.state_machine.loop.leases) == 2
            for name, own in (("second", twin), ("first", lease)):
                story.worker_id = (await story.client.register(hello(name))).worker_id
                assert (await story.beat(own.lease_id)).cancelled_leases == ()
            assert await story.submit(twin, "second-1") is SubmitVerdict.ACCEPTED
            assert (await story.beat(lease.lease_id)).cancelled_leases == (lease.lease_id,)

    asyncio.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_of_a_slow_worker_moves_with_its_beginning_before_it_is_late(
    tmp_path: Path, fails: bool
) -> None:
    async def act(story: Story) -> None:
        leases = story.state_machine.loop.leases
        lease = await story.begin()
        told = (LeaseProgress(lease.lease_id, (piece(0, 3), piece(0, 2, sample=1))),)
        await story.beat(lease.lease_id, progress=told, numerics="same")
        other = await join(story, "second")
        asking = LeaseRequest(other, 0, 1, 0.0)
        for seconds, worker_id in ((1000.0, "first-1"), (0.1, other)):
            leases._ends.add(worker_id, seconds, (5, 5))
        assert not (await story.client.lease_group(asking)).leases  # how long it will be is not known
        remembered = story.state_machine.loop.planner.order
        remembered.predict = lambda prompt_index: 50.0  # type: ignore[method-assign]
        moved = await story.lease(other)
        assert moved.group_id == lease.group_id and [p.stop for p in moved.prefix] == [3, 2]
        if fails:  # its holder went on meanwhile
            machine = story.state_machine
            machine.run(consequences.lose_named(machine.loop, "second", "it is gone", machine.clock()))
            assert not story.state_machine.loop.leases.of_worker(other)
            assert await story.submit(lease, "first-1") is SubmitVerdict.ACCEPTED
        else:
            assert await story.submit(moved, other) is SubmitVerdict.ACCEPTED
            assert (await story.beat(lease.lease_id)).cancelled_leases == (lease.lease_id,)
        assert len(leases) == 0 and leases.partial_groups.tokens == 0

    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            await act(Story(site.service, site.client()))

    asyncio.run(run())
