"""Saved weights: what a path names, and what `antiphon export` says of one that it cannot give."""

from pathlib import Path

import pytest

from antiphon.api.client_run import ModelOrder, SavedVersion
from antiphon.cli.export import export
from antiphon.core.client_records import SavedWeights
from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.lineage.saved_weights import INDEX, find_saved, note_saved, saved_at, saved_of

SAVED = SavedWeights("run-1", "weights", "final")


def test_a_path_names_what_has_it() -> None:
    assert saved_at(SAVED.path) == SAVED


@pytest.mark.parametrize(
    "path", ["tinker://run-1/other/final", "tinker://run-1/weights/", "tinker://a/../b", "run-1"]
)
def test_another_path_names_nothing(path: str) -> None:
    with pytest.raises(ContractError, match="names no saved weights"):
        saved_at(path)


def test_what_is_noted_is_found_and_a_damaged_list_is_said(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "run-1"
    run_dir.mkdir(parents=True)
    with pytest.raises(ContractError, match="run-1/weights/final is not here"):
        find_saved(tmp_path, SAVED)
    made = SavedVersion(SAVED, 3, "0" * 64, 7, 1.0, None, ModelOrder(rank=4, description={"a": "b"}))
    note_saved(run_dir, [made])
    assert find_saved(tmp_path, SAVED) == made and saved_of(run_dir) == [made]
    (run_dir / INDEX).write_text("[")
    with pytest.raises(UnavailableError, match=r"index\.json cannot be read"):
        saved_of(run_dir)


def test_export_refuses_a_version_beside_a_name_and_what_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="names a version; leave v3 out"):
        export(SAVED.path, "v3", tmp_path / "out")
    with pytest.raises(ContractError, match="is not here"):
        export(SAVED.path, str(tmp_path / "out"))
