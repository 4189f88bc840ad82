"""Every worker second and token is booked once, whatever happens to workers, leases and coordinators."""

import math
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.preemption import shares
from antiphon.core.loop import events as e
from antiphon.core.loop.work_account import Use, WorkAccounts


@dataclass
class Model:
    """Acts at random and counts for itself, in the plainest way."""

    rng: np.random.Generator
    ledger: WorkAccounts = field(default_factory=WorkAccounts)
    now: float = 100.0
    alive: dict[str, float] = field(default_factory=dict)
    """Worker id -> when it came."""
    leases: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Lease id -> (group, worker id)."""
    kept: dict[str, int] = field(default_factory=dict)
    """Open group -> tokens its next holder may go on from."""
    waiting: list[str] = field(default_factory=list)
    """Submitted groups."""
    prices: dict[str, float] = field(default_factory=dict)
    """Worker id -> US dollars per second."""
    seconds: float = 0.0
    dollars: float = 0.0
    tokens: int = 0
    count: int = 0

    def tell(self, event: e.JournalEvent) -> None:
        self.ledger.apply(event)

    def pick(self, things: list[str]) -> str:
        return things[int(self.rng.integers(len(things)))]

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}-{self.count}"

    def come(self) -> None:
        worker = self.name("w")
        self.alive[worker] = self.now
        self.register(worker, worker)

    def register(self, worker: str, name: str) -> None:
        price = float(self.rng.integers(0, 4))
        self.prices[worker] = price / 3600.0
        self.tell(e.WorkerRegistered(worker, name, 1, self.now, "", price, f"class-{price:g}"))

    def lose(self) -> None:
        if self.alive:
            worker = self.pick(list(self.alive))
            passed = self.now - self.alive.pop(worker)
            self.seconds, self.dollars = self.seconds + passed, self.dollars + passed * self.prices[worker]
            self.tell(e.WorkerLost(worker, "silent", self.now))
            for lease in [lease for lease, (_, holder) in self.leases.items() if holder == worker]:
                self.expire(lease)

    def lease(self) -> None:
        if self.alive:
            worker, group = self.pick(list(self.alive)), self.name("g")
            continued = 0
            if self.kept and self.rng.random() < 0.7:
                group = self.pick(list(self.kept))
                continued = self.kept[group] if self.rng.random() < 0.8 else 0
                if not continued:
                    self.kept[group] = 0
            lease = self.name("l")
            self.leases[lease] = (group, worker)
            self.kept.pop(group, None)
            self.given[lease] = continued
            self.tell(e.LeaseGranted(group, lease, worker, 1, 0, self.now, continued))

    given: dict[str, int] = field(default_factory=dict)

    def expire(self, lease: str) -> None:
        group, worker = self.leases.pop(lease)
        sampled = int(self.rng.integers(0, 50))
        self.tokens += sampled
        waste = "stale" if self.rng.random() < 0.2 else "preempted"
        keeps = waste == "preempted" and self.rng.random() < 0.7
        kept = self.given[lease] + sampled if keeps else 0
        silent = float(self.rng.random())
        if kept:
            self.kept[group] = kept
        elif waste == "preempted" and self.given[lease]:
            # The partial_groups keeps all or nothing: what came along is gone as well.
            self.tell(e.GroupDropped(group, "stale"))
        self.tell(e.LeaseExpired(group, lease, worker, "gone", self.now, sampled, kept, silent, waste))

    def end_one(self) -> None:
        if self.leases:
            self.expire(self.pick(list(self.leases)))

    def submit(self) -> None:
        if self.leases:
            lease = self.pick(list(self.leases))
            group, worker = self.leases.pop(lease)
            given = self.given[lease]
            reused = int(self.rng.integers(0, given + 1))
            own = int(self.rng.integers(1, 50))
            self.tokens += own
            authors = ((0, "earlier", 0, reused),) if reused else ()
            self.tell(
                e.GroupSubmitted(
                    group, lease, worker, 1, "", 0, (reused + own,), 0.0, self.now, authors=authors
                )
            )
            self.waiting.append(group)

    def settle(self) -> None:
        if self.waiting:
            group = self.waiting.pop(int(self.rng.integers(len(self.waiting))))
            reason = self.pick(["stale", "filtered", "sealed"])
            if reason == "sealed":
                self.tell(e.BatchSealed(0, (group,), (), "", "", 1, 0, 0, 1, 0.0, 1.0, ()))
            else:
                self.tell(e.GroupDropped(group, reason))

    def restart(self) -> None:
        """Die and come back at once, on another clock; the workers register again."""
        # Unwatched from the last booked moment on: book everybody now, so that the model need not know it.
        for worker in list(self.alive):
            self.tell(e.LeaseGranted("probe", f"probe-{worker}", worker, 1, 0, self.now))
            self.tell(e.LeaseExpired("probe", f"probe-{worker}", worker, "", self.now, waste="stale"))
            self.seconds += self.now - self.alive[worker]
            self.dollars += (self.now - self.alive[worker]) * self.prices[worker]
        self.now = float(self.rng.random() * 50)
        self.tell(e.RunResumed())
        for number, worker in enumerate(list(self.alive)):
            del self.alive[worker]
            again = f"{worker}+{number}"
            self.alive[again] = self.now
            self.register(again, worker)
            for lease, (group, holder) in self.leases.items():
                if holder == worker:
                    self.leases[lease] = (group, again)

    def check(self) -> None:
        account = self.ledger.account(self.now)
        expected = self.seconds + sum(self.now - since for since in self.alive.values())
        assert math.isclose(account.total_s, expected, rel_tol=1e-9, abs_tol=1e-6)
        dollars = self.dollars + sum((self.now - at) * self.prices[w] for w, at in self.alive.items())
        assert math.isclose(sum(account.dollars.values()), dollars, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(sum(c.seconds for c in account.classes.values()), expected, abs_tol=1e-6)
        for name, spent in account.classes.items():
            price = float(name.removeprefix("class-")) / 3600.0
            assert math.isclose(spent.dollars, spent.seconds * price, rel_tol=1e-9, abs_tol=1e-9)
        assert sum(account.tokens.values()) == self.tokens
        assert min(account.seconds.values()) >= -1e-9 and min(account.tokens.values()) >= 0
        assert set(account.seconds) == {use.value for use in Use}
        assert 0.0 <= shares(account)[0] <= 1.0 + 1e-9


@given(seed=st.integers(0, 2**32 - 1), actions=st.integers(1, 60))
def test_the_ledger_balances(seed: int, actions: int) -> None:
    print(f"seed={seed}")
    model = Model(np.random.default_rng(seed))
    model.come()
    for _ in range(actions):
        model.now += float(model.rng.random() * 3)
        act = (model.come, model.lose, model.lease, model.lease, model.submit, model.settle, model.end_one)
        act[int(model.rng.integers(len(act)))]()
        model.check()


@given(seed=st.integers(0, 2**32 - 1))
def test_it_balances_across_restarts_of_the_coordinator(seed: int) -> None:
    print(f"seed={seed}")
    model = Model(np.random.default_rng(seed))
    for _ in range(3):
        model.come()
        for _ in range(8):
            model.now += float(model.rng.random() * 3)
            act = (model.lose, model.lease, model.lease, model.lease, model.submit, model.end_one)
            act[int(model.rng.integers(len(act)))]()
        model.restart()
        model.check()


def test_each_second_goes_to_what_it_was_good_for() -> None:
    ledger = WorkAccounts()
    ledger.apply(e.WorkerRegistered("a-1", "a", 2, 0.0))
    ledger.apply(e.LeaseGranted("g1", "l1", "a-1", 1, 0, 10.0))
    ledger.apply(e.LeaseGranted("g2", "l2", "a-1", 1, 0, 20.0))
    assert ledger.account(40.0).seconds["open"] == 30.0  # however many leases share them
    ledger.apply(e.GroupSubmitted("g1", "l1", "a-1", 1, "", 0, (7, 8), 0.0, 40.0))
    ledger.apply(e.BatchSealed(0, ("g1",), (), "", "", 2, 0, 0, 15, 0.0, 7.5, ()))
    ledger.apply(e.WorkerLost("a-1", "silent", 50.0))
    ledger.apply(e.LeaseExpired("g2", "l2", "a-1", "lost", 50.0, tokens=6, kept=6, silent_s=4.0))
    ledger.apply(e.WorkerRegistered("b-1", "b", 2, 50.0))
    ledger.apply(e.LeaseGranted("g2", "l3", "b-1", 2, 0, 50.0, continued=6))
    ledger.apply(e.GroupSubmitted("g2", "l3", "b-1", 2, "", 0, (9,), 0.0, 53.0, authors=((0, "a-1", 0, 6),)))
    account = ledger.account(55.0)
    # 10 passed before the first lease; 10 alone and half of 20 were for g1; the other 20 of the first worker
    # for g2, 4 of them unheard of.
    assert account.seconds == {
        "useful": 20.0,
        "stale": 0.0,
        "duplicate": 0.0,
        "preempted": 4.0,
        "filtered": 0.0,
        "voided": 0.0,
        "untrusted": 0.0,
        "starting": 10.0,
        "idle": 2.0,
        "open": 16.0 + 3.0,
    }
    assert account.tokens == {
        "useful": 15, "stale": 0, "duplicate": 0, "preempted": 0, "filtered": 0, "voided": 0, "untrusted": 0,
        "open": 9,
    }  # fmt: skip
    # Its batch is voided: what was good for the learner is not any more, and nothing is counted twice.
    ledger.apply(e.BatchVoided(0, "", "no finite loss", "ada"))
    voided = ledger.account(55.0)
    assert (voided.seconds["useful"], voided.seconds["voided"], voided.total_s) == (
        0.0,
        20.0,
        account.total_s,
    )
    assert (voided.tokens["useful"], voided.tokens["voided"]) == (0, 15)
    assert shares(voided)[0] > shares(account)[0]
    assert shares(account)[0] == 4.0 / 43.0
    assert account.leased_s == 43.0 and shares(account)[0] == 4.0 / 43.0


def test_a_worker_starts_until_its_first_lease_and_again_when_it_comes_again() -> None:
    ledger = WorkAccounts()
    ledger.apply(e.WorkerRegistered("a-1", "a", 2, 0.0))
    assert ledger.account(60.0).seconds["starting"] == 60.0
    ledger.apply(e.LeaseGranted("g1", "l1", "a-1", 1, 0, 60.0))
    ledger.apply(e.GroupSubmitted("g1", "l1", "a-1", 1, "", 0, (7,), 0.0, 65.0))
    assert ledger.account(70.0).seconds["idle"] == 5.0
    ledger.apply(e.WorkerLost("a-1", "silent", 70.0))
    ledger.apply(e.WorkerRegistered("a-2", "a", 2, 80.0))
    seconds = ledger.account(100.0).seconds
    assert (seconds["starting"], seconds["idle"]) == (80.0, 5.0)


def test_nothing_counts_after_the_end_of_the_run() -> None:
    ledger = WorkAccounts()
    ledger.apply(e.WorkerRegistered("a-1", "a", 2, 0.0))
    ledger.apply(e.LeaseGranted("g1", "l1", "a-1", 1, 0, 60.0))
    ledger.apply(e.GroupSubmitted("g1", "l1", "a-1", 1, "", 0, (7,), 0.0, 65.0))
    ledger.apply(e.RunFinished())
    assert ledger.account(1000.0).total_s == 65.0
