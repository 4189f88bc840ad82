"""Provisioner: looks at a run now and then, and has workers of its pool started and drained.

How many are wanted is the activator's decision, how each order stands the order book's. Engines are asked in
tasks of their own: a look takes in what they have answered since, notes in the journal what changed, and only
then has engines asked again, so that no look waits for an engine and a continued run knows of every order.

A worker that is no longer needed hands its groups over first: the coordinator tells it to leave with the
answer to its next heartbeat. Its instance is stopped when it has left, or has not within its grace. Nothing
that fails here ends the run.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.capacity.activation import Activator, Orders
from antiphon.core.capacity.cover import WorkerOffer
from antiphon.core.capacity.order_book import Instance, InstanceState, OrderBook, Verb
from antiphon.core.capacity.provisioning_config import PoolClass, ProvisioningSection
from antiphon.core.errors import AntiphonError
from antiphon.core.status import OrderState, RunStatus, WorkerRecord, WorkerState
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.runs.fleet.launcher import Launcher, Order
from antiphon.runs.fleet.local import LocalLauncher
from antiphon.system.clock import wall_clock

LOOK_S = 2.0
"""Seconds between two looks at the run."""
ENDING_LOOK_S = 0.5
"""The same once the run has ended."""
QUIET_S = 10.0
"""Seconds between two lists of a class none of whose orders is about to change."""
LISTING_S = 60.0
"""Longest wait for an engine's list of instances, and what it has for a stop beyond the grace time."""
UNKNOWN_TOKENS_PER_S = 1.0
"""Stands for a rate that nothing is known of: the decision takes what others give."""
MOST_TOKENS_PER_S = 1e9
"""A worker that says more is not believed, and counts as one of its class."""
_log = structlog.get_logger(__name__)

_Answer = Instance | tuple[Instance, ...] | None


