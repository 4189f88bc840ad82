"""Voided batches over real gRPC: both modes, restarts in between, and what waits for the batch."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from antiphon.core.config import RunConfig
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.loop.run_state import fold, new_state
from antiphon.core.records import BatchRef, StepCommit
from antiphon.lineage.rollout_table import decode_batch
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_parties import LightWorker, insist, reward_all, served
from tests.support.loop_model import RUN_ID, light_manifest, make_config

VOIDS = (1, 1, 3)


async def batch_of(client: CoordinatorClient, step: int) -> BatchRef:
    while True:
        reply = await insist(client.await_stage, "reward", step, 5.0)
        if reply.batch is not None:
            return reply.batch


async def train(
    client: CoordinatorClient, config: RunConfig, voids: list[int], first: int, last: int
) -> None:
    """Train the steps first..last - 1; an operator voids those in `voids`, which are taken off that list."""
    for step in range(first, last):
        ahead = min(config.run.steps - 1, step + config.loop.max_staleness)
        await insist(client.open_step, ahead)
        while True:
            batch = await batch_of(client, step)
            version = step + 1
            commit = StepCommit(step, version, light_manifest(version).weights_digest, batch.digest)
            if step not in voids:
                break
            voids.remove(step)
            before = (await client.status()).work_done
            voided = await client.void_batch(step, batch.digest, "no finite loss", "ada")
            assert (voided.digest, voided.groups, voided.operator) == (batch.digest, batch.groups, "ada")
            assert await client.void_batch(step, batch.digest, "again", "bob") == voided
            assert (await client.status()).work_done > before  # patience begins anew
            with pytest.raises(IntegrityError, match=f"step {step}"):
                await client.commit_step(commit)
        await client.commit_step(commit)
        if version % config.loop.publish_interval == 0:
            await client.announce_snapshot(light_manifest(version))


async def live(config: RunConfig, folder: Path, seed: int, delay_s: float = 0.0) -> list[str]:
    """Live a run with `VOIDS` and a restart while a step has no batch; return the digests that trained."""
    folder.mkdir()
    voids = list(VOIDS)
    for part in range(2):
        async with served(config, folder, snapshot_every=10) as site:
            client, rng = site.client(), np.random.default_rng(seed + part)
            if not part:
                await client.announce_snapshot(light_manifest(0))
            tasks = [asyncio.ensure_future(reward_all(client, rng, delay_s))]
            for index in range(2):
                worker = LightWorker(client, f"w{index}", np.random.default_rng(seed + index))
                worker.elastic, worker.delay_s = config.loop.mode == "elastic", delay_s
                tasks.append(asyncio.ensure_future(worker.run()))
            try:
                async with asyncio.timeout(60.0):
                    if not part:
                        await train(client, config, voids, 0, 3)
                        digest = (await batch_of(client, 3)).digest
                        await client.void_batch(3, digest[:12], "no finite loss", "ada")
                        voids.remove(3)
                        continue  # the next coordinator finds step 3 without a batch, or with another one
                    await train(client, config, voids, 3, config.run.steps)
                    await client.finish()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            status, state = await client.status(), site.service.state_machine.state
            assert not voids and [batch.step for batch in status.voided] == list(VOIDS)
            assert max(status.staleness_histogram) <= config.loop.max_staleness
            groups = []
            for ref, commit in zip(state.sealed, state.commits, strict=True):
                assert ref.digest == commit.batch_digest
                assert ref.replaced == tuple(batch for batch in state.voided if batch.step == ref.step)
                groups += [
                    row.group_id for row in decode_batch(site.store.get(ref.digest)) if not row.sample_index
                ]
            assert len(groups) == len(set(groups))
            for batch in status.voided:
                spent = {row.group_id for row in decode_batch(site.store.get(batch.digest))}
                assert len(spent) == batch.groups and not spent & set(groups)
            kept = {group for ids in state.sealed_groups.values() for group in ids} | set(state.groups)
            kept |= {group.group_id for group in state.since_seal.filtered}  # perhaps a sample
    engine = sa.create_engine(f"sqlite:///{folder / JOURNAL_NAME}")
    with engine.connect() as connection:
        names = {row[0] for row in connection.execute(sa.text("select name from payloads"))}
    engine.dispose()
    assert {name for name in names if name[0] in "gs" and name[1].isdigit()} <= kept
    journal = Journal(folder / JOURNAL_NAME, RUN_ID)
    assert fold(new_state(config), journal.replay()) == state
    await journal.close()
    return [commit.batch_digest for commit in state.commits]


@pytest.mark.parametrize("filter_", ["none", "drop", "refill"])
def test_an_elastic_run_with_voided_batches_keeps_its_promises(tmp_path: Path, filter_: str) -> None:
    config = make_config(filter_=filter_, steps=6, max_staleness=2, lease_s=0.5)
    assert len(asyncio.run(live(config, tmp_path / "run", seed=1))) == 6


@pytest.mark.parametrize("filter_", ["none", "refill"])
def test_a_fixed_run_has_the_same_batches_after_the_same_voids(tmp_path: Path, filter_: str) -> None:
    config = make_config(mode="fixed", filter_=filter_, steps=6, max_staleness=1, lease_s=0.5)
    calm = asyncio.run(live(config, tmp_path / "calm", seed=1))
    assert calm == asyncio.run(live(config, tmp_path / "stormy", seed=5, delay_s=0.02))


def test_who_waits_for_a_voided_batch_is_told_what_it_waits_for(tmp_path: Path) -> None:
    config = make_config(steps=3, max_staleness=0, filter_="none")

    async def body() -> None:
        async with served(config, tmp_path) as site:
            client, rng = site.client(), np.random.default_rng(0)
            await client.announce_snapshot(light_manifest(0))
            worker = LightWorker(client, "w", rng)
            tasks = [asyncio.ensure_future(work) for work in (worker.run(), reward_all(client, rng))]
            await client.open_step(0)
            first = await batch_of(client, 0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(ContractError, match="step 1 of run run-1 has no sealed batch yet"):
                await client.void_batch(1, "", "x", "ada")
            await client.void_batch(0, "", "", "ada")
            status = await client.status()
            assert status.sealed_steps == 0 and status.voided[0].reason == "no reason was given"
            assert status.staleness_histogram == {}
            assert "step 0: 0 of 3 groups rewarded; 3 not issued yet" in status.waiting
            reply = await client.await_stage("collect", 0, 0.0)
            assert not reply.done and reply.progress == 0.0
            tasks = [
                asyncio.ensure_future(work)
                for work in (LightWorker(client, "v", rng).run(), reward_all(client, rng))
            ]
            assert (await batch_of(client, 0)).digest != first.digest
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(body(), 60.0))
