"""Batches whose engines gave no log-probabilities: the learner takes those of the versions that sampled."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.cli import app as cli
from antiphon.core.errors import IntegrityError
from antiphon.core.records import BatchRow, VersionSpan
from antiphon.lineage.documents.replay_copy import find_copy
from antiphon.lineage.rollout_table import decode_batch, encode_batch, is_recomputed
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.earlier_policies import stored_policies
from antiphon.services.learner.packing import Packing
from antiphon.services.learner.step import Trainer
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from tests.services.learner.test_learner import Bench, make_config, make_rows, model_path  # noqa: F401
from tests.support import replay_artifacts
from tests.support.replay_artifacts import RUN_ID, STEPS, TinyRun, run_of_few_weights, save_model

pytestmark = pytest.mark.engine


def trained(model: Path, folder: Path, payload: bytes, **changes: Any) -> str:
    """Return the digest of version 1."""
    trainer = Trainer(make_config(model, learner__warmup_steps=0, **changes), CheckpointStore(folder, 3))
    trainer.start(0)
    digest = trainer.train(0, payload).weights.digest()
    trainer.stop()
    return digest


def own_logprobs(model: Path, folder: Path, rows: list[BatchRow]) -> list[BatchRow]:
    """Return rows with what the learner's first weights make of their tokens."""
    trainer = Trainer(make_config(model, learner__warmup_steps=0), CheckpointStore(folder, 3))
    trainer.start(0)
    found = {}
    for batch in Packing(rows, 0, 64).of_rank(0):
        for key, row in zip(batch.rows, trainer._held().logprobs(batch).numpy(), strict=True):
            found[key] = row
    trainer.stop()
    return [
        replace(row, logprobs=found[row.group_id, row.sample_index][: row.token_ids.size].astype(np.float32))
        for row in rows
    ]


@pytest.mark.parametrize("updates", [1, 2])
def test_what_engines_said_plays_no_part(model_path: Path, tmp_path: Path, updates: int) -> None:  # noqa: F811
    rows, changes = make_rows(0), {"algorithm__updates_per_step": updates}
    silent = [replace(row, logprobs=np.zeros_like(row.logprobs)) for row in rows]
    exact = own_logprobs(model_path, tmp_path / "own", rows)
    digests = [
        trained(model_path, tmp_path / str(place), payload, **changes)
        for place, payload in enumerate(
            [
                encode_batch(exact),
                encode_batch(silent, recomputed=True),
                encode_batch(rows, recomputed=True),
                encode_batch(rows),
            ]
        )
    ]
    assert digests[0] == digests[1] == digests[2], "the learner's own are what a true engine would have said"
    assert digests[3] != digests[0], "or the log-probabilities would change nothing here"


