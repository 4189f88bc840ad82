"""Order book: how the orders of the pool's workers stand, and what their engines are to be asked next.

An order is a worker's name. It is noted before its engine hears of it, so that a process that continues the
run knows what may be there; asking an engine again changes nothing. Each state that an answer ends has a
deadline, after which the worker is stopped and its class is out of order for a while.

| state | leaves it |
|---|---|
| asked | when the engine has answered; one that fails is stopped too, since it may have started something |
| pending | when it is up, or was in the queue for too long |
| up | when it is no longer wanted, its worker did not join in time, or the engine no longer lists it |
| stopping | when the engine no longer lists it; asked again after each grace time |
| gone | when it is ordered again |

Nothing here waits: engines are asked elsewhere, and what they say is told here with the time it was asked at.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from antiphon.core.capacity.provisioning_config import PoolClass, ProvisioningSection
from antiphon.core.status import OrderState, WorkerOrder

FIRST_PAUSE_S = 15.0
"""How long a worker is out of order after a failed start, and its class after two; it doubles with each
further one in a row."""
MOST_PAUSE_S = 1800.0
AGAIN_S = 30.0
"""Beyond its grace time, when an engine is asked again to stop a worker that is still there."""
FAILED_STOP_S = 5.0
"""The same after an engine that could not do it."""
SILENT = 2.0
"""Heartbeats that a worker missed when its engine is asked whether it is still there."""
SPARE_S = 120.0
"""For how long a worker may cost beyond its grace time: an engine that takes a minute for each answer, and
fails once. What took longer before counts instead."""


class InstanceState(StrEnum):
    """What an engine says of an instance."""

    PENDING = "pending"
    """Asked for and not there yet: it waits in a queue and costs nothing."""
    UP = "up"
    """It runs and costs."""
    STOPPING = "stopping"
    """It was asked to stop and still costs."""
    UNKNOWN = "unknown"
    """Its machine does not answer, which says nothing of it."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One worker as its engine knows it."""

    worker: str
    """Its name in the run."""
    name: str
    """What the engine calls it: a process, job or actor."""
    state: InstanceState
    reason: str = ""
    """Why it is in that state, in the engine's own words."""
    up_s: float = 0.0
    """Seconds for which it has been up, as far as the engine knows."""


class Verb(StrEnum):
    """What an engine is asked to do."""

    START = "start"
    STOP = "stop"


@dataclass(slots=True)
class _Held:
    """An order, and what memory knows of it."""

    order: WorkerOrder
    until_s: float
    """Deadline of its state."""
    changed_s: float
    """When its state changed; a listing that was asked for before says nothing of it."""
    asked: bool = False
    """Its engine was asked for this state, by this process."""
    up_since_s: float = 0.0
    seen_s: float = 0.0
    """When the newest list was asked for that has it."""
    heard_s: float = 0.0
    """When its worker's newest heartbeat came."""
    lost: bool = False
    """Its worker takes part no more, and its machine does not answer."""
    here: bool = False
    """Its worker takes part in the run."""
    joined: bool = False
    """Its worker has registered since it is up; what an earlier process started is believed to have."""


@dataclass(slots=True)
class _Standing:
    """How starts of a worker, or of a class, went."""

    failures: int = 0
    """In a row."""
    until_s: float = -math.inf
    """Until when it is out of order."""
    reason: str = ""

    def fail(self, reason: str, now: float, allowed: int = 0) -> None:
        """Be out of order for a while, the longer the more often; `allowed` failures are overlooked."""
        self.failures += 1
        if (counted := self.failures - allowed) > 0:
            pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(counted - 1, 16))
            self.until_s, self.reason = now + pause_s, reason


