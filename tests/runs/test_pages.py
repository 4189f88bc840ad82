"""The servers of a home directory: whose they are, what they import, how they end (tests/attack has `up`)."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from antiphon.cli import up
from antiphon.cli.up import Page, read_pages, running_prefect, write_pages
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.runs.servers.prefect_server import answers, begin_prefect_server, check_port, server_environment
from antiphon.system.ports import free_port

START_S = 170.0


def test_mlflow_imports_nothing_from_the_folder_in_which_up_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begin(arguments: list[str], *_: object, **__: object) -> None:
        raise Begun(arguments)

    monkeypatch.setattr(up, "ChildProcess", begin)
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").touch()
    with pytest.raises(Begun) as begun:
        up._begin_mlflow(tmp_path, 1)
    here = tmp_path / "here"
    here.mkdir()
    (here / "shadow.py").write_text("open('imported', 'w')")
    *before, _ = begun.value.args[0]
    done = subprocess.run([*before, "shadow:application"], cwd=here, capture_output=True, timeout=60)
    assert b"Could not import module" in done.stderr and not (here / "imported").exists()


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from antiphon.runs.servers.prefect_server import begin_prefect_server\n"
        "home = Path(sys.argv[1])\n"
        "print(begin_prefect_server(home, 0, home / 'log').process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait(20)
    _, alive = psutil.wait_procs([server], timeout=30)
    assert not alive


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "nonsense://")
    server = begin_prefect_server(tmp_path, 0, tmp_path / "log")
    with pytest.raises(UnavailableError, match="the Prefect server ended with status"):
        server.wait_healthy(START_S)


def test_ports() -> None:
    port = free_port()
    check_port(port, "--prefect-port")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken.*--prefect-port"):
            check_port(port, "--prefect-port")
    assert not answers(f"http://127.0.0.1:{port}/")


def test_the_server_reports_to_nobody_and_forgets_foreign_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    environment = server_environment(tmp_path, "http://127.0.0.1:1/api", schedules=False)
    assert "PREFECT_API_URL" not in environment
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert environment["PREFECT_SERVER_UI_API_URL"] == "http://127.0.0.1:1/api"
    served = server_environment(tmp_path, "http://127.0.0.1:1/api", schedules=True)
    for name in (
        "SERVER_SERVICES_SCHEDULER_ENABLED",
        "API_BLOCKS_REGISTER_ON_START",
        "MEMOIZE_BLOCK_AUTO_REGISTRATION",
    ):
        assert environment[f"PREFECT_{name}"] == "false" and f"PREFECT_{name}" not in served


def test_a_page_is_its_process_and_no_later_one_with_the_same_id(tmp_path: Path) -> None:
    me = psutil.Process(os.getpid())
    assert Page("prefect", "http://x", me.pid, me.create_time()).alive()
    assert not Page("prefect", "http://x", me.pid, me.create_time() - 5.0).alive()
    write_pages(tmp_path, {"prefect": Page("prefect", "http://x", me.pid, me.create_time() - 5.0)})
    assert read_pages(tmp_path)["prefect"].pid == me.pid
    assert running_prefect(tmp_path) is None


def test_a_spoilt_record_of_what_is_up_is_named(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match=r"up\.json cannot be read"):
        read_pages(tmp_path)
