"""Leases: the right to produce one group until a deadline, told the time by the caller.

The table is volatile on purpose: the journal knows who holds which group, and deadlines belong
to one process's monotonic clock. After a restart every lease that was open gets a fresh one.

A heartbeat extends a lease, and an engine that hangs does not end its worker's heartbeats. So what
heartbeats say of the engine's tokens is followed too: an engine that brings none for a multiple of the
usual pause loses its leases, and gets no others before it moves.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.core.frozen import frozen
from antiphon.core.trust.worker_names import name_of_worker


@frozen
class HeldLease:
    """One lease and when it ends."""

    lease_id: str
    group_id: str
    worker_id: str
    deadline_s: float
    """On the clock of the caller that passes `now`."""
    granted_s: float
    """On the same clock; after the coordinator's restart, when that was."""

    def belongs_to(self, worker_id: str) -> bool:
        """Return whether a worker holds this lease, under this id or one that it registered with later."""
        return name_of_worker(self.worker_id) == name_of_worker(worker_id)


class LeaseTable:
    """The leases that are running, by id; a lease id is the fencing token of one attempt."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._held: dict[str, HeldLease] = {}
        self._of_worker: dict[str, dict[str, None]] = {}
        """Worker -> ids of its leases; status asks it of every worker."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, lease_id: str) -> HeldLease | None:
        return self._held.get(lease_id)

    def grant(self, lease_id: str, group_id: str, worker_id: str, now: float) -> HeldLease:
        """Start a lease; a group has one, or two while it is sampled speculatively."""
        held = HeldLease(lease_id, group_id, worker_id, now + self._duration_s, now)
        self._put(held)
        return held

    def extend(self, lease_ids: Iterable[str], worker_id: str, now: float) -> tuple[str, ...]:
        """Give the running leases of a worker a fresh deadline and return the ids of all others.

        A worker that registered again after the coordinator's restart continues its groups under its
        new id.
        """
        gone = []
        for lease_id in lease_ids:
            held = self._held.get(lease_id)
            if held is None or not held.belongs_to(worker_id):
                gone.append(lease_id)
            else:
                self._put(dataclasses.replace(held, worker_id=worker_id, deadline_s=now + self._duration_s))
        return tuple(gone)

    def foreign(self, lease_ids: Iterable[str], worker_id: str) -> dict[str, HeldLease]:
        """Return, by id, those of the named leases that are running and another worker holds."""
        found = {lease_id: self._held.get(lease_id) for lease_id in lease_ids}
        return {i: held for i, held in found.items() if held is not None and not held.belongs_to(worker_id)}

    def end(self, lease_id: str) -> None:
        """Forget a lease that was used or taken back; an unknown one is ignored."""
        held = self._held.pop(lease_id, None)
        if held is not None:
            self._forget_worker(held)

    def _put(self, held: HeldLease) -> None:
        before = self._held.get(held.lease_id)
        if before is not None and before.worker_id != held.worker_id:
            self._forget_worker(before)
        self._held[held.lease_id] = held
        self._of_worker.setdefault(held.worker_id, {})[held.lease_id] = None

    def _forget_worker(self, held: HeldLease) -> None:
        ids = self._of_worker[held.worker_id]
        del ids[held.lease_id]
        if not ids:
            del self._of_worker[held.worker_id]

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
        return [self._held[lease_id] for lease_id in self._of_worker.get(worker_id, ())]

    def count_of_worker(self, worker_id: str) -> int:
        """Return how many leases a worker holds."""
        return len(self._of_worker.get(worker_id, ()))


PAUSES_REMEMBERED = 1024
"""Pauses between new tokens that say what is usual."""
PAUSES_NEEDED = 20
"""Fewer than these say nothing about the longest hundredth."""
USUAL_SHARE = 0.99
"""Share of the remembered pauses that the usual pause is at least as long as."""
MOST_DOUBLINGS = 6
"""A group that one engine after the other stood still with is waited for twice as long each time, up to
so often: perhaps its first token only takes that long."""
COUNTED_HEARTBEATS = 3.0
"""Of the time since the last heartbeat at most this many usual pauses between two count as silence of the
engine: in the rest its worker was not heard, or the coordinator stood still itself."""


