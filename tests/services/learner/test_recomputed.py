"""Batches whose engines gave no log-probabilities: the learner takes those of the weights it begins with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.core.records import BatchRow
from antiphon.lineage.rollout_table import decode_batch, encode_batch, is_recomputed
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.packing import Packing
from antiphon.services.learner.step import Trainer
from tests.services.learner.test_learner import make_config, make_rows, model_path  # noqa: F401

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
