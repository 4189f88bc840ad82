"""A whole run over real gRPC: every promise of the loop, in both modes."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.records import GroupRewards, SampleReward, SubmitVerdict
from antiphon.core.requests import LeaseRequest
from antiphon.lineage.rollout_table import decode_batch, decode_timings
from tests.support.light_parties import hello, reward_all, run_parties, sample_lease, served
from tests.support.loop_model import light_manifest, make_config


@pytest.mark.parametrize("filter_", ["none", "drop", "refill"])
def test_elastic_run_trains_every_step_within_the_bound(tmp_path: Path, filter_: str) -> None:
    config = make_config(filter_=filter_, steps=6, max_staleness=2)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            refs, _ = await run_parties(site.client(), config, seed=1, store=site.store)
            status = await site.client().status()
            assert status.finished and status.committed_steps == 6
            assert status.waiting == "nothing: the run is finished"
            assert max(status.staleness_histogram) <= 2
            for ref in refs:
                rows = decode_batch(site.store.get(ref.digest))
                assert len(rows) == ref.trajectories == sum(ref.staleness_histogram.values())
                assert [(r.group_id, r.sample_index) for r in rows] == sorted(
                    (r.group_id, r.sample_index) for r in rows
                )
                timings = decode_timings(site.store.get(ref.timings_digest))
                assert all(t.leased_at_s <= t.submitted_at_s <= t.rewarded_at_s for t in timings)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("staleness", "interval", "filter_"),
    [(0, 1, "refill"), (2, 1, "drop"), (2, 1, "refill"), (2, 2, "refill")],
)
def test_fixed_run_has_the_same_batches_whatever_the_timing(
    tmp_path: Path, staleness: int, interval: int, filter_: str
) -> None:
    config = make_config(
        mode="fixed",
        filter_=filter_,
        max_staleness=staleness,
        publish_interval=interval,
        steps=5,
        lease_s=0.4,
    )

    async def digests(name: str, **chance: object) -> list[str]:
        (tmp_path / name).mkdir()
        async with served(config, tmp_path / name) as site:
            refs, _ = await run_parties(site.client(), config, store=site.store, **chance)  # type: ignore[arg-type]
            return [ref.digest for ref in refs]

    async def run() -> None:
        calm = await digests("calm", seed=1, workers=1)
        stormy = await digests("stormy", seed=2, workers=3, delay_s=0.02, lose_share=0.1)
        assert calm == stormy

    asyncio.run(run())


def test_evaluations_run_beside_training_and_are_recorded(tmp_path: Path) -> None:
    config = make_config(steps=4, evaluation_prompts=5)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            await client.open_evaluation(0)
            await client.open_evaluation(0)
            await client.open_evaluation(3)
            await run_parties(client, config, seed=4)
            first = (await client.status()).evaluations[0]
            assert first.version == 0 and first.complete
            assert 0.0 <= first.reward_mean <= 1.0 and first.completion_tokens_mean >= 1.0
            kinds = [event.kind async for event in client.watch_events(0, follow=False)]
            assert kinds.count("evaluation.opened") == 2
            assert kinds.count("evaluation.finished") >= 1

    asyncio.run(run())


def test_events_can_be_followed_to_the_end_of_the_run(tmp_path: Path) -> None:
    config = make_config(steps=3)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()

            async def follow() -> list[tuple[int, str, dict[str, object]]]:
                return [
                    (event.seq, event.kind, json.loads(event.data_json))
                    async for event in client.watch_events(0, follow=True)
                ]

            following = asyncio.ensure_future(follow())
            await run_parties(client, config, seed=5)
            seen = await asyncio.wait_for(following, 20.0)
            assert [seq for seq, _, _ in seen] == list(range(1, len(seen) + 1))
            kinds = {kind for _, kind, _ in seen}
            assert kinds >= {
                "run.opened", "step.opened", "group.opened", "lease.granted", "group.submitted",
                "group.rewarded", "batch.sealed", "step.committed", "snapshot.announced",
                "worker.registered", "worker.loaded", "run.finished",
            }  # fmt: skip
            loads = [body for _, kind, body in seen if kind == "worker.loaded"]
            assert all(set(body) == {"worker_id", "version"} for body in loads)

    asyncio.run(run())


def test_the_end_is_told_to_followers_before_it_is_on_the_disk(tmp_path: Path) -> None:
    config = make_config(steps=3)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            await site.service.announce_snapshot(light_manifest(0))
            await site.service.open_step(0)
            finishing = asyncio.ensure_future(site.service.finish())
            await asyncio.sleep(0)  # it is finished now, and its event is being written
            pages = [page async for page in site.service.event_pages(0, follow=True)]
            assert [event.kind for page in pages for event in page][-1] == "run.finished"
            await finishing

    asyncio.run(run())


def test_nothing_acknowledged_is_handed_to_the_learner_twice(tmp_path: Path) -> None:
    config = make_config(steps=6, filter_="none", lease_s=0.5)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            refs, crew = await run_parties(client, config, seed=6, workers=3, delay_s=0.01, lose_share=0.1)
            trained = [r.group_id for ref in refs for r in decode_batch(site.store.get(ref.digest))]
            assert len(trained) == len(refs) * 3 * 2
            assert max(trained.count(group_id) for group_id in trained) == 2  # one per sample
            verdicts = {verdict for worker in crew for verdict in worker.verdicts}
            assert SubmitVerdict.CONFLICT not in verdicts

    asyncio.run(run())


def test_judge_that_dies_loses_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.core.coordinator.groups.REWARD_S", 0.3)
    config = make_config(steps=2)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client = site.client()
            # It waits before the others come and gathers nothing: who has waited longest is asked first.
            taking = asyncio.ensure_future(site.service.pull_for_reward("dead", 1, 20.0))
            await asyncio.sleep(0)
            running = asyncio.ensure_future(run_parties(client, config, seed=7))
            assert (await taking).groups
            await asyncio.wait_for(running, 30.0)
            assert (await client.status()).finished

    asyncio.run(run())


def test_groups_are_gathered_for_a_reward_service_until_a_batch_waits_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.services.coordinator.service.GATHER_S", 3600.0)
    monkeypatch.setattr("antiphon.services.coordinator.service.GATHER_LOOK_S", 0.001)
    config = make_config(prompts_per_step=3)

    async def run() -> None:
        async with served(config, tmp_path) as site, asyncio.timeout(30.0):
            client = site.client()
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            await client.open_step(1)
            worker = (await client.register(hello())).worker_id
            leases = (await client.lease_group(LeaseRequest(worker, 0, 4, 5.0))).leases
            pulling = asyncio.ensure_future(site.service.pull_for_reward("judge", 16, 20.0))
            for lease in leases[:2]:
                await client.submit_group(sample_lease(lease, worker, 0))
            await client.status()
            assert not pulling.done()
            await client.submit_group(sample_lease(leases[2], worker, 0))
            assert [group.group_id for group in (await pulling).groups] == [
                lease.group_id for lease in leases[:3]
            ]
            # What is behind the batch is not in a hurry, unless as many came as may be taken.
            await client.submit_rewards([GroupRewards(lease.group_id, two_rewards()) for lease in leases[:3]])
            await client.await_stage("reward", 0, 20.0)
            await client.submit_group(sample_lease(leases[3], worker, 0))
            assert len((await site.service.pull_for_reward("judge", 1, 20.0)).groups) == 1

    asyncio.run(run())


def two_rewards() -> tuple[SampleReward, ...]:
    return SampleReward(0, 0.0), SampleReward(1, 1.0)


def test_each_deadline_that_passes_doubles_the_time_to_score_a_group(tmp_path: Path) -> None:
    config = make_config(steps=2)

    async def run() -> None:
        async with served(config, tmp_path) as site:
            client, machine = site.client(), site.service.state_machine
            await client.announce_snapshot(light_manifest(0))
            await client.open_step(0)
            worker = (await client.register(hello())).worker_id
            (lease,) = (await client.lease_group(LeaseRequest(worker, 0, 1, 5.0))).leases
            await client.submit_group(sample_lease(lease, worker, 0))
            now = 1000.0
            machine.clock = lambda: now

            async def handed_out(seconds: float) -> bool:
                nonlocal now
                now += seconds
                return bool((await site.service.pull_for_reward("slow", 1, 0.0)).groups)

            assert await handed_out(0.0)
            for deadline_s in (15.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0):  # up to the stall timeout
                assert not await handed_out(deadline_s - 1.0)
                assert await handed_out(2.0)
            # The slow one ends, within its last deadline.
            rewards = [SampleReward(i, float(i % 2)) for i in range(config.loop.group_size)]
            assert await client.submit_rewards([GroupRewards(lease.group_id, tuple(rewards))])

    asyncio.run(run())


def test_pull_after_the_end_does_not_spin(tmp_path: Path) -> None:
    config = make_config()

    async def run() -> None:
        async with served(config, tmp_path) as site:
            await site.service.finish()
            rewarding = asyncio.ensure_future(reward_all(site.service, np.random.default_rng(0)))
            done, _ = await asyncio.wait([rewarding], timeout=0.1)
            assert not done
            rewarding.cancel()

    asyncio.run(run())
