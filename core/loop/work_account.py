"""Work account: every worker second and every token counts once, as useful or as a named waste.

It follows the run's events and nothing else. A worker's time counts from its registration until it
leaves or is lost, on the coordinator's clock: what a worker claims plays no part. At each moment a
worker's second is shared evenly among the leases it holds; without any it is idle, and before its
first one it is starting. What a lease cost stays open until its group is used or dropped. Tokens count
as far as the coordinator heard of them.

While no coordinator runs nothing counts: the time from its last event to its restart is left out. Nor
does the time after the run has finished.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from antiphon.core.loop import events as e


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


@dataclass(frozen=True, slots=True)
class WorkAccount:
    """Worker seconds and tokens by use at one moment."""

    seconds: dict[str, float]
    """Worker seconds by use."""
    tokens: dict[str, int]
    """Completion tokens by use."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def leased_s(self) -> float:
        """Seconds of workers that held a lease."""
        return self.total_s - self.seconds.get(Use.IDLE, 0.0) - self.seconds.get(Use.STARTING, 0.0)

    def wasted_share(self) -> float:
        """Return the share of the seconds with a lease that are known to be wasted; 0 without any."""
        wastes = (Use.STALE, Use.DUPLICATE, Use.PREEMPTED, Use.VOIDED, Use.UNTRUSTED)
        wasted = sum(self.seconds.get(use, 0.0) for use in wastes)
        return wasted / self.leased_s if self.leased_s > 0 else 0.0


@dataclass(slots=True)
class _WorkerHours:
    """One worker's time."""

    name: str
    at_s: float
    """Until when it is booked."""
    leases: int = 0
    share_s: float = 0.0
    """Seconds that a lease held all along would have got."""
    gone: bool = False
    led: bool = False
    """It has held a lease."""

    @property
    def unleased(self) -> Use:
        """What a second without a lease is booked as."""
        return Use.IDLE if self.led else Use.STARTING


@dataclass(slots=True)
class _Running:
    """One lease that is held."""

    group_id: str
    worker_id: str
    """Empty from the coordinator's restart until its worker registers again."""
    worker_name: str
    from_s: float
    """The worker's `share_s` when it began."""
    before_s: float = 0.0
    """What it got before the coordinator's last restart."""


@dataclass(slots=True)
class _Cost:
    """What a living group has cost so far."""

    seconds: float = 0.0
    tokens: int = 0


def _no_seconds() -> dict[Use, float]:
    return dict.fromkeys((use for use in Use if use is not Use.OPEN), 0.0)


def _no_tokens() -> dict[Use, int]:
    return dict.fromkeys((use for use in Use if use not in (Use.OPEN, Use.IDLE, Use.STARTING)), 0)


