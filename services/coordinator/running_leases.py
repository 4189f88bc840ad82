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
from antiphon.core.records import PartialTrajectory


class RunningLeases(LeaseTable):
    """The leases by id, each with the beginning of its group."""

    def __init__(self, section: CoordinatorSection) -> None:
        """Begin without leases."""
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

    def take(self, lease_id: str, worker_id: str, piece: PartialTrajectory) -> None:
        """Keep a piece that `check_piece` passed."""
        self.partial_groups.take(lease_id, worker_id, piece)

    def kept(self, lease_id: str) -> tuple[int, ...]:
        """Return [G] how many tokens of each completion are kept."""
        return self.partial_groups.kept(lease_id)

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
                tokens=self.sampled_in_vain(group, lease_id),
                waste="duplicate",
            )
            found.append(expired)
            self.stop(lease_id)
        return found

    def keep(self, group_id: str, kept: KeptGroup) -> None:
        """Keep the beginning of a group for its next lease."""
        self.partial_groups.wait(group_id, kept)

    def sampled(self, lease_id: str) -> int:
        """Return how many tokens its holder is known to have sampled under a lease."""
        return self.partial_groups.sampled(lease_id)

    def snapshot(self, lease_id: str) -> KeptGroup | None:
        """Return what is kept of a group under a running lease, or None when that is nothing."""
        return self.partial_groups.snapshot(lease_id)

    def waiting(self, group_id: str) -> KeptGroup | None:
        """Return what the next lease of a group can start from."""
        return self.partial_groups.waiting(group_id)

    def sampled_in_vain(self, group: GroupState, lease_id: str) -> int:
        """Return the tokens known of a lease, without those that a duplicate of it continued from."""
        partials, sampled = self.partial_groups, self.sampled(lease_id)
        if group.twin_lease_id and lease_id == group.lease_id:
            shared = partials.given(group.twin_lease_id) - partials.given(lease_id)
            return max(0, sampled - max(0, shared))
        return sampled

    def done(self, lease_id: str, group_id: str) -> None:
        """End a lease whose group was handed in; no one continues it."""
        self.stop(lease_id)
        self.partial_groups.forget(group_id)