def test_a_batch_says_that_it_is_recomputed_and_others_keep_their_bytes() -> None:
    rows = make_rows(0)
    plain, marked = encode_batch(rows), encode_batch(rows, recomputed=True)
    assert is_recomputed(marked) and not is_recomputed(plain)
    assert encode_batch(rows, recomputed=False) == plain
    for one, other in zip(decode_batch(plain), decode_batch(marked), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


SILENT = {
    "rollout__logprobs": "learner",
    "trust__audits": "off",
    "record__checkpoint_stride": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run whose engines said nothing, with tokens up to two versions old."""
    root = tmp_path_factory.mktemp("silent")
    config = replay_artifacts.make_config(
        save_model(root / "model"), **SILENT, record__weights="last", loop__max_staleness=2
    )
    return TinyRun(root / "home", config)


@pytest.mark.parametrize("budget", [16, 4096])
def test_tokens_two_versions_old_have_what_they_were_sampled_with(run: TinyRun, budget: int) -> None:
    step, rows = 3, run.sampled[3]
    packing = Packing(rows, step, budget)
    nothing = [torch.full(one.mask.shape, torch.nan) for one in packing.of_rank(0)]
    earlier, passes = stored_policies(run.config, PayloadStore(run.run_dir / PAYLOADS)), list[int]()
    (found,) = earlier.sampled_with([1], step, [packing], [nothing], lambda: passes.append(1))
    assert passes
    old = 0
    for batch, own in zip(packing.of_rank(0), found, strict=True):
        stale = batch.staleness > 0
        old += int(stale.sum())
        torch.testing.assert_close(own[stale], batch.behaviour_logprobs[stale], atol=1e-4, rtol=0.0)
        assert own[~stale].isnan().all(), "tokens of the present version are left as they were"
    assert old == sum(span.stop - span.start for row in rows for span in row.spans if span.version < step)


def test_a_silent_engine_trains_to_what_one_that_speaks_does(run: TinyRun, tmp_path: Path) -> None:
    """With what engines would have said, each step goes where it went without."""
    trainer = Trainer(run.config, CheckpointStore(tmp_path, 1))
    trainer.start(0)
    records = find_copy(run.ledger, RUN_ID).steps
    try:
        for step in range(STEPS):
            metrics = trainer.train(step, encode_batch(run.sampled[step])).metrics
            for name in ("loss", "ratio_mean", "kl_k3", "kl_k1_s2", "gradient_norm"):
                assert metrics.get(name, 0.0) == pytest.approx(
                    records[step].metrics.get(name, 0.0), rel=1e-3, abs=1e-5
                ), name
    finally:
        trainer.stop()


def test_stale_tokens_without_stored_versions_are_refused_before_anything_changes(
    run: TinyRun, tmp_path: Path
) -> None:
    trainer = Trainer(run.config, CheckpointStore(tmp_path, 1))
    trainer.start(0)
    batches = find_copy(run.ledger, RUN_ID)
    try:
        trainer.train(0, batches.batch(0))
        with pytest.raises(IntegrityError, match="tokens of version 0 without log-probabilities"):
            trainer.train(1, batches.batch(1))
        assert trainer.version == 1
    finally:
        trainer.stop()


@pytest.mark.parametrize("step", ["", "2", "3"])
def test_a_copy_repeats_what_earlier_versions_scored(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    """The versions between are recorded by digest alone, so they are made again on the way."""
    shutil.copytree(run.ledger, tmp_path / RUN_ID)
    assert find_copy(tmp_path, RUN_ID).recorded_by_digest() == [1]
    words = ["--step", step] if step else []
    assert cli.execute(["replay", RUN_ID, "--copy", str(tmp_path), *words]) == 0
    assert "exact here" in capsys.readouterr().out
    assert cli.execute(["replay", RUN_ID, "--copy", str(tmp_path), "--ranks", "2"]) == 2
    assert "--ranks 2 is not possible" in capsys.readouterr().err
    assert cli.execute(["replay", RUN_ID, "--copy", str(tmp_path), "--rollouts"]) == 2
    assert "engines gave no log-probabilities to compare" in capsys.readouterr().err


def test_a_replay_begins_where_all_versions_that_its_steps_need_are_to_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of version 2 will not do: step 2 needs version 1, which the ledger does not keep."""
    run = run_of_few_weights(tmp_path, **SILENT)
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))
    assert find_copy(run.ledger, RUN_ID).recorded_by_digest() == [1, 2]
    assert CheckpointStore(run.run_dir / "checkpoints", STEPS).versions() == [2, 4]
    assert cli.execute(["replay", RUN_ID, "--step", "3"]) == 0
    assert "exact here" in capsys.readouterr().out
    assert cli.execute(["export", RUN_ID, "v2", str(tmp_path / "out")]) == 0
    assert "2 steps to repeat from the base model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("interval", "stored"),
    [
        (4, [2, 3, 4, 5, 6, 7]),  # the newest four, and the two before the checkpoint of version 4
        (10, [4, 5, 6, 7]),  # it begins again at the base, and versions are made again on the way
    ],
)
def test_a_killed_learner_has_the_versions_that_sampled(
    model_path: Path,  # noqa: F811
    tmp_path: Path,
    interval: int,
    stored: list[int],
) -> None:
    async def body() -> None:
        config = make_config(
            model_path,
            rollout__logprobs="learner",
            loop__max_staleness=2,
            trust__audits="off",
            broadcast__snapshots_kept=4,
            learner__checkpoint_interval=interval,
            learner__checkpoints_kept=1,
        )

        def bench(folder: Path) -> Bench:
            made = Bench(folder, config)
            for step in range(8):
                rows = [
                    replace(row, spans=(VersionSpan(max(0, step - 2), 0, row.token_ids.size),))
                    for row in make_rows(step)
                ]
                made.coordinator.batches[step] = made.store.put(encode_batch(rows, recomputed=True))
            return made

        unbroken = bench(tmp_path / "a")
        learner = await unbroken.learner()
        for step in range(7):
            await learner.step(step)
            await learner.publish(step + 1)
        assert unbroken.payloads().versions() == stored
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # what a kill at this moment leaves
        broken = bench(tmp_path / "b")
        broken.coordinator.commits_made = [*unbroken.coordinator.commits_made]
        await learner.step(7)
        await learner.close()
        learner = await broken.learner()
        await learner.step(7)
        await learner.close()
        expected = [commit.weights_digest for commit in unbroken.coordinator.commits_made]
        assert [commit.weights_digest for commit in broken.coordinator.commits_made] == expected

    asyncio.run(asyncio.wait_for(body(), 120))
