"""A run's place is checked before anything is started for it, and stays as it was when it is refused."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.runs.directory import check_place, choose_run, create, lock, make_usable
from antiphon.runs.finding import find_run

CONFIG = RunConfig.model_validate({"record": {"dvc": False}})
Usage = namedtuple("Usage", "total used free")


def test_a_run_that_another_process_has_is_refused_and_a_free_one_is_not(tmp_path: Path) -> None:
    place = choose_run(CONFIG, None, tmp_path, fresh=False)
    check_place(place, CONFIG)
    assert not list(tmp_path.iterdir())
    create(place, CONFIG)
    again = choose_run(CONFIG, None, tmp_path, fresh=False)
    assert again.resumed
    check_place(again, CONFIG)
    with lock(again.directory), pytest.raises(ConfigError, match=r"is already running \(process \d+\)"):
        check_place(again, CONFIG)
    check_place(again, CONFIG)
    check_place(choose_run(CONFIG, None, tmp_path, fresh=True), CONFIG)


def test_a_full_disk_is_named_with_the_space_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 3 << 20))
    with pytest.raises(ConfigError, match=r"only 3 MiB are free under .*; a run needs 512 MiB"):
        check_place(choose_run(CONFIG, None, tmp_path, fresh=False), CONFIG)
    assert not list(tmp_path.iterdir())
    lower, higher = (RunConfig.model_validate({"record": {"free_mib": mib}}) for mib in (3, 4))
    check_place(choose_run(CONFIG, None, tmp_path, fresh=False), lower)
    with pytest.raises(ConfigError, match=r"a run needs 4 MiB \(record\.free_mib\)"):
        check_place(choose_run(CONFIG, None, tmp_path, fresh=False), higher)


def test_an_unknown_run_names_those_that_are_near(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are none yet; start one"):
        find_run(tmp_path, "demo")
    create(choose_run(CONFIG, None, tmp_path, fresh=False), CONFIG)
    known = find_run(tmp_path, None).name
    with pytest.raises(ConfigError, match=f"did you mean {known}"):
        find_run(tmp_path, known.replace("s0", "s1"))
    with pytest.raises(ConfigError, match=f"the newest is {known}"):
        find_run(tmp_path, "zzz")


def test_a_folder_is_made_and_tried(tmp_path: Path) -> None:
    make_usable(tmp_path / "a" / "b", "--results")
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(
            ConfigError, match=f"{folder} cannot be written .*; give --results another folder"
        ):
            make_usable(folder, "--results")
