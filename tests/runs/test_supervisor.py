"""Supervisor: real service processes are watched, started again at their address, and never left behind."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from antiphon.core.config import build_config, dump_config
from antiphon.core.errors import AntiphonError
from antiphon.runs.supervisor import ServiceSpec, Supervisor, service_specs

START_S = 120.0


def until(look: Callable[[], bool]) -> None:
    """Look until it is so; fail after START_S."""
    deadline = time.perf_counter() + START_S
    while not look():
        assert time.perf_counter() < deadline
        time.sleep(0.05)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Supervisor, ServiceSpec, list[str]]]:
    """A supervisor, a coordinator it may start, and what it complains of."""
    config = build_config(
        {"environment": {"train_size": 32, "heldout_size": 1}, "evaluation": {"prompts": 1}}
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    complaints: list[str] = []
    supervisor = Supervisor(tmp_path, 2, complaints.append)
    spec = service_specs("run-1", tmp_path, tmp_path / "store", "127.0.0.1")["coordinator"]("")
    yield supervisor, spec, complaints
    supervisor.close()


def test_a_killed_or_stopped_service_is_back_at_its_address(
    watched: tuple[Supervisor, ServiceSpec, list[str]],
) -> None:
    supervisor, spec, complaints = watched
    supervisor.start(spec)
    port = supervisor.wait_ready("coordinator", START_S)
    for restarts, number in enumerate((signal.SIGKILL, signal.SIGTERM), start=1):
        os.kill(supervisor.process_ids()["coordinator"], number)
        until(lambda wanted=restarts: supervisor.restarts()["coordinator"] == wanted)  # type: ignore[misc]
        assert supervisor.wait_ready("coordinator", START_S) == port
    assert complaints == []
    last = supervisor.process_ids()["coordinator"]
    os.kill(last, signal.SIGKILL)
    until(lambda: bool(complaints))
    assert complaints[0].startswith("coordinator ended with status -9")
    supervisor.close()
    assert not psutil.pid_exists(last)


def test_a_service_that_ends_with_the_run_is_let_go(
    watched: tuple[Supervisor, ServiceSpec, list[str]],
) -> None:
    supervisor, spec, complaints = watched
    supervisor.start(spec)
    supervisor.wait_ready("coordinator", START_S)
    supervisor.expect_end()
    os.kill(supervisor.process_ids()["coordinator"], signal.SIGTERM)
    until(lambda: not supervisor.process_ids())
    supervisor.close()
    assert supervisor.restarts() == {"coordinator": 0}
    assert complaints == []


def test_what_does_not_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {stepz: 3}\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "coordinator.log").write_text("antiphon: what an earlier process complained of\n")
    supervisor = Supervisor(tmp_path, 2, [].append)
    try:
        specs = service_specs("run-1", tmp_path, tmp_path / "store", "127.0.0.1")
        supervisor.start(specs["coordinator"](""))
        with pytest.raises(AntiphonError, match=r"coordinator did not start: unknown key run\.stepz"):
            supervisor.wait_ready("coordinator", START_S)
    finally:
        supervisor.close()
