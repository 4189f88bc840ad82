"""A journal whose place is away or held by a coordinator that hangs: one waits, the other is deposed."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

from antiphon.benchmarks.parts.postgres import PostgresServer, postgres_server
from antiphon.core.config import RunConfig, dump_config
from antiphon.core.errors import AntiphonError, BlockedError, ConfigError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.requests import LeaseRequest
from antiphon.net.rpc.serving import refusing_server
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.databases import open_sql_store, schema_name
from antiphon.services.coordinator.journal.journal import Journal, journal_place
from antiphon.services.coordinator.journal.opening import open_journal
from antiphon.system.ports import free_port
from tests.services.coordinator.test_restart import end, start_process
from tests.support.loop_model import RUN_ID, make_config

ENOUGH_S = 60.0
_runs = count()


@pytest.fixture(scope="module")
def server(needs_system: Callable[[str], str]) -> Iterator[PostgresServer]:
    with postgres_server(needs_system("postgresql")) as running:
        yield running


@pytest.fixture
def run_id() -> str:
    return f"outage-{next(_runs)}"


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest) -> Iterator[RunConfig]:
    """A run on either database; its journal there is dropped at the end."""
    plain = make_config(steps=4)
    if request.param == "sqlite":
        yield plain
        return
    server: PostgresServer = request.getfixturevalue("server")
    section = plain.coordinator.model_copy(update={"journal_url": server.url})
    yield plain.model_copy(update={"coordinator": section})
    engine = sa.create_engine(sa.make_url(server.url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA {schema_name(RUN_ID)} CASCADE")
    engine.dispose()


def test_the_server_looks_for_a_client_that_vanished(server: PostgresServer, run_id: str) -> None:
    """By its own defaults it would keep the lock of a machine without power for two hours."""
    store = open_sql_store(server.tcp_url, run_id)
    try:
        with store._connection.begin():
            found = {
                name: store._connection.exec_driver_sql(f"SHOW {name}").scalar()
                for name in ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
            }
        assert {name: int(str(value)) for name, value in found.items()} == {
            "tcp_keepalives_idle": 5,
            "tcp_keepalives_interval": 2,
            "tcp_keepalives_count": 3,
        }
    finally:
        store.close()


NAMESPACE, HERE, THERE = "antiphon-gone", "10.231.7.1", "10.231.7.2"
HOLDER = """
import sys, time
from antiphon.services.coordinator.journal.databases import open_sql_store
store = open_sql_store(sys.argv[1], sys.argv[2])
print("held", flush=True)
time.sleep(600)
"""


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=30.0)
    if done.returncode:
        pytest.skip(f"needs a network of its own: ip {words}: {done.stderr.strip()}")


@pytest.fixture
def cable(needs_system: Callable[[str], str]) -> Iterator[None]:
    """A network namespace as another machine, and a cable to it that can be pulled out."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for a network of its own")
    try:
        ip(f"netns add {NAMESPACE}")
        ip(f"link add gone0 type veth peer name gone1 netns {NAMESPACE}")
        ip(f"addr add {HERE}/30 dev gone0")
        ip("link set gone0 up")
        ip(f"-n {NAMESPACE} addr add {THERE}/30 dev gone1")
        ip(f"-n {NAMESPACE} link set gone1 up")
        yield
    finally:
        for words in ("link del gone0", f"netns del {NAMESPACE}"):
            subprocess.run(["ip", *words.split()], capture_output=True, timeout=30.0, check=False)


def test_the_lock_of_a_machine_that_vanished_is_free_soon(
    cable: None, needs_system: Callable[[str], str], run_id: str
) -> None:
    """No packet says that it is gone: the server has to find out, within seconds and not hours."""
    with postgres_server(needs_system("postgresql"), f"{HERE}/30") as server:
        url = f"postgresql://tester@{HERE}:{server.port}/postgres"
        command = ["ip", "netns", "exec", NAMESPACE, sys.executable, "-c", HOLDER, url, run_id]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            try:
                assert holder.stdout is not None and holder.stdout.readline() == "held\n"
                ip("link set gone0 down")
                open_sql_store(server.url, run_id, hung_s=3600.0).close()
            finally:
                holder.kill()


