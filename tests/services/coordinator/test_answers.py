"""Late, repeated and disordered calls: one answer each, as docs/concepts/leases.md lists them."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.config import RunConfig
from antiphon.core.coordinator import consequences
from antiphon.core.errors import ContractError
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import (
    GroupSubmission,
    KeptProgress,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    SubmitVerdict,
    VersionSpan,
)
from antiphon.core.requests import HeartbeatReply, LeaseRequest, WorkerHeartbeat
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.service import CoordinatorService
from tests.support.light_parties import hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(mode="fixed", steps=4, max_staleness=1, filter_="none", prompts_per_step=4)


class Story:
    """A coordinator, a worker that holds a lease, and somebody who takes over."""

    def __init__(self, service: CoordinatorService, client: CoordinatorClient) -> None:
        self.service, self.state_machine, self.client = service, service.state_machine, client
        self.worker_id = ""

    async def begin(self) -> Lease:
        await self.client.announce_snapshot(light_manifest(0))
        await self.client.open_step(0)
        self.worker_id = (await self.client.register(hello("first"))).worker_id
        return await self.lease(self.worker_id)

    async def lease(self, worker_id: str) -> Lease:
        reply = await self.client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0))
        return reply.leases[0]

    async def expire(self, lease: Lease) -> None:
        held = self.state_machine.loop.leases.get(lease.lease_id)
        assert held is not None
        self.state_machine.run(
            consequences.take_back(
                self.state_machine.loop, held, "no sign of life for 60 s", self.state_machine.clock()
            )
        )
        await self.state_machine.written()

    async def lease_again(self, lease: Lease) -> Lease:
        other = (await self.client.register(hello("second"))).worker_id
        again = await self.lease(other)
        assert again.group_id == lease.group_id and again.attempt == lease.attempt + 1
        return again

    async def submit(self, lease: Lease, worker_id: str = "") -> SubmitVerdict:
        return await self.client.submit_group(sample_lease(lease, worker_id or self.worker_id, 0))

    async def told(self, kind: str) -> dict[str, str]:
        """Return the newest event of a kind."""
        rows = await self.state_machine.journal.read(0, 1000)
        return dict(json.loads([row.body for row in rows if row.kind == kind][-1]))

    async def beat(self, *leases: str, **fields: object) -> HeartbeatReply:
        digest = light_manifest(0).weights_digest
        return await self.client.heartbeat(
            WorkerHeartbeat(self.worker_id, 0, digest, leases, 0, 0.0, 1.0, **fields)  # type: ignore[arg-type]
        )


def play(tmp_path: Path, act: Callable[[Story], Awaitable[None]], config: RunConfig = CONFIG) -> None:
    async def run() -> None:
        async with served(config, tmp_path) as site, asyncio.timeout(60.0):
            await act(Story(site.service, site.client()))

    asyncio.run(run())


def altered(submission: GroupSubmission) -> GroupSubmission:
    first = submission.trajectories[0]
    logprobs = first.logprobs - np.float32(0.5)
    changed = dataclasses.replace(first, logprobs=logprobs)
    return dataclasses.replace(submission, trajectories=(changed, *submission.trajectories[1:]))


async def in_time(story: Story) -> SubmitVerdict:
    return await story.submit(await story.begin())


async def repeated(story: Story) -> SubmitVerdict:
    lease = await story.begin()
    await story.submit(lease)
    return await story.submit(lease)


async def repeated_differently(story: Story) -> SubmitVerdict:
    lease = await story.begin()
    await story.submit(lease)
    return await story.client.submit_group(altered(sample_lease(lease, story.worker_id, 0)))


async def after_its_deadline(story: Story) -> SubmitVerdict:
    lease = await story.begin()
    await story.expire(lease)
    return await story.submit(lease)


async def after_another_was_given_it(story: Story) -> SubmitVerdict:
    lease = await story.begin()
    await story.expire(lease)
    await story.lease_again(lease)
    return await story.submit(lease)


async def after_another_handed_in_the_same(story: Story) -> SubmitVerdict:
    lease = await story.begin()
    await story.expire(lease)
    await story.submit(await story.lease_again(lease), "second-1")
    return await story.submit(lease)


async def after_another_handed_in_something_else(story: Story) -> SubmitVerdict:
    lease = await story.begin()
    await story.expire(lease)
    again = await story.lease_again(lease)
    await story.client.submit_group(altered(sample_lease(again, "second-1", 0)))
    return await story.submit(lease)


async def after_the_run(story: Story) -> SubmitVerdict:
    lease = await story.begin()
    await story.client.finish()
    return await story.submit(lease)


SUBMISSIONS = {
    in_time: SubmitVerdict.ACCEPTED,
    repeated: SubmitVerdict.ALREADY_ACCEPTED,
    repeated_differently: SubmitVerdict.CONFLICT,
    after_its_deadline: SubmitVerdict.ACCEPTED,
    after_another_was_given_it: SubmitVerdict.ACCEPTED,
    after_another_handed_in_the_same: SubmitVerdict.ALREADY_ACCEPTED,
    after_another_handed_in_something_else: SubmitVerdict.LATE,
    after_the_run: SubmitVerdict.LATE,
}


@pytest.mark.parametrize(
    ("tell", "verdict"), SUBMISSIONS.items(), ids=lambda x: getattr(x, "__name__", str(x))
)
def test_each_submission_has_one_answer(
    tmp_path: Path, tell: Callable[[Story], Awaitable[SubmitVerdict]], verdict: SubmitVerdict
) -> None:
    async def act(story: Story) -> None:
        assert await tell(story) is verdict
        group_id = next(iter(story.state_machine.state.groups))
        taken = story.state_machine.state.groups[group_id].phase is GroupPhase.SUBMITTED
        again = tell in (repeated, repeated_differently)
        other = tell in (after_another_handed_in_the_same, after_another_handed_in_something_else)
        assert taken == (verdict is SubmitVerdict.ACCEPTED or again or other)

    play(tmp_path, act)


def test_a_lease_that_was_never_granted_is_a_broken_contract(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        lease = dataclasses.replace(await story.begin(), lease_id="f" * 32)
        with pytest.raises(ContractError, match="was never granted"):
            await story.submit(lease)

    play(tmp_path, act)


def piece(start: int, stop: int, sample: int = 0, version: int = 0) -> PartialTrajectory:
    tokens = np.arange(start, stop, dtype=np.int32)
    logprobs = -np.ones(stop - start, dtype=np.float32)
    return PartialTrajectory(tokens, logprobs, (VersionSpan(version, start, stop),), sample_index=sample)


def test_progress_in_any_order_has_one_answer_each(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        lease = await story.begin()
        lease_id = lease.lease_id

        async def told(*pieces: PartialTrajectory) -> tuple[int, ...]:
            reply = await story.beat(lease_id, progress=(LeaseProgress(lease_id, pieces),))
            assert reply.known and not reply.cancelled_leases
            assert [kept.lease_id for kept in reply.kept] == [lease_id]
            return reply.kept[0].tokens

        assert await told(piece(0, 2)) == (2, 0)
        assert await told(piece(0, 2)) == (2, 0)  # repeated
        assert await told(piece(1, 3), piece(0, 1, sample=1)) == (3, 1)  # overlapping
        assert await told(piece(4, 5)) == (3, 1)  # with a gap: the answer says from where to tell again
        assert await told(piece(0, 1)) == (3, 1)  # an older beat that comes late
        assert await told(piece(3, 4)) == (4, 1)
        assert (await story.beat(lease_id)).kept == ()

    play(tmp_path, act)


def test_a_piece_that_cannot_be_begins_its_group_anew(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        lease = await story.begin()
        await story.beat(lease.lease_id, progress=(LeaseProgress(lease.lease_id, (piece(0, 3),)),))
        false = (LeaseProgress(lease.lease_id, (piece(3, 4, version=7),)),)
        reply = await story.beat(lease.lease_id, progress=false)
        assert reply.known and reply.cancelled_leases == (lease.lease_id,) and reply.kept == ()
        assert "sampled with version 7" in (await story.told("worker.struck"))["reason"]
        assert not (await story.lease_again(lease)).prefix

    play(tmp_path, act)


def test_heartbeats_for_ended_leases_are_told_so(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        lease = await story.begin()
        await story.expire(lease)
        told = (LeaseProgress(lease.lease_id, (piece(0, 2),)),)
        reply = await story.beat(lease.lease_id, progress=told, released_leases=(lease.lease_id,))
        assert reply.cancelled_leases == (lease.lease_id,) and reply.kept == ()
        again = await story.lease_again(lease)
        assert not again.prefix
        # The new lease is untouched by what the old holder says.
        await story.beat(lease.lease_id, progress=told, released_leases=(lease.lease_id,))
        held = story.state_machine.loop.leases.get(again.lease_id)
        assert held is not None and held.worker_id == "second-1"

    play(tmp_path, act)


def test_released_leases_are_offered_again_at_once_with_their_progress(tmp_path: Path) -> None:
    async def act(story: Story) -> None:
        lease = await story.begin()
        told = (LeaseProgress(lease.lease_id, (piece(0, 2), piece(0, 1, sample=1))),)
        reply = await story.beat(progress=told, released_leases=(lease.lease_id,), leaving=True)
        assert reply.kept == (KeptProgress(lease.lease_id, (2, 1)),)
        again = await story.lease_again(lease)
        assert [p.stop for p in again.prefix] == [2, 1]
        assert again.prefix[0].spans == (VersionSpan(0, 0, 2),)
        assert not (await story.beat()).known  # it left
        # Released once more by a beat that was on its way: nothing happens.
        assert not (await story.beat(released_leases=(again.lease_id,))).known
        assert story.state_machine.loop.leases.get(again.lease_id) is not None

    play(tmp_path, act)
