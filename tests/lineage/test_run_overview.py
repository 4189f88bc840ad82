"""The state of a run follows from its folder, and looking changes nothing."""

import os
from pathlib import Path

from antiphon.lineage.run_overview import is_running, note_cancelled, overview, state_of
from antiphon.runs import directory
from antiphon.system.set_up import command
from tests.support.recorded_folders import record_run


def test_a_run_is_running_while_its_lock_is_held_and_looking_does_not_take_it(tmp_path: Path) -> None:
    folder = record_run(tmp_path, "small-a", 2)
    assert state_of(folder) == "unfinished"
    with directory.lock(folder):
        assert is_running(folder) and state_of(folder) == "running"
    assert not is_running(folder)
    with directory.lock(folder):
        (found,), _ = overview([folder])
        assert (found.state, found.next_command) == ("running", f"{command()} status small-a")


def test_a_cancelled_run_is_cancelled_until_it_is_started_again(tmp_path: Path) -> None:
    folder = record_run(tmp_path, "small-a", 2)
    with directory.lock(folder):
        note_cancelled(folder)
    assert state_of(folder) == "cancelled"
    later = (folder / "cancelled").stat().st_mtime_ns + 1
    with directory.lock(folder):
        os.utime(folder / "lock", ns=(later, later))
    assert state_of(folder) == "unfinished"


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    folder = record_run(tmp_path, "small-a", 4)
    note_cancelled(folder)
    assert state_of(folder) == "finished"
