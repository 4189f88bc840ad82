"""ssh: an order gives one process, which a later call adopts, stopped within its grace, with nothing left."""

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from antiphon.benchmarks.parts.fleets.sshd import SshHosts, ssh_hosts
from antiphon.core.capacity.order_book import InstanceState
from antiphon.core.errors import UnavailableError
from tests.support.fleet_site import FleetSite


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, needs_system: Callable[[str], str]) -> Iterator[SshHosts]:
    needs_system("openssh-server")
    with ssh_hosts(tmp_path_factory.mktemp("sshd"), 2, refusing=1) as found:
        yield found


@pytest.fixture
def site(tmp_path: Path, hosts: SshHosts) -> Iterator[FleetSite]:
    found = FleetSite(tmp_path, {"kind": "ssh", "hosts": hosts.hosts, "options": hosts.options})
    yield found
    found.close()


def test_an_order_given_four_times_at_once_is_one_process_and_is_adopted(site: FleetSite) -> None:
    async def order() -> None:
        one = site.launcher()
        order = site.site.order("spot-0")
        started = await asyncio.gather(*(one.start(order) for _ in range(4)))
        assert len({instance.name for instance in started}) == 1 and len(site.processes) == 1
        another = site.launcher()  # of a process that continues the run
        assert [x.name for x in await another.running() if x.state is InstanceState.UP] == [started[0].name]
        assert (await another.start(order)).name == started[0].name and len(site.processes) == 1
        await another.stop("spot-0", 5.0)
        await another.stop("spot-0", 5.0)
        assert not site.processes
        assert not [x for x in await one.running() if x.state is InstanceState.UP]

    asyncio.run(order())


def test_a_worker_gets_its_own_bundle_and_nothing_secret_is_seen(site: FleetSite) -> None:
    async def order() -> None:
        one = site.launcher()
        await one.start(site.site.order("spot-1"))
        (process,) = site.processes
        words = process.cmdline()
        bundle = Path(words[words.index("--credentials") + 1])
        place = bundle if bundle.is_absolute() else Path.home() / bundle
        assert (place / "key.pem").read_text() == "secret key.pem of 1"
        assert stat.S_IMODE(os.stat(place).st_mode) == 0o700
        assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in place.iterdir())
        seen = [*words, *(f"{k}={v}" for k, v in process.environ().items())]
        assert not [text for text in seen if "secret" in text]
        assert words[words.index("--name") + 1] == "spot-1"
        await one.stop("spot-1", 5.0)
        assert not place.exists()

    asyncio.run(order())


def test_a_process_that_does_not_leave_is_killed_after_its_grace(site: FleetSite) -> None:
    site.stubborn.touch()

    async def order() -> None:
        one = site.launcher()
        await one.start(site.site.order("spot-0"))
        while not site.called:
            await asyncio.sleep(0.01)
        await one.stop("spot-0", 1.0)

    asyncio.run(order())
    assert not site.processes


def test_what_a_worker_leaves_of_its_children_ends_with_it(site: FleetSite) -> None:
    left = site.folder / "left"
    script = (
        f"(trap '' TERM; exec sleep 600) & echo $! > {left}; trap 'exit 0' TERM; while :; do sleep 0.1; done"
    )
    (site.folder / "antiphon").write_text(f"#!/bin/sh\n{script}\n")

    async def order() -> None:
        one = site.launcher()
        await one.start(site.site.order("spot-0"))
        async with asyncio.timeout(30.0):
            while not (left.exists() and left.read_text().strip()):
                await asyncio.sleep(0.01)
        child = psutil.Process(int(left.read_text()))
        await one.stop("spot-0", 5.0)
        with suppress(psutil.NoSuchProcess):
            async with asyncio.timeout(30.0):
                while child.status() != psutil.STATUS_ZOMBIE:  # until who inherited it takes note of its end
                    await asyncio.sleep(0.01)

    try:
        asyncio.run(order())
    finally:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int(left.read_text())).kill()


def test_a_host_that_refuses_says_nothing_of_its_workers_and_a_start_there_fails(site: FleetSite) -> None:
    async def order() -> None:
        one = site.launcher()
        with pytest.raises(UnavailableError, match="refused"):
            await one.start(site.site.order("spot-2"))
        await one.start(site.site.order("spot-0"))
        found = {instance.worker: instance for instance in await one.running()}
        assert found["spot-0"].state is InstanceState.UP and "spot-1" not in found
        assert found["spot-2"].state is InstanceState.UNKNOWN and "refused" in found["spot-2"].reason
        assert [line for line in await one.missing() if "refused" in line]
        await one.stop("spot-0", 5.0)

    asyncio.run(order())


def test_what_would_be_sent_is_shown_without_a_secret(site: FleetSite) -> None:
    ((name, text),) = site.launcher().render(site.site.draft("spot-1")).items()
    assert name.startswith("spot-1-on-") and "--coordinator 127.0.0.1:7700" in text and "secret" not in text
