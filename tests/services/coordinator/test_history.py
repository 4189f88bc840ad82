"""What was rewarded comes back with later leases of its prompt, after a restart too, within limits."""

import asyncio
import dataclasses
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.config import RunConfig
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.loop.group_state import GroupState
from antiphon.core.message_sizes import MESSAGE_BYTES
from antiphon.core.records import (
    FinishReason,
    GroupRewards,
    GroupSubmission,
    Lease,
    PromptHistory,
    SampleReward,
    SamplingParameters,
    StepCommit,
    Trajectory,
    VersionSpan,
)
from antiphon.core.requests import LeaseReply, LeaseRequest
from antiphon.protos import records_pb2, rollout_pb2
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.archive import REPLY_BYTES, Archive
from antiphon.services.coordinator.journal.journal import HistoryEdit, HistoryRow
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_history import archived, read_journal, rewarded_epochs
from tests.support.light_parties import Served, hello, run_parties, sample_lease, served
from tests.support.loop_model import light_manifest, make_config
from tests.support.messages import written

# Every step visits every prompt, so step t is epoch t.
CONFIG = make_config(
    steps=4, max_staleness=0, filter_="none", train_size=2, prompts_per_step=2, evaluation_prompts=2
)


def configured(config: RunConfig = CONFIG, **drafting: object) -> RunConfig:
    section = DraftingSection.model_validate(drafting)
    return config.model_copy(update={"drafting": section})


def serve_and(
    folder: Path, act: Callable[[Served, CoordinatorClient], Awaitable[None]], config: RunConfig = CONFIG
) -> None:
    async def run() -> None:
        async with served(config, folder) as site, asyncio.timeout(60.0):
            await act(site, site.client())

    asyncio.run(run())


async def take(
    client: CoordinatorClient, worker_id: str, held: int, groups: int = 2, wants_history: bool = True
) -> tuple[Lease, ...]:
    reply = await client.lease_group(LeaseRequest(worker_id, held, groups, 5.0, wants_history))
    assert reply.leases, reply.reason
    return reply.leases


async def judge(
    client: CoordinatorClient, worker_id: str, leases: tuple[Lease, ...], version: int
) -> list[GroupSubmission]:
    """Sample and judge leases; the reward is the sample index."""
    found = []
    for lease in leases:
        found.append(sample_lease(lease, worker_id, version))
        await client.submit_group(found[-1])
    for group in (await client.pull_for_reward("judge", len(leases), 5.0)).groups:
        sample_rewards = [SampleReward(i, float(i % 2)) for i in range(len(group.trajectories))]
        assert await client.submit_rewards([GroupRewards(group.group_id, tuple(sample_rewards))])
    return found


async def run_step(client: CoordinatorClient, worker_id: str, step: int) -> dict[str, GroupSubmission]:
    """Sample, judge, commit and publish a step; return its groups by prompt key."""
    await client.announce_snapshot(light_manifest(step))
    await client.open_step(step)
    leases = await take(client, worker_id, step)
    submissions = await judge(client, worker_id, leases, step)
    batch = (await client.await_stage("reward", step, 10.0)).batch
    assert batch is not None
    digest = light_manifest(step + 1).weights_digest
    await client.commit_step(StepCommit(step, step + 1, digest, batch.digest))
    await client.announce_snapshot(light_manifest(step + 1))
    return {lease.prompt_key: sent for lease, sent in zip(leases, submissions, strict=True)}


def rows_of(history: PromptHistory | None) -> list[tuple[int, int, int, float, list[int]]]:
    completions = () if history is None else history.completions
    return [(p.epoch, p.sample_index, p.version, p.reward, p.token_ids.tolist()) for p in completions]


def rows_from(epoch: int, submission: GroupSubmission) -> list[tuple[int, int, int, float, list[int]]]:
    return [
        (epoch, i, t.oldest_version, float(i), t.token_ids.tolist())
        for i, t in enumerate(submission.trajectories)
    ]


