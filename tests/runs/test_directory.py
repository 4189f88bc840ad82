"""A run's place is checked before anything is started for it, and stays as it was when it is refused."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.core.loop import events as e
from antiphon.core.status import Event
from antiphon.lineage.run_events import EventPacker
from antiphon.lineage.run_log import STEPS_FILE
from antiphon.runs.directory import (
    RunPlace,
    check_place,
    choose_run,
    create,
    lock,
    make_home,
    make_usable,
)
from antiphon.runs.finding import find_run
from antiphon.services.coordinator.journal.pinned import input_files, pinned_values
from antiphon.services.coordinator.journal.reading import make_journal
from antiphon.services.coordinator.server import JOURNAL_NAME

CONFIG = RunConfig.model_validate({"record": {"dvc": False}})
Usage = namedtuple("Usage", "total used free")


def test_a_folder_of_all_users_is_no_home(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"is a folder for the files of all users.*ANTIPHON_HOME"):
        make_home(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


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


def write_journal(place: RunPlace, config: RunConfig, committed: bool) -> None:
    """Let the run have been opened, and perhaps have made a step."""
    events: list[e.JournalEvent] = [e.RunOpened(place.run_id, pinned_values(config, input_files(config)))]
    if committed:
        events += [
            e.BatchSealed(0, ("g",), (), "b", "t", 1, 0, 0, 1, 0.5, 1.0, ((0, 1),)),
            e.StepCommitted(0, 1, "w", "b", {}, True),
        ]
    packer = EventPacker()
    packer.add(
        [Event(seq, 1.0, event.kind, e.dump_event(event)) for seq, event in enumerate(events, start=1)]
    )
    make_journal(place.directory / JOURNAL_NAME, place.run_id, packer.finish())


@pytest.mark.parametrize("opened", [False, True])
def test_a_run_whose_journal_is_gone_does_not_begin_again(tmp_path: Path, opened: bool) -> None:
    place = choose_run(CONFIG, None, tmp_path, fresh=False)
    create(place, CONFIG)
    (place.directory / STEPS_FILE).write_text('{"step": 0}\n')
    if opened:  # another one in its place
        write_journal(place, CONFIG, committed=False)
    for run_id in (None, place.run_id):
        with pytest.raises(
            ConfigError, match=r"metrics\.jsonl has steps of run .*journal\.db is gone.*--fresh"
        ):
            choose_run(CONFIG, run_id, tmp_path, fresh=False)
    assert not choose_run(CONFIG, None, tmp_path, fresh=True).resumed
    (place.directory / JOURNAL_NAME).unlink(missing_ok=True)
    write_journal(place, CONFIG, committed=True)
    for run_id in (None, place.run_id):
        assert choose_run(CONFIG, run_id, tmp_path, fresh=False).resumed


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("changed", ["model", "environment"])
def test_a_run_whose_files_changed_is_opened_anew_before_its_first_step_and_refused_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, committed: bool
) -> None:
    model, package = tmp_path / "model", tmp_path / "code"
    model.mkdir()
    package.mkdir()
    files = {"model": model / "config.json", "environment": package / "changing_task.py"}
    for file in files.values():
        file.write_text("{}")
    monkeypatch.syspath_prepend(package)
    sections = {"record": {"dvc": False}, "model": {"path": str(model)}}
    config = RunConfig.model_validate({**sections, "environment": {"name": "changing_task:Task"}})
    place = choose_run(config, None, tmp_path, fresh=False)
    create(place, config)
    assert choose_run(config, None, tmp_path, fresh=False) == replace(place, resumed=True), (
        "without a journal"
    )
    write_journal(place, config, committed)
    assert choose_run(config, None, tmp_path, fresh=False).resumed
    files[changed].write_text("[]")
    if committed:
        with pytest.raises(ConfigError, match=rf"the digest of {changed}\..*differs.*--fresh"):
            choose_run(config, None, tmp_path, fresh=False)
    else:
        again = choose_run(config, None, tmp_path, fresh=False)
        assert not again.resumed and again.run_id == f"{place.run_id[:-1]}2"


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
