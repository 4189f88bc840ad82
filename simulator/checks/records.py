"""Records of the witness: its groups, who holds which lease, and how long workers were connected."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.core.loop import events as e
from antiphon.simulator.hostile_worker import NAME


@dataclass(slots=True)
class GroupRecord:
    """One group."""

    phase: str = "open"
    attempt: int = 0
    lease_id: str = ""
    twin_id: str = ""
    """Lease of a speculative duplicate."""
    oldest: int = 0
    digest: str = ""
    step: int | None = None
    evaluation: int | None = None
    """Version that its held-out prompt scores."""
    rewards: tuple[float, ...] = ()
    failed: dict[int, str] = field(default_factory=dict)
    stale: bool = False
    """It was dropped for its age."""


class LeaseHolders:
    """What honest workers say of their leases."""

    def __init__(self, lease_s: float) -> None:
        """Begin without a lease; `lease_s` is how long one lasts without a sign of life, seconds."""
        self._lease_s = lease_s
        self._heard_s: dict[str, tuple[float, float]] = {}
        """Lease -> seconds at which the newest answered heartbeat that named it was sent, and answered."""
        self._own: set[str] = set()
        """Leases that honest workers hold or held."""
        self._given_up: set[str] = set()
        """Those of them that they gave up themselves."""

    def told(self, lease_ids: Sequence[str], given_up: Sequence[str]) -> None:
        """An honest worker speaks of leases that it holds and of others that it gives up."""
        self._own.update(lease_ids, given_up)
        self._given_up.update(given_up)

    def heard(self, lease_ids: Sequence[str], sent_s: float, now: float) -> None:
        """The heartbeat of a worker that holds these leases, sent at that second, was answered."""
        self._heard_s.update(dict.fromkeys(lease_ids, (sent_s, now)))

    def wrongly_ended(self, event: e.LeaseExpired, now: float, decided_s: float) -> str:
        """Return why a lease should not have ended, or "".

        `decided_s`: when that was decided by the time of day, long before `now` where the disk was full.
        """
        sent_s, answered_s = self._heard_s.pop(event.lease_id, (-math.inf, -math.inf))
        silent_s = now - sent_s
        late = event.reason.startswith("no sign of life") and silent_s < self._lease_s / 2
        if late and decided_s >= answered_s:  # one that was answered later may have come later
            return f"lease {event.lease_id} expired, but its holder was heard {silent_s:.1f} s ago"
        stolen = event.lease_id in self._own and event.lease_id not in self._given_up
        if event.reason.startswith("handed over") and stolen:
            return f"lease {event.lease_id} was given up, but not by its holder"
        return ""


def wrongly_struck(event: e.WorkerStruck) -> str:
    """Return what is wrong with a strike: there are none for honest workers."""
    if event.worker_name.startswith(NAME):
        return ""
    return f"{event.worker_name} was struck for group {event.group_id}: {event.reason}"


@dataclass(slots=True)
class _Stay:
    """One worker's time under one coordinator."""

    name: str
    from_s: float
    seen_s: float


@dataclass(slots=True)
class WorkerHours:
    """The stays of all workers of a run."""

    past_s: float = 0.0
    _stays: dict[str, _Stay] = field(default_factory=dict)
    _holders: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Lease -> id and name of the worker that holds it; the id is empty after a restart."""

    def look(self, event: e.JournalEvent) -> None:
        match event:
            case e.WorkerRegistered(worker_id, name) if event.at_s is not None:
                self._leave(worker_id)
                self._stays[worker_id] = _Stay(name, event.at_s, event.at_s)
                for lease_id, (holder, holder_name) in self._holders.items():
                    if not holder and holder_name == name:
                        self._holders[lease_id] = (worker_id, name)
            case e.WorkerLost(worker_id):
                self._see(worker_id, event.at_s)
                self._leave(worker_id)
            case e.LeaseGranted() | e.LeaseDuplicated():
                self._see(event.worker_id, event.at_s)
                stay = self._stays.get(event.worker_id)
                self._holders[event.lease_id] = (event.worker_id, "" if stay is None else stay.name)
            case e.LeaseExpired() | e.GroupSubmitted():
                holder, _ = self._holders.pop(event.lease_id, ("", ""))
                self._see(holder, event.at_s)
            case e.RunResumed() | e.RunFinished():
                for worker_id in list(self._stays):
                    self._leave(worker_id)
                self._holders = {lease: ("", name) for lease, (_, name) in self._holders.items()}
            case _:
                pass

    def total_s(self, now: float) -> float:
        """Return all worker seconds up to `now`, on the coordinator's clock."""
        return self.past_s + sum(max(stay.seen_s, now) - stay.from_s for stay in self._stays.values())

    def _see(self, worker_id: str, at_s: float | None) -> None:
        stay = self._stays.get(worker_id)
        if stay is not None and at_s is not None:
            stay.seen_s = max(stay.seen_s, at_s)

    def _leave(self, worker_id: str) -> None:
        stay = self._stays.pop(worker_id, None)
        if stay is not None:
            self.past_s += stay.seen_s - stay.from_s
