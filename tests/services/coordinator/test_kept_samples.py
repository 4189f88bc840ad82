"""What trains nothing is kept too: the completions of filtered groups and of every evaluation."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from antiphon.api.coordinator import Coordinator
from antiphon.core.config import RunConfig
from antiphon.core.records import BatchRef
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.rollout_table import decode_batch
from antiphon.services.coordinator.server import JOURNAL_NAME
from tests.support.light_parties import LightWorker, Served, reward_all, run_parties, served
from tests.support.loop_model import light_reward, make_config

PROMPTS = 12


async def whole_run(
    config: RunConfig, folder: Path, **chance: object
) -> tuple[Served, list[BatchRef], tuple[EvaluationRecord, ...]]:
    folder.mkdir(exist_ok=True)
    async with served(config, folder) as site:
        client = site.client()
        await client.open_evaluation(0)
        refs, _ = await run_parties(client, config, **{"seed": 3, **chance})  # type: ignore[arg-type]
        return site, refs, (await client.status()).evaluations


def payloads_left(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / JOURNAL_NAME)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM payloads")]


@pytest.mark.parametrize("filter_", ["drop", "refill"])
@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_filtered_groups_are_kept_whole(tmp_path: Path, mode: str, filter_: str) -> None:
    config = make_config(mode=mode, filter_=filter_, steps=8, evaluation_prompts=PROMPTS)
    site, refs, _ = asyncio.run(whole_run(config, tmp_path))
    assert any(ref.groups_filtered for ref in refs), "the run shows nothing: no group was filtered"
    for ref in refs:
        assert bool(ref.samples_digest) == bool(ref.groups_filtered)
        rows = decode_batch(site.store.get(ref.samples_digest)) if ref.samples_digest else []
        assert len({row.group_id for row in rows}) == ref.groups_filtered
        assert len(rows) == ref.groups_filtered * config.loop.group_size
        trained = {row.group_id for row in decode_batch(site.store.get(ref.digest))}
        for row in rows:
            assert row.group_id not in trained and row.advantage == 0.0
            assert row.reward == light_reward(row.token_ids)


def test_an_evaluation_keeps_its_answers_and_the_journal_none(tmp_path: Path) -> None:
    config = make_config(steps=4, evaluation_prompts=PROMPTS)
    site, _, evaluations = asyncio.run(whole_run(config, tmp_path))
    (found,) = evaluations
    assert found.complete and found.samples_digest
    rows = decode_batch(site.store.get(found.samples_digest))
    assert len(rows) == PROMPTS
    assert [row.reward for row in rows] == [light_reward(row.token_ids) for row in rows]
    assert all(row.prompt_key.startswith("heldout-") for row in rows)
    assert np.mean([row.reward for row in rows]) == pytest.approx(found.reward_mean)
    assert not [name for name in payloads_left(tmp_path) if name.startswith("v000000-e")]


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_an_evaluation_of_several_samples_begins_with_those_of_one(tmp_path: Path, mode: str) -> None:
    found: dict[int, EvaluationRecord] = {}
    answers: dict[int, dict[tuple[str, int], tuple[int, ...]]] = {}
    for samples in (1, 5):
        config = make_config(mode=mode, steps=2, evaluation_prompts=4, evaluation_samples=samples)
        site, _, (found[samples],) = asyncio.run(whole_run(config, tmp_path / str(samples)))
        rows = decode_batch(site.store.get(found[samples].samples_digest))
        assert len(rows) == 4 * samples
        assert [row.reward for row in rows] == [light_reward(row.token_ids) for row in rows]
        assert np.mean([row.reward for row in rows]) == pytest.approx(found[samples].reward_mean)
        answers[samples] = {(row.prompt_key, row.sample_index): tuple(row.token_ids) for row in rows}
    assert {place: ids for place, ids in answers[5].items() if not place[1]} == answers[1]
    assert found[5].prompts == found[5].rewarded == 4


@pytest.mark.parametrize("filter_", ["drop", "refill"])
def test_a_fixed_run_keeps_the_same_completions_whatever_the_timing(tmp_path: Path, filter_: str) -> None:
    config = make_config(mode="fixed", filter_=filter_, steps=5, evaluation_prompts=6, lease_s=0.4)
    _, calm, first = asyncio.run(whole_run(config, tmp_path / "calm", seed=1, workers=1))
    _, stormy, second = asyncio.run(
        whole_run(config, tmp_path / "stormy", seed=2, workers=3, delay_s=0.02, lose_share=0.1)
    )
    digests = [[(ref.digest, ref.samples_digest) for ref in refs] for refs in (calm, stormy)]
    assert digests[0] == digests[1]
    assert [e.samples_digest for e in first] == [e.samples_digest for e in second]


def test_keeping_none_changes_no_batch(tmp_path: Path) -> None:
    config = make_config(mode="fixed", steps=4, evaluation_prompts=4)
    without = config.model_copy(update={"record": config.record.model_copy(update={"samples": 0})})
    _, refs, _ = asyncio.run(whole_run(config, tmp_path / "some"))
    _, bare, evaluations = asyncio.run(whole_run(without, tmp_path / "none"))
    assert [ref.digest for ref in refs] == [ref.digest for ref in bare]
    assert not any(ref.samples_digest for ref in bare)
    assert all(found.complete and not found.samples_digest for found in evaluations)


def test_a_coordinator_that_ends_amid_an_evaluation_keeps_the_same_answers(tmp_path: Path) -> None:
    """Half of the answers are rewarded by one coordinator, the rest by the next one."""
    config = make_config(mode="fixed", steps=2, evaluation_prompts=PROMPTS, lease_s=0.4)

    async def in_two_parts(folder: Path) -> str:
        folder.mkdir()
        async with served(config, folder) as site:
            await site.client().open_evaluation(0)
            await _until_rewarded(site, config, PROMPTS // 2)
        assert len(payloads_left(folder)) - 1 > 0  # the manifest apart
        async with served(config, folder) as site:
            return await _the_rest(site.client())

    _, _, (whole,) = asyncio.run(whole_run(config, tmp_path / "whole"))
    assert asyncio.run(in_two_parts(tmp_path / "parts")) == whole.samples_digest != ""


async def _the_rest(client: Coordinator) -> str:
    """Answer what is left of the evaluation, leases of the one before included, and return its digest."""
    rng = np.random.default_rng(4)
    parties = [LightWorker(client, "w9", rng).run(), reward_all(client, rng, 0.0)]
    running = [asyncio.ensure_future(party) for party in parties]
    try:
        async with asyncio.timeout(30.0):
            while (found := (await client.await_stage("evaluate", 0, 1.0)).evaluation) is None:
                pass
        return found.samples_digest
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def _until_rewarded(site: Served, config: RunConfig, count: int) -> None:
    """Run the parties until this many held-out answers are rewarded."""
    running = asyncio.ensure_future(run_parties(site.client(), config, seed=5, workers=1, delay_s=0.01))
    evaluation = site.service.state_machine.state.evaluations[0]
    async with asyncio.timeout(30.0):
        while evaluation.rewarded < count and not running.done():
            await site.service.state_machine.rewarded.wait(1.0)
    running.cancel()
    await asyncio.wait({running})
