"""What a benchmark counts of a job: the CPU time of all its processes, and what became of its groups."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from antiphon.benchmarks.parts.measure import count_groups, run_module, wait_for_orphans

BURN_S = 0.3
FAMILY = f"""\
import os, signal, subprocess, sys, time

def burn():
    while time.process_time() < {BURN_S}:
        pass

if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "waited"])
    child.wait()
    subprocess.Popen([sys.executable, __file__, "killed"]).wait()
    subprocess.Popen([sys.executable, __file__, "orphan"], start_new_session=True)
elif sys.argv[1] == "orphan":
    while os.getppid() != int(os.environ["BENCHMARK_PID"]):
        time.sleep(0.01)
burn()
if sys.argv[1:] == ["killed"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_cpu_time_of_every_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("BENCHMARK_PID", str(os.getpid()))
    job = run_module(tmp_path, ["family"], "family", 60.0, tmp_path)
    assert job.cpu_s >= 4 * BURN_S, "one of four processes is not counted"
    assert run_module(tmp_path, ["this"], "little", 60.0, tmp_path).cpu_s < job.cpu_s


@pytest.mark.parametrize("ends", [psutil.ZombieProcess, psutil.NoSuchProcess, psutil.AccessDenied])
def test_a_child_that_ends_while_it_is_looked_at_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: type[psutil.Error]
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for

    def no_memory(process: psutil.Process) -> dict[str, str]:
        if process.pid != child.pid:  # what other tests of this process share goes on running
            return {"ANTIPHON_HOME": "another"}
        raise ends(process.pid)

    monkeypatch.setattr(psutil.Process, "status", lambda process: psutil.STATUS_RUNNING)
    monkeypatch.setattr(psutil.Process, "environ", no_memory)
    wait_for_orphans(tmp_path, "little")
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def test_groups_are_counted_from_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "runs" / "r-1" / "journal.db"
    journal.parent.mkdir(parents=True)

    def submitted(name: str, version: int, *tokens: int) -> tuple[str, dict[str, object]]:
        return "group.submitted", {"group_id": name, "oldest_version": version, "token_counts": tokens}

    events = [
        submitted("a", 1, 10, 20),
        submitted("b", 2, 30, 30),
        submitted("c", 2, 30, 30),
        submitted("d", 0, 5, 5),
        submitted("e", 0, 20, 20),
        ("batch.sealed", {"step": 2, "group_ids": ["a", "b"], "filtered_ids": ["c"]}),
        ("group.dropped", {"group_id": "d", "reason": "filtered"}),
        ("group.dropped", {"group_id": "e", "reason": "stale_on_arrival"}),
        ("lease.expired", {"tokens": 20, "kept": 10}),
    ]
    with sqlite3.connect(journal) as connection:
        connection.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, kind TEXT, body TEXT)")
        rows = [(kind, json.dumps(body)) for kind, body in events]
        connection.executemany("INSERT INTO events (kind, body) VALUES (?, ?)", rows)
    connection.close()
    found = count_groups(tmp_path, "r-1")
    assert found.stale_token_share == pytest.approx(50 / 210)
    assert found.length_by_staleness == {0: pytest.approx(30 / 25), 1: pytest.approx(15 / 25)}
    assert found.staleness_shares == {0: pytest.approx(2 / 3), 1: pytest.approx(1 / 3)}
