"""Work account: every worker second and every token counts once, as useful or as a named waste.

It follows the run's events and nothing else. A worker's time counts from its registration until it
leaves or is lost, on the coordinator's clock: what a worker claims plays no part. At each moment a
worker's second is shared evenly among the leases it holds; without any it is idle, and before its
first one it is starting. What a lease cost stays open until its group is used or dropped. Tokens count
as far as the coordinator heard of them.

With its seconds goes what they cost: each worker has a price from its registration on, so the dollars of
all uses add up to the seconds of each class at its price. An instance that the run ordered costs from the
moment it is up until it is gone: what its worker does not fill counts as starting, and as idle after it left.

While no coordinator runs only such instances count: the time from its last event to its restart is left out
for all others. Nor does the time after the run has finished count.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from antiphon.core.frozen import frozen
from antiphon.core.loop import events as e

_SECONDS_PER_HOUR = 3600.0


class Use(StrEnum):
    """What became of a worker second or a token."""

    USEFUL = "useful"
    """The learner trained on it, or an evaluation needed it."""
    STALE = "stale"
    """Too old for every step that could still train on it."""
    DUPLICATE = "duplicate"
    """Another worker handed the same group in first."""
    PREEMPTED = "preempted"
    """Its worker was lost and no other could continue from it."""
    FILTERED = "filtered"
    """Its group lacked variance of rewards."""
    VOIDED = "voided"
    """An operator voided its batch before that was trained."""
    UNTRUSTED = "untrusted"
    """A worker that is in quarantine had sampled some of it."""
    STARTING = "starting"
    """The worker held no lease since it registered: its engine starts, and loads its first version."""
    IDLE = "idle"
    """The worker held no lease, after its first one."""
    OPEN = "open"
    """Not known yet: the group is being sampled, rewarded, or waits for its batch."""


@frozen
class Spent:
    """Worker seconds, and what they cost."""

    seconds: float = 0.0
    dollars: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.seconds + other.seconds, self.dollars + other.dollars)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.seconds - other.seconds, self.dollars - other.dollars)

    def part(self, share: float) -> "Spent":
        """Return a share of it."""
        return Spent(self.seconds * share, self.dollars * share)


_NOTHING = Spent()


@frozen
class WorkAccount:
    """Worker seconds, their price and tokens by use at one moment."""

    seconds: dict[str, float]
    """Worker seconds by use."""
    tokens: dict[str, int]
    """Completion tokens by use."""
    dollars: dict[str, float] = field(default_factory=dict)
    """US dollars by use."""
    classes: dict[str, Spent] = field(default_factory=dict)
    """Class of worker -> its seconds and dollars, whatever their use."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def leased_s(self) -> float:
        """Seconds of workers that held a lease."""
        return self.total_s - self.seconds.get(Use.IDLE, 0.0) - self.seconds.get(Use.STARTING, 0.0)


@dataclass(slots=True)
class _WorkerHours:
    """One worker's time."""

    name: str
    at_s: float
    """Until when it is booked."""
    usd_per_s: float = 0.0
    of_class: str = ""
    leases: int = 0
    share: Spent = _NOTHING
    """What a lease held all along would have got."""
    gone: bool = False
    led: bool = False
    """It has held a lease."""
    since_s: float = 0.0
    """When it registered."""
    ended_s: float = math.inf
    """When its instance ended, which is known before its loss is."""

    def until(self, now: float) -> Spent:
        """Return what it spends until then, from where it is booked."""
        passed = max(0.0, min(now, self.ended_s) - self.at_s)
        return Spent(passed, passed * self.usd_per_s)

    @property
    def unleased(self) -> Use:
        """What a second without a lease is booked as."""
        return Use.IDLE if self.led else Use.STARTING


@dataclass(slots=True)
class _Instance:
    """One instance that was ordered and is up."""

    at_s: float | None
    """Until when it is booked; None while its worker is booked in its place."""
    began_s: float
    """When it was up; moved along where the clock begins again."""
    usd_per_s: float
    of_class: str
    use: Use = Use.STARTING
    silent: Use = Use.IDLE
    """What its worker's last seconds were booked as."""

    def until(self, now: float) -> Spent:
        """Return what it spends until then, from where it is booked."""
        passed = 0.0 if self.at_s is None else max(0.0, now - self.at_s)
        return Spent(passed, passed * self.usd_per_s)


