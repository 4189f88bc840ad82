"""Spot trace: how many machines a market gave, replayed within minutes on the hosts of a fleet.

What the pool's activator decided is compared with production's own decisions in virtual time, which see the
same machines and the same workers come and go.
"""

import asyncio
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import ProvisioningSection
from antiphon.core.errors import UnavailableError
from antiphon.core.status import OrderState, RunStatus, WorkerOrder
from antiphon.runs.fleet.launcher import Order
from antiphon.runs.fleet.provisioner import LOOK_S, Provisioner

HOURS = 2.0
"""Of the trace, from its beginning."""
TRACE_S = 180.0
"""What they are replayed in."""
MACHINES = 6
POOL = "pool"
LATE_S = 8.0
"""Longest time between a decision and the simulated one: looks, and a list that a real engine takes for."""
ANSWERING = 5
"""Passes of the event loop in which a modelled engine answers."""
HEARTBEAT_S = 2.0


class Machines(Protocol):
    """Machines that can be taken away without notice, and given back."""

    def reclaim(self, number: int) -> None: ...

    def restore(self, number: int) -> None: ...


def read_supply(path: Path) -> list[tuple[float, int]]:
    """Return when (seconds of the replay) how many of MACHINES are there, by a file of the Bamboo traces."""
    with gzip.open(path, "rt") as file:
        events = next(row["events"] for row in map(json.loads, file) if row["unit"] == "ms")
    counts, there = list[tuple[float, int]](), 0
    for at_ms, what, _ in events:
        there += 1 if what == "add" else -1
        counts.append((at_ms / 3.6e6, there))
    most, found = max(there for _, there in counts), list[tuple[float, int]]()
    for hour, count in counts:
        share = round(MACHINES * count / most)
        if hour <= HOURS and (not found or share != found[-1][1]):
            found.append((hour / HOURS * TRACE_S, share))
    at_once = [one for one in found if one[0] == 0.0]
    return [at_once[-1], *found[len(at_once) :]]


@dataclass(frozen=True, slots=True)
class Change:
    """A machine that came, or was taken."""

    at_s: float
    machine: int
    here: bool
    worker: str = ""
    """Whom it took away."""


def changes_of(supply: Sequence[tuple[float, int]]) -> list[Change]:
    """Return the machines' changes: the one that came last is taken first."""
    found, there = list[Change](), MACHINES
    for at_s, count in supply:
        found += [Change(at_s, number, here=False) for number in reversed(range(count, there))]
        found += [Change(at_s, number, here=True) for number in range(there, count)]
        there = count
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened in a replay; times are seconds since the trace began, negative before."""

    changes: list[Change]
    """As they were made."""
    statuses: list[tuple[float, RunStatus]]
    asked: list[tuple[float, str]]
    """Decisions: when which worker was ordered."""


class _ModelledEngine:
    """An engine with what was seen of the machines; where it `waits`, orders queue for a free machine."""

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self.here = set(range(MACHINES))
        self.there: set[str] = set()
        self.queued: set[str] = set()

    def take(self, change: Change) -> None:
        """Let a machine come or go, and what waits for a place have one."""
        if change.here:
            self.here.add(change.machine)
        else:
            self.here.discard(change.machine)
            self.there.discard(change.worker)
        for worker in sorted(self.queued)[: max(0, len(self.here) - len(self.there))]:
            self.queued.discard(worker)
            self.there.add(worker)

    async def start(self, order: Order) -> Instance:
        if self._waits:
            free = len(self.here) > len(self.there)
            (self.there if free else self.queued).add(order.worker)
            return self._instance(order.worker)
        if order.ordinal not in self.here:
            raise UnavailableError("connection refused")
        self.there.add(order.worker)
        return self._instance(order.worker)

    async def running(self) -> tuple[Instance, ...]:
        found = [self._instance(one) for one in sorted(self.there | self.queued)]
        if not self._waits:
            absent = set(range(MACHINES)) - self.here
            found += [Instance(f"{POOL}-{n}", "", InstanceState.UNKNOWN) for n in sorted(absent)]
        return tuple(found)

    async def stop(self, worker: str, grace_s: float) -> None:
        if not self._waits and int(worker.rpartition("-")[2]) not in self.here:
            raise UnavailableError("connection refused")
        self.there.discard(worker)
        self.queued.discard(worker)

    async def missing(self) -> list[str]:
        return []

    def render(self, order: Order) -> dict[str, str]:
        return {}

    def _instance(self, worker: str) -> Instance:
        state = InstanceState.PENDING if worker in self.queued else InstanceState.UP
        return Instance(worker, "i", state)


class _Notes:
    def __init__(self) -> None:
        self.orders: dict[str, WorkerOrder] = {}
        self.now = 0.0
        self.asked: list[tuple[float, str]] = []

    async def drain(self, name: str) -> None:
        """Nothing: its engine stops it after its grace time."""

    async def note_orders(self, orders: Sequence[WorkerOrder]) -> None:
        self.orders |= {order.worker: order for order in orders}
        self.asked += [(self.now, one.worker) for one in orders if one.state is OrderState.ASKED]


async def simulate(
    section: ProvisioningSection, seen: Seen, waits: bool, grace_s: float
) -> list[tuple[float, str]]:
    """Return the orders that production's provisioner gives in virtual time for what was seen.

    Args:
        section: the pool.
        seen: what happened to machines and workers.
        waits: the engine keeps an order that no machine has room for, as Ray does.
        grace_s: what a worker gets to leave.
    """
    engine, notes = _ModelledEngine(waits), _Notes()
    provisioner = Provisioner(
        section,
        {POOL: engine},
        lambda name: Order(name, (), Path()),
        notes,  # type: ignore[arg-type]
        grace_s,
        HEARTBEAT_S,
    )
    changes, statuses = list(seen.changes), list(seen.statuses)
    notes.now, status = statuses[0]
    while notes.now < seen.statuses[-1][0]:
        while changes and changes[0].at_s <= notes.now:
            engine.take(changes.pop(0))
        while statuses and statuses[0][0] <= notes.now:
            _, status = statuses.pop(0)
        await provisioner.look(replace(status, orders=tuple(notes.orders.values())), notes.now)
        for _ in range(ANSWERING):
            await asyncio.sleep(0)
        notes.now += LOOK_S
    return notes.asked


def differences(seen: Sequence[tuple[float, str]], simulated: Sequence[tuple[float, str]]) -> list[str]:
    """Return in words where two lists of decisions differ: other workers, or the same at other times."""
    found = []
    for name in sorted({name for _, name in [*seen, *simulated]}):
        real, modelled = ([at_s for at_s, one in told if one == name] for told in (seen, simulated))
        alike = len(real) == len(modelled) and all(
            abs(a - b) <= LATE_S for a, b in zip(real, modelled, strict=True)
        )
        if not alike:
            found.append(
                f"{name}: {[round(t, 1) for t in real]}, simulated {[round(t, 1) for t in modelled]}"
            )
    return found
