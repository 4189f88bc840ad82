"""Workers in actors of a real Ray cluster: ordered once, adopted, stopped in time, lost with their node."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from antiphon.benchmarks.parts.fleets.ray_cluster import RayCluster, ray_cluster
from antiphon.core.capacity.launcher_config import RayLauncherSection
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.runs.fleet.launcher import LaunchSite, Order
from antiphon.runs.fleet.ray import RayLauncher
from tests.support.light_fleet import SECRET, alive, command, in_loop, make_bundle, told, until

if importlib.util.find_spec("ray") is None:
    if os.environ.get("ANTIPHON_CI") == "1":
        pytest.fail("needs Ray: requirements/ray.lock")
    pytest.skip("needs Ray (the extra ray)", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(nodes=1) as made:
        yield made


class Fleet:
    """A class of Ray workers played by a light process."""

    def __init__(self, folder: Path, address: str, label: str) -> None:
        self.folder, self.label = folder, label
        section = RayLauncherSection(kind="ray", address=address, command=command())
        one = PoolClass(name="spot", usd_per_hour=1.0, count=4, launcher=section)
        site = LaunchSite("math", label, "127.0.0.1:1", folder / "bundles", RunConfig())
        self.launcher = RayLauncher(one, section, site)

    def order(self, worker: str) -> Order:
        bundle = self.folder / "bundles" / worker
        if not bundle.exists():
            make_bundle(bundle)
        arguments = ("worker", "--name", worker, "--coordinator", "127.0.0.1:1")
        return Order(worker, arguments, bundle, {"LIGHT_FLEET": str(self.folder)})

    async def of(self, worker: str) -> Instance | None:
        return next((one for one in await self.launcher.running() if one.worker == worker), None)

    async def gone(self, worker: str) -> bool:
        return await self.of(worker) is None


@in_loop
async def test_an_order_is_one_process_however_often_and_by_whom_it_is_given(
    cluster: RayCluster, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, cluster.address, "math-1")
    order = fleet.order("spot-0")
    # Another process gives the order and is killed.
    program = (
        "import asyncio, sys, time; from pathlib import Path; from tests.runs.fleet.test_ray import Fleet\n"
        "async def main():\n"
        "    fleet = Fleet(Path(sys.argv[1]), sys.argv[2], 'math-1')\n"
        "    print((await fleet.launcher.start(fleet.order('spot-0'))).state, flush=True)\n"
        "asyncio.run(main()); time.sleep(600)"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), cluster.address], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline().strip() in ("up", "pending")
    (says,) = await until(lambda: told(tmp_path, "spot-0"))
    first.send_signal(signal.SIGKILL)
    first.wait()
    again = await asyncio.gather(*(fleet.launcher.start(order) for _ in range(3)))
    assert {one.state for one in again} == {InstanceState.UP}
    assert f"process {says['pid']} " in again[0].name
    assert [one.worker for one in await fleet.launcher.running()] == ["spot-0"]
    assert len(told(tmp_path, "spot-0")) == 1
    assert await Fleet(tmp_path, cluster.address, "math-2").launcher.running() == ()  # of another run

    assert says["folder"] == "0o700"
    assert set(says["modes"].values()) == {"0o600"} and len(says["modes"]) == 4
    given = says["given"]
    bundle = Path(given[given.index("--credentials") + 1])
    variables = Path(f"/proc/{says['pid']}/environ").read_bytes()
    assert SECRET.encode() not in variables + Path(f"/proc/{says['pid']}/cmdline").read_bytes()

    await fleet.launcher.stop("spot-0", 30.0)
    await until(lambda: fleet.gone("spot-0"))
    assert not alive(says["pid"])
    await until(lambda: not bundle.exists())
    await fleet.launcher.stop("spot-0", 30.0)  # nothing is there
    # The name is free again.
    assert (await fleet.launcher.start(order)).state == InstanceState.UP
    (_, second) = await until(lambda: len(told(tmp_path, "spot-0")) == 2 and told(tmp_path, "spot-0"))

    # One that does not leave is killed, and nothing secret was written by Ray.
    (tmp_path / "stubborn").touch()
    await fleet.launcher.stop("spot-0", 0.5)
    await until(lambda: fleet.gone("spot-0"))
    assert not alive(second["pid"])
    for folder, _, names in os.walk(os.path.realpath("/tmp/ray/session_latest")):
        for path in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):  # Ray goes on writing, and removes what it needs no more
                assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@in_loop
async def test_what_no_node_has_room_for_waits_and_is_placed_on_a_new_node_or_taken_back(
    cluster: RayCluster, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, cluster.address, "math-3")
    for number in range(4):
        await fleet.launcher.start(fleet.order(f"spot-{number}"))
    stand = await fleet.launcher.running()
    waiting = [one for one in stand if one.state == InstanceState.PENDING]
    assert len(stand) == 4 and len(waiting) == 2
    assert all("Ray has not placed" in one.reason and "CPU" in one.reason for one in waiting)
    await fleet.launcher.stop(waiting[1].worker, 5.0)
    await until(lambda: fleet.gone(waiting[1].worker))

    node = cluster.add_node()
    (says,) = await until(lambda: told(tmp_path, waiting[0].worker))
    placed = await fleet.of(waiting[0].worker)
    assert placed is not None and placed.state == InstanceState.UP
    cluster.lose_node(node)
    await until(lambda: fleet.gone(waiting[0].worker))
    await until(lambda: not alive(says["pid"]))

    for one in await fleet.launcher.running():
        await fleet.launcher.stop(one.worker, 5.0)
    await until(lambda: _none(fleet))
    pids = [one["pid"] for number in range(4) for one in told(tmp_path, f"spot-{number}")]
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)


async def _none(fleet: Fleet) -> bool:
    return await fleet.launcher.running() == ()


@in_loop
async def test_a_class_that_no_node_could_hold_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, cluster.address, "math-4")
    assert await fleet.launcher.missing() == []
    section = RayLauncherSection(kind="ray", address=cluster.address, gpus=8.0)
    launcher = RayLauncher(fleet.launcher._class, section, fleet.launcher._site)
    (sentence,) = await launcher.missing()
    assert "'GPU': 8.0" in sentence and cluster.address in sentence


@in_loop
async def test_no_cluster_is_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "127.0.0.1:1", "math-5")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1.*connect"):
        await fleet.launcher.running()


def test_what_is_submitted_is_shown_without_a_secret(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "auto", "math-6")
    (name, text), *_ = fleet.launcher.render(fleet.order("spot-0")).items()
    assert name == "ray/spot.json" and '"namespace": "math-6"' in text and "worker --name spot-0" in text
    assert SECRET not in text


def test_ray_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"antiphon\[ray\]"):
        Fleet(tmp_path, "auto", "math-7")


def test_the_guide_shows_a_configuration(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "fleet-ray.md").read_text()
    (tmp_path / "my.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    (one,) = load_config(tmp_path / "my.yaml", []).provisioning.pool
    assert one.launcher.kind == "ray" and one.launcher.gpus == 1
