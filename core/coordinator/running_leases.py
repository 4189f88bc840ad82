"""Running leases: who samples which group until when, and what is known of it so far.

Kept in memory alone: the journal knows who holds which group, and what was handed over. What the
next holder of a group may continue from waits here too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from antiphon.core.config import RunConfig
from antiphon.core.lengths.running import GroupEnds, RunningGroup
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.leases import EngineSign, EngineWatch, HeldLease, LeaseTable
from antiphon.core.loop.partials import KeptGroup, PartialGroups
from antiphon.core.loop.speculation import LeaseTimes
from antiphon.core.records import LeaseProgress
from antiphon.core.requests import WorkerHeartbeat


class RunningLeases(LeaseTable):
    """The leases by id, each with the beginning of its group."""

    def __init__(self, config: RunConfig) -> None:
        section = config.coordinator
        super().__init__(section.lease_s)
        self.engines = EngineWatch(
            section.heartbeat_s,
            section.lease_s,
            section.hung_factor,
            config.services.stall_timeout_s,
            steps_are_tokens=section.partials_mib == 0,
        )
        self.partial_groups = PartialGroups(section.partials_mib << 20)
        self.times = LeaseTimes()
        """How long whole groups took lately."""
        self._ends = GroupEnds()
        self._reported: dict[str, int] = {}
        """Lease id -> most tokens of its group that a heartbeat reported."""
        self._hangs: Counter[str] = Counter()
        """Group id -> how many engines stood still with it."""

    def begin(
        self, lease_id: str, group: GroupState, worker_id: str, now: float, given: KeptGroup | None
    ) -> None:
        """Start a lease of a group that continues from `given`."""
        self.grant(lease_id, group.group_id, worker_id, now)
        self.partial_groups.begin(lease_id, group.group_id, group.samples, given)

    def measure(self, lease_id: str, counts: Sequence[int], now: float) -> None:
        """Take in how long a lease that is handed in now has lasted, if it began at the first token.

        `counts`: tokens of its completions.
        """
        held = self.get(lease_id)
        if held is not None and not self.partial_groups.given(lease_id):
            self.times.add(now - held.granted_s)
            self._ends.add(held.worker_id, now - held.granted_s, counts)

    def ends_sooner_at(self, worker_id: str, group: GroupState, remembered: float | None, now: float) -> bool:
        """Return whether a worker should end a leased group well before its holder.

        A group that was continued before stays where it is.

        `remembered`: tokens that its longest completion should have, or None.
        """
        held = self.get(group.lease_id)
        if held is None or self.partial_groups.given(group.lease_id):
            return False
        kept = self.partial_groups.snapshot(group.lease_id)
        pieces = () if kept is None else kept.pieces()
        running = RunningGroup(
            held.worker_id,
            now - held.granted_s,
            group.samples,
            remembered,
            max((piece.sampled_tokens for piece in pieces), default=0),
            # Of a sample whose turn is answered, more may come.
            [
                piece.sampled_tokens
                for piece in pieces
                if (reason := piece.finish_reason) is not None and not (group.answers and reason.ends_turn)
            ],
        )
        return self._ends.sooner_at(running, worker_id)

    def may_be_late(self, now: float) -> bool:
        """Return whether a lease is slow, or one worker is much slower than another."""
        slow_s = self.times.slow_s
        return self._ends.uneven or (
            slow_s is not None and any(s > slow_s for s in self.ages_s(now).values())
        )

    def forget_worker(self, worker_id: str) -> None:
        """Forget what a worker that is gone was like."""
        self.engines.forget(worker_id)
        self._ends.forget(worker_id)

    def take_progress(self, worker_id: str, progress: LeaseProgress) -> bool:
        """Keep the pieces of a running lease, and return whether any heartbeat reported fewer tokens of it.

        What finds no room is not kept, but reported again with each heartbeat.
        """
        lease_id = progress.lease_id
        for piece in progress.pieces:
            self.partial_groups.take(lease_id, worker_id, piece)
        stops = dict(enumerate(self.partial_groups.kept(lease_id)))
        for piece in progress.pieces:
            stops[piece.sample_index] = max(stops.get(piece.sample_index, 0), piece.stop)
        reported, before = sum(stops.values()), self._reported.get(lease_id, 0)
        self._reported[lease_id] = max(reported, before)
        return reported > before

    def engine_hangs(
        self, heartbeat: WorkerHeartbeat, gained: bool, waits: bool, now: float
    ) -> list[HeldLease]:
        """Take in what a heartbeat says of the engine; when it stands still, return the leases to take back.

        `gained`: it reported new tokens of unfinished groups. `waits`: turns of its groups wait for answers.
        """
        held = [lease for lease_id in heartbeat.lease_ids if (lease := self.get(lease_id)) is not None]
        sign = EngineSign(
            tokens_generated=heartbeat.tokens_generated,
            gained=gained,
            busy_s=heartbeat.busy_s,
            version=heartbeat.held_version,
            sampling=heartbeat.sampling,
            leased=bool(held),
            attempts=max((self._hangs[lease.group_id] for lease in held), default=0),
            waits=waits and not heartbeat.sampling,
        )
        if not self.engines.hear(heartbeat.worker_id, sign, now):
            return []
        self._hangs.update(() if sign.waits else [lease.group_id for lease in held])
        return held

    def stop(self, lease_id: str) -> KeptGroup | None:
        """End a lease and return what is kept of its group, or None when that is nothing."""
        self.end(lease_id)
        self._reported.pop(lease_id, None)
        return self.partial_groups.end(lease_id)

    def known_of(self, lease_id: str, group: GroupState) -> KeptGroup | None:
        """Return what heartbeats reported of a group that is handed in under a lease.

        When that lease has ended, what is kept of it waits for the next one, or went on with it.
        """
        partials = self.partial_groups
        return (
            partials.snapshot(lease_id)
            or partials.waiting(group.group_id)
            or partials.snapshot(group.lease_id)
        )

    def slower(self, group: GroupState, winner: str, now: float) -> Iterator[e.LeaseExpired]:
        """Yield the ends of the leases whose group another holder handed in first.

        The winner's own lease may have ended before.
        """
        for lease_id in (group.lease_id, group.twin_lease_id):
            held = self.get(lease_id)
            if held is not None and lease_id != winner:
                yield e.LeaseExpired(
                    group_id=group.group_id,
                    lease_id=lease_id,
                    worker_id=held.worker_id,
                    reason="a duplicate was handed in first",
                    at_s=now,
                    tokens=self.wasted_tokens(group, lease_id),
                    waste="duplicate",
                )

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
        self._hangs.pop(group_id, None)
        self.partial_groups.forget(group_id)