class Provisioner:
    """Decides and orders, on one event loop; times are on the clock of the caller that passes `now`."""

    def __init__(
        self,
        section: ProvisioningSection,
        launchers: Mapping[str, Launcher],
        order: Callable[[str], Order],
        coordinator: Coordinator,
        grace_s: float,
        heartbeat_s: float,
        wall: Callable[[], float] = wall_clock,
    ) -> None:
        """Provision with a launcher for each class.

        Args:
            section: the pool and when it is changed.
            launchers: by the name of the class.
            order: what is asked of an engine for the worker of a name.
            coordinator: takes notes of orders, and lets workers leave.
            grace_s: seconds that a worker gets for that.
            heartbeat_s: seconds between its heartbeats.
            wall: the wall clock, Unix seconds: prices follow it.
        """
        self._section, self._launchers, self._order = section, launchers, order
        self._coordinator, self._grace_s, self._wall = coordinator, grace_s, wall
        self._activator = Activator(section.redundancy, section.add_after_s, section.hold_s)
        self._book = OrderBook(section, grace_s, lambda one: one.usd_at(wall()), heartbeat_s)
        self._draining: dict[str, float] = {}
        self._asking: dict[tuple[str, str], tuple[asyncio.Task[tuple[_Answer, float]], float]] = {}
        """What engines are asked now: (verb, worker) or ("list", class) -> the task, and since when."""
        self._listed_s: dict[str, float] = {}
        """Class -> when its engine was last asked for a list."""
        self._resumed = self._ending = False
        self._told: dict[str, str] = {}
        """What was last said of each class that is out of order, or does not answer."""

    async def look(self, status: RunStatus, now: float) -> Orders:
        """Take in a look at the run, give the orders that follow from it, and return them.

        Raises:
            UnavailableError: when the coordinator does not answer; no engine is asked then.
        """
        here = {
            name_of_worker(worker.worker_id): worker
            for worker in status.workers
            if worker.state is not WorkerState.LOST
        }
        self._take_in(status, here, now)
        await self._end_drained(here, now)
        orders = Orders()
        if not (self._ending or status.finished or status.paused_reason):
            orders = await self._change(status, here, now)
        await self._note_and_ask(now)
        return orders

    async def end(self, now: Callable[[], float], limit_s: float) -> list[str]:
        """Have every instance stopped that would outlive the run, and return those still there at `limit_s`.

        `now` is the clock of the looks, which order nothing any more. A coordinator that is gone by then
        learns of it when the run continues.
        """
        self._ending = True
        until_s = now() + limit_s
        while True:
            self._harvest(now())
            left = [name for name in self._outliving() if self._book.state_of(name) is not OrderState.GONE]
            for name in left:
                self._book.release(name, "the run has ended", now())
            if not left or now() >= until_s:
                break
            try:
                await self._note_and_ask(now())
            except AntiphonError as error:
                _log.warning("workers.unnoted", reason=str(error))
                self._ask(now())
            await asyncio.sleep(ENDING_LOOK_S)
        asked = [task for task, _ in self._asking.values()]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        try:
            await self._note()
        except AntiphonError as error:
            _log.warning("workers.unnoted", reason=str(error))
        return left

    def _outliving(self) -> list[str]:
        return [name for one in self._section.pool if not self._is_local(one) for name in one.workers]

    def _is_local(self, one: PoolClass) -> bool:
        return isinstance(self._launchers[one.name], LocalLauncher)

    def _take_in(self, status: RunStatus, here: Mapping[str, WorkerRecord], now: float) -> None:
        if not self._resumed:
            local = {one.name for one in self._section.pool if self._is_local(one)}
            self._book.resume(status.orders, now, ended=local)
            self._resumed = True
        self._harvest(now)
        for order in status.orders:  # the coordinator turns away what the run cannot use
            if order.state is OrderState.STOPPING:
                self._book.refused(order.worker, order.reason, now)
        self._book.joined({name: one.seconds_since_heartbeat for name, one in here.items()}, now)
        told = self._book.out_of_order(now)
        for name, reason in told.items():
            if self._told.get(name) != reason:
                _log.warning("workers.out_of_order", workers=name, reason=reason)
        self._told = told

    async def _change(self, status: RunStatus, here: Mapping[str, WorkerRecord], now: float) -> Orders:
        book, pool = self._book, {name for one in self._section.pool for name in one.workers}
        spent = sum(status.dollars_by_class.get(one.name, 0.0) for one in self._section.pool)
        if not book.within_budget(spent):
            for name in book.active(now):
                book.release(name, f"provisioning.budget_usd={self._section.budget_usd:g} is reached", now)
            return Orders()
        rates = {
            name: rate for name, worker in here.items() if 0.0 < (rate := rate_of(worker)) < MOST_TOKENS_PER_S
        }
        for name in rates.keys() & pool:
            self._activator.measured(name, rates[name], now)
        offers = [
            _guessed(one, rates)
            for one in self._offers()
            if one.name not in self._draining and book.can_be_had(one.name, now)
        ]
        # Workers that came by themselves give what they give: they cost nothing here and are never drained.
        others = {name: WorkerOffer(name, 0.0, rate) for name, rate in rates.items() if name not in pool}
        mine = (book.active(now) & {one.name for one in offers}) | others.keys()
        orders = self._decide(status, [*offers, *others.values()], mine, set(others), now)
        started = book.order(orders.activate, spent, now)
        for name in orders.drain:
            self._draining[name] = now + self._grace_s
            await self._coordinator.drain(name)
        if started or orders.drain:
            _log.info("workers.ordered", start=started, drain=orders.drain, reason=orders.reason)
        return replace(orders, activate=started)

    def _offers(self) -> list[WorkerOffer]:
        """Return the pool at the prices of this moment; rates are in tokens per second."""
        at = self._wall()
        return [
            WorkerOffer(
                name,
                one.usd_at(at),
                one.tokens_per_s or UNKNOWN_TOKENS_PER_S,
                one.availability,
                one.zone or name,
            )
            for one in self._section.pool
            for name in one.workers
        ]

    def _decide(
        self, status: RunStatus, offers: list[WorkerOffer], mine: set[str], others: set[str], now: float
    ) -> Orders:
        plan = status.capacity
        if plan is None:  # nothing is measured yet, which takes a worker
            free: Sequence[WorkerOffer] = () if mine or status.workers else offers
            cheapest = min(free, key=lambda one: (one.usd_per_hour / one.rate, one.name), default=None)
            return Orders((cheapest.name,), (), "no worker is there") if cheapest else Orders()
        joined = [worker for worker in status.workers if worker.state is WorkerState.ACTIVE]
        holders = {name_of_worker(w.worker_id) for w in joined if w.held_version == status.newest_version}
        under_way = len(holders) < len(joined)
        return self._activator.decide(
            now,
            offers,
            mine,
            plan.need_tokens_per_s,
            left_s=max(0, status.steps_total - status.committed_steps) * plan.step_s,
            join_s=self._section.join_s,
            relays=others | (holders if under_way else set()),
        )

    async def _end_drained(self, here: Mapping[str, WorkerRecord], now: float) -> None:
        for name, until_s in list(self._draining.items()):
            if name not in here or now >= until_s:
                self._book.release(name, "it is not needed", now)
                del self._draining[name]
            else:
                await self._coordinator.drain(name)  # one that was restarted in between forgot it

    async def _note_and_ask(self, now: float) -> None:
        await self._note()
        self._ask(now)

    async def _note(self) -> None:
        if changes := self._book.changes():
            await self._coordinator.note_orders(changes)
            self._book.noted(changes)

    def _ask(self, now: float) -> None:
        """Begin to ask engines what is due, and each for its list unless it still owes the last one."""
        for verb, name in self._book.due(now):
            if (verb, name) not in self._asking:
                self._begin(verb, name, now)
        for one in self._section.pool:
            asked_s, moving = self._listed_s.get(one.name), self._book.is_moving(one.name, now)
            due = asked_s is None or moving or (moving is False and now - asked_s >= QUIET_S)
            if due and ("list", one.name) not in self._asking:
                self._listed_s[one.name] = now
                self._ask_in_task(("list", one.name), self._launchers[one.name].running(), LISTING_S, now)

    def _begin(self, verb: Verb, name: str, now: float) -> None:
        launcher = self._launchers[name.rpartition("-")[0]]
        if verb is Verb.STOP:
            stopping = launcher.stop(name, self._grace_s)
            self._ask_in_task((verb, name), stopping, self._grace_s + LISTING_S, now)
            return
        try:
            starting = launcher.start(self._order(name))
        except AntiphonError as error:
            self._book.failed(verb, name, str(error), now)
        else:
            self._ask_in_task((verb, name), starting, self._section.start_timeout_s, now)

    def _ask_in_task(
        self, asked: tuple[str, str], answer: Coroutine[object, object, _Answer], limit_s: float, now: float
    ) -> None:
        self._asking[asked] = asyncio.ensure_future(_timed(answer, limit_s)), now

    def _harvest(self, now: float) -> None:
        """Take in what engines have answered."""
        for (verb, name), (task, asked_s) in list(self._asking.items()):
            if not task.done():
                continue
            del self._asking[verb, name]
            try:
                answer, answered_s = task.result()
            except (AntiphonError, TimeoutError, OSError) as error:
                reason = str(error) or "its engine did not answer in time"
                _log.warning("launcher.failed", what=verb, name=name, reason=reason)
                if verb != "list":
                    self._book.failed(Verb(verb), name, reason, now)
                continue
            if verb == Verb.STOP:
                self._book.stopped(name)
                continue
            since_s = asyncio.get_running_loop().time() - answered_s
            if isinstance(answer, Instance):
                self._book.answered(_later(answer, since_s), now)
            elif answer is not None:
                there = [_later(one, since_s) for one in answer]
                for stray in self._book.listed(name, there, asked_s, now):
                    _log.warning("worker.not_ordered", name=stray)


async def _timed(answer: Coroutine[object, object, _Answer], limit_s: float) -> tuple[_Answer, float]:
    """Return an engine's answer, and when the event loop had it."""
    return await asyncio.wait_for(answer, limit_s), asyncio.get_running_loop().time()


def _later(one: Instance, passed_s: float) -> Instance:
    return replace(one, up_s=one.up_s + passed_s) if one.state is InstanceState.UP else one


def _guessed(offer: WorkerOffer, rates: Mapping[str, float]) -> WorkerOffer:
    """Return an offer with the mean rate of its class, or of all workers, where nothing is known of it."""
    if offer.rate != UNKNOWN_TOKENS_PER_S or not rates:
        return offer
    own = offer.name.rpartition("-")[0]
    alike = [rate for name, rate in rates.items() if name.rpartition("-")[0] == own] or [*rates.values()]
    return replace(offer, rate=sum(alike) / len(alike))


def rate_of(worker: WorkerRecord) -> float:
    """Return the tokens per second of a worker while its engine runs; 0 while that is not known."""
    return worker.tokens_per_s / worker.busy_share if worker.busy_share > 0.0 else 0.0
