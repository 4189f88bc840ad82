"""Holders: whether leases end by their holders or their deadlines alone, and whom strikes are for."""

import math
from collections.abc import Sequence

from antiphon.core.loop import events as e
from antiphon.simulator.hostile_worker import NAME


class LeaseHolders:
    """What honest workers say of their leases."""

    def __init__(self, lease_s: float) -> None:
        """Begin without a lease; `lease_s` is how long one lasts without a sign of life, seconds."""
        self._lease_s = lease_s
        self._heard_s: dict[str, float] = {}
        """Lease -> second at which the newest answered heartbeat that named it was sent."""
        self._own: set[str] = set()
        """Leases that honest workers hold or held."""
        self._given_up: set[str] = set()
        """Those of them that they gave up themselves."""

    def told(self, lease_ids: Sequence[str], given_up: Sequence[str]) -> None:
        """An honest worker speaks of leases that it holds and of others that it gives up."""
        self._own.update(lease_ids, given_up)
        self._given_up.update(given_up)

    def heard(self, lease_ids: Sequence[str], sent_s: float) -> None:
        """The heartbeat of a worker that holds these leases, sent at that second, was answered."""
        self._heard_s.update(dict.fromkeys(lease_ids, sent_s))

    def wrongly_ended(self, event: e.LeaseExpired, now: float, decided_s: float) -> str:
        """Return why a lease should not have ended, or "".

        `decided_s`: when that was decided by the time of day, long before `now` where the disk was full.
        """
        heard_s = self._heard_s.pop(event.lease_id, -math.inf)
        silent_s = now - heard_s
        late = event.reason.startswith("no sign of life") and silent_s < self._lease_s / 2
        if late and decided_s >= heard_s:
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