class UsualPause:
    """How long engines that work go without a new token, as the heartbeats of all workers show it."""

    def __init__(self, shortest_s: float, unknown_s: float) -> None:
        """Start with `unknown_s`, until enough is known; never return less than `shortest_s`."""
        self._shortest_s = shortest_s
        self._unknown_s = unknown_s
        self._pauses: deque[float] = deque(maxlen=PAUSES_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Add the seconds from one sign of new tokens to the next."""
        self._pauses.append(seconds)

    @property
    def seconds(self) -> float:
        """Return the usual pause."""
        if len(self._pauses) < PAUSES_NEEDED:
            return max(self._shortest_s, self._unknown_s)
        return max(self._shortest_s, sorted(self._pauses)[math.ceil(USUAL_SHARE * len(self._pauses)) - 1])


@frozen
class EngineSign:
    """What one heartbeat says of its worker's engine."""

    tokens_generated: int
    """Of finished completions, since the worker started."""
    gained: bool
    """It reports tokens of unfinished completions that no heartbeat reported before."""
    busy_s: float
    """Seconds in which the engine had requests, up to its last step."""
    version: int | None
    """Version that samples."""
    sampling: bool
    """It has requests and takes in no weights: tokens are due."""
    leased: bool
    """Its worker holds leases, which wait for it."""
    attempts: int = 0
    """How often the groups of these leases, at most, were lost to an engine that stood still."""
    waits: bool = False
    """What it would sample next waits for an environment's answer: no token is due."""


@dataclass(slots=True)
class _Engine:
    """What is known of one worker's engine."""

    sign: EngineSign
    """The last one."""
    heard_s: float
    silent_s: float = 0.0
    """Seconds without a new token, while tokens were waited for and its worker was heard."""
    hung_s: float = 0.0
    """Once it was found to hang: seconds since its last token. 0 while it works."""
    moved: bool = False
    """Since it was found to hang, a step ended or weights were loaded, but no token came."""


class EngineWatch:
    """Which engines stand still although their workers are heard; the caller gives the time."""

    def __init__(
        self,
        heartbeat_s: float,
        lease_s: float,
        hung_factor: float,
        longest_s: float,
        steps_are_tokens: bool = False,
    ) -> None:
        """Watch.

        Args:
            heartbeat_s: usual pause between two heartbeats.
            lease_s: an engine hangs after so long without a token, while too few pauses are known.
            hung_factor: after this many usual pauses, once they are.
            longest_s: how long an engine may be without tokens for a reason that its worker names: it
                takes in weights, or what it sampled is on its way here.
            steps_are_tokens: unfinished completions are not reported; each step counts as a token.
        """
        self.usual = UsualPause(heartbeat_s, lease_s / hung_factor)
        self._most_counted_s = COUNTED_HEARTBEATS * heartbeat_s
        self._factor = hung_factor
        self._longest_s = longest_s
        self._steps_are_tokens = steps_are_tokens
        self._engines: dict[str, _Engine] = {}

    def hear(self, worker_id: str, sign: EngineSign, now: float) -> bool:
        """Take in a heartbeat and return whether the engine has just been found to hang.

        A worker that samples for any of its leases keeps them all: the others wait for their turn. One that
        has waited too long for answers loses its leases too, since hosts may wait for groups that it has no
        room for; its engine does not count as one that hangs.
        """
        engine = self._engines.get(worker_id)
        if engine is None:
            self._engines[worker_id] = _Engine(sign, now)
            return False
        before, passed_s = engine.sign, min(now - engine.heard_s, self._most_counted_s)
        engine.sign, engine.heard_s = sign, now
        if before.leased:
            engine.silent_s += passed_s
        if engine.hung_s:
            engine.hung_s += passed_s
        loaded, stepped = sign.version != before.version, sign.busy_s > before.busy_s
        gained = sign.gained or sign.tokens_generated > before.tokens_generated
        if gained or (self._steps_are_tokens and stepped):
            if before.leased:
                self.usual.add(engine.silent_s)
            engine.silent_s = engine.hung_s = 0.0
        elif loaded:
            engine.silent_s = 0.0
        engine.moved = engine.hung_s > 0 and (engine.moved or loaded or stepped)
        if not sign.leased or not engine.silent_s or engine.silent_s < self.patience_s(sign):
            return False
        engine.hung_s = 0.0 if sign.waits else engine.hung_s or engine.silent_s
        engine.silent_s, engine.moved = 0.0, False
        engine.sign = dataclasses.replace(sign, leased=False)  # the caller takes its leases back
        return True

    def patience_s(self, sign: EngineSign) -> float:
        """Return how long an engine may be without a token: longer for groups that others failed at."""
        patience_s = self._factor * self.usual.seconds * 2.0 ** min(sign.attempts, MOST_DOUBLINGS)
        return patience_s if sign.sampling else max(patience_s, self._longest_s)

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is gone."""
        self._engines.pop(worker_id, None)

    def stands_still_s(self, worker_id: str) -> float:
        """Return for how long an engine that was found to hang has brought no token; 0 for others."""
        engine = self._engines.get(worker_id)
        return 0.0 if engine is None else engine.hung_s

    def most_leases(self, worker_id: str) -> int | None:
        """Return how many leases a worker may hold, None for as many as it likes.

        One whose engine was found to hang gets none before it moves, and one before a token comes.
        """
        engine = self._engines.get(worker_id)
        return None if engine is None or not engine.hung_s else int(engine.moved)


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
