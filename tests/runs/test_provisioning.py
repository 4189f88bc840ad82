"""Provisioning: workers of a pool are ordered and drained, each order once, and taken up after a restart."""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from antiphon.core.capacity.activation import Orders
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass, ProvisioningSection
from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.core.status import (
    CapacityRecord,
    OrderState,
    RunStatus,
    WorkerOrder,
    WorkerRecord,
    WorkerState,
)
from antiphon.runs.fleet.launcher import Order, check_bundles
from antiphon.runs.fleet.local import LocalLauncher
from antiphon.runs.fleet.provisioner import Provisioner
from antiphon.runs.supervisor import ServiceSpec

POOL = (
    PoolClass(name="cheap", usd_per_hour=1.0, count=3, zone="east"),
    PoolClass(name="dear", usd_per_hour=3.0, count=3, zone="west"),
)
SECTION = ProvisioningSection(pool=POOL, confidence=0.5, add_after_s=10.0, hold_s=100.0, join_s=5.0)
RATE = 100.0


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Make a test that needs an event loop one that brings its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Engine:
    """An engine whose workers are there at once, unless it fails or waits."""

    def __init__(self, site: "Site") -> None:
        self.site = site
        self.fails = ""
        self.answers = asyncio.Event()
        self.answers.set()

    async def start(self, order: Order) -> Instance:
        self.site.starts.append(order.worker)
        await self.answers.wait()
        if self.fails:
            raise UnavailableError(self.fails)
        self.site.here.add(order.worker)
        return Instance(order.worker, "i", InstanceState.UP)

    async def running(self) -> tuple[Instance, ...]:
        await self.answers.wait()
        return tuple(Instance(name, "i", InstanceState.UP) for name in sorted(self.site.here))

    async def stop(self, worker: str, grace_s: float) -> None:
        self.site.stops.append(worker)
        self.site.here.discard(worker)

    async def missing(self) -> list[str]:
        return []

    def render(self, order: Order) -> dict[str, str]:
        return {}


class Site:
    """An engine, and a coordinator that lets workers go when told and keeps what is noted."""

    def __init__(self, section: ProvisioningSection = SECTION, noted: Sequence[WorkerOrder] = ()) -> None:
        self.section = section
        self.here: set[str] = set()
        self.starts: list[str] = []
        self.stops: list[str] = []
        self.told: list[str] = []
        self.noted = {order.worker: order for order in noted}
        self.need, self.spent = 150.0, 0.0
        self.engine = Engine(self)
        self.provisioner = self.another()

    def another(self) -> Provisioner:
        engines = {one.name: self.engine for one in POOL}
        order: Callable[[str], Order] = lambda name: Order(name, (), Path())  # noqa: E731
        return Provisioner(self.section, engines, order, self, 20.0, 2.0)  # type: ignore[arg-type]

    async def drain(self, name: str) -> None:
        self.told.append(name)

    async def note_orders(self, orders: Sequence[WorkerOrder]) -> None:
        self.noted |= {order.worker: order for order in orders}

    async def look(
        self, now: float, measured: bool = True, gone: Sequence[str] = (), **fields: object
    ) -> Orders:
        """Take a look at what is here but for those `gone`, and let engines answer."""
        told = dataclasses.replace(
            status(self.here - set(gone), self.need if measured else None),
            orders=tuple(self.noted.values()),
            dollars_by_class={"cheap": self.spent},
            **fields,  # type: ignore[arg-type]
        )
        orders = await self.provisioner.look(told, now)
        for _ in range(5):
            await asyncio.sleep(0)
        return orders


def ordered(*names: str) -> list[WorkerOrder]:
    return [WorkerOrder(name, OrderState.UP, "i") for name in names]


def status(workers: set[str], need: float | None) -> RunStatus:
    plan = CapacityRecord(need or 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, "sampling", 1.0, 1.0, 1, 2)
    records = tuple(
        WorkerRecord(f"{name}-1", WorkerState.ACTIVE, 0, 0, 1000, 0.5, 0.0, tokens_per_s=RATE / 2.0)
        for name in sorted(workers)
    )
    return RunStatus(
        "run", 10_000, 5, 6, 6, 0, 0, 0, 0, 0, 0, 0, 0, workers=records, capacity=plan if need else None
    )


@on_a_loop
async def test_one_worker_measures_and_the_cheapest_that_are_enough_follow() -> None:
    site = Site()
    await site.look(0.0, measured=False)
    await site.look(1.0, measured=False)
    assert site.starts == ["cheap-0"]
    site.need = 380.0
    await site.look(2.0)
    await site.look(11.0)
    assert site.starts == ["cheap-0"], "a shortage must last"
    await site.look(12.0)
    assert site.starts == ["cheap-0", "cheap-1", "cheap-2", "dear-0"]