@dataclass(slots=True)
class _Running:
    """One lease that is held."""

    group_id: str
    worker_id: str
    """Empty from the coordinator's restart until its worker registers again."""
    worker_name: str
    begun: Spent
    """The worker's `share` when it began."""
    before: Spent = _NOTHING
    """What it got before the coordinator's last restart."""


@dataclass(slots=True)
class _Cost:
    """What a living group has cost so far."""

    spent: Spent = _NOTHING
    tokens: int = 0


def _nothing() -> dict[Use, Spent]:
    return dict.fromkeys((use for use in Use if use is not Use.OPEN), Spent())


def _no_tokens() -> dict[Use, int]:
    return dict.fromkeys((use for use in Use if use not in (Use.OPEN, Use.IDLE, Use.STARTING)), 0)


@dataclass(slots=True)
class WorkAccounts:
    """The fold of a run's events into what its work was good for."""

    orphan_s: float = 600.0
    """`services.orphan_s`: no instance lives longer without a coordinator."""
    spent: dict[Use, Spent] = field(default_factory=_nothing)
    tokens: dict[Use, int] = field(default_factory=_no_tokens)
    origin_bytes: int = 0
    """Bytes of snapshots that the origin sent, as far as workers told; others passed the rest on."""
    _workers: dict[str, _WorkerHours] = field(default_factory=dict)
    _running: dict[str, _Running] = field(default_factory=dict)
    _costs: dict[str, _Cost] = field(default_factory=dict)
    _sealed: dict[int, _Cost] = field(default_factory=dict)
    """Step -> what the groups of its batch had cost, until it is committed: it may still be voided."""
    _classes: dict[str, Spent] = field(default_factory=dict)
    _instances: dict[str, _Instance] = field(default_factory=dict)
    """Name of a worker -> its instance."""
    _seen_s: float = 0.0
    """Moment of the newest event, while there are instances."""

    def apply(self, event: e.JournalEvent) -> None:
        """Book what an event says; events of no concern are ignored."""
        if self._instances and (at_s := getattr(event, "at_s", None)) is not None:
            if isinstance(event, e.RunResumed):
                self._go_on(self._seen_s, event.break_s, at_s)
            self._seen_s = at_s
        match event:
            case e.LeaseGranted():
                self._granted(event)
            case e.LeaseDuplicated():
                self._begin(event.group_id, event.lease_id, event.worker_id, event.at_s)
            case e.LeaseExpired():
                self._expired(event)
            case e.GroupSubmitted():
                self._submitted(event)
            case e.GroupDropped():
                known = event.reason in (Use.FILTERED, Use.UNTRUSTED)
                self.close_group(event.group_id, Use(event.reason) if known else Use.STALE)
            case e.BatchSealed():
                costs = [self.close_group(group_id, Use.USEFUL) for group_id in event.group_ids]
                self._sealed[event.step] = _Cost(
                    sum((cost.spent for cost in costs), Spent()), sum(cost.tokens for cost in costs)
                )
                for group_id in event.filtered_ids:
                    self.close_group(group_id, Use.FILTERED)
            case e.BatchVoided():
                cost = self._sealed.pop(event.step, _Cost())
                for use, sign in ((Use.USEFUL, -1), (Use.VOIDED, 1)):
                    self.spent[use] += cost.spent.part(sign)
                    self.tokens[use] += sign * cost.tokens
            case e.StepCommitted():
                self._sealed.pop(event.step, None)
            case e.WorkerRegistered():
                self._registered(event)
            case e.WorkerPriced():
                self._advance(event.worker_id, event.at_s)
                if worker := self._workers.get(event.worker_id):
                    worker.usd_per_s = event.usd_per_hour / _SECONDS_PER_HOUR
                    if instance := self._instances.get(worker.name):
                        instance.usd_per_s = worker.usd_per_s
            case e.WorkerLost():
                self._advance(event.worker_id, event.at_s)
                self._leave(event.worker_id, event.at_s)
            case e.WorkerOrdered():
                self._ordered(event)
            case e.RunFinished():
                self._stop()
                for instance in self._instances.values():
                    self._book(instance, self._seen_s)
                self._instances.clear()
            case e.RunResumed():
                self._stop()
            case e.SnapshotDelivered():
                self.origin_bytes += event.bytes_from.get("", 0)
            case _:
                pass

    def close_group(self, group_id: str, use: Use) -> _Cost:
        """Book what a group cost and return it; nothing where nothing is known."""
        cost = self._costs.pop(group_id, _Cost())
        self.spent[use] += cost.spent
        self.tokens[use] += cost.tokens
        return cost

    def account(self, now: float) -> WorkAccount:
        """Return the account at `now`, on the coordinator's clock; nothing is changed by it."""
        spent, classes = dict(self.spent), dict(self._classes)
        tokens = {use.value: count for use, count in self.tokens.items()}
        spent[Use.OPEN] = sum((cost.spent for cost in self._costs.values()), Spent())
        for worker in self._workers.values():
            passed = worker.until(0.0 if worker.gone else now)
            spent[Use.OPEN if worker.leases else worker.unleased] += passed
            classes[worker.of_class] = classes.get(worker.of_class, Spent()) + passed
        for instance in self._instances.values():
            passed = instance.until(now)
            spent[instance.use] += passed
            classes[instance.of_class] = classes.get(instance.of_class, Spent()) + passed
        for lease in self._running.values():
            share = self._workers[lease.worker_id].share if lease.worker_id else lease.begun
            spent[Use.OPEN] += lease.before + share - lease.begun
        tokens[Use.OPEN.value] = sum(cost.tokens for cost in self._costs.values())
        return WorkAccount(
            {use.value: found.seconds for use, found in spent.items()},
            tokens,
            {use.value: found.dollars for use, found in spent.items()},
            classes,
        )

    def _granted(self, event: e.LeaseGranted) -> None:
        if not event.continued:
            # What earlier holders sampled was too old to continue from.
            self.close_group(event.group_id, Use.STALE)
        self._begin(event.group_id, event.lease_id, event.worker_id, event.at_s)

    def _begin(self, group_id: str, lease_id: str, worker_id: str, now: float) -> None:
        if worker_id not in self._workers:  # in a journal that had no times yet
            self._workers[worker_id] = _WorkerHours(worker_id, now)
        self._advance(worker_id, now)
        worker = self._workers[worker_id]
        worker.leases += 1
        worker.led = True
        self._running[lease_id] = _Running(group_id, worker_id, worker.name, worker.share)

    def _end(self, lease_id: str, now: float | None) -> Spent:
        """End a lease and return what it got."""
        lease = self._running.pop(lease_id, None)
        if lease is None:
            return Spent()
        if not lease.worker_id:
            return lease.before
        self._advance(lease.worker_id, now)
        worker = self._workers[lease.worker_id]
        worker.leases -= 1
        if worker.gone and not worker.leases:
            del self._workers[lease.worker_id]
        return lease.before + worker.share - lease.begun

    def _expired(self, event: e.LeaseExpired) -> None:
        spent = self._end(event.lease_id, event.at_s)
        if event.waste != Use.PREEMPTED:
            use = Use(event.waste)
            self.spent[use] += spent
            self.tokens[use] += event.tokens
            if use is Use.STALE:
                self.close_group(event.group_id, use)
        elif event.kept:
            silent = spent.part(min(1.0, event.silent_s / spent.seconds) if spent.seconds > 0.0 else 0.0)
            self.spent[Use.PREEMPTED] += silent
            cost = self._costs.setdefault(event.group_id, _Cost())
            cost.spent += spent - silent
            cost.tokens += event.tokens
        else:
            self.spent[Use.PREEMPTED] += spent
            self.tokens[Use.PREEMPTED] += event.tokens

    def _submitted(self, event: e.GroupSubmitted) -> None:
        running = event.lease_id in self._running
        cost = self._costs.setdefault(event.group_id, _Cost())
        cost.spent += self._end(event.lease_id, event.at_s)
        total = sum(event.token_counts)
        # A late submission of an ended lease holds what was kept of that very lease.
        reused = sum(stop - start for _, _, start, stop in event.authors) if running else total
        self.tokens[Use.PREEMPTED] += max(0, cost.tokens - reused)
        cost.tokens = total

    def _registered(self, event: e.WorkerRegistered) -> None:
        if event.at_s is None:
            return
        worker = self._workers[event.worker_id] = _WorkerHours(
            event.worker_name,
            event.at_s,
            event.usd_per_hour / _SECONDS_PER_HOUR,
            event.worker_class,
            since_s=event.at_s,
        )
        if instance := self._instances.get(event.worker_name):
            self._book(instance, event.at_s)
            instance.at_s, instance.use = None, Use.IDLE
        # After a coordinator's restart a worker continues its leases under a new id.
        for lease in self._running.values():
            if not lease.worker_id and lease.worker_name == event.worker_name:
                lease.worker_id = event.worker_id
                worker.leases += 1
                worker.led = True

    def _ordered(self, event: e.WorkerOrdered) -> None:
        """Book an instance from when it was up, and no longer once its order says that it is gone."""
        name, up = event.worker_name, event.state in ("up", "stopping")
        if not event.instance:
            return  # a process of the run's own machine ends with the run: its worker's time is all
        if not up:
            if (known := self._instances.pop(name, None)) is not None:
                self._ended(name, known, known.began_s + event.up_s if event.up_s else event.at_s)
        elif name not in self._instances:
            usd_per_s, began_s = event.usd_per_hour / _SECONDS_PER_HOUR, event.at_s - event.up_s
            instance = _Instance(began_s, began_s, usd_per_s, event.worker_class)
            self._instances[name], self._seen_s = instance, event.at_s
            here = [one.since_s for one in self._living(name) if one.ended_s == math.inf]
            if here:  # its worker was quicker than the look that found it up
                self._book(instance, here[0])
                instance.at_s, instance.use = None, Use.IDLE

    def _living(self, name: str) -> list[_WorkerHours]:
        return [one for one in self._workers.values() if one.name == name and not one.gone]

    def _ended(self, name: str, instance: _Instance, ended_s: float) -> None:
        self._book(instance, ended_s)
        if instance.at_s is not None:  # what its worker was booked for until its silence was noticed
            over_s = min(max(0.0, instance.at_s - ended_s), self.spent[instance.silent].seconds)
            over = Spent(over_s, over_s * instance.usd_per_s)
            self.spent[instance.silent] -= over
            self._classes[instance.of_class] -= over
        for worker in self._living(name):
            worker.ended_s = ended_s

    def _go_on(self, last_s: float, break_s: float, now: float) -> None:
        """Book instances over a coordinator's break: they cost all the same."""
        for instance in self._instances.values():
            self._book(instance, last_s)
            instance.began_s += now - break_s - last_s
            instance.at_s, instance.use = now - break_s, Use.IDLE
            self._book(instance, min(now, now - break_s + self.orphan_s))
            instance.at_s = now

    def _book(self, instance: _Instance, until_s: float) -> None:
        """Book an instance up to a moment, unless its worker is booked in its place."""
        if instance.at_s is None:
            return
        spent = instance.until(until_s)
        self.spent[instance.use] += spent
        self._classes[instance.of_class] = self._classes.get(instance.of_class, Spent()) + spent
        instance.at_s = max(instance.at_s, until_s)

    def _leave(self, worker_id: str, now: float | None) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.gone = True
        instance = self._instances.get(worker.name)
        if instance is not None and instance.at_s is None:
            instance.at_s = now
            instance.silent = Use.PREEMPTED if worker.leases else worker.unleased
        if not worker.leases:
            del self._workers[worker_id]

    def _stop(self) -> None:
        """Count nothing from here on until the workers register again."""
        for lease in self._running.values():
            if lease.worker_id:
                lease.before += self._workers[lease.worker_id].share - lease.begun
                lease.worker_id, lease.begun = "", Spent()
        self._workers.clear()

    def _advance(self, worker_id: str, now: float | None) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.gone or now is None or now <= worker.at_s:
            return
        passed, worker.at_s = worker.until(now), now
        self._classes[worker.of_class] = self._classes.get(worker.of_class, Spent()) + passed
        if worker.leases:
            worker.share += passed.part(1.0 / worker.leases)
        else:
            self.spent[worker.unleased] += passed
