"""A service dies with its parent, leaves on a signal, and says whole words when it is ready."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS
from antiphon.core.config import build_config, dump_config
from antiphon.core.errors import ConfigError
from antiphon.system import processes
from antiphon.system.logs import configure_logs
from antiphon.system.processes import LEFT_GROUP, ChildGroup, ChildProcess, stop_groups, write_ready_file

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"

SERVICE = """
import asyncio, sys
from pathlib import Path
from antiphon.system.processes import run_service, write_ready_file
async def serve(stop):
    write_ready_file(Path(sys.argv[1]), 7)
    print("ready", flush=True)
    await asyncio.sleep(60)
sys.exit(run_service(serve))
"""

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE,
                         env={**os.environ, "ANTIPHON_PARENT_PID": str(os.getpid())})
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


LEAVING = """
import os, signal, sys, tempfile
from antiphon.system import processes
processes.SETTLED_S = -1.0
processes.keep_temporary_files()
open(os.path.join(tempfile.gettempdir(), "vllm_dist_1"), "w").close()
print(tempfile.gettempdir(), flush=True)
sys.stdin.read(1)
if sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    def begin(*how: str) -> tuple["subprocess.Popen[str]", Path]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", LEAVING, *how],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    killed, left = begin("by SIGKILL")
    mark = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{killed.pid}_{os.getuid()}")
    mark.write_text("as OpenMP does")
    living, kept = begin()
    assert left.exists() and mark.exists()  # neither is dead
    killed.communicate("x", timeout=60)
    assert killed.returncode == -signal.SIGKILL and (left / "vllm_dist_1").exists()
    last, own = begin()
    assert not left.exists() and not mark.exists() and kept.exists()
    for process in (living, last):
        process.communicate("x", timeout=60)
    assert not list(tmp_path.iterdir()) and not own.exists()


