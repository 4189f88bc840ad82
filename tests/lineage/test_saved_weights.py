"""Saved weights: what a path names, and what `antiphon export` says of one that it cannot give."""

from pathlib import Path

import pytest

from antiphon.api.client_run import ModelOrder, SavedVersion
from antiphon.cli.export import export
from antiphon.core.client_records import SavedWeights
from antiphon.core.errors import ConfigError, ContractError, IntegrityError
from antiphon.lineage.saved_weights import (
    NOTE,
    SavedNote,
    drop_saved,
    find_saved,
    saved_at,
    saved_folder,
    saved_of,
    write_note,
    write_order,
)

SAVED = SavedWeights("run-1", "weights", "final")


def test_a_path_names_what_has_it() -> None:
    assert saved_at(SAVED.path) == SAVED


@pytest.mark.parametrize(
    "path", ["tinker://run-1/other/final", "tinker://run-1/weights/", "tinker://a/../b", "run-1"]
)
def test_another_path_names_nothing(path: str) -> None:
    with pytest.raises(ContractError, match="names no saved weights"):
        saved_at(path)


def test_what_is_noted_is_found_until_it_is_dropped_and_a_damaged_note_is_said(tmp_path: Path) -> None:
    run_dir, order = tmp_path / "runs" / "run-1", ModelOrder(rank=4, description={"a": "b"})
    folder = saved_folder(run_dir, "weights", "final")
    folder.mkdir(parents=True)
    with pytest.raises(ContractError, match="run-1/weights/final is not here"):
        find_saved(tmp_path, SAVED)
    write_order(run_dir, order)
    write_note(folder, SavedNote(3, "0" * 64, 7, 2.0, 9.0))
    later = saved_folder(run_dir, "sampler_weights", "a")
    later.mkdir(parents=True)
    (later / NOTE).write_text('{"version": 2, "digest": "d", "bytes": 0}')  # as they were without a time
    made = SavedVersion(SAVED, 3, "0" * 64, 7, 2.0, 9.0, order)
    old = SavedVersion(SavedWeights("run-1", "sampler_weights", "a"), 2, "d", 0, 0.0, None, order)
    assert find_saved(tmp_path, SAVED) == made and saved_of(run_dir) == [old, made]
    drop_saved(run_dir, "sampler_weights", "a")
    drop_saved(run_dir, "sampler_weights", "a")
    assert not later.exists() and saved_of(run_dir) == [made]
    with pytest.raises(ContractError, match="cannot be a name"):
        drop_saved(run_dir, "weights", "..")
    (folder / NOTE).write_text("[")
    with pytest.raises(IntegrityError, match=r"saved\.json is not readable"):
        saved_of(run_dir)


def test_export_refuses_a_version_beside_a_name_and_what_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="names a version; leave v3 out"):
        export(SAVED.path, "v3", tmp_path / "out")
    with pytest.raises(ContractError, match="is not here"):
        export(SAVED.path, str(tmp_path / "out"))
