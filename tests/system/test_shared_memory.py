"""What killed engines left in shared memory goes, and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

from antiphon.system import shared_memory


def test_what_processes_left_that_are_gone_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    user = os.getuid()
    kept = [
        shared_memory.new_name(),
        f"antiphon-{user + 1}-{ended.pid}-aa-tp",
        f"psm_{ended.pid}",
        f"antiphon-{user}-notes",
    ]
    left = [f"antiphon-{user}-{ended.pid}-aa-tp:0-[0-1]-cpushm_0", f"antiphon-{user}-{2**30}-bb"]
    for name in (*kept, *left):
        (tmp_path / name).touch()
    assert sorted(shared_memory.sweep(tmp_path)) == sorted(left)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_number_that_another_process_has_by_now_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / shared_memory.new_name()).touch()
    (old := tmp_path / shared_memory.new_name()).touch()
    before = time.time() - 10 * 365 * 86_400
    os.utime(old, (before, before))
    assert shared_memory.sweep(tmp_path) == [old.name]


def test_each_start_has_a_name_of_its_own() -> None:
    assert len({shared_memory.new_name() for _ in range(100)}) == 100
