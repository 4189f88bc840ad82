"""Fleet: which workers take part, what they hold and how busy they are; kept in memory alone.

After a restart of the coordinator no one is known, every worker registers again, and nothing
is lost: leases name their groups, not the fleet's memory of a worker.
"""

from dataclasses import dataclass

from antiphon.core.coordinator.running_leases import RunningLeases
from antiphon.core.dissemination.transfers import TransferPlans
from antiphon.core.loop.leases import heartbeat_pause_s
from antiphon.core.requests import WorkerHeartbeat
from antiphon.core.status import WorkerRecord, WorkerState

MISSED_HEARTBEATS = 5
"""A worker that missed this many in a row counts as lost."""
LONGEST_SWAP_ERROR = 300
"""Characters that are kept of a worker's reason for a swap that failed."""
FASTEST_TOKENS_PER_S = 1e6
"""No worker is believed to sample faster."""
LOST_REMEMBERED = 32
"""Lost workers that status still lists."""


@dataclass(slots=True)
class Member:
    """One worker as the coordinator knows it."""

    worker_id: str
    name: str
    concurrent_groups: int
    seen_s: float
    usd_per_hour: float = 0.0
    """What it costs now."""
    state: WorkerState = WorkerState.JOINING
    held_version: int | None = None
    tokens_generated: int = 0
    busy_s: float = 0.0
    uptime_s: float = 0.0
    bytes_fetched: int = 0
    numerics: str = ""
    swap_error: str = ""
    """Why it could not load newer weights; empty once it could."""
    swap_failing_since_s: float = 0.0
    missing_abilities: tuple[str, ...] = ()
    pause_s: float = 0.0
    """Until its next heartbeat, as the reply to the last one said; 0 for the usual pause."""
    relay_address: str = ""
    """host:port at which other workers may take payloads from it; "": nowhere."""
    draining: bool = False
    """It is to leave, and gets no further group."""
    max_leases: int | None = None
    """Leases that its access token allows at the same time; None without tokens."""
    instance: str = ""
    """What its process drew when it began."""
    streams: int = 0
    """Open streams on which it has spoken: while there is one its process lives."""
    sent_newest: int | None = None
    """Newest announced version that it was sent."""
    sent_wanted: int | None = None
    """The version it was last asked to sample with."""

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens over the seconds since it was ready to sample; 0 before it was heard of."""
        return _rate(self.tokens_generated, self.uptime_s)


class Fleet:
    """The workers by id; the caller gives the time."""

    def __init__(self, heartbeat_s: float, uplink_bytes_per_s: float | None = None) -> None:
        self._heartbeat_s = heartbeat_s
        self._members: dict[str, Member] = {}
        self._living: list[Member] | None = None  # what `living`, `active` and `newest_held` return, until a
        self._active: list[Member] = []  # worker joins, leaves or loads a version: each lease asks for them
        self._newest_held = self._places = 0
        self.transfers = TransferPlans(uplink_bytes_per_s)
        self.size = 0
        """Workers that are not lost."""
        self.work_done = 0
        """Grows with each group, reward, loaded version, token that is kept, and heartbeat that tells of more
        tokens or fetched bytes, of use or not: patience with the fleet counts from its last change."""

    def add(
        self,
        worker_id: str,
        name: str,
        concurrent_groups: int,
        now: float,
        relay_address: str = "",
        usd_per_hour: float = 0.0,
    ) -> Member:
        member = Member(worker_id, name, concurrent_groups, now, usd_per_hour, relay_address=relay_address)
        self._members[worker_id] = member
        self._living = None
        self.size += 1
        return member

    def get(self, worker_id: str) -> Member | None:
        """Return a worker, or None for one that is unknown or lost."""
        member = self._members.get(worker_id)
        return None if member is None or member.state is WorkerState.LOST else member

    def note_quota(self, worker_id: str, max_leases: int) -> None:
        """Note how many leases a worker's access token allows it at the same time."""
        if (member := self.get(worker_id)) is not None:
            member.max_leases = max_leases

    def named(self, name: str) -> list[Member]:
        """Return the workers of a name that are not lost."""
        return [member for member in self.living() if member.name == name]

    def living(self) -> list[Member]:
        """Return every worker that is not lost."""
        if self._living is None:
            members = self._members.values()
            self._living = [member for member in members if member.state is not WorkerState.LOST]
            self._active = [member for member in self._living if member.state is WorkerState.ACTIVE]
            self._newest_held = max((member.held_version or 0 for member in self._living), default=0)
            self._places = sum(member.concurrent_groups for member in self._active)
        return self._living

    def take_heartbeat(self, member: Member, heartbeat: WorkerHeartbeat, now: float) -> bool:
        """Note a heartbeat; True when the worker holds another version than before."""
        member.seen_s = now
        member.pause_s = heartbeat_pause_s(self._heartbeat_s, self.size, busy=bool(heartbeat.lease_ids))
        # Not by how much: that is a claim, and no claim is summed up.
        self.work_done += heartbeat.tokens_generated > member.tokens_generated
        self.work_done += heartbeat.bytes_fetched > member.bytes_fetched
        member.tokens_generated, member.busy_s = heartbeat.tokens_generated, heartbeat.busy_s
        member.uptime_s, member.bytes_fetched = heartbeat.uptime_s, heartbeat.bytes_fetched
        member.numerics, member.missing_abilities = heartbeat.numerics, heartbeat.missing_abilities
        member.swap_error = " ".join(heartbeat.swap_error[:LONGEST_SWAP_ERROR].split())
        member.swap_failing_since_s = now - heartbeat.swap_failing_s
        return self.holds(member, heartbeat.held_version)

    def holds(self, member: Member, version: int | None) -> bool:
        """Note which version a worker samples with; True when that is news.

        A worker that holds its first version has joined; one that holds none any more joins again.
        """
        if member.held_version == version:
            return False
        member.held_version, self._living = version, None
        if version is not None and member.state is WorkerState.JOINING:
            member.state = WorkerState.ACTIVE
        if version is None and member.state is WorkerState.ACTIVE:
            member.state = WorkerState.JOINING
        self.work_done += version is not None
        return version is not None

    def active(self) -> list[Member]:
        """Return the workers that can sample: neither joining nor lost."""
        self.living()
        return self._active

    def absence(self) -> str:
        """Return whom the run waits for while no worker is active, as a sentence; "" when one is."""
        if self.active():
            return ""
        joining = ", ".join(sorted(member.worker_id for member in self.living())[:4])
        if not joining:
            return "a worker to join: none is active"
        return f"a worker to load its first version: none is active, {joining} is joining"

    def share_holding(self, version: int) -> float:
        """Return the share of the active workers' tokens per second that samples with `version` or newer.

        While no one has sampled anything it is the share of the workers; 0 without any.
        """
        active = self.active()
        speeds = [member.tokens_per_s for member in active]
        if not any(speeds):
            speeds = [1.0] * len(active)
        holding = sum(speed for member, speed in zip(active, speeds, strict=True) if _holds(member, version))
        return holding / sum(speeds) if speeds else 0.0

    def holders(self, version: int) -> int:
        """Return how many active workers sample with `version` or newer."""
        return sum(_holds(member, version) for member in self.active())

    def held_elsewhere(self, worker_id: str) -> set[int]:
        """Return the versions that other active workers hold."""
        return {
            member.held_version
            for member in self.active()
            if member.worker_id != worker_id and member.held_version is not None
        }

    def newest_held(self) -> int:
        """Return the newest version that an active worker holds; 0 before any does."""
        self.living()
        return self._newest_held

    def places(self) -> int:
        """Return how many groups the active workers can sample at once."""
        self.living()
        return self._places

    def speeds(self) -> list[tuple[str, float, int]]:
        """Return id, completion tokens per second and groups at once of each active worker."""
        return [(m.worker_id, m.tokens_per_s, m.concurrent_groups) for m in self.active()]

    def supply(self) -> float:
        """Return the completion tokens per second of the active workers, each while its engine runs."""
        return sum(_rate(m.tokens_generated, m.busy_s) for m in self.active())

    def silent(self, now: float) -> list[Member]:
        """Return the workers that missed too many heartbeats."""
        every_s = self._heartbeat_s
        return [m for m in self.living() if now - m.seen_s > MISSED_HEARTBEATS * max(every_s, m.pause_s)]

    def lose(self, member: Member) -> None:
        """Note that a worker is gone; the longest gone are forgotten."""
        self.size -= member.state is not WorkerState.LOST
        member.state, self._living = WorkerState.LOST, None
        self.transfers.forget(member.worker_id)
        lost = [m.worker_id for m in self._members.values() if m.state is WorkerState.LOST]
        for worker_id in lost[:-LOST_REMEMBERED]:
            del self._members[worker_id]

    def records(self, leases: RunningLeases, now: float) -> tuple[WorkerRecord, ...]:
        """Return every worker at a glance."""
        return tuple(
            WorkerRecord(
                worker_id=member.worker_id,
                state=member.state,
                held_version=member.held_version,
                open_leases=leases.count_of_worker(member.worker_id),
                stands_still_s=leases.engines.stands_still_s(member.worker_id),
                tokens_generated=member.tokens_generated,
                busy_share=min(1.0, member.busy_s / member.uptime_s) if member.uptime_s > 0 else 0.0,
                seconds_since_heartbeat=max(0.0, now - member.seen_s),
                tokens_per_s=member.tokens_per_s,
                swap_error=member.swap_error,
                swap_failing_s=max(0.0, now - member.swap_failing_since_s) if member.swap_error else 0.0,
                missing_abilities=member.missing_abilities,
            )
            for member in self._members.values()
        )


def _rate(tokens: int, seconds: float) -> float:
    return min(tokens / seconds, FASTEST_TOKENS_PER_S) if seconds > 0.0 else 0.0


def _holds(member: Member, version: int) -> bool:
    return member.held_version is not None and member.held_version >= version