def test_leases_carry_what_was_judged_and_a_restart_changes_nothing(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    sent: list[dict[str, GroupSubmission]] = []

    def look(site: Served) -> None:
        seen.append({key: rows_of(site.service.state_machine.archive.history(key)) for key in sent[0]})

    async def first(site: Served, client: CoordinatorClient) -> None:
        worker = await client.register(hello())
        for step in range(3):
            sent.append(await run_step(client, worker.worker_id, step))
        look(site)

    async def second(site: Served, client: CoordinatorClient) -> None:
        look(site)
        await client.open_step(3)
        worker = await client.register(hello())
        (lease,) = await take(client, worker.worker_id, 3, groups=1)
        assert rows_of(lease.history) == seen[0][lease.prompt_key] != []
        (bare,) = await take(client, worker.worker_id, 3, groups=1, wants_history=False)
        assert bare.prompt_key != lease.prompt_key and bare.history is None

    serve_and(tmp_path, first)
    assert archived(tmp_path) == rewarded_epochs(tmp_path, CONFIG.drafting.epochs)
    serve_and(tmp_path, second)
    expected = {key: rows_from(2, sent[2][key]) + rows_from(1, sent[1][key]) for key in sent[0]}
    assert seen == [expected, expected]


def test_held_out_prompts_draft_from_earlier_evaluations(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker = await client.register(hello())
        sent: dict[str, list[list[tuple[int, int, int, float, list[int]]]]] = {}
        for version in range(4):
            await client.announce_snapshot(light_manifest(version))
            await client.open_evaluation(version)
            leases = await take(client, worker.worker_id, version)
            assert {lease.prompt_key for lease in leases} == {"heldout-0-0", "heldout-0-1"}
            for lease in leases:
                earlier = sent.get(lease.prompt_key, [])
                assert rows_of(lease.history) == [row for rows in reversed(earlier) for row in rows]
            submissions = await judge(client, worker.worker_id, leases, version)
            for lease, submission in zip(leases, submissions, strict=True):
                sent.setdefault(lease.prompt_key, []).append(rows_from(version, submission))
            await run_step(client, worker.worker_id, version)

    serve_and(tmp_path, act)
    assert archived(tmp_path)["heldout-0-0"] == {0, 1, 2, 3}


@pytest.mark.parametrize("drafting", [{"enabled": False}, {"epochs": 0}])
def test_nothing_is_kept_when_history_is_switched_off(tmp_path: Path, drafting: dict[str, object]) -> None:
    config = configured(**drafting)

    async def act(site: Served, client: CoordinatorClient) -> None:
        _, crew = await run_parties(client, config, seed=1)
        assert not any(history for worker in crew for history in worker.histories.values())

    serve_and(tmp_path, act, config)
    assert archived(tmp_path) == {}


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_no_batch_depends_on_history(tmp_path: Path, mode: str) -> None:
    """One worker at a time, so that elastic mode has one order as well."""
    digests, carried = [], 0
    for number, drafting in enumerate([{"enabled": False}, {}, {"store_mib": 1, "lease_kib": 1}]):
        config = configured(make_config(mode=mode, steps=5, max_staleness=0, filter_="none"), **drafting)
        folder = tmp_path / str(number)
        folder.mkdir()

        async def run(config: RunConfig = config, folder: Path = folder) -> tuple[list[str], int]:
            async with served(config, folder) as site:
                refs, crew = await run_parties(site.client(), config, seed=4, workers=1)
            found = sum(history is not None for w in crew for history in w.histories.values())
            return [ref.digest for ref in refs], found

        found, with_history = asyncio.run(run())
        digests.append(found)
        carried += with_history
    assert digests[0] == digests[1] == digests[2]
    assert carried


def test_damaged_rows_are_dropped_with_a_log_line(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker = await client.register(hello())
        await run_step(client, worker.worker_id, 0)

    async def again(site: Served, client: CoordinatorClient) -> None:
        archive = site.service.state_machine.archive
        assert archive.history("train-0-0") is None and archive.history("train-0-1") is not None
        worker = await client.register(hello())
        await run_step(client, worker.worker_id, 1)

    serve_and(tmp_path, act)
    with closing(sqlite3.connect(tmp_path / JOURNAL_NAME)) as database:
        database.execute("UPDATE history SET body = x'ff00ff' WHERE prompt_key = 'train-0-0'")
        database.commit()
    serve_and(tmp_path, again)
    assert archived(tmp_path) == {"train-0-0": {1}, "train-0-1": {0, 1}}


def test_another_configuration_cuts_what_is_kept(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        worker = await client.register(hello())
        for step in range(3):
            await run_step(client, worker.worker_id, step)

    async def look(site: Served, client: CoordinatorClient) -> None:
        await site.service.state_machine.written()

    serve_and(tmp_path, act)
    assert archived(tmp_path) == {"train-0-0": {1, 2}, "train-0-1": {1, 2}}
    serve_and(tmp_path, look, configured(epochs=1))
    assert archived(tmp_path) == {"train-0-0": {2}, "train-0-1": {2}}


# Limits, with completions too long for a quick run.


def long_group(
    number: int, samples: int, tokens: int
) -> tuple[str, GroupState, GroupSubmission, list[float]]:
    rng = np.random.default_rng(number)
    key = f"train-0-{number}"
    group = GroupState(key, number, "train", number, epoch=0, samples=samples)
    trajectories = tuple(
        Trajectory(
            sample_index=i,
            seed=i,
            token_ids=rng.integers(0, 2**31 - 1, tokens).astype(np.int32),
            logprobs=np.zeros(tokens, dtype=np.float32),
            spans=(VersionSpan(0, 0, tokens),),
            finish_reason=FinishReason.LENGTH,
        )
        for i in range(samples)
    )
    return key, group, GroupSubmission("l", key, "w", trajectories, 0.1), [0.0] * samples


def lease_of(key: str) -> Lease:
    return Lease("0" * 32, key, key, (1, 2), 1, (1,), SamplingParameters(), None, 60.0, 1)


def test_no_lease_and_no_reply_exceeds_its_limit() -> None:
    assert REPLY_BYTES <= MESSAGE_BYTES // 2
    archive = Archive(DraftingSection(lease_kib=4096))
    for number in range(9):
        edit = archive.take(*long_group(number, 4, 250_000))
        assert edit is not None and len(edit.kept) == 1
    leases = asyncio.run(archive.attach([lease_of(f"train-0-{n}") for n in range(9)]))
    sizes = [written(lease, records_pb2.Lease).history.ByteSize() for lease in leases if lease.history]
    counts = [len(lease.history.completions) if lease.history else 0 for lease in leases]
    assert counts[:6] == [4] * 6 and sum(counts) < 9 * 4  # the last ones go without
    assert max(sizes) <= 4096 << 10 and sum(sizes) <= REPLY_BYTES
    message = written(LeaseReply(tuple(leases), "", 0, None, False), rollout_pb2.LeaseReply)
    assert message.ByteSize() < MESSAGE_BYTES
    small = Archive(DraftingSection(lease_kib=1))
    small.take(*long_group(0, 4, 100))
    (lease,) = asyncio.run(small.attach([lease_of("train-0-0")]))
    assert lease.history is not None and [p.sample_index for p in lease.history.completions] == [0, 1]


def test_the_store_tells_the_journal_what_left_it() -> None:
    archive = Archive(DraftingSection(store_mib=1, epochs=2))
    rows: dict[tuple[str, int], HistoryRow] = {}
    for epoch in range(3):
        for number in range(4):
            key, group, submission, rewards = long_group(number, 2, 20_000)
            edit = archive.take(key, dataclasses.replace(group, epoch=epoch), submission, rewards)
            for row in () if edit is None else edit.kept:
                rows[row.prompt_key, row.epoch] = row
            for gone in () if edit is None else edit.gone:
                del rows[gone]
    again = Archive(DraftingSection(store_mib=1, epochs=2))
    assert again.load(rows.values()) is None
    for number in range(4):
        before, after = archive.history(f"train-0-{number}"), again.history(f"train-0-{number}")
        assert rows_of(before) == rows_of(after) and before is not None
    smaller = Archive(DraftingSection(store_mib=1, epochs=1))
    edit = smaller.load(rows.values())
    assert isinstance(edit, HistoryEdit) and len(edit.gone) == len(rows) - 4


def test_history_is_no_event(tmp_path: Path) -> None:
    async def act(site: Served, client: CoordinatorClient) -> None:
        await run_parties(client, CONFIG, seed=2)

    serve_and(tmp_path, act)
    events, rows = read_journal(tmp_path)
    assert rows and not any("history" in event.kind for event in events)
