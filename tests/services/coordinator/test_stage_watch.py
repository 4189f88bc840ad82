"""The flow's long poll ends when its stage is over, and says meanwhile whom the stage waits for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.config import RunConfig
from antiphon.core.errors import BlockedError, ContractError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.records import GroupRewards, LeaseProgress, PartialTrajectory, SampleReward
from antiphon.core.requests import LeaseRequest, StageReply, WorkerHeartbeat
from antiphon.core.status import WorkerRecord, WorkerState
from antiphon.services.coordinator.client import CoordinatorClient
from tests.support.light_parties import Served, decided, hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config

CONFIG = make_config(steps=4, max_staleness=0, filter_="none", evaluation_prompts=1)
FAR_S = 90.0
"""Longer than any test takes: the one that waits so long must be woken."""


def serve_and(
    tmp_path: Path,
    act: Callable[[Served, CoordinatorClient], Awaitable[None]],
    config: RunConfig = CONFIG,
) -> None:
    async def run() -> None:
        async with served(config, tmp_path) as site, asyncio.timeout(60.0):
            await act(site, site.client())

    asyncio.run(run())


def beat(worker_id: str, version: int, tokens: int = 0) -> WorkerHeartbeat:
    digest = light_manifest(version).weights_digest
    return WorkerHeartbeat(worker_id, version, digest, (), tokens, 0.0, 1.0)


def announce_next(site: Served) -> None:
    """Announce version 1, as if step 0 had been trained."""
    machine = site.service.state_machine
    machine.run(decided(e.SnapshotAnnounced(1, light_manifest(1).weights_digest, "origin")))


async def begin(client: CoordinatorClient, stage: str, number: int) -> "asyncio.Task[StageReply]":
    """Begin to wait for a stage that is not over."""
    assert not (await client.await_stage(stage, number, 0.0)).done
    return asyncio.ensure_future(client.await_stage(stage, number, FAR_S))


async def reward_waiting(client: CoordinatorClient) -> None:
    for group in (await client.pull_for_reward("j", 10, 5.0)).groups:
        rewards = [SampleReward(i, float(i % 2)) for i in range(len(group.trajectories))]
        await client.submit_rewards([GroupRewards(group.group_id, tuple(rewards))])


def test_collect_ends_when_the_groups_are_handed_in_and_reward_when_they_are_rewarded(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        collecting, rewarding = await begin(client, "collect", 0), await begin(client, "reward", 0)
        await client.announce_snapshot(light_manifest(0))
        await client.open_step(0)
        worker = (await client.register(hello())).worker_id
        leases = (await client.lease_group(LeaseRequest(worker, 0, 3, 5.0))).leases
        for lease in leases[:2]:
            await client.submit_group(sample_lease(lease, worker, 0))
        assert not collecting.done()
        far = await client.await_stage("collect", 0, 0.0)
        assert far.progress == pytest.approx(2 / 3) and "1 being sampled" in far.waiting_for
        await client.submit_group(sample_lease(leases[2], worker, 0))
        assert (await collecting).done and not rewarding.done()
        await reward_waiting(client)
        batch = (await rewarding).batch
        assert batch is not None and batch == (await client.await_stage("reward", 0, 0.0)).batch
        assert (batch.reward_mean, batch.reward_std) == (0.5, 0.5)
        assert not (await client.await_stage("collect", 1, 0.0)).done

    serve_and(tmp_path, act)


def test_a_version_is_broadcast_when_it_is_announced_and_one_worker_holds_it(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        one, straggler, _ = [(await client.register(hello(name))).worker_id for name in ("a", "b", "c")]
        waiting = await begin(client, "broadcast", 0)
        words = (await client.await_stage("broadcast", 0, 0.0)).waiting_for
        assert words == "version 0 to be announced"
        await client.announce_snapshot(light_manifest(0))
        await client.heartbeat(beat(straggler, 0))
        assert (await waiting).done
        announce_next(site)
        behind = await client.await_stage("broadcast", 1, 0.0)
        assert not behind.done and behind.waiting_for == f"any of {straggler} to load version 1"
        # A joiner that becomes active with the newest version is a holder like any other.
        await client.heartbeat(beat(one, 1))
        assert (await client.await_stage("broadcast", 1, 0.0)).done

    serve_and(tmp_path, act)


def test_with_a_quorum_the_holders_make_up_their_share_of_the_tokens_per_second(tmp_path: Path) -> None:
    config = make_config(steps=4, max_staleness=0, quorum=0.6)

    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        fast, slow, joiner = [(await client.register(hello(name))).worker_id for name in ("a", "b", "c")]
        await client.heartbeat(beat(fast, 0, tokens=900))
        await client.heartbeat(beat(slow, 0, tokens=100))
        await client.heartbeat(WorkerHeartbeat(joiner, None, None, (), 0, 0.0, 0.0))
        announce_next(site)
        await client.heartbeat(beat(slow, 1, tokens=100))
        reply = await client.await_stage("broadcast", 1, 0.0)
        assert not reply.done and reply.progress == pytest.approx(0.1)
        assert reply.waiting_for == f"any of {fast} to load version 1: 10% of the tokens/s have it, 60% must"
        await client.heartbeat(beat(fast, 1, tokens=900))
        assert (await client.await_stage("broadcast", 1, 0.0)).done

    serve_and(tmp_path, act, config)


def test_a_worker_is_joining_until_its_engine_holds_a_version(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        async def states() -> list[WorkerState]:
            return [worker.state for worker in (await client.status()).workers]

        await client.announce_snapshot(light_manifest(0))
        one, two = [(await client.register(hello(name))).worker_id for name in ("a", "b")]
        await client.heartbeat(WorkerHeartbeat(one, None, None, (), 0, 0.0, 0.0))
        assert await states() == [WorkerState.JOINING, WorkerState.JOINING]
        await client.heartbeat(beat(one, 0))
        assert await states() == [WorkerState.ACTIVE, WorkerState.JOINING]
        await client.open_step(0)
        assert (await client.lease_group(LeaseRequest(two, 0, 1, 0.0))).leases
        assert await states() == [WorkerState.ACTIVE, WorkerState.ACTIVE]

    serve_and(tmp_path, act)


def test_a_stage_says_that_there_is_no_worker_to_wait_for(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        async def absent(stage: str) -> StageReply:
            reply = await client.await_stage(stage, 0, 0.0)
            assert not reply.done and reply.no_workers
            return reply

        assert not (await client.await_stage("broadcast", 0, 0.0)).no_workers  # the learner is to announce it
        await client.announce_snapshot(light_manifest(0))
        await client.open_step(0)
        await client.open_evaluation(0)
        assert (await absent("collect")).waiting_for == "a worker to join: none is active"
        worker = (await client.register(hello())).worker_id
        for stage in ("broadcast", "collect", "reward", "evaluate"):
            words = (await absent(stage)).waiting_for
            assert words == f"a worker to load its first version: none is active, {worker} is joining"
        await client.heartbeat(beat(worker, 0))
        for stage in ("collect", "reward", "evaluate"):
            assert not (await client.await_stage(stage, 0, 0.0)).no_workers
        # What is sampled already waits for the reward service and not for workers.
        leases = (await client.lease_group(LeaseRequest(worker, 0, 9, 5.0))).leases
        for lease in leases:
            await client.submit_group(sample_lease(lease, worker, 0))
        await client.heartbeat(WorkerHeartbeat(worker, 0, None, (), 0, 0.0, 1.0, leaving=True))
        for stage in ("reward", "evaluate"):
            assert not (await client.await_stage(stage, 0, 0.0)).no_workers

    serve_and(tmp_path, act)


def test_whatever_a_worker_does_moves_the_counter_and_a_bare_heartbeat_does_not(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        async def counter() -> int:
            return (await client.await_stage("reward", 0, 0.0)).counter

        await client.announce_snapshot(light_manifest(0))
        await client.open_step(0)
        worker = (await client.register(hello())).worker_id
        seen = [await counter()]
        # A slow link: bytes before the first version; then the version; then tokens of an unfinished group.
        await client.heartbeat(WorkerHeartbeat(worker, None, None, (), 0, 0.0, 0.0, bytes_fetched=10))
        seen.append(await counter())
        await client.heartbeat(beat(worker, 0))
        seen.append(await counter())
        (lease,) = (await client.lease_group(LeaseRequest(worker, 0, 1, 5.0))).leases
        whole = sample_lease(lease, worker, 0).trajectories[0]
        piece = PartialTrajectory(
            whole.token_ids, whole.logprobs, whole.spans, whole.finish_reason, sample_index=0
        )
        begun = WorkerHeartbeat(
            worker, 0, None, (lease.lease_id,), 0, 0.0, 1.0, (LeaseProgress(lease.lease_id, (piece,)),)
        )
        await client.heartbeat(begun)
        seen.append(await counter())
        await client.submit_group(sample_lease(lease, worker, 0))
        seen.append(await counter())
        await reward_waiting(client)
        seen.append(await counter())
        assert seen == sorted(set(seen)), seen
        # Neither an engine that hangs nor a lease that is given from hand to hand is progress.
        await client.heartbeat(beat(worker, 0))
        (lease,) = (await client.lease_group(LeaseRequest(worker, 0, 1, 5.0))).leases
        handed = WorkerHeartbeat(worker, 0, None, (), 0, 0.0, 2.0, released_leases=(lease.lease_id,))
        await client.heartbeat(handed)
        assert await counter() == seen[-1]

    serve_and(tmp_path, act)


def test_evaluate_ends_with_the_score(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        waiting = await begin(client, "evaluate", 0)
        await client.open_evaluation(0)
        worker = (await client.register(hello())).worker_id
        await client.heartbeat(beat(worker, 0))
        words = (await client.await_stage("evaluate", 0, 0.0)).waiting_for
        assert words == "the evaluation of version 0: 0 of 1 prompts"
        (lease,) = (await client.lease_group(LeaseRequest(worker, 0, 1, 5.0))).leases
        await client.submit_group(sample_lease(lease, worker, 0))
        await reward_waiting(client)
        reply = await waiting
        assert reply.evaluation == (await client.status()).evaluations[0]

    serve_and(tmp_path, act)


def test_a_pause_and_the_end_of_the_run_end_every_wait(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        waits = [await begin(client, stage, 0) for stage in ("collect", "reward", "broadcast", "evaluate")]
        await client.pause("two digests of one step")
        for reply in await asyncio.gather(*waits):
            assert not reply.done and reply.halted == "the run is paused: two digests of one step"
        await client.finish()
        assert (await client.await_stage("collect", 0, FAR_S)).halted == "run run-1 is finished"
        with pytest.raises(ContractError, match="stage 'step' is unknown; known: collect, reward"):
            await client.await_stage("step", 0, FAR_S)

    serve_and(tmp_path, act)


def test_a_stage_says_that_nothing_can_be_recorded(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.open_step(0)
        journal = site.service.state_machine.journal
        journal.blocked = UnavailableError("no space is left for the journal")
        for stage in ("collect", "reward", "broadcast"):
            with pytest.raises(BlockedError, match="no space is left"):
                await client.await_stage(stage, 0, 0.01)
        with pytest.raises(BlockedError, match="no space is left"):
            await client.open_step(1)
        journal.blocked = None
        assert not (await client.await_stage("collect", 0, 0.01)).done

    serve_and(tmp_path, act)


def test_what_an_engine_cannot_do_is_in_the_status(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        worker = (await client.register(hello())).worker_id
        await client.heartbeat(replace(beat(worker, 0), missing_abilities=("ids", "seeds")))
        assert (await client.status()).workers[0].missing_abilities == ("ids", "seeds")
        for names in (("\x1b[31m",), ("a",) * 500):
            with pytest.raises(ContractError, match="missing_abilities of a heartbeat"):
                await client.heartbeat(replace(beat(worker, 0), missing_abilities=names))

    serve_and(tmp_path, act)


def test_why_a_worker_cannot_swap_is_in_the_status_until_it_can(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await client.announce_snapshot(light_manifest(0))
        worker = (await client.register(hello())).worker_id

        async def seen(**more: Any) -> WorkerRecord:
            await client.heartbeat(replace(beat(worker, 0), **more))
            return (await client.status()).workers[0]

        said = await seen(swap_error="a\ntensor  " + "x" * 5000, swap_failing_s=60.0)
        assert said.swap_error.startswith("a tensor xxx") and len(said.swap_error) <= 300
        assert said.swap_failing_s >= 60.0 and said.state is WorkerState.ACTIVE
        await client.open_step(0)
        announce_next(site)
        for stage, number in (("broadcast", 1), ("reward", 0)):  # a run that ends of it ends with these words
            words = (await client.await_stage(stage, number, 0.0)).waiting_for
            assert f"; {worker} says: a tensor xxx" in words
        for odd in (float("nan"), -5.0):  # a third strike would shut it out
            with pytest.raises(ContractError, match="swap_failing_s of a heartbeat"):
                await seen(swap_error="why", swap_failing_s=odd)
        lost = await seen(held_version=None, weights_digest=None, swap_error="nothing is served")
        assert (lost.state, lost.held_version) == (WorkerState.JOINING, None)  # nothing waits for it
        again = await seen()
        assert (again.state, again.swap_error, again.swap_failing_s) == (WorkerState.ACTIVE, "", 0.0)

    serve_and(tmp_path, act)
