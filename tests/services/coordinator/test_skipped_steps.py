"""Skipped steps over real gRPC: both modes, and restarts in between."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError
from antiphon.core.loop.run_state import fold, new_state
from antiphon.core.records import BatchRef, StepCommit
from antiphon.lineage.rollout_table import decode_batch
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_parties import LightWorker, insist, reward_all, served
from tests.support.loop_model import RUN_ID, light_manifest, make_config

SKIPPED = (1, 3)


async def batch_of(client: CoordinatorClient, step: int) -> BatchRef:
    while True:
        reply = await insist(client.await_stage, "reward", step, 5.0)
        if reply.batch is not None:
            return reply.batch


async def train(
    client: CoordinatorClient, config: RunConfig, skips: list[int], first: int, last: int
) -> None:
    """Train the steps first..last - 1; an operator skips those in `skips`, which are taken off that list."""
    for step in range(first, last):
        ahead = min(config.run.steps - 1, step + config.loop.max_staleness)
        await insist(client.open_step, ahead)
        while True:
            batch = await batch_of(client, step)
            version = step + 1
            commit = StepCommit(step, version, light_manifest(version).weights_digest, batch.digest)
            if step not in skips:
                break
            skips.remove(step)
            before = (await client.status()).work_done
            voided = await client.skip_step(step, "no finite loss", "ada")
            assert (voided.digest, voided.groups, voided.operator) == (batch.digest, batch.groups, "ada")
            assert await client.skip_step(step, "again", "bob") == voided
            assert (await client.status()).work_done > before  # patience begins again
            with pytest.raises(IntegrityError, match=f"step {step}"):
                await client.commit_step(commit)
        await client.commit_step(commit)
        if version % config.loop.publish_interval == 0:
            await client.announce_snapshot(light_manifest(version))


async def live(config: RunConfig, folder: Path, seed: int, delay_s: float = 0.0) -> list[str]:
    """Live a run with `SKIPPED` and a restart after a skip; return the digests that trained."""
    folder.mkdir()
    skips = list(SKIPPED)
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
                        await train(client, config, skips, 0, 3)
                        await batch_of(client, 3)
                        await client.skip_step(3, "no finite loss", "ada")
                        skips.remove(3)
                        continue  # the next coordinator finds step 3 with an empty batch
                    await train(client, config, skips, 3, config.run.steps)
                    await client.finish()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            status, state = await client.status(), site.service.state_machine.state
            assert not skips and [batch.step for batch in status.voided] == list(SKIPPED)
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
                assert state.sealed[batch.step].trajectories == 0
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
def test_an_elastic_run_with_skipped_steps_keeps_its_promises(tmp_path: Path, filter_: str) -> None:
    config = make_config(filter_=filter_, steps=6, max_staleness=2, lease_s=0.5)
    assert len(asyncio.run(live(config, tmp_path / "run", seed=1))) == 6


@pytest.mark.parametrize("filter_", ["none", "refill"])
def test_a_fixed_run_has_the_same_batches_after_the_same_skips(tmp_path: Path, filter_: str) -> None:
    config = make_config(mode="fixed", filter_=filter_, steps=6, max_staleness=1, lease_s=0.5)
    calm = asyncio.run(live(config, tmp_path / "calm", seed=1))
    assert calm == asyncio.run(live(config, tmp_path / "stormy", seed=5, delay_s=0.02))
