"""A real worker process whose engine hangs ends by itself, says so, and gives its groups back."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from antiphon.core.config import RunConfig
from antiphon.core.loop.events import LeaseExpired, load_event
from antiphon.core.status import WorkerState
from antiphon.services.rollout.engine.watchdog import HUNG_EXIT, STEP_FACTOR, Watchdog
from tests.support.light_parties import Served, served
from tests.support.light_weights import light_manifest
from tests.support.loop_model import RUN_ID, make_config

PROJECT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120.0

WORKER = """
import ctypes, sys, threading
from pathlib import Path
from antiphon.services.rollout.process import serve_worker
from antiphon.system.processes import run_service
from tests.support.light_engine import LightEngine
from tests.support.light_weights import ENDLESS, LightSource

address, folder, how, steps = sys.argv[1:]
left = int(steps)

def before_step():
    global left
    left -= 1
    if left == 0:
        print("hangs", flush=True)
        if how == "waits":
            threading.Event().wait()
        ctypes.PyDLL(None).sleep(10_000)  # keeps the interpreter to itself

def engine(config):
    return LightEngine(before_step)

def source(config):
    return LightSource(lambda version: ENDLESS)

sys.exit(
    run_service(
        lambda stop: serve_worker(
            address, "w", "", Path(folder), lambda: None, engine, source, stop=stop
        )
    )
)
"""


def configured(**rollout: object) -> RunConfig:
    config = make_config(steps=2, max_staleness=1, filter_="none", heartbeat_s=0.5)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})


class Child:
    """A worker's process."""

    def __init__(self, address: str, folder: Path, how: str, steps: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(folder / "worker"), how, str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PROJECT,
        )

    async def hangs(self) -> None:
        """Wait until its engine hangs."""
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line == "hangs\n"

    async def ended(self) -> tuple[int, str]:
        """Return its exit code and what it wrote to its log."""
        _, log = await asyncio.to_thread(self.process.communicate, timeout=DEADLINE_S)
        return self.process.returncode, log


@asynccontextmanager
async def hanging(config: RunConfig, folder: Path, how: str = "waits") -> AsyncIterator[tuple[Served, Child]]:
    """Serve a run whose one worker hangs in its second step."""
    async with served(config, folder) as site, asyncio.timeout(DEADLINE_S):
        client = site.client()
        await client.announce_snapshot(light_manifest(RUN_ID, 0))
        await client.open_step(0)
        child = Child(site.address, folder, how, 2)
        try:
            await child.hangs()
            yield site, child
        finally:
            child.process.kill()
            await asyncio.to_thread(child.process.wait)


async def expired(site: Served) -> list[LeaseExpired]:
    rows = await site.service.state_machine.journal.read(0, 1000)
    return [e for row in rows if isinstance(e := load_event(row.kind, row.body), LeaseExpired)]


def test_a_process_ends_itself_when_its_engine_hangs_and_hands_its_leases_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with hanging(configured(hung_step_s=2.0), tmp_path) as (site, child):
            code, log = await child.ended()
            assert code == HUNG_EXIT, log
            assert log.count("engine.hung") == 1 and "raise rollout.hung_step_s" in log
            machine = site.service.state_machine
            assert [w.state for w in machine.loop.fleet.records(machine.loop.leases, 0.0)] == [
                WorkerState.LOST
            ]
            assert len(machine.loop.leases) == 0 and machine.state.open_groups
            assert {event.reason for event in await expired(site)} == {"handed over by its worker"}

    asyncio.run(run())


def test_a_process_ends_even_when_no_thread_of_it_gets_a_turn(tmp_path: Path) -> None:
    async def run() -> None:
        async with hanging(configured(hung_step_s=1.0), tmp_path, "keeps the interpreter") as (_, child):
            code, log = await child.ended()
            assert code == 1 and "before_step" in log, log  # the traceback says where it hangs

    asyncio.run(run())


def test_a_process_ends_even_when_it_hangs_before_the_watchdog_had_a_turn() -> None:
    program = (
        "import ctypes\n"
        "from antiphon.services.rollout.engine import watchdog\n"
        "watchdog.LEAVE_S = 0.1\n"
        "watchdog.Watchdog().arm(0.05, 0.05)\n"
        "ctypes.PyDLL(None).sleep(10_000)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, cwd=PROJECT
    )
    assert ended.returncode == 1 and "Timeout" in ended.stderr, ended.stderr


def test_sigterm_ends_a_process_whose_engine_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with hanging(configured(grace_s=1.0), tmp_path) as (site, child):
            child.process.send_signal(signal.SIGTERM)
            code, log = await child.ended()
            assert code == 0, log
            assert len(site.service.state_machine.loop.leases) == 0
            assert site.service.state_machine.state.open_groups

    asyncio.run(run())


def test_how_long_a_step_may_take_is_measured() -> None:
    watchdog = Watchdog()
    watchdog.arm(1000.0, 2000.0)
    try:
        assert (watchdog.limit_s(is_step=True), watchdog.limit_s(is_step=False)) == (1000.0, 2000.0)
        watchdog._steps.extend([1.0, 500.0, 2.0])
        assert watchdog.limit_s(is_step=True) == watchdog.limit_s(is_step=False) == STEP_FACTOR * 500.0
        watchdog.begin(is_step=False)
        assert watchdog.finish() >= 0.0 and len(watchdog._steps) == 3
        watchdog.begin(is_step=True)
        assert watchdog.finish() == watchdog._steps[-1]
    finally:
        watchdog.disarm()


@pytest.mark.parametrize("leaves", [True, False])
def test_the_process_ends_whether_the_worker_can_leave_or_not(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setattr("antiphon.services.rollout.engine.watchdog.LEAVE_S", 0.05)
    ended, never, codes = threading.Event(), threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watchdog = Watchdog(lambda seconds: None if leaves else never.wait(DEADLINE_S) and None, end)
    watchdog.arm(0.05, 0.05)
    try:
        watchdog.begin(is_step=False)
        assert ended.wait(DEADLINE_S) and codes == [HUNG_EXIT]
    finally:
        never.set()
        watchdog.disarm()