def test_nothing_that_others_put_beside_temporary_files_holds_up_a_start(tmp_path: Path) -> None:
    pipe = tmp_path / f"antiphon-{os.getuid()}-pipe"
    os.mkfifo(pipe)  # who opens it waits for somebody who writes
    mark = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{2**30 + os.getpid()}_{os.getuid()}")
    mark.mkdir()  # cannot be unlinked, like a file of another user
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", LEAVING],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            input="x",
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        mark.rmdir()
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_service_that_was_started_with_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    arguments = ["nohup", sys.executable, "-P", "-c", SERVICE, str(tmp_path / "service.json")]
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n"
        handled = int(re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{service.pid}/status").read_text())[0], 16)
        assert handled >> (signal.SIGHUP - 1) & 1
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_service_in_order(number: signal.Signals, code: int, tmp_path: Path) -> None:
    ready = tmp_path / "deep" / "service.json"
    with subprocess.Popen(
        [*DEFAULT_SIGNALS, sys.executable, "-P", "-c", SERVICE, str(ready)],
        stdout=subprocess.PIPE,
        text=True,
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n"
        assert json.loads(ready.read_text()) == {"pid": service.pid, "port": 7}
        service.send_signal(number)
        assert service.wait(60) == code
    assert [p.name for p in ready.parent.iterdir()] == ["service.json"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_coordinator_in_order(number: signal.Signals, code: int, tmp_path: Path) -> None:
    ready, config = tmp_path / "coordinator.json", tmp_path / "config.yaml"
    settings = {"environment": {"train_size": 64, "heldout_size": 4}, "evaluation": {"prompts": 4}}
    config.write_text(dump_config(build_config({**settings, "model": {"path": str(MODEL)}})))
    arguments = ["serve", "coordinator", "--config", str(config), "--run-dir", str(tmp_path / "run")]
    arguments += ["--store", str(tmp_path / "store"), "--ready-file", str(ready)]
    with subprocess.Popen([sys.executable, "-P", "-m", "antiphon.cli.app", *arguments]) as service:
        deadline = time.monotonic() + 120
        while not ready.exists() and service.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ready.exists()
        service.send_signal(number)
        assert service.wait(60) == code
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {
        "journal.db",
        "journal.lock",
        "keys",
    }  # a journal that was not closed leaves its write-ahead log


def test_a_service_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    arguments = [sys.executable, "-P", "-c", PARENT, SERVICE, str(tmp_path / "service.json")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(60)
    gone, alive = psutil.wait_procs([child], timeout=60)
    assert gone and not alive


def test_a_service_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVICE, str(tmp_path / "service.json")],
        env={**os.environ, "ANTIPHON_PARENT_PID": "1" if os.getppid() != 1 else "2"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "service.json").exists()


def test_a_ready_file_is_optional() -> None:
    write_ready_file(None, 1)


def test_an_unknown_log_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_LOG", "loud")
    with pytest.raises(ConfigError, match="ANTIPHON_LOG=loud is no log level"):
        configure_logs()


LEADER = """
import subprocess, sys
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
"""


def test_what_a_child_leaves_behind_ends_with_it_and_its_id_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = ChildProcess([sys.executable, "-c", LEADER], tmp_path / "log")
    while child.alive():
        time.sleep(0.01)
    left = int((tmp_path / "log").read_text())
    _, alive = psutil.wait_procs([psutil.Process(left)] if psutil.pid_exists(left) else [], timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    signalled: list[object] = []
    monkeypatch.setattr(processes, "_signal_group", lambda leader, number: signalled.append(leader))
    assert stop_groups([child], 1.0) == []
    assert signalled == []  # by now another process may lead a group of that id


RANK = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
(folder / f"begun-{rank}").write_text(str(os.getpid()))
(folder / f"begun-{rank}").rename(folder / rank)  # whole, or not there
while not (folder / f"end-{rank}").exists():
    time.sleep(0.01)
print(f"antiphon: rank {rank} ends", file=sys.stderr)
sys.exit(int((folder / f"end-{rank}").read_text()))
"""


@pytest.fixture
def ranks(tmp_path: Path) -> ChildGroup:
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    group = ChildGroup(
        command, tmp_path / "learner.log", [{**os.environ, "RANK": str(rank)} for rank in range(3)]
    )
    until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)))
    return group


def until(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 120.0
    while not condition():
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def pids_of(folder: Path) -> list[int]:
    return [int((folder / str(rank)).read_text()) for rank in range(3)]


@pytest.mark.parametrize("killed", range(3))
def test_of_a_group_none_is_left_when_any_is_killed(ranks: ChildGroup, tmp_path: Path, killed: int) -> None:
    os.kill(pids_of(tmp_path)[killed], signal.SIGKILL)
    until(lambda: ranks.poll() is not None)
    assert ranks.poll() == -signal.SIGKILL
    assert not any(psutil.pid_exists(pid) for pid in pids_of(tmp_path))


def test_a_group_is_ended_with_its_first_process(ranks: ChildGroup, tmp_path: Path) -> None:
    ranks.stop(0.5)
    assert not any(psutil.pid_exists(pid) for pid in pids_of(tmp_path))


def test_a_group_that_ends_in_order_waits_for_its_first_process(ranks: ChildGroup, tmp_path: Path) -> None:
    (tmp_path / "end-1").write_text("0")
    until(lambda: psutil.Process(pids_of(tmp_path)[1]).status() == psutil.STATUS_ZOMBIE)
    assert ranks.poll() is None
    (tmp_path / "end-0").write_text("0")
    until(lambda: ranks.poll() is not None)
    assert ranks.poll() == 0 and not any(psutil.pid_exists(pid) for pid in pids_of(tmp_path))


def test_who_left_because_of_another_is_not_blamed(ranks: ChildGroup, tmp_path: Path) -> None:
    for rank, status in enumerate((LEFT_GROUP, LEFT_GROUP, 3)):
        (tmp_path / f"end-{rank}").write_text(str(status))
    until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids_of(tmp_path)))
    assert ranks.poll() == 3 and ranks.last_words() == "rank 2 ends"


def test_a_process_that_comes_last_is_nicer_and_none_is_made_less_nice(tmp_path: Path) -> None:
    sleeping = [sys.executable, "-P", "-c", "import time; time.sleep(60)"]
    usual, nicest = (
        ChildProcess(words, tmp_path / "log") for words in (sleeping, ["nice", "-19", *sleeping])
    )
    try:
        until(lambda: os.getpriority(os.PRIO_PROCESS, nicest.pid) == 19)
        before = os.getpriority(os.PRIO_PROCESS, usual.pid)
        for child in (usual, nicest):
            child.come_last()
        assert os.getpriority(os.PRIO_PROCESS, usual.pid) > before
        assert os.getpriority(os.PRIO_PROCESS, nicest.pid) == 19
        group = Path(f"/proc/{usual.pid}/autogroup")
        if group.exists():
            niceness = int(group.read_text().split("nice")[1])
            assert niceness == os.getpriority(os.PRIO_PROCESS, usual.pid)
    finally:
        stop_groups([usual, nicest], 5.0)