class OrderBook:
    """The orders of one run; times are on the clock of the caller that passes `now`."""

    def __init__(
        self,
        section: ProvisioningSection,
        grace_s: float,
        price: Callable[[PoolClass], float],
        heartbeat_s: float = math.inf,
    ) -> None:
        """Begin without an order.

        Args:
            section: the pool and its limits.
            grace_s: what a worker that is asked to leave has for it, seconds.
            price: what a worker of a class costs now, US dollars per hour.
            heartbeat_s: seconds between a worker's heartbeats.
        """
        self._section, self._grace_s, self._price = section, grace_s, price
        self._heartbeat_s = heartbeat_s
        self._held: dict[str, _Held] = {}
        self._standings: defaultdict[str, _Standing] = defaultdict(_Standing)
        """By the names of workers and of classes."""
        self._starts: deque[float] = deque()
        self._noted: dict[str, WorkerOrder] = {}
        self._ending_s = SPARE_S
        self._owed: set[tuple[Verb, str]] = set()
        """Answers that engines still owe: no worker is gone, and can be ordered again, before its own."""
        self._ended: list[WorkerOrder] = []
        """Orders that ended and are not noted yet, since they may be given again before that."""

    def resume(self, orders: Iterable[WorkerOrder], now: float, ended: Collection[str] = ()) -> None:
        """Take up what an earlier process had noted.

        Args:
            orders: from the journal.
            now: each state has its whole time again.
            ended: classes whose instances ended with that process: they are started again.
        """
        for order in orders:
            one = self._section.class_of(order.worker)
            if one is None:
                continue
            self._noted[order.worker] = order
            state = order.state
            if one.name in ended and state is not OrderState.GONE:
                state = OrderState.GONE if state is OrderState.STOPPING else OrderState.ASKED
            self._held[order.worker] = held = _Held(order, math.inf, now)
            if state is not order.state:
                self._become(held, state, now, "the run continues")
            held.until_s, held.joined = now + self._time_of(state), state is OrderState.UP

    def active(self, now: float) -> set[str]:
        """Return the workers that count as ordered: what waits in a queue only for `join_s`."""
        waited_s = self._section.join_s
        return {
            name
            for name, held in self._held.items()
            if (held.order.state in (OrderState.ASKED, OrderState.UP) and not held.lost)
            or (held.order.state is OrderState.PENDING and now - held.changed_s < waited_s)
        }

    def can_be_had(self, worker: str, now: float) -> bool:
        """Return whether a worker is there or could be ordered now."""
        held = self._held.get(worker)
        if held is not None and held.order.state in (OrderState.ASKED, OrderState.UP):
            return not held.lost
        free = held is None or held.order.state is OrderState.GONE
        names = worker, worker.rpartition("-")[0]
        return free and all(self._standings[name].until_s <= now for name in names)

    def within_budget(self, spent_usd: float, another: PoolClass | None = None) -> bool:
        """Return whether all that costs can still be stopped in time, or one more could join and be.

        `spent_usd` is what the pool's workers have cost so far.
        """
        if self._section.budget_usd is None:
            return True
        held = (h.order.worker for h in self._held.values() if h.order.state is not OrderState.GONE)
        classes = [one for name in held if (one := self._section.class_of(name)) is not None]
        left_s = self._grace_s + self._ending_s
        if another is not None:
            # A start is worth its price only if what is there can sample for a while after it.
            classes, left_s = [*classes, another], left_s + self._section.join_s
        return spent_usd + sum(map(self._price, classes)) * left_s / 3600.0 <= self._section.budget_usd

    def order(self, workers: Iterable[str], spent_usd: float, now: float) -> tuple[str, ...]:
        """Order workers, each unless it is held already or the budget does not reach; return which were."""
        taken = []
        for name in workers:
            one = self._section.class_of(name)
            if one is None or self.state_of(name) is not OrderState.GONE or not self.can_be_had(name, now):
                continue
            if not self.within_budget(spent_usd, one):
                continue
            held = self._held[name] = _Held(WorkerOrder(name, OrderState.GONE), math.inf, now)
            self._become(held, OrderState.ASKED, now, "")
            taken.append(name)
        return tuple(taken)

    def release(self, worker: str, reason: str, now: float) -> None:
        """Have a worker stopped, whatever it does."""
        held = self._held.get(worker)
        if held is not None and held.order.state not in (OrderState.STOPPING, OrderState.GONE):
            self._become(held, OrderState.STOPPING, now, reason)

    def due(self, now: float) -> list[tuple[Verb, str]]:
        """Return what engines are to be asked now; each is asked once, and stops again after each grace."""
        self._expire(now)
        found = []
        while self._starts and now - self._starts[0] >= 60.0:
            self._starts.popleft()
        for name, held in self._held.items():
            if held.asked:
                continue
            if held.order.state is OrderState.STOPPING:
                found.append((Verb.STOP, name))
            elif held.order.state is OrderState.ASKED:
                if len(self._starts) >= self._section.starts_per_minute:
                    continue
                self._starts.append(now)
                found.append((Verb.START, name))
            else:
                continue
            held.asked = True
            self._owed.add(found[-1])
        return found

    def answered(self, instance: Instance, now: float) -> None:
        """Take what an engine answered to a start."""
        self._owed.discard((Verb.START, instance.worker))
        held = self._held.get(instance.worker)
        if held is not None and held.order.state is OrderState.ASKED:
            self._see(held, instance, now)
        elif held is not None and held.order.state is OrderState.STOPPING:
            held.asked = False  # the engine may have stopped nothing, since this was not there yet

    def failed(self, verb: Verb, worker: str, reason: str, now: float) -> None:
        """Note that an engine could not do what it was asked."""
        self._owed.discard((verb, worker))
        held = self._held.get(worker)
        if held is None:
            return
        if verb is Verb.START and held.order.state is OrderState.ASKED:
            self._fail(held, reason, now)
        elif verb is Verb.STOP and held.order.state is OrderState.STOPPING:
            held.order = replace(held.order, reason=reason)
            held.until_s = min(held.until_s, now + FAILED_STOP_S)

    def stopped(self, worker: str) -> None:
        """Note that an engine has answered a stop; that the worker is gone its list will show."""
        self._owed.discard((Verb.STOP, worker))

    def listed(self, of_class: str, instances: Sequence[Instance], asked_s: float, now: float) -> list[str]:
        """Take a whole list of a class's instances, and return those that nobody ordered: they are stopped.

        `asked_s` is when it was asked for: an order that changed since is left as it is.
        """
        there = {one.worker: one for one in instances if one.worker.rpartition("-")[0] == of_class}
        for name, held in self._held.items():
            state = held.order.state
            one = self._section.class_of(name)
            if one is None or one.name != of_class or held.changed_s > asked_s or state is OrderState.GONE:
                continue
            if (instance := there.get(name)) is not None:
                if instance.state is InstanceState.UNKNOWN:
                    held.lost = held.joined and not held.here
                    continue
                held.seen_s, held.lost = asked_s, False
                if state is not OrderState.STOPPING and not (state is OrderState.ASKED and not held.asked):
                    self._see(held, instance, now)
            elif state is OrderState.STOPPING:
                if not self._owed & {(Verb.START, name), (Verb.STOP, name)}:
                    self._ending_s = max(self._ending_s, now - held.changed_s - self._grace_s)
                    self._gone(held, held.order.reason, asked_s, now)
            elif state is not OrderState.ASKED:
                if state is OrderState.UP and not held.joined:
                    self._blame(name, "its instance went before its worker joined", now)
                self._gone(held, "its instance is gone", asked_s, now)
        younger = {name for name, held in self._held.items() if held.changed_s > asked_s}
        known = [n for n, instance in there.items() if instance.state is not InstanceState.UNKNOWN]
        strays = [n for n in known if n not in younger and self.state_of(n) is OrderState.GONE]
        for name in strays:  # none is ordered before it is gone
            held = self._held[name] = _Held(WorkerOrder(name, OrderState.GONE), math.inf, now)
            self._become(held, OrderState.STOPPING, now, "nobody ordered it", there[name].name)
        return strays

    def joined(self, silent_s: Mapping[str, float], now: float) -> None:
        """Note that workers take part in the run, and for how long they were not heard: their classes are in
        order."""
        for name, held in self._held.items():
            heard_s = now - silent_s.get(name, math.inf)
            held.here = heard_s >= held.up_since_s  # else it is of the instance before
            if not held.here or held.order.state is not OrderState.UP:
                continue
            held.lost, held.heard_s = False, heard_s
            if not held.joined:
                self._standings[name] = self._standings[name.rpartition("-")[0]] = _Standing()
            held.joined, held.until_s = True, math.inf

    def refused(self, worker: str, reason: str, now: float) -> None:
        """Note that the run cannot use a worker that is there, so that its class is out of order."""
        held = self._held.get(worker)
        if held is not None and held.order.state not in (OrderState.STOPPING, OrderState.GONE):
            self._fail(held, reason, now)

    def changes(self) -> tuple[WorkerOrder, ...]:
        """Return the orders that changed since they were last noted."""
        now = [held.order for name, held in self._held.items() if self._noted.get(name) != held.order]
        return (*self._ended, *(order for order in now if order not in self._ended))

    def noted(self, orders: Iterable[WorkerOrder]) -> None:
        """Take in that these stand in the journal now."""
        self._noted |= {order.worker: order for order in orders}
        self._ended.clear()

    def state_of(self, worker: str) -> OrderState:
        """Return how an order stands; `gone` for one that never was."""
        held = self._held.get(worker)
        return OrderState.GONE if held is None else held.order.state

    def is_moving(self, of_class: str, now: float) -> bool | None:
        """Return whether an order of a class is about to change, or its worker fell silent; None where no
        order is there at all."""
        mine = [
            held
            for name, held in self._held.items()
            if name.rpartition("-")[0] == of_class and held.order.state is not OrderState.GONE
        ]
        return any(self._moves(held, now) for held in mine) if mine else None

    def _moves(self, held: _Held, now: float) -> bool:
        if held.order.state is OrderState.UP:
            return not held.joined or now - held.heard_s > SILENT * self._heartbeat_s
        return held.order.state is not OrderState.PENDING

    def out_of_order(self, now: float) -> dict[str, str]:
        """Return the workers and classes that cannot be ordered for a while, and why."""
        return {name: one.reason for name, one in self._standings.items() if one.until_s > now}

    def _gone(self, held: _Held, reason: str, asked_s: float, now: float) -> None:
        """Note that nothing is left of an order. Its end is taken to lie between the last two lists, and of a
        worker that nobody asked to leave within a heartbeat of the last one."""
        first_s, last_s = max(held.seen_s, held.up_since_s, held.heard_s), asked_s
        if held.joined and held.order.state is OrderState.UP:
            last_s = min(asked_s, max(first_s, held.heard_s + self._heartbeat_s))
        ended_s = (first_s + last_s) / 2.0
        up_s = max(0.0, ended_s - held.up_since_s) if held.up_since_s else 0.0
        self._become(held, OrderState.GONE, now, reason, up_s=up_s)
        self._ended.append(held.order)
        held.up_since_s = held.seen_s = held.heard_s = 0.0

    def _see(self, held: _Held, instance: Instance, now: float) -> None:
        state = OrderState.PENDING if instance.state is InstanceState.PENDING else OrderState.UP
        changed = held.order.state is not state
        if changed:
            self._become(held, state, now, instance.reason, instance.name, instance.up_s)
        elif state is OrderState.PENDING and held.order.reason != instance.reason:
            held.order = replace(held.order, reason=instance.reason)
        # A continued run has not seen it before; one that was queued again begins a new life.
        if state is OrderState.UP and (changed or not held.up_since_s):
            held.up_since_s = now - instance.up_s

    def _become(
        self, held: _Held, state: OrderState, now: float, reason: str, instance: str = "", up_s: float = 0.0
    ) -> None:
        left_s = self._time_of(state)
        held.order = WorkerOrder(
            held.order.worker,
            state,
            instance or held.order.instance,
            reason,
            up_s,
            left_s if left_s < math.inf else 0.0,
        )
        held.until_s, held.changed_s, held.asked = now + left_s, now, False
        if state is not OrderState.STOPPING:
            held.joined = False

    def _time_of(self, state: OrderState) -> float:
        section = self._section
        return {
            OrderState.ASKED: section.start_timeout_s,
            OrderState.PENDING: section.queue_timeout_s,
            OrderState.UP: section.start_timeout_s,
            OrderState.STOPPING: self._grace_s + AGAIN_S,
            OrderState.GONE: math.inf,
        }[state]

    def _expire(self, now: float) -> None:
        for held in self._held.values():
            if now < held.until_s:
                continue
            match held.order.state:
                case OrderState.ASKED:
                    if held.asked:
                        self._fail(held, "its engine did not answer in time", now)
                case OrderState.PENDING:
                    waited = f"it was in the queue for {self._section.queue_timeout_s:g} s"
                    self._fail(held, f"{waited}: {held.order.reason}" if held.order.reason else waited, now)
                case OrderState.UP:
                    self._fail(held, "its worker did not join in time", now)
                case OrderState.STOPPING:
                    held.asked, held.until_s = False, now + self._time_of(OrderState.STOPPING)

    def _fail(self, held: _Held, reason: str, now: float) -> None:
        self._blame(held.order.worker, reason, now)
        self._become(held, OrderState.STOPPING, now, reason)

    def _blame(self, worker: str, reason: str, now: float) -> None:
        self._standings[worker].fail(reason, now)
        # One machine may be at fault; the next failure in a row is the class's.
        self._standings[worker.rpartition("-")[0]].fail(reason, now, allowed=1)