@on_a_loop
async def test_what_is_not_needed_is_drained_by_the_coordinator_and_then_stopped() -> None:
    site = Site(noted=ordered("cheap-0", "cheap-1", "dear-0"))
    site.here = {"cheap-0", "cheap-1", "dear-0"}
    for now in (0.0, 99.0):
        await site.look(now)
    assert not site.told
    await site.look(100.0)
    assert site.told == ["dear-0"] and not site.stops, "it hands over first"
    await site.look(101.0)
    assert site.told == ["dear-0", "dear-0"], "a coordinator that forgot is told again"
    await site.look(102.0, gone=["dear-0"])
    assert site.stops == ["dear-0"] and not site.starts


@on_a_loop
async def test_a_worker_that_does_not_leave_is_stopped_after_its_grace() -> None:
    site = Site(noted=ordered("cheap-0", "cheap-1", "dear-0"))
    site.here = {"cheap-0", "cheap-1", "dear-0"}
    for now in (0.0, 100.0, 119.0):
        await site.look(now)
    assert not site.stops
    await site.look(120.0)
    assert site.stops == ["dear-0"]
    await site.look(121.0)
    await site.look(122.0)
    assert site.noted["dear-0"].state is OrderState.GONE


@on_a_loop
async def test_workers_that_came_by_themselves_count_and_are_left_alone() -> None:
    site = Site(noted=ordered("cheap-0"))
    site.here = {"worker-0", "worker-1", "cheap-0"}
    await site.look(0.0)
    await site.look(100.0)
    assert site.told == ["cheap-0"]
    await site.look(101.0, gone=["cheap-0"])
    await site.look(300.0)
    assert site.told == ["cheap-0"] and not site.starts


@on_a_loop
async def test_a_worker_that_reports_nonsense_counts_as_its_class_and_stops_nothing() -> None:
    site = Site(noted=ordered("cheap-0", "cheap-1"))
    site.here, site.need = {"cheap-0", "cheap-1"}, 280.0
    for now in (0.0, 10.0):
        told = status(site.here, site.need)
        liar = dataclasses.replace(told.workers[1], tokens_per_s=math.inf)
        await site.look(now, workers=(told.workers[0], liar))
    assert site.starts == ["cheap-2"]


@on_a_loop
async def test_a_finished_or_paused_run_orders_nothing() -> None:
    site = Site(noted=ordered("cheap-0"))
    site.here, site.need = {"cheap-0"}, 900.0
    for fields in ({"finished": True}, {"paused_reason": "an operator said so"}):
        for now in (0.0, 100.0):
            await site.look(now, **fields)  # type: ignore[arg-type]
    assert not site.starts and not site.told


@on_a_loop
async def test_a_look_does_not_wait_for_an_engine_and_an_order_is_noted_before_it_hears_of_it() -> None:
    site = Site()
    site.engine.answers.clear()
    await site.look(0.0, measured=False)
    assert site.starts == ["cheap-0"] and site.noted["cheap-0"].state is OrderState.ASKED
    for now in (2.0, 4.0):
        await site.look(now, measured=False)
    assert site.starts == ["cheap-0"], "it is under way"
    site.engine.answers.set()
    await site.look(6.0, measured=False)
    await site.look(8.0, measured=False)
    assert site.noted["cheap-0"].state is OrderState.UP and site.starts == ["cheap-0"]


@on_a_loop
async def test_what_a_coordinator_could_not_note_no_engine_hears_of() -> None:
    site = Site()

    async def away(orders: Sequence[WorkerOrder]) -> None:
        raise UnavailableError("the coordinator is away")

    note, site.note_orders = site.note_orders, away  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await site.look(0.0, measured=False)
    assert not site.starts
    site.note_orders = note  # type: ignore[method-assign]
    await site.look(2.0, measured=False)
    assert site.starts == ["cheap-0"]


@on_a_loop
async def test_a_class_whose_starts_fail_is_out_of_order_for_a_while() -> None:
    site = Site()
    site.engine.fails = "quota of 0 GPUs"
    for now in (0.0, 1.0, 2.0, 3.0, 4.0):
        await site.look(now, measured=False)
    assert site.starts == ["cheap-0", "cheap-1", "dear-0", "dear-1"], (
        "after two failures another class is tried"
    )
    assert site.stops == site.starts, "what failed may have started something"
    assert site.noted["cheap-0"].reason == "quota of 0 GPUs"
    await site.look(16.5, measured=False)
    assert len(site.starts) == 4
    await site.look(17.5, measured=False)
    assert site.starts[4:] == ["cheap-0"]


@on_a_loop
async def test_a_run_that_continues_adopts_what_is_there_and_stops_what_nobody_ordered() -> None:
    site = Site()
    site.need = 380.0
    for now in (0.0, 1.0):
        await site.look(now, measured=False)
    for now in (2.0, 12.0, 14.0):
        await site.look(now)
    assert (before := sorted(site.here)) == ["cheap-0", "cheap-1", "cheap-2", "dear-0"]
    starts = list(site.starts)
    site.provisioner = site.another()  # the process was killed
    site.here |= {"dear-2"}
    site.here -= {"cheap-1"}
    for now in (100.0, 102.0, 104.0):
        await site.look(now, gone=["dear-2"])
    assert site.stops == ["dear-2"] and site.starts == starts
    assert site.noted["cheap-1"].state is OrderState.GONE and site.noted["cheap-0"].state is OrderState.UP
    await site.look(114.0)
    assert site.starts == [*starts, "cheap-1"], "a loss is made good"
    assert sorted(site.here) == before