@pytest.mark.parametrize("asked", [True, False])
def test_a_coordinator_that_hangs_is_deposed_and_never_writes_again(
    config: RunConfig, tmp_path: Path, asked: bool
) -> None:
    """Nor does it go on to answer what needs no writing, although nobody asks it to write."""
    (tmp_path / "config.yaml").write_text(dump_config(config))
    place = journal_place(config, tmp_path)

    async def act() -> None:
        port = free_port()
        hung = await start_process(tmp_path, port)
        client = CoordinatorClient(f"127.0.0.1:{port}")
        try:
            assert hung.stdout is not None
            async with asyncio.timeout(ENOUGH_S):
                while not (line := await hung.stdout.readline()).startswith(b"ready"):
                    assert line
            await client.open_step(0)
            os.kill(hung.pid, signal.SIGSTOP)
            async with asyncio.timeout(ENOUGH_S):
                successor = await open_journal(place, RUN_ID, 60.0, hung_s=0.5)
            await successor.enqueue([e.StepOpened(1)])
            os.kill(hung.pid, signal.SIGCONT)
            if asked:
                with pytest.raises(UnavailableError):  # a caller asks again, and finds the other one
                    await client.open_step(2)
            async with asyncio.timeout(ENOUGH_S):
                said = (await hung.stdout.read()).decode()
                assert await hung.wait() != 0
            assert "lost its place" in said
            opened = [event.step for event in successor.replay() if isinstance(event, e.StepOpened)]
            assert opened == [0, 1]
            await successor.close()
        finally:
            await client.close()
            await end(hung)

    asyncio.run(act())


def test_a_coordinator_that_works_is_not_deposed(config: RunConfig, tmp_path: Path) -> None:
    place = journal_place(config, tmp_path)
    journal, over = Journal(place, RUN_ID), threading.Event()

    def work() -> None:
        while not over.wait(0.05):
            journal._wait_for(journal._store.last_seq)

    working = threading.Thread(target=work)
    working.start()
    try:
        with pytest.raises(ConfigError, match="already has a coordinator"):
            open_sql_store(place, RUN_ID, hung_s=ENOUGH_S)
    finally:
        over.set()
        working.join()
    asyncio.run(journal.close())


def refusing(port: int, problem: Callable[[], AntiphonError]) -> AbstractAsyncContextManager[None]:
    return refusing_server("127.0.0.1", port, None, problem)


async def blocked_by(call: Callable[[], Awaitable[object]]) -> str:
    """Call until the answer is that the coordinator is blocked, and return why."""
    while True:
        try:
            await call()
        except BlockedError as error:
            return str(error)
        except UnavailableError:  # it does not listen yet
            await asyncio.sleep(0.02)


def test_callers_of_a_coordinator_that_waits_for_its_database_hear_why(
    server: PostgresServer, run_id: str
) -> None:
    async def act() -> None:
        port = free_port()
        client = CoordinatorClient(f"127.0.0.1:{port}")
        server.stop()
        with pytest.raises(UnavailableError, match="cannot be reached"):  # a first start says so at once
            await open_journal(server.url, run_id, 60.0)
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await open_journal(server.url, run_id, 0.0, partial(refusing, port), retry_s=0.01)
        again = partial(refusing, port)
        opening = asyncio.ensure_future(open_journal(server.url, run_id, 60.0, again, retry_s=0.05))
        async with asyncio.timeout(ENOUGH_S):
            assert re.search("journal .* cannot be reached", await blocked_by(client.status))
            asking = LeaseRequest("w-1", None, 1, 0.0)
            assert "cannot be reached" in await blocked_by(lambda: client.lease_group(asking))
            assert not opening.done()
            server.start()
            journal = await opening
        await journal.close()
        await client.close()

    try:
        asyncio.run(act())
    finally:
        if not (server.folder / "data" / "postmaster.pid").exists():
            server.start()
