"""Order book: no order is given twice, limits hold, and all is stopped, whatever engines do and when."""

import heapq
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.capacity.order_book import FIRST_PAUSE_S, Instance, InstanceState, OrderBook, Verb
from antiphon.core.capacity.provisioning_config import PoolClass, ProvisioningSection
from antiphon.core.status import OrderState, WorkerOrder

POOL = tuple(PoolClass(name=f"c{i}", usd_per_hour=1.0 + i, count=10) for i in range(4))
GRACE_S = 20.0
SECTION = ProvisioningSection(
    pool=POOL, budget_usd=2.0, starts_per_minute=12, start_timeout_s=90.0, queue_timeout_s=120.0
)


def book(section: ProvisioningSection = SECTION) -> OrderBook:
    return OrderBook(section, GRACE_S, lambda one: one.usd_per_hour)


def up(worker: str) -> Instance:
    return Instance(worker, f"i-{worker}", InstanceState.UP)


class Engines:
    """Engines that answer late, fail now and then, queue, and lose instances; time is the caller's."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.there: dict[str, Instance] = {}
        self.since: dict[str, float] = {}
        self.usd = 0.0
        self.under_way: list[tuple[float, int, str, str, float]] = []
        self.number = itertools.count()
        self.starting: set[str] = set()

    def ask(self, what: str, name: str, now: float) -> None:
        late_s = 10 ** self.rng.uniform(-1.0, 1.78)  # 0.1 to 60 s
        heapq.heappush(self.under_way, (now + late_s, next(self.number), what, name, now))

    def settle(self, now: float) -> None:
        """Book what is up at its price up to now."""
        for name, instance in self.there.items():
            price = next(one.usd_per_hour for one in POOL if one.name == name.rpartition("-")[0])
            if instance.state is InstanceState.UP:
                self.usd += price * (now - self.since[name]) / 3600.0
            self.since[name] = now


def run(
    seed: int, looks: int, quiet: bool = False
) -> tuple[OrderBook, Engines, list[tuple[float, Verb, str]]]:
    """Run a book against engines, a look every two seconds; workers are wanted and unwanted by chance."""
    engines, orders, asked = Engines(seed), book(), []
    for look in range(looks):
        now = 2.0 * look
        while engines.under_way and engines.under_way[0][0] <= now:
            _, _, what, name, since = heapq.heappop(engines.under_way)
            fails = engines.rng.random() < 0.1
            if what == "list":
                if not fails:
                    listed = [one for one in engines.there.values() if one.worker.startswith(f"{name}-")]
                    strays = orders.listed(name, listed, since, now)
                    for stray in strays:
                        engines.ask(Verb.STOP, stray, now)
            elif what == Verb.START:
                engines.starting.discard(name)
                if fails:
                    orders.failed(Verb.START, name, "no capacity", now)
                    continue
                queued = engines.rng.random() < 0.2
                engines.there.setdefault(
                    name, up(name) if not queued else Instance(name, "q", InstanceState.PENDING)
                )
                engines.since.setdefault(name, now)
                orders.answered(engines.there[name], now)
            elif fails:
                orders.failed(Verb.STOP, name, "no answer", now)
            else:
                orders.stopped(name)
                engines.there.pop(name, None)
                engines.since.pop(name, None)
        engines.settle(now)
        for name in list(engines.there):
            if not quiet and engines.rng.random() < 0.01:  # reclaimed
                del engines.there[name], engines.since[name]
            elif engines.there[name].state is InstanceState.PENDING and engines.rng.random() < 0.05:
                engines.there[name] = up(name)
        orders.joined({n: 0.0 for n, one in engines.there.items() if one.state is InstanceState.UP}, now)
        active = orders.active(now)
        if not orders.within_budget(engines.usd):
            for name in active:
                orders.release(name, "the budget", now)
        elif not quiet:
            wanted = [name for one in POOL for name in one.workers if engines.rng.random() < 0.05]
            orders.order(wanted, engines.usd, now)
            for name in active:
                if engines.rng.random() < 0.02:
                    orders.release(name, "not needed", now)
        orders.noted(orders.changes())
        for verb, name in orders.due(now):
            asked.append((now, verb, name))
            if verb is Verb.START:
                assert name not in engines.starting, f"{name} was ordered twice (seed {seed})"
                engines.starting.add(name)
            engines.ask(verb, name, now)
        for one in POOL:
            if orders.is_moving(one.name, now) is not None and ("list", one.name) not in {
                x[2:4] for x in engines.under_way
            }:
                engines.ask("list", one.name, now)
    return orders, engines, asked


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_order_is_given_twice_and_no_limit_is_passed(seed: int) -> None:
    _, engines, asked = run(seed, looks=600)
    starts = [at_s for at_s, verb, _ in asked if verb is Verb.START]
    for first, later in zip(starts, starts[SECTION.starts_per_minute :], strict=False):
        assert later - first >= 60.0, "too many starts within a minute"
    assert engines.usd <= (SECTION.budget_usd or 0.0)


def test_all_that_is_released_is_gone_in_the_end() -> None:
    orders, engines = book(), Engines(7)
    orders.order([name for one in POOL for name in one.workers[:2]], 0.0, 0.0)
    for now in range(0, 3000, 2):
        for verb, name in orders.due(now):
            if verb is Verb.START:
                orders.answered(engines.there.setdefault(name, up(name)), now)
            else:
                orders.stopped(name)
                if engines.rng.random() < 0.5:
                    engines.there.pop(name, None)
        if now == 10:
            assert len(engines.there) == 8
        if now >= 20:
            for name in orders.active(now):
                orders.release(name, "over", now)
        for one in POOL:
            orders.listed(one.name, list(engines.there.values()), now, now)
    assert not engines.there
    assert {order.state for order in orders.changes()} == {OrderState.GONE}


def test_a_queue_costs_nothing_but_its_time_and_counts_for_join_s_only() -> None:
    orders = book()
    assert orders.order(["c0-1"], 0.0, 0.0) == ("c0-1",)
    assert orders.due(0.0) == [(Verb.START, "c0-1")] and orders.due(1.0) == []
    orders.answered(Instance("c0-1", "job 7", InstanceState.PENDING, "Resources"), 1.0)
    assert orders.active(60.0) == {"c0-1"} and orders.active(62.0) == set()
    assert not orders.can_be_had("c0-1", 62.0), "it is in the queue already"
    (pending,) = orders.changes()
    assert pending == WorkerOrder("c0-1", OrderState.PENDING, "job 7", "Resources", 0.0, 120.0)
    assert orders.due(122.0) == [(Verb.STOP, "c0-1")]
    (stopping,) = orders.changes()
    assert stopping.state is OrderState.STOPPING and "Resources" in stopping.reason
    assert "in the queue for 120 s" in orders.out_of_order(122.0)["c0-1"]


def test_pauses_grow_with_each_failure_and_end_with_a_worker_that_joins() -> None:
    orders, now, pauses = book(), 0.0, []
    for _ in range(4):
        assert orders.order(["c1-0"], 0.0, now) == ("c1-0",)
        orders.due(now)
        orders.failed(Verb.START, "c1-0", "quota", now)
        orders.listed("c1", [], now + 1.0, now + 1.0)
        began = now
        while not orders.can_be_had("c1-0", now):
            now += 1.0
        pauses.append(now - began)
    assert pauses == [FIRST_PAUSE_S * 2.0**n for n in range(4)]
    orders.order(["c1-0"], 0.0, now)
    orders.due(now)
    orders.answered(up("c1-0"), now)
    orders.joined({"c1-0": 0.0}, now)
    assert orders.out_of_order(now) == {}


def test_a_worker_that_never_joins_is_stopped_and_one_that_did_is_not() -> None:
    orders = book()
    orders.order(["c0-0", "c0-1"], 0.0, 0.0)
    orders.due(0.0)
    for name in ("c0-0", "c0-1"):
        orders.answered(up(name), 1.0)
    orders.joined({"c0-0": 0.0}, 1.0)
    assert orders.due(91.0) == [(Verb.STOP, "c0-1")]
    assert orders.due(10_000.0) == [(Verb.STOP, "c0-1")]


def test_an_older_list_says_nothing_of_a_younger_order() -> None:
    orders = book()
    orders.order(["c0-0"], 0.0, 10.0)
    orders.due(10.0)
    orders.answered(up("c0-0"), 11.0)
    assert orders.listed("c0", [], asked_s=9.0, now=12.0) == []
    assert orders.state_of("c0-0") is OrderState.UP
    orders.listed("c0", [], asked_s=12.0, now=13.0)
    assert orders.state_of("c0-0") is OrderState.GONE
    assert orders.listed("c0", [up("c0-0"), up("c0-3")], asked_s=14.0, now=15.0) == ["c0-0", "c0-3"]


def test_a_worker_whose_machine_is_gone_is_not_counted_and_ended_when_it_was_last_heard() -> None:
    orders = OrderBook(SECTION, GRACE_S, lambda one: one.usd_per_hour, 2.0)
    orders.order(["c0-0"], 0.0, 10.0)
    orders.due(10.0)
    orders.answered(up("c0-0"), 11.0)
    orders.joined({"c0-0": 0.0}, 20.0)
    unknown = Instance("c0-0", "host", InstanceState.UNKNOWN, "no route")
    orders.listed("c0", [unknown], asked_s=22.0, now=22.0)
    assert orders.active(22.0) == {"c0-0"}, "its worker is heard"
    orders.joined({}, 32.0)
    orders.listed("c0", [unknown], asked_s=33.0, now=33.0)
    assert orders.active(33.0) == set() and not orders.can_be_had("c0-0", 33.0)
    orders.listed("c0", [], asked_s=90.0, now=91.0)
    assert [order.up_s for order in orders.changes() if order.state is OrderState.GONE] == [21.0 - 11.0]
    assert orders.can_be_had("c0-0", 91.0)


def test_a_worker_that_fell_silent_ended_within_a_heartbeat_of_its_last_one() -> None:
    orders = OrderBook(SECTION, GRACE_S, lambda one: one.usd_per_hour, 2.0)
    orders.order(["c0-0"], 0.0, 10.0)
    orders.due(10.0)
    orders.answered(up("c0-0"), 11.0)
    orders.listed("c0", [up("c0-0")], asked_s=20.0, now=21.0)
    orders.joined({"c0-0": 1.0}, 26.0)
    orders.listed("c0", [], asked_s=40.0, now=41.0)
    assert [order.up_s for order in orders.changes() if order.state is OrderState.GONE] == [26.0 - 11.0]


def test_an_instance_that_was_queued_again_is_up_since_its_second_start() -> None:
    orders = OrderBook(SECTION, GRACE_S, lambda one: one.usd_per_hour, 2.0)
    orders.order(["c0-0"], 0.0, 10.0)
    orders.due(10.0)
    orders.answered(up("c0-0"), 11.0)
    orders.joined({"c0-0": 0.0}, 20.0)
    orders.listed("c0", [Instance("c0-0", "job 7", InstanceState.PENDING, "preempted")], 30.0, 31.0)
    orders.listed("c0", [up("c0-0")], asked_s=50.0, now=50.0)
    orders.joined({"c0-0": 0.0}, 60.0)
    orders.listed("c0", [], asked_s=61.0, now=62.0)
    (gone,) = [order for order in orders.changes() if order.state is OrderState.GONE]
    assert gone.up_s == 60.5 - 50.0
