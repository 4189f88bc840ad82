"""Slurm: an order gives one job, which a later call adopts and a preemption queues again, until it ends."""

import asyncio
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.benchmarks.parts.fleets.slurm import slurm_cluster
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.errors import UnavailableError
from antiphon.runs.fleet.launcher import Launcher
from tests.support.fleet_site import FleetSite


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory, needs_system: Callable[[str], str]) -> Iterator[None]:
    needs_system("slurm-wlm")
    needs_system("munge")
    with (
        slurm_cluster(tmp_path_factory.mktemp("slurm") / "here") as environment,
        pytest.MonkeyPatch.context() as m,
    ):
        for name, value in environment.items():
            m.setenv(name, value)
        yield


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FleetSite]:
    found = FleetSite(tmp_path, {"kind": "slurm", "partition": "spot"})
    yield found
    subprocess.run(["scancel", f"--name={found.site.label}.spot"], check=True)
    found.close()


async def until(one: Launcher, worker: str, *states: InstanceState) -> Instance | None:
    """Wait until a worker is in one of some states; without any, until it is not there."""
    async with asyncio.timeout(90.0):
        while True:
            found = next((x for x in await one.running() if x.worker == worker), None)
            if (found is None and not states) or (found is not None and found.state in states):
                return found
            await asyncio.sleep(0.1)


def test_an_order_is_one_job_whose_worker_has_its_bundle_and_leaves_in_its_grace(site: FleetSite) -> None:
    async def order() -> None:
        one, order = site.launcher(), site.site.order("spot-1")
        assert await one.missing() == []
        first = await one.start(order)
        another = site.launcher()
        assert (await another.start(order)).name == first.name
        up = await until(another, "spot-1", InstanceState.UP)
        assert up is not None and up.name == first.name and up.name.endswith("_1")
        async with asyncio.timeout(30.0):
            while not site.called:
                await asyncio.sleep(0.05)
        (process,) = site.processes
        words = process.cmdline()
        bundle = Path(words[words.index("--credentials") + 1])
        assert (bundle / "key.pem").read_text() == "secret key.pem of 1"
        assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in bundle.iterdir())
        shown = subprocess.run(["scontrol", "show", "job"], capture_output=True, text=True, check=True).stdout
        assert "secret" not in shown and "secret" not in " ".join(words)
        await another.stop("spot-1", 10.0)
        await until(another, "spot-1")
        assert not site.processes and not bundle.exists()

    asyncio.run(order())


def test_one_that_ignores_its_end_is_killed_and_one_in_the_queue_leaves_it(site: FleetSite) -> None:
    site.stubborn.touch()

    async def order() -> None:
        one = site.launcher()
        for number in range(3):
            await one.start(site.site.order(f"spot-{number}"))
        async with asyncio.timeout(30.0):
            while len(site.called) < 2:
                await asyncio.sleep(0.05)
        async with asyncio.timeout(30.0):  # of two cores none is free; Slurm says so a look later
            while not ((waiting := await until(one, "spot-2", InstanceState.PENDING)) and waiting.reason):
                await asyncio.sleep(0.1)
        await asyncio.gather(*(one.stop(f"spot-{number}", 1.0) for number in range(3)))
        for number in range(3):
            await until(one, f"spot-{number}")
        assert not site.processes

    asyncio.run(order())


def test_a_preempted_worker_is_told_and_waits_in_the_queue_again(site: FleetSite) -> None:
    async def order() -> None:
        one = site.launcher()
        await one.start(site.site.order("spot-0"))
        await until(one, "spot-0", InstanceState.UP)
        words = [
            "sbatch",
            "--parsable",
            "--partition=high",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=sleep 600",
        ]
        other = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        again = await until(one, "spot-0", InstanceState.PENDING)
        assert again is not None and not site.processes
        subprocess.run(["scancel", other], check=True)
        await one.stop("spot-0", 1.0)

    asyncio.run(order())


def test_a_job_that_ends_before_it_is_cancelled_is_stopped(
    site: FleetSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("scancel")
    (tmp_path / "bin").mkdir()
    late = tmp_path / "bin" / "scancel"
    late.write_text(
        f'#!/bin/sh\nfor job; do :; done\n{real} --full --signal=KILL "$job"\n'
        'while squeue --noheader --jobs="$job" 2>/dev/null | grep -q .; do sleep 0.2; done\n'
        f'{real} "$@"\nexit 1\n'
    )
    late.chmod(0o755)

    async def order() -> None:
        one = site.launcher()
        await one.start(site.site.order("spot-0"))
        await until(one, "spot-0", InstanceState.UP)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        await one.stop("spot-0", 5.0)
        monkeypatch.undo()
        await until(one, "spot-0")

    asyncio.run(order())


def test_what_the_cluster_has_not_is_said(site: FleetSite, tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    wrong = FleetSite(tmp_path / "wrong", {"kind": "slurm", "partition": "nowhere", "gpus": 2})
    (said,) = asyncio.run(wrong.launcher().missing())
    assert "launcher.partition=nowhere is no partition here; there are spot, high" in said
    with pytest.raises(UnavailableError, match=r"sbatch: .*(partition|gres)"):
        asyncio.run(wrong.launcher().start(wrong.site.order("spot-0")))
