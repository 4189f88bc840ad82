"""Supervisor: real service processes are watched, started again at their address, and never left behind."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from antiphon.benchmarks.parts.postgres import postgres_server
from antiphon.core.config import build_config, dump_config
from antiphon.core.errors import AntiphonError, BlockedError, UnavailableError
from antiphon.lineage.hosts import HOST_TOKEN
from antiphon.net.security.local_run import local_credentials
from antiphon.runs import supervisor as supervisor_module
from antiphon.runs.supervisor import ServiceSpec, Supervisor, host_spec, service_spec, worker_spec
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.system.processes import ChildProcess, tied_command, write_starting_file

START_S = 120.0


def until(look: Callable[[], bool]) -> None:
    """Look until it is so; fail after START_S."""
    deadline = time.perf_counter() + START_S
    while not look():
        assert time.perf_counter() < deadline
        time.sleep(0.05)


def process_ids(supervisor: Supervisor) -> dict[str, int]:
    """Return the running children: service name -> process id."""
    processes = {name: child.process for name, child in supervisor._children.items()}
    return {name: one.pid for name, one in processes.items() if one is not None and one.alive()}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Supervisor, ServiceSpec, list[str]]]:
    """A supervisor, a coordinator it may start, and what it complains of."""
    config = build_config(
        {"environment": {"train_size": 32, "heldout_size": 1}, "evaluation": {"prompts": 1}}
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    complaints: list[str] = []
    supervisor = Supervisor(tmp_path, 2, 3600.0, complaints.append)
    spec = service_spec("run-1", tmp_path, tmp_path / "store", "127.0.0.1", "coordinator")
    yield supervisor, spec, complaints
    supervisor.close()


def test_threads_of_a_learner_that_wait_leave_the_cores_to_workers(tmp_path, monkeypatch):
    def started():
        spec = service_spec("run-1", tmp_path, tmp_path / "store", "127.0.0.1", "learner", "127.0.0.1:1")
        return spec.environment["OMP_WAIT_POLICY"]

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert started() == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert started() == "ACTIVE"


def test_a_worker_of_the_run_hands_weights_on_only_where_it_is_told_a_host(tmp_path: Path) -> None:
    silent = worker_spec("run-1", tmp_path, "127.0.0.1:7700", {}, "", "worker-0")
    names = ("worker-0", "worker-1")
    relays = [worker_spec("run-1", tmp_path, "127.0.0.1:7700", {}, "127.0.0.1", name) for name in names]
    assert "--relay-address" not in silent.arguments
    addresses = [spec.arguments[spec.arguments.index("--relay-address") + 1] for spec in relays]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    assert len(set(addresses)) == 2


def test_a_killed_or_stopped_service_is_back_at_its_address(
    watched: tuple[Supervisor, ServiceSpec, list[str]],
) -> None:
    supervisor, spec, complaints = watched
    supervisor.start(spec)
    port = supervisor.wait_ready("coordinator", START_S)
    for restarts, number in enumerate((signal.SIGKILL, signal.SIGTERM), start=1):
        os.kill(process_ids(supervisor)["coordinator"], number)
        until(lambda wanted=restarts: supervisor.restarts()["coordinator"] == wanted)  # type: ignore[misc]
        assert supervisor.wait_ready("coordinator", START_S) == port
    assert complaints == []
    last = process_ids(supervisor)["coordinator"]
    os.kill(last, signal.SIGKILL)
    until(lambda: bool(complaints))
    assert complaints[0].startswith("coordinator was ended by SIGKILL (is there enough memory?)")
    supervisor.close()
    assert not psutil.pid_exists(last)


def test_a_program_that_holds_the_environment_is_told_where_and_kept_alive(
    watched: tuple[Supervisor, ServiceSpec, list[str]], tmp_path: Path
) -> None:
    supervisor, _, complaints = watched
    (tmp_path / "keys").mkdir()
    (tmp_path / HOST_TOKEN).write_text("secret-1\n")
    code = (
        "import os, pathlib, sys, time; told = os.environ\n"
        "pathlib.Path(sys.argv[1]).write_text(told['ANTIPHON_GATEWAY'] + ' ' + told['ANTIPHON_TOKEN'])\n"
        "time.sleep(600)"
    )
    told = tmp_path / "told"
    command = [sys.executable, "-c", code, str(told)]
    supervisor.start(host_spec(tmp_path, "http://127.0.0.1:7", command))
    supervisor.wait_ready("host", START_S)
    for restarts in range(1, 3):
        until(lambda: told.exists() and told.read_text() == "http://127.0.0.1:7 secret-1")
        told.unlink()
        os.kill(process_ids(supervisor)["host"], signal.SIGKILL)
        until(lambda wanted=restarts: supervisor.restarts()["host"] == wanted)  # type: ignore[misc]
    assert complaints == []


def test_a_host_behind_tls_believes_the_run_beside_the_authorities_of_the_machine(
    tmp_path: Path, monkeypatch
) -> None:
    usual = tmp_path / "usual.pem"
    usual.write_bytes(b"USUAL")
    monkeypatch.setenv("SSL_CERT_FILE", str(usual))
    (tmp_path / "keys").mkdir()
    (tmp_path / HOST_TOKEN).write_text("secret-1\n")
    plain = host_spec(tmp_path, "http://127.0.0.1:7", ["host"], b"OURS")
    assert "SSL_CERT_FILE" not in plain.environment
    told = host_spec(tmp_path, "https://10.0.0.1:7", ["host"], b"OURS").environment
    assert Path(told["SSL_CERT_FILE"]).read_bytes() == b"USUAL\nOURS"


def test_a_service_that_ends_with_the_run_is_let_go(
    watched: tuple[Supervisor, ServiceSpec, list[str]],
) -> None:
    supervisor, spec, complaints = watched
    supervisor.start(spec)
    supervisor.wait_ready("coordinator", START_S)
    supervisor.expect_end()
    os.kill(process_ids(supervisor)["coordinator"], signal.SIGTERM)
    until(lambda: not process_ids(supervisor))
    supervisor.close()
    assert supervisor.restarts() == {"coordinator": 0}
    assert complaints == []


def test_a_coordinator_whose_database_is_away_waits_for_it(
    tmp_path: Path, needs_system: Callable[[str], str]
) -> None:
    """It says why to all who ask, costs one restart however long it takes, and continues by itself."""
    with postgres_server(needs_system("postgresql")) as server:
        config = build_config(
            {
                "environment": {"train_size": 32, "heldout_size": 1},
                "evaluation": {"prompts": 1},
                "coordinator": {"journal_url": server.url},
            }
        )
        (tmp_path / "config.yaml").write_text(dump_config(config))
        complaints: list[str] = []
        supervisor = Supervisor(tmp_path, 1, 3600.0, complaints.append)
        try:
            supervisor.start(service_spec("run-1", tmp_path, tmp_path / "store", "127.0.0.1", "coordinator"))
            port = supervisor.wait_ready("coordinator", START_S)
            server.stop()
            os.kill(process_ids(supervisor)["coordinator"], signal.SIGKILL)
            until(lambda: "cannot be reached" in blocked_reason(tmp_path, port))
            assert supervisor.restarts() == {"coordinator": 1} and complaints == []
            server.start()
            assert supervisor.wait_ready("coordinator", START_S) == port
            assert supervisor.restarts() == {"coordinator": 1} and complaints == []
        finally:
            supervisor.close()


def blocked_reason(run_dir: Path, port: int) -> str:
    """Return why the coordinator at a port is blocked; nothing when it is not, or does not answer."""

    async def ask() -> str:
        client = CoordinatorClient(f"127.0.0.1:{port}", 2.0, credentials=local_credentials(run_dir))
        try:
            await client.status()
        except BlockedError as error:
            return str(error)
        except UnavailableError:
            pass
        finally:
            await client.close()
        return ""

    return asyncio.run(ask())


def test_what_does_not_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {stepz: 3}\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "coordinator.log").write_text("antiphon: what an earlier process complained of\n")
    supervisor = Supervisor(tmp_path, 2, 3600.0, [].append)
    try:
        supervisor.start(service_spec("run-1", tmp_path, tmp_path / "store", "127.0.0.1", "coordinator"))
        with pytest.raises(AntiphonError, match=r"coordinator did not start: unknown key run\.stepz"):
            supervisor.wait_ready("coordinator", START_S)
    finally:
        supervisor.close()


def test_a_service_may_take_any_time_to_start_while_it_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.03)
    looks = 0

    class Restoring(Supervisor):
        def _spawn(self, child: object) -> None:
            """Nothing is started: the reports are what counts."""

        def _starting(self, name: str) -> tuple[str, int]:
            nonlocal looks
            looks += 1
            return f"restoring: step {min(looks, 50)} of 60", min(looks, 50)

    supervisor, said = Restoring(tmp_path, 2, 3600.0, [].append), list[str]()
    try:
        supervisor.start(ServiceSpec("learner", ("serve", "learner")))
        # Half as long as it takes to look 50 times.
        with pytest.raises(
            AntiphonError, match=r"learner has stood still at `restoring: step 50 of 60` for 0\.75 s"
        ):
            supervisor.wait_ready("learner", 0.75, said.append)
    finally:
        supervisor.close()
    assert looks > 50 and said[0] == "learner: restoring: step 1 of 60" and len(said) == 50


DEAF = """
import json, os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text("up")
time.sleep(600)
"""
"""A service that starts its engine: it does not listen, and has started something itself."""


def deaf_supervisor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Return a supervisor that has started worker-0, which is deaf, and coordinator, which is ready."""

    class Deaf(Supervisor):
        def _spawn(self, child: Any) -> None:
            up = folder / f"{child.spec.name}.up"
            command = [sys.executable, "-c", DEAF, str(up)]
            child.process = ChildProcess(tied_command(command), folder / "log")
            child.starts += 1
            if child.spec.name == "coordinator":
                child.ready.set()

    monkeypatch.setattr(supervisor_module, "HURRIED_GRACE_S", 0.2)
    supervisor = Deaf(folder, 2, 3600.0, [].append)
    for name in ("coordinator", "worker-0"):
        supervisor.start(ServiceSpec(name, ("worker",)))
    until(lambda: all((folder / f"{name}.up").exists() for name in ("coordinator", "worker-0")))
    return supervisor


