"""Leases: the right to produce one group until a deadline, told the time by the caller.

The table is volatile on purpose: the journal knows who holds which group, and deadlines belong
to one process's monotonic clock. After a restart every lease that was open gets a fresh one.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldLease:
    """One lease and when it ends."""

    lease_id: str
    group_id: str
    worker_id: str
    deadline_s: float
    """On the clock of whoever passes `now`."""
    granted_s: float
    """On the same clock; after the coordinator's restart, when that was."""


class LeaseTable:
    """The leases that are running, by id; a lease id is the fencing token of one attempt."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._held: dict[str, HeldLease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, lease_id: str) -> HeldLease | None:
        return self._held.get(lease_id)

    def grant(self, lease_id: str, group_id: str, worker_id: str, now: float) -> HeldLease:
        """Start a lease; a group has one, or two while it is sampled speculatively."""
        held = HeldLease(lease_id, group_id, worker_id, now + self._duration_s, now)
        self._held[lease_id] = held
        return held

    def extend(self, lease_ids: Iterable[str], worker_id: str, now: float) -> tuple[str, ...]:
        """Give running leases a fresh deadline and return the ids that are not running.

        Whoever names the lease id holds the lease: a worker that registered again after the
        coordinator's restart continues its groups under its new name.
        """
        gone = []
        for lease_id in lease_ids:
            held = self._held.get(lease_id)
            if held is None:
                gone.append(lease_id)
            else:
                self._held[lease_id] = dataclasses.replace(
                    held, worker_id=worker_id, deadline_s=now + self._duration_s
                )
        return tuple(gone)

    def end(self, lease_id: str) -> None:
        """Forget a lease that was used or taken back; an unknown one is ignored."""
        self._held.pop(lease_id, None)

    def expired(self, now: float) -> list[HeldLease]:
        """Return the leases whose deadline has passed, oldest first; they are not ended here."""
        late = [held for held in self._held.values() if held.deadline_s <= now]
        return sorted(late, key=lambda held: (held.deadline_s, held.lease_id))

    def ages_s(self, now: float) -> dict[str, float]:
        """Return the seconds since each running lease was granted, by id."""
        return {held.lease_id: now - held.granted_s for held in self._held.values()}

    def silent_s(self, held: HeldLease, now: float) -> float:
        """Return the seconds since a lease was granted or last extended."""
        return max(0.0, now - (held.deadline_s - self._duration_s))

    def of_worker(self, worker_id: str) -> list[HeldLease]:
        """Return the leases that a worker holds."""
        return [held for held in self._held.values() if held.worker_id == worker_id]


IDLE_HEARTBEATS_PER_S = 50.0
"""Heartbeats that all workers without a lease send together, at most; each costs the coordinator time."""


def heartbeat_pause_s(heartbeat_s: float, workers: int, busy: bool) -> float:
    """Return the seconds until a worker's next heartbeat.

    One that holds a lease reports its progress at the usual pace. One that holds none is only to be
    known as alive: in a large fleet it is heard less often, and its silence is noticed later.

    Args:
        heartbeat_s: the usual pause.
        workers: living workers of the run.
        busy: whether it holds a lease.

    >>> heartbeat_pause_s(2.0, 1000, busy=False), heartbeat_pause_s(2.0, 8, busy=False)
    (20.0, 2.0)
    """
    return heartbeat_s if busy else max(heartbeat_s, workers / IDLE_HEARTBEATS_PER_S)


def finishes_in_time(tokens_left: int, seconds_per_token: float | None, time_left_s: float) -> bool:
    """Return whether a group is surely finished before its worker must be gone; if not, it is handed over.

    Args:
        tokens_left: most tokens that its slowest completion can still get.
        seconds_per_token: of one completion, as measured; None when nothing was measured yet.
        time_left_s: until the worker must have handed it in.

    >>> finishes_in_time(40, 0.1, 5.0), finishes_in_time(60, 0.1, 5.0), finishes_in_time(1, None, 5.0)
    (True, False, False)
    """
    return seconds_per_token is not None and tokens_left * seconds_per_token <= time_left_s
