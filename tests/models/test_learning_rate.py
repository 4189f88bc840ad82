"""A configuration without a learning rate gets that of its model's size."""

import json
from pathlib import Path

from antiphon.core.config import build_config, dump_config, parse_config
from antiphon.models.directory import TENSOR_TABLE
from antiphon.models.learning_rate import with_learning_rate


def model_of(folder: Path, rows: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    tensors = [["embed.weight", "F32", [rows, 1000]], ["lm_head.weight", "F32", [rows, 1000]]]
    (folder / TENSOR_TABLE).write_text(json.dumps(tensors))
    return str(folder)


def test_the_rate_is_that_of_the_model_s_size_and_is_recorded(tmp_path: Path) -> None:
    for rows, rate in ((9_000, 2e-4), (60_000, 2e-5), (600_000, 1e-6)):
        config = build_config({"model": {"path": model_of(tmp_path / str(rows), rows)}})
        assert config.learner.learning_rate is None
        found = with_learning_rate(config)
        assert found.learner.learning_rate == rate
        assert parse_config(dump_config(found)) == found == with_learning_rate(found)


def test_a_rate_that_is_given_stays_and_a_model_elsewhere_leaves_it_open(tmp_path: Path) -> None:
    given = build_config({"learner": {"learning_rate": 0.5}})
    assert with_learning_rate(given) == given
    (tmp_path / "empty").mkdir()
    for path in ("owner/model", str(tmp_path / "empty")):
        elsewhere = build_config({"model": {"path": path}})
        assert with_learning_rate(elsewhere) == elsewhere