def family_of(supervisor: Supervisor) -> list[psutil.Process]:
    leaders = [psutil.Process(pid) for pid in process_ids(supervisor).values()]
    family = leaders + [child for leader in leaders for child in leader.children(recursive=True)]
    assert len(family) == 4
    return family


def test_a_hurried_supervisor_says_what_starts_and_waits_for_no_service_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = deaf_supervisor(tmp_path, monkeypatch)
    family = family_of(supervisor)
    assert supervisor.doing() == "coordinator, worker-0 (worker-0 is starting its engine)"
    write_starting_file(tmp_path / "services" / "worker-0.json", "restoring: step 3 of 9", 12)
    assert supervisor.doing().endswith("(worker-0 is restoring: step 3 of 9)")
    with capture_logs() as logs:
        supervisor.hurry()
        with pytest.raises(UnavailableError, match="the run is stopping; worker-0 was not started"):
            supervisor.wait_ready("worker-0", START_S)
        supervisor.close()
    assert not psutil.wait_procs(family, timeout=START_S)[1]
    assert [entry["log_level"] for entry in logs if entry["event"] == "service.killed"] == ["info"] * 2


def test_a_dismissed_worker_is_ended_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.2)
    supervisor = deaf_supervisor(tmp_path, monkeypatch)
    assert supervisor.keeps("worker-0") and not supervisor.keeps("worker-1")
    supervisor.dismiss("worker-0")
    until(lambda: set(process_ids(supervisor)) == {"coordinator"})
    assert not supervisor.keeps("worker-0") and supervisor.restarts()["worker-0"] == 0
    supervisor.kill()
    supervisor.close()