@dataclass(slots=True)
class WorkAccounts:
    """The fold of a run's events into what its work was good for."""

    seconds: dict[Use, float] = field(default_factory=_no_seconds)
    tokens: dict[Use, int] = field(default_factory=_no_tokens)
    _workers: dict[str, _WorkerHours] = field(default_factory=dict)
    _running: dict[str, _Running] = field(default_factory=dict)
    _costs: dict[str, _Cost] = field(default_factory=dict)
    _sealed: dict[int, _Cost] = field(default_factory=dict)
    """Step -> what the groups of its batch had cost, until it is committed: it may still be voided."""

    def apply(self, event: e.JournalEvent) -> None:
        """Book what an event says; events of no concern are ignored."""
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
                    sum(cost.seconds for cost in costs), sum(cost.tokens for cost in costs)
                )
                for group_id in event.filtered_ids:
                    self.close_group(group_id, Use.FILTERED)
            case e.BatchVoided():
                cost = self._sealed.pop(event.step, _Cost())
                for use, sign in ((Use.USEFUL, -1), (Use.VOIDED, 1)):
                    self.seconds[use] += sign * cost.seconds
                    self.tokens[use] += sign * cost.tokens
            case e.StepCommitted():
                self._sealed.pop(event.step, None)
            case e.WorkerRegistered():
                self._registered(event)
            case e.WorkerLost():
                self._advance(event.worker_id, event.at_s)
                self._leave(event.worker_id)
            case e.RunResumed() | e.RunFinished():
                self._stop()
            case _:
                pass

    def close_group(self, group_id: str, use: Use) -> _Cost:
        """Book what a group cost and return it; nothing where nothing is known."""
        cost = self._costs.pop(group_id, _Cost())
        self.seconds[use] += cost.seconds
        self.tokens[use] += cost.tokens
        return cost

    def account(self, now: float) -> WorkAccount:
        """Return the account at `now`, on the coordinator's clock; nothing is changed by it."""
        seconds = {use.value: value for use, value in self.seconds.items()}
        tokens = {use.value: count for use, count in self.tokens.items()}
        open_s = sum(cost.seconds for cost in self._costs.values())
        for worker in self._workers.values():
            passed = 0.0 if worker.gone else max(0.0, now - worker.at_s)
            if worker.leases:
                open_s += passed
            else:
                seconds[worker.unleased] += passed
        for lease in self._running.values():
            worker_share = self._workers[lease.worker_id].share_s if lease.worker_id else lease.from_s
            open_s += lease.before_s + worker_share - lease.from_s
        seconds[Use.OPEN.value] = open_s
        tokens[Use.OPEN.value] = sum(cost.tokens for cost in self._costs.values())
        return WorkAccount(seconds, tokens)

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
        self._running[lease_id] = _Running(group_id, worker_id, worker.name, worker.share_s)

    def _end(self, lease_id: str, now: float | None) -> float:
        """End a lease and return the seconds it got."""
        lease = self._running.pop(lease_id, None)
        if lease is None:
            return 0.0
        if not lease.worker_id:
            return lease.before_s
        self._advance(lease.worker_id, now)
        worker = self._workers[lease.worker_id]
        worker.leases -= 1
        if worker.gone and not worker.leases:
            del self._workers[lease.worker_id]
        return lease.before_s + worker.share_s - lease.from_s

    def _expired(self, event: e.LeaseExpired) -> None:
        seconds = self._end(event.lease_id, event.at_s)
        if event.waste != Use.PREEMPTED:
            use = Use(event.waste)
            self.seconds[use] += seconds
            self.tokens[use] += event.tokens
            if use is Use.STALE:
                self.close_group(event.group_id, use)
        elif event.kept:
            silent = min(seconds, event.silent_s)
            self.seconds[Use.PREEMPTED] += silent
            cost = self._costs.setdefault(event.group_id, _Cost())
            cost.seconds += seconds - silent
            cost.tokens += event.tokens
        else:
            self.seconds[Use.PREEMPTED] += seconds
            self.tokens[Use.PREEMPTED] += event.tokens

    def _submitted(self, event: e.GroupSubmitted) -> None:
        running = event.lease_id in self._running
        cost = self._costs.setdefault(event.group_id, _Cost())
        cost.seconds += self._end(event.lease_id, event.at_s)
        total = sum(event.token_counts)
        # A late submission of an ended lease holds what was kept of that very lease.
        reused = sum(stop - start for _, _, start, stop in event.authors) if running else total
        self.tokens[Use.PREEMPTED] += max(0, cost.tokens - reused)
        cost.tokens = total

    def _registered(self, event: e.WorkerRegistered) -> None:
        if event.at_s is None:
            return
        worker = self._workers[event.worker_id] = _WorkerHours(event.worker_name, event.at_s)
        # After a coordinator's restart a worker continues its leases under a new id.
        for lease in self._running.values():
            if not lease.worker_id and lease.worker_name == event.worker_name:
                lease.worker_id = event.worker_id
                worker.leases += 1
                worker.led = True

    def _leave(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.gone = True
        if not worker.leases:
            del self._workers[worker_id]

    def _stop(self) -> None:
        """Count nothing from here on until the workers register again."""
        for lease in self._running.values():
            if lease.worker_id:
                lease.before_s += self._workers[lease.worker_id].share_s - lease.from_s
                lease.worker_id, lease.from_s = "", 0.0
        self._workers.clear()

    def _advance(self, worker_id: str, now: float | None) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.gone or now is None or now <= worker.at_s:
            return
        passed, worker.at_s = now - worker.at_s, now
        if worker.leases:
            worker.share_s += passed / worker.leases
        else:
            self.seconds[worker.unleased] += passed
