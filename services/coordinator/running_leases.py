"""Running leases: who samples which group until when, and what is known of it so far.

Kept in memory alone: the journal knows who holds which group, and what was handed over. What the
next holder of a group may continue from waits here too.
"""

from antiphon.core.config_sections import CoordinatorSection
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.leases import LeaseTable
from antiphon.core.loop.partials import KeptGroup, PartialGroups
from antiphon.core.loop.speculation import LeaseTimes


class RunningLeases(LeaseTable):
    """The leases by id, each with the beginning of its group."""

    def __init__(self, section: CoordinatorSection) -> None:
        super().__init__(section.lease_s)
        self.partial_groups = PartialGroups(section.partials_mib << 20)
        self.times = LeaseTimes()
        """How long whole groups took lately."""

    def begin(
        self, lease_id: str, group: GroupState, worker_id: str, now: float, given: KeptGroup | None
    ) -> None:
        """Start a lease of a group that continues from `given`."""
        self.grant(lease_id, group.group_id, worker_id, now)
        self.partial_groups.begin(lease_id, group.group_id, group.samples, given)

    def measure(self, lease_id: str, now: float) -> None:
        """Take in how long a lease that is handed in now has lasted, if it began at the first token."""
        held = self.get(lease_id)
        if held is not None and not self.partial_groups.given(lease_id):
            self.times.add(now - held.granted_s)

    def stop(self, lease_id: str) -> KeptGroup | None:
        """End a lease and return what is kept of its group, or None when that is nothing."""
        self.end(lease_id)
        return self.partial_groups.end(lease_id)

    def stop_slower(self, group: GroupState, winner: str, now: float) -> list[e.JournalEvent]:
        """End the lease that another holder of its group was faster than, and return what happened."""
        found: list[e.JournalEvent] = []
        both = (group.lease_id, group.twin_lease_id)
        for lease_id in both if winner in both else ():
            held = self.get(lease_id)
            if held is None or lease_id == winner:
                continue
            expired = e.LeaseExpired(
                group_id=group.group_id,
                lease_id=lease_id,
                worker_id=held.worker_id,
                reason="a duplicate was handed in first",
                at_s=now,
                tokens=self.wasted_tokens(group, lease_id),
                waste="duplicate",
            )
            found.append(expired)
            self.stop(lease_id)
        return found

    def wasted_tokens(self, group: GroupState, lease_id: str) -> int:
        """Return the tokens known of a lease, without those that a duplicate of it continued from."""
        partials, sampled = self.partial_groups, self.partial_groups.sampled(lease_id)
        if group.twin_lease_id and lease_id == group.lease_id:
            shared = partials.given(group.twin_lease_id) - partials.given(lease_id)
            return max(0, sampled - max(0, shared))
        return sampled

    def done(self, lease_id: str, group_id: str) -> None:
        """End a lease whose group was handed in; no one continues it."""
        self.stop(lease_id)
        self.partial_groups.forget(group_id)