def test_a_worker_that_the_run_can_do_without_is_given_up(tmp_path: Path) -> None:
    class Failing(Supervisor):
        def _spawn(self, child: Any) -> None:
            child.process = ChildProcess([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
            child.starts += 1

    failures: list[str] = []
    supervisor = Failing(tmp_path, 2, 3600.0, failures.append)
    supervisor.start(ServiceSpec("cheap-0", ("worker",), needed=False))
    until(lambda: not supervisor.keeps("cheap-0"))
    supervisor.start(ServiceSpec("worker-0", ("worker",)))
    until(lambda: bool(failures))
    assert [words.split()[0] for words in failures] == ["worker-0"]
    supervisor.close()


@pytest.mark.parametrize("limit", [2, 0])
def test_a_first_start_that_is_killed_is_tried_again_and_its_end_is_said(tmp_path: Path, limit: int) -> None:
    class Killed(Supervisor):
        def _spawn(self, child: Any) -> None:
            child.starts += 1
            ready = (
                f"open({str(tmp_path / 'services' / 'learner.json')!r}, 'w').write('{{}}'); time.sleep(600)"
            )
            end = "os.kill(os.getpid(), 9)" if child.starts == 1 else ready
            words = [sys.executable, "-c", f"import os, time; {end}"]
            child.process = ChildProcess(tied_command(words), self.log_path("learner"))

    failures: list[str] = []
    supervisor = Killed(tmp_path, limit, 3600.0, failures.append)
    try:
        supervisor.start(ServiceSpec("learner", ("serve", "learner")))
        if limit:
            supervisor.wait_ready("learner", START_S)
            assert supervisor.restarts() == {"learner": 1} and not failures
        else:
            why = r"learner did not start: it was ended by SIGKILL \(is there enough memory\?\): it wrote"
            with pytest.raises(AntiphonError, match=why):
                supervisor.wait_ready("learner", START_S)
    finally:
        supervisor.close()


def test_only_a_service_that_was_ready_is_told_that_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was killed before it wrote a journal would else miss what never was."""
    started: list[list[str]] = []

    def start(arguments: list[str], log: Path, environment: Any) -> ChildProcess:
        started.append(arguments)
        ready = (
            f"open({str(tmp_path / 'services' / 'coordinator.json')!r}, 'w').write('{{}}'); time.sleep(600)"
        )
        end = ready if len(started) > 1 else "os.kill(os.getpid(), 9)"
        return ChildProcess(tied_command([sys.executable, "-c", f"import os, time; {end}"]), log)

    monkeypatch.setattr(supervisor_module, "ChildProcess", start)
    supervisor = Supervisor(tmp_path, 3, 3600.0, [].append)
    try:
        supervisor.start(service_spec("run-1", tmp_path, tmp_path / "store", "127.0.0.1", "coordinator"))
        supervisor.wait_ready("coordinator", START_S)
        os.kill(process_ids(supervisor)["coordinator"], signal.SIGKILL)
        until(lambda: len(started) == 3)
        assert ["--wait-for-journal" in arguments for arguments in started] == [False, False, True]
    finally:
        supervisor.close()


def test_a_supervisor_ends_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = deaf_supervisor(tmp_path, monkeypatch)
    family = family_of(supervisor)
    supervisor.hurry()  # as the first Ctrl-C does
    supervisor.kill()
    assert not psutil.wait_procs(family, timeout=START_S)[1]
    supervisor.close()


def test_what_a_starting_service_reports_is_read(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 2, 3600.0, [].append)
    supervisor.close()
    assert supervisor._starting("learner") == ("", 0)
    write_starting_file(tmp_path / "services" / "learner.json", "restoring: step 3 of 9", 12)
    assert supervisor._starting("learner") == ("restoring: step 3 of 9", 12)


PLACED = """
import json, os, pathlib, sys, time
names = ("RANK", "WORLD_SIZE", "ANTIPHON_MEETING")
meeting = pathlib.Path(os.environ["ANTIPHON_MEETING"])
place = pathlib.Path(sys.argv[1]) / f"{os.getpid()}"
place.with_suffix(".part").write_text(json.dumps([os.environ[name] for name in names] + [meeting.exists()]))
place.with_suffix(".part").rename(place)
time.sleep(600)
"""


def test_ranks_are_told_their_places_and_all_start_again_when_one_ends(tmp_path: Path) -> None:
    supervisor, folder = Supervisor(tmp_path, 2, 3600.0, [].append), tmp_path / "placed"
    folder.mkdir()
    command = tied_command([sys.executable, "-c", PLACED, str(folder)])

    def places() -> dict[int, list[Any]]:
        return {int(p.name): json.loads(p.read_text()) for p in folder.iterdir() if not p.suffix}

    try:
        supervisor.start(ServiceSpec("learner", ("serve",), command=tuple(command), ranks=2))
        until(lambda: len(places()) == 2)
        first = places()
        assert sorted(place[:2] for place in first.values()) == [["0", "2"], ["1", "2"]]
        Path(next(iter(first.values()))[2]).touch()  # the ranks have met
        follower = next(pid for pid, place in first.items() if place[0] == "1")
        os.kill(follower, signal.SIGKILL)
        until(lambda: len(places()) == 4)
        assert not any(psutil.pid_exists(pid) for pid in first)
        assert [place[3] for place in places().values()] == [False] * 4
        assert supervisor.restarts() == {"learner": 1}
    finally:
        supervisor.close()
    assert not any(psutil.pid_exists(pid) for pid in places())
