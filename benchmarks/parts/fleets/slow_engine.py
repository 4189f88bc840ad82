"""Slow engine: 40 instances whose engine takes up to a minute for each answer and fails now and then.

Ten seconds are one here, also between two looks.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass, ProvisioningSection
from antiphon.core.errors import UnavailableError
from antiphon.core.status import CapacityRecord, RunStatus, WorkerOrder, WorkerRecord, WorkerState
from antiphon.runs.fleet.launcher import Order
from antiphon.runs.fleet.provisioner import Provisioner

SCALE = 10.0
LOOK_S = 2.0 / SCALE
LOOKS = 150
FAILING = 0.1


class SlowEngine:
    """An engine of one class."""

    def __init__(self, rng: random.Random, there: set[str], asked: Counter[str]) -> None:
        self._rng, self._there, self._asked = rng, there, asked

    async def _answer(self) -> None:
        await asyncio.sleep(math.exp(self._rng.uniform(math.log(0.1), math.log(60.0))) / SCALE)
        if self._rng.random() < FAILING:
            raise UnavailableError("it does not answer")

    async def start(self, order: Order) -> Instance:
        if order.worker in self._there:
            self._asked[order.worker] += 1
        await self._answer()
        self._there.add(order.worker)
        return Instance(order.worker, "i", InstanceState.UP)

    async def running(self) -> tuple[Instance, ...]:
        await self._answer()
        return tuple(Instance(name, "i", InstanceState.UP) for name in sorted(self._there))

    async def stop(self, worker: str, grace_s: float) -> None:
        await self._answer()
        self._there.discard(worker)

    async def missing(self) -> list[str]:
        return []

    def render(self, order: Order) -> dict[str, str]:
        return {}


class Notes:
    """Of a coordinator what takes notes and lets workers go."""

    def __init__(self) -> None:
        self.orders: dict[str, WorkerOrder] = {}

    async def drain(self, name: str) -> None:
        """Nothing: the engine stops it after its grace time."""

    async def note_orders(self, orders: Sequence[WorkerOrder]) -> None:
        self.orders |= {order.worker: order for order in orders}


async def late_looks(seed: int) -> tuple[int, int]:
    """Return how many looks came later than 1.5 periods, and how many orders were given to what was there."""
    rng, asked = random.Random(seed), Counter[str]()
    pool = tuple(PoolClass(name=f"c{number}", usd_per_hour=1.0 + number, count=10) for number in range(4))
    section = ProvisioningSection(pool=pool, add_after_s=0.0, hold_s=0.0, join_s=0.0, starts_per_minute=600)
    there: dict[str, set[str]] = {one.name: set() for one in pool}
    engines = {one.name: SlowEngine(rng, there[one.name], asked) for one in pool}
    notes = Notes()
    provisioner = Provisioner(section, engines, lambda n: Order(n, (), Path()), notes, 1.0, 2.0)  # type: ignore[arg-type]
    late, last = 0, time.monotonic()
    for look in range(LOOKS):
        need = 100.0 * (5 + 30 * (look // 30 % 2))  # wanted, and not wanted, again and again
        here = sorted(name for names in there.values() for name in names)
        records = tuple(
            WorkerRecord(f"{n}-1", WorkerState.ACTIVE, 0, 0, 9, 1.0, 0.0, tokens_per_s=100.0) for n in here
        )
        plan = CapacityRecord(need, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, "sampling", 1.0, 1.0, 1, 2)
        orders = tuple(notes.orders.values())
        status = RunStatus(
            "run", 10**6, 5, 6, 6, 0, 0, 0, 0, 0, 0, 0, 0, workers=records, capacity=plan, orders=orders
        )
        await provisioner.look(status, SCALE * time.monotonic())
        await asyncio.sleep(max(0.0, last + LOOK_S - time.monotonic()))
        now = time.monotonic()
        late += now - last > 1.5 * LOOK_S
        last = now
    return late, sum(asked.values())
