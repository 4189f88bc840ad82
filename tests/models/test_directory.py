"""A model directory's digest changes with what a run would sample from."""

from pathlib import Path

import pytest

from antiphon.models import directory
from antiphon.models.directory import model_digest


def test_every_change_of_the_files_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(directory, "SAMPLE_BYTES", 100)
    weights, tokenizer = tmp_path / "model.safetensors", tmp_path / "tokenizer.json"
    weights.write_bytes(bytes(5000))
    tokenizer.write_bytes(b"{}")
    seen = [model_digest(tmp_path)]
    for at in (0, 2500, 4999):
        weights.write_bytes(bytes(at) + b"\1" + bytes(4999 - at))
        seen.append(model_digest(tmp_path))
    weights.write_bytes(bytes(5001))
    seen.append(model_digest(tmp_path))
    tokenizer.write_bytes(b"[]")
    seen.append(model_digest(tmp_path))
    tokenizer.rename(tmp_path / "vocabulary.json")
    seen.append(model_digest(tmp_path))
    assert len(set(seen)) == len(seen)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "note").write_text("of a hub client")
    assert model_digest(tmp_path) == seen[-1]
