"""Provisioning: workers of a pool are ordered and drained, each order once, and taken up after a restart."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.core.capacity.cover import WorkerOffer
from antiphon.core.capacity.provisioning_config import PoolClass, ProvisioningSection
from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError
from antiphon.core.status import CapacityRecord, RunStatus, WorkerRecord, WorkerState
from antiphon.runs.provisioner import LocalLauncher, Provisioner
from antiphon.runs.supervisor import ServiceSpec

POOL = (
    PoolClass(name="cheap", usd_per_hour=1.0, count=3, zone="east"),
    PoolClass(name="dear", usd_per_hour=3.0, count=3, zone="west"),
)
SECTION = ProvisioningSection(pool=POOL, confidence=0.5, add_after_s=10.0, hold_s=100.0, join_s=5.0)
RATE = 100.0


class Site:
    """A launcher whose workers are there at once, and a coordinator that lets them go when told."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.starts: list[str] = []
        self.stops: list[str] = []
        self.told: list[str] = []
        self.need = 150.0
        self.provisioner = Provisioner(SECTION, self, self.told.append, grace_s=20.0)  # type: ignore[arg-type]

    def offers(self) -> list[WorkerOffer]:
        return [WorkerOffer(n, one.usd_per_hour, 1.0, 1.0, one.zone) for one in POOL for n in one.workers]

    def running(self) -> set[str]:
        return set(self.here)

    def start(self, name: str) -> None:
        self.starts.append(name)
        self.here.add(name)

    def stop(self, name: str) -> None:
        self.stops.append(name)
        self.here.discard(name)

    def look(self, now: float, measured: bool = True, gone: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.provisioner.look(status(self.here - gone, self.need if measured else None), now)


def status(workers: set[str], need: float | None) -> RunStatus:
    plan = CapacityRecord(need or 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, "sampling", 1.0, 1.0, 1, 2)
    records = tuple(
        WorkerRecord(f"{name}-1", WorkerState.ACTIVE, 0, 0, 1000, 0.5, 0.0, tokens_per_s=RATE / 2.0)
        for name in sorted(workers)
    )
    return RunStatus(
        "run", 10_000, 5, 6, 6, 0, 0, 0, 0, 0, 0, 0, 0, workers=records, capacity=plan if need else None
    )


def test_one_worker_measures_and_the_cheapest_that_are_enough_follow() -> None:
    site = Site()
    site.look(0.0, measured=False)
    site.look(1.0, measured=False)
    assert site.starts == ["cheap-0"]
    site.need = 380.0
    site.look(2.0)
    site.look(11.0)
    assert site.starts == ["cheap-0"], "a shortage must last"
    site.look(12.0)
    assert site.starts == ["cheap-0", "cheap-1", "cheap-2", "dear-0"]


def test_what_is_not_needed_is_drained_by_the_coordinator_and_then_stopped() -> None:
    site = Site()
    site.here = {"cheap-0", "cheap-1", "dear-0"}
    for now in (0.0, 99.0):
        site.look(now)
    assert not site.told
    site.look(100.0)
    assert site.told == ["dear-0"] and not site.stops, "it hands over first"
    site.look(101.0)
    assert site.told == ["dear-0", "dear-0"], "a coordinator that forgot is told again"
    site.look(102.0, gone={"dear-0"})
    assert site.stops == ["dear-0"] and not site.starts


def test_a_worker_that_does_not_leave_is_stopped_after_its_grace() -> None:
    site = Site()
    site.here = {"cheap-0", "cheap-1", "dear-0"}
    for now in (0.0, 100.0, 119.0):
        site.look(now)
    assert not site.stops
    site.look(120.0)
    assert site.stops == ["dear-0"]


def test_workers_that_came_by_themselves_count_and_are_left_alone() -> None:
    site = Site()
    site.here = {"worker-0", "worker-1", "cheap-0"}
    site.look(0.0)
    site.look(100.0)
    assert site.told == ["cheap-0"]
    site.look(101.0, gone={"cheap-0"})
    site.look(300.0)
    assert site.told == ["cheap-0"] and not site.starts


def test_a_worker_that_reports_nonsense_counts_as_its_class_and_stops_nothing() -> None:
    site = Site()
    site.here, site.need = {"cheap-0", "cheap-1"}, 280.0
    for now in (0.0, 10.0):
        told = status(site.here, site.need)
        liar = dataclasses.replace(told.workers[1], tokens_per_s=math.inf)
        site.provisioner.look(dataclasses.replace(told, workers=(told.workers[0], liar)), now)
    assert site.starts == ["cheap-2"]


def test_a_finished_or_paused_run_orders_nothing() -> None:
    site = Site()
    for fields in ({"finished": True}, {"paused_reason": "an operator said so"}):
        told = dataclasses.replace(status({"cheap-0"}, 900.0), **fields)  # type: ignore[arg-type]
        for now in (0.0, 100.0):
            site.provisioner.look(told, now)
    assert not site.starts and not site.told


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


def test_orders_are_named_repeated_without_effect_and_taken_up_again(tmp_path: Path) -> None:
    spec: Callable[[str], ServiceSpec] = lambda name: ServiceSpec(name, ("worker",), needed=False)  # noqa: E731
    first, again = Processes(), Processes()
    launcher = LocalLauncher(POOL, first, spec, tmp_path / "ordered.json")  # type: ignore[arg-type]
    for name in ("cheap-0", "dear-1", "cheap-0"):
        launcher.start(name)
    launcher.stop("dear-1")
    launcher.stop("dear-1")
    assert first.started == ["cheap-0", "dear-1"] and launcher.running() == {"cheap-0"}
    adopted = LocalLauncher(POOL, again, spec, tmp_path / "ordered.json")  # type: ignore[arg-type]
    assert again.started == ["cheap-0"] and adopted.running() == {"cheap-0"}


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
