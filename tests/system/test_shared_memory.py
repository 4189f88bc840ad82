"""What killed processes left in shared memory goes, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

from antiphon.system import shared_memory
from antiphon.system.clock import wall_clock


def test_only_segments_of_runs_whose_maker_is_gone_are_removed(tmp_path: Path) -> None:
    shared, gone = tmp_path / "shm", subprocess.Popen(["true"])
    gone.wait()
    shared.mkdir()
    engine = shared_memory.new_name().rsplit("-", 2)[0]  # of this namespace of process ids
    other = f"antiphon-{os.getuid()}-1"  # a container's, whose processes are not seen here
    own, now = os.getpid(), wall_clock()
    removed = {
        "psm_1a2b",
        "sem.mp-x",
        "a1-b2-cpushm",
        f"torch_{gone.pid}_7_0",
        f"__KMP_REGISTERED_LIB_{gone.pid}_0",
        f"{engine}-{gone.pid}-aa-tp:0-[0-1]-cpushm_0",
        f"{other}-{own}-bb",
        f"antiphon-{os.getuid()}-{own}-3b728fb5-tp",  # of an earlier release
    }
    kept = {
        f"torch_{own}_7_0",
        f"__KMP_REGISTERED_LIB_{own}_0",
        shared_memory.new_name(),
        f"{other}-{gone.pid}-young",
        "antiphon-0-notes",
        "notes.txt",
        "psm_young",
        "psm_open",
        "torch_x_1",
    }
    for name in removed | kept:
        (shared / name).write_bytes(b"x")
        os.utime(shared / name, (now, now if name.endswith("young") else now - 2 * shared_memory.SETTLED_S))
    with (shared / "psm_open").open("rb"):
        assert {path.name for path in shared_memory.remove_leftovers(shared)} == removed
    assert {path.name for path in shared.iterdir()} == kept


def test_what_a_maker_has_mapped_stays_until_it_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "psm_1a2b"
    file.write_bytes(bytes(4096))
    code = f"import mmap; f = open({str(file)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); "
    code += "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=-1, stdout=-1) as maker:
        assert maker.stdout is not None and maker.stdout.readline()
        os.utime(file, (0, 0))
        assert not list(shared_memory.remove_leftovers(tmp_path))
        maker.kill()
    assert list(shared_memory.remove_leftovers(tmp_path)) == [file] and not file.exists()


def test_an_engine_that_starts_removes_what_engines_left_alone(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"{shared_memory.new_name().rsplit('-', 2)[0]}-{gone.pid}-aa"
    for name in (left, "psm_1a2b"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    found = list(shared_memory.remove_leftovers(tmp_path, named=shared_memory.ENGINES))
    assert [path.name for path in found] == [left] and (tmp_path / "psm_1a2b").exists()


def test_each_start_has_a_name_of_its_own() -> None:
    assert len({shared_memory.new_name() for _ in range(100)}) == 100
