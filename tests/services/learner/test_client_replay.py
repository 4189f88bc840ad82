"""A client's steps repeated from artifacts alone, and what people see of their data."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.client_records import AdamParameters, LoadOrder, SavedWeights
from antiphon.core.errors import ConfigError
from antiphon.core.records import BatchRef
from antiphon.lineage.client_steps import encode_step
from antiphon.lineage.documents.replay_copy import find_copy
from antiphon.lineage.ledger.verify import verify_run
from antiphon.lineage.rollout_table import encode_timings, sampled_versions
from antiphon.lineage.samples import SampleFiles
from antiphon.services.learner.replay.steps import Replayer, replay_run
from antiphon.services.learner.saved import SavedFolder
from tests.support.client_calls import chunks, client_config, make_call
from tests.support.replay_artifacts import RUN_ID, STEPS, TinyRun, save_model

pytestmark = pytest.mark.engine


class ClientRun(TinyRun):
    """Two steps of calls, weights saved and, after a third step, loaded again."""

    def _batch(self, step: int) -> BatchRef:
        order: Any = AdamParameters(learning_rate=1e-2 / (step + 1), grad_clip_norm=float(step))
        calls = chunks(make_call(step, 9, "importance_sampling" if step % 2 else "cross_entropy"), 2)
        if step == 2:
            saved, digest = SavedFolder(self.run_dir), self._payloads.weights()[2]
            self.trainer.save_to(saved.checkpoints("a"))
            saved.write("weights", "a", 2, digest)
            order, calls = LoadOrder(SavedWeights(RUN_ID, "weights", "a"), True, digest), []
        timings, digest = self.store.put(encode_timings([])), self.store.put(encode_step(calls, order))
        return BatchRef(step, digest, timings, 8, 2, 0, 0, 40, 0.0, {0: 8}, 0.0)


@pytest.fixture(scope="module", params=[{}, {"learner__lora": {"rank": 4}}], ids=str)
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyRun:
    root = tmp_path_factory.mktemp("client")
    config = client_config(
        save_model(root / "model"),
        run__steps=STEPS,
        record__mlflow=False,
        record__checkpoint_stride=1,
        **request.param,
    )
    return ClientRun(root / "home", config)


def test_all_steps_are_repeated_bit_for_bit(run: TinyRun) -> None:
    versions = run._payloads.weights()
    assert versions[2] == versions[3] and len(set(versions.values())) == STEPS
    for first in (0, 3):  # from the base model, and from a checkpoint
        replayer = Replayer(find_copy(run.ledger, RUN_ID), own_checkpoints=run.run_dir / "checkpoints")
        try:
            summary = replay_run(replayer, range(first, STEPS), rollouts=False)
        finally:
            replayer.close()
        assert summary.first_difference() is None
        assert [check.step for check in summary.steps][-1] == STEPS - 1


def test_the_ledger_alone_has_what_was_loaded(run: TinyRun, tmp_path: Path) -> None:
    """As on another machine, where neither the run's folder is nor that of the run that saved the weights."""
    ledger = tmp_path / RUN_ID
    shutil.copytree(run.ledger, ledger)
    replayer = Replayer(find_copy(ledger, RUN_ID))
    try:
        replayer.start(0)
        checks = [replayer.step(step) for step in range(STEPS)]
    finally:
        replayer.close()
    assert all(check.found_digest == check.recorded_digest for check in checks)
    assert replayer.summary.first_difference() is None


def test_the_ledger_is_sound(run: TinyRun) -> None:
    found = verify_run(run.run_dir, run.store.root, run.home, "ledger")
    assert found.files > 10 and not found.findings


def test_rollouts_are_refused_in_a_sentence(run: TinyRun) -> None:
    with pytest.raises(ConfigError, match="--rollouts cannot be with tiny-s0-1"):
        Replayer(find_copy(run.ledger, RUN_ID), rollouts=True)


def test_data_are_seen_as_rows(run: TinyRun) -> None:
    files = SampleFiles(run.run_dir, run.store, run.ledger.parent)
    rows = files.rows("batches/t000001.parquet")
    assert len(rows) == 9 and files.timings("batches/t000001.parquet") == []
    datum = make_call(1, 9, "importance_sampling").data[0]
    row = rows[0]
    first = len(row.prompt_token_ids) - 1
    assert row.prompt_token_ids.tolist() == datum.token_ids[: first + 1].tolist()
    assert row.token_ids.tolist() == datum.targets[first:].tolist() and row.oldest_version == 1
    assert files.rows("batches/t000002.parquet") == []  # it loaded weights
    assert sampled_versions(files.body("batches/t000001.parquet") or b"") == ()