@on_a_loop
async def test_the_budget_stops_all_before_it_is_passed() -> None:
    section = SECTION.model_copy(update={"budget_usd": 2.0})
    site = Site(section, noted=ordered("cheap-0", "cheap-1"))
    site.here, site.need, site.spent = {"cheap-0", "cheap-1"}, 900.0, 1.6
    for now in (0.0, 10.0):
        await site.look(now)
    # Three at a dollar an hour and two at three: 140 s of each to be stopped in, and 5 to join in.
    assert site.starts == ["cheap-2", "dear-0", "dear-1"], "more could not be stopped in time"
    site.spent = 2.0 - 9.0 * 140.0 / 3600.0
    await site.look(12.0)
    assert not site.stops
    site.spent = 1.9
    await site.look(14.0)
    assert sorted(site.stops) == ["cheap-0", "cheap-1", "cheap-2", "dear-0", "dear-1"]


@on_a_loop
async def test_at_the_end_nothing_is_left_that_would_outlive_the_run() -> None:
    site = Site(noted=ordered("cheap-0"))
    site.here = {"cheap-0", "dear-1"}
    await site.look(0.0)
    clock = asyncio.get_running_loop().time
    assert await site.provisioner.end(clock, 10.0) == []
    assert not site.here and site.noted["cheap-0"].state is OrderState.GONE


class Processes:
    """A supervisor's part that launchers use."""

    def __init__(self) -> None:
        self.kept: dict[str, ServiceSpec] = {}
        self.started: list[str] = []

    def start(self, spec: ServiceSpec) -> None:
        self.started.append(spec.name)
        self.kept[spec.name] = spec

    def keeps(self, name: str) -> bool:
        return name in self.kept

    def dismiss(self, name: str) -> None:
        del self.kept[name]


@on_a_loop
async def test_processes_of_this_machine_are_named_and_started_again_by_a_run_that_continues() -> None:
    spec: Callable[[str], ServiceSpec] = lambda name: ServiceSpec(name, ("worker",), needed=False)  # noqa: E731
    site, here = Site(), Processes()
    launchers = {one.name: LocalLauncher(one, here, spec) for one in POOL}  # type: ignore[arg-type]
    order: Callable[[str], Order] = lambda name: Order(name, (), Path())  # noqa: E731
    for name in ("cheap-0", "cheap-1", "cheap-0"):
        await launchers["cheap"].start(order(name))
    assert here.started == ["cheap-0", "cheap-1"]
    for _ in range(2):
        await launchers["cheap"].stop("cheap-1", 1.0)
    assert [one.worker for one in await launchers["cheap"].running()] == ["cheap-0"]
    here.kept.clear()
    site.noted = {one.worker: one for one in ordered("cheap-0")}
    site.provisioner = Provisioner(SECTION, launchers, order, site, 20.0, 2.0)  # type: ignore[arg-type]
    await site.look(0.0)
    assert here.started == ["cheap-0", "cheap-1", "cheap-0"]


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        ([{"name": "a", "usd_per_hour": -1}], "at least 0"),
        ([{"name": "a", "usd_per_hour": 1}, {"name": "a", "usd_per_hour": 2}], "a twice"),
        ([{"name": "worker", "usd_per_hour": 1}], "rename it"),
        ([{"name": "a"}], "usd_per_hour"),
    ],
)
def test_a_wrong_pool_is_refused_with_a_sentence(pool: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config({"provisioning": {"pool": pool}})


def test_a_worker_is_of_the_class_that_has_its_name() -> None:
    for one in POOL:
        assert [SECTION.class_of(name) for name in one.workers] == [one] * one.count
    for name in ("cheap-3", "cheap-00", "cheap--1", "cheap-", "cheap", "worker-0", "cheap-\u0661", ""):
        assert SECTION.class_of(name) is None


def test_workers_elsewhere_that_could_not_join_are_named_before_anything_starts(tmp_path: Path) -> None:
    launcher = {"kind": "ssh", "hosts": ["far.example"]}
    pool = [{"name": "far", "usd_per_hour": 1.0, "count": 2, "launcher": launcher}]
    services: dict[str, object] = {}
    plain = {"provisioning": {"pool": pool}, "services": services}
    check_bundles(build_config({}))
    with pytest.raises(ConfigError, match=r"services\.coordinator_port=0 .*give a port"):
        check_bundles(build_config(plain))
    services["coordinator_port"] = 7000
    with pytest.raises(ConfigError, match=r"services\.credentials=null does not make"):
        check_bundles(build_config(plain))
    services["credentials"] = str(tmp_path / "services")
    bundle = tmp_path / "workers" / "far-0"
    bundle.mkdir(parents=True)
    (bundle / "token").touch()
    with pytest.raises(ConfigError, match=r"far-1 has no bundle .*`antiphon invite --pool far --count N"):
        check_bundles(build_config(plain))
