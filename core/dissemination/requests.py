"""Requests: which chunks to ask of whom next, while a payload arrives.

A worker asks one parent at a time for chunks in order, some ahead, so that a chunk is passed on while the
next one comes. A parent that fails, or is asked and sends no byte for a stated time, is left for the next
one, and what it was asked for is asked of that; what has arrived stays. It is tried again with a chunk
that is not needed soon, and preferred again once it delivers. One that is far below the planned rate is
helped out by the next one. Who sent a wrong chunk is asked nothing more.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from antiphon.core.dissemination.plan import ORIGIN, Assignment

BoolArray = npt.NDArray[np.bool_]

AHEAD_S = 1.0
"""Seconds' worth of chunks that a source is asked for ahead."""
SLOW_SHARE = 0.25
"""Of the planned rate; a source below it for as long as a stall takes is helped out."""
ALONE = 12
"""Times as much patience has a worker that can ask no one else, and one that asks the origin: many share its
uplink."""
MOST_IN_REQUEST = 1024
PIECE_BYTES = 256 << 10
"""A turn at a capped uplink; a source that needs longer than a stall for so much is given twice that time."""
LEAST_PIECE_BYTES, MOST_PIECE_BYTES, QUICK_PIECE_S = 32 << 10, 4 << 20, 0.02
"""Smallest and largest piece, and how soon a piece must be sent for the next one to be larger."""
BUFFERED_BYTES = 128 << 10
"""Of one call: so much goes into the buffers of a connection at once, however slow the link is."""
PROGRESS_WINDOW_S, PROGRESS_BYTES = 10.0, 10_000
"""This many new bytes in this many seconds are progress; fewer may be a source that drips."""
_MOST_DOUBLINGS = 8
"""Of the patience with the origin."""
MOST_STALL_S = 60.0
"""Longest patience next to the origin, however slow the links are; twice that further down."""
_RATE_WINDOW_S = 0.25
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 8.0
"""Before a source that failed is asked again; doubled with each failure until it delivers."""


@dataclass(frozen=True, slots=True)
class Request:
    """Chunks to ask of one source in one call, in this order."""

    number: int
    source: str
    indices: tuple[int, ...]
    held_only: bool
    """The source need not get these chunks before this worker does: it is not to wait for them."""


@dataclass(slots=True)
class PiecePace:
    """How much one message carries: what the link takes in `QUICK_PIECE_S`.

    A message costs either end about a millisecond of CPU, so where links are fast it carries several chunks,
    or much of a large one. A receiver hands a chunk on when its message is whole, so where they are
    slow, or a stream is one of many, it carries one chunk, or a little of it.
    """

    least_bytes: int = LEAST_PIECE_BYTES
    piece_bytes: int = field(init=False)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self.piece_bytes = self.least_bytes

    def sent(self, length: int, seconds: float) -> None:
        """Note how large the last piece was and how long it took to send."""
        self.sent_bytes += length
        if seconds >= QUICK_PIECE_S:
            self.piece_bytes = max(self.piece_bytes // 2, self.least_bytes)
        elif self.sent_bytes >= BUFFERED_BYTES:
            self.piece_bytes = min(2 * self.piece_bytes, MOST_PIECE_BYTES)


@dataclass(slots=True)
class Source:
    """One who may be asked, and what is known of it."""

    name: str
    upstream: bool
    """It has every chunk, or gets it before this worker does; others send what they hold of what is asked."""
    calls_at_once: int
    bytes_per_s: float
    """Measured; at first what was planned."""
    calls: dict[int, Request] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    """Open request -> chunks that it has still to bring."""
    bytes_in: int = 0
    best_bytes_per_s: float = 0.0
    failures: int = 0
    """Since it last delivered a chunk."""
    stalls: int = 0
    """Times that nothing came of it in time; each chunk that it delivers takes one off."""
    retry_at_s: float = 0.0
    slow: bool = False
    last_byte_s: float = 0.0
    """When the last byte came, or when it was asked after it had nothing to do."""
    rate_since_s: float = 0.0
    rate_bytes: int = 0
    watched_since_s: float = 0.0
    watched_bytes: int = 0

    @property
    def keeps_pace(self) -> bool:
        """Whether no one else need be asked besides."""
        return not self.slow and not self.failures

    def is_free(self) -> bool:
        """Return whether another request may begin: beside one that brings its last chunk it may."""
        if self.failures:
            return not self.calls
        over = sum(self.left[number] <= 1 < len(call.indices) for number, call in self.calls.items())
        return len(self.calls) - over < self.calls_at_once and over <= self.calls_at_once


class Transfer:
    """The decisions of one payload's transfer; the caller tells what happens, and the time."""

    def __init__(
        self,
        held: BoolArray,
        chunk_bytes: int,
        assignment: Assignment,
        culprits: MutableMapping[str, str],
        now: float,
        *,
        calls_at_once: int = 2,
        stall_s: float = 5.0,
    ) -> None:
        """Begin or continue a transfer.

        Args:
            held: per chunk, whether it is here; copied.
            chunk_bytes: of each chunk but the last.
            assignment: whom to ask.
            culprits: name -> what it did; shared by the transfers of a run, and added to.
            now: seconds on a clock that never goes back.
            calls_at_once: requests that one source may have open.
            stall_s: seconds without a byte after which an asked source is left, on a fast link next to
                the origin; who is further down waits longer, so that the nearest to the fault repairs it.
        """
        count = len(held)
        self._held = held.copy()
        self._asked = np.zeros(count, np.int16)
        """Per chunk: open requests that will still bring it."""
        self._chunk_bytes = chunk_bytes
        self._assignment = assignment
        self._culprits = culprits
        self._wrong: dict[str, str] = {}
        self._number = 0
        self.last_progress_s = self._window_s = now
        """Instant at which the last chunk was kept, or new bytes came at more than a drip, from anyone."""
        self._window_bytes = 0
        self._most = np.zeros(count, np.int64)
        """Per chunk: the most bytes of it that came in one request."""
        chunk_s = chunk_bytes / assignment.bytes_per_s
        piece_s = min(chunk_s, PIECE_BYTES / assignment.bytes_per_s)
        depth_factor = 1 + min(assignment.depth, 8) / 8
        # A worker that claims a slow link must not make those below wait for hours.
        longest_s = max(stall_s, MOST_STALL_S)
        self._stall_s = min(max(stall_s, 2 * piece_s), longest_s) * depth_factor
        self._first_stall_s = min(self._stall_s + assignment.depth * chunk_s, 2 * longest_s)
        names = [*assignment.parents, *assignment.others]
        self.sources = {
            name: Source(name, name in assignment.parents, calls_at_once, assignment.bytes_per_s)
            for name in dict.fromkeys(names)
        }

    @property
    def complete(self) -> bool:
        return bool(self._held.all())

    def hopeless(self) -> dict[str, str] | None:
        """Return what each source did when every one of them sent something wrong, else None."""
        if all(self._avoided(name) for name in self.sources):
            return {name: self._wrong.get(name) or self._culprits[name] for name in self.sources}
        return None

    def all_failing(self) -> bool:
        """Return whether every source that may be asked has failed since it last delivered.

        An origin that is only slow to send has not: the worker's own link may be slow.
        """
        upstream = [s for s in self.sources.values() if s.upstream and not self._avoided(s.name)]
        return all(s.failures > (s.stalls if s.name == ORIGIN else 0) for s in upstream)

    def next_requests(self, now: float) -> list[Request]:
        """Return the requests to begin now; they count as open until `ended`."""
        found: list[Request] = []
        for source in self._active(now):
            while source.is_free() and (indices := self._choose(source)):
                if not source.calls:
                    source.last_byte_s = source.watched_since_s = source.rate_since_s = now
                    source.watched_bytes = source.rate_bytes = 0
                self._number += 1
                request = Request(self._number, source.name, indices, not source.upstream)
                source.calls[request.number] = request
                source.left[request.number] = len(indices)
                self._asked[list(indices)] += 1
                found.append(request)
        return found

    def stalled(self, now: float) -> list[str]:
        """Return whose open requests are to be given up now, and count each as a failure of its source."""
        found = []
        for source in self.sources.values():
            if not source.calls:
                continue
            limit_s = self._limit_s(source)
            if now - source.last_byte_s >= self._patience_s(source):
                found.append(source.name)
                source.stalls = min(source.stalls + 1, _MOST_DOUBLINGS)
                self.failed(source.name, now)
            elif now - source.watched_since_s > limit_s:
                planned = self._assignment.bytes_per_s * (now - source.watched_since_s)
                source.slow = source.watched_bytes < SLOW_SHARE * planned
                source.watched_since_s, source.watched_bytes = now, 0
        return found

    def bytes_came(self, name: str, count: int, now: float, index: int, so_far: int) -> None:
        """Note `count` bytes of chunk `index`, of which a request has brought `so_far` with these."""
        source = self.sources[name]
        source.last_byte_s = now
        if now - self._window_s > PROGRESS_WINDOW_S:
            self._window_s, self._window_bytes = now, 0
        # What comes again is no progress: a chunk may be sent all but its end any number of times.
        self._window_bytes += max(0, so_far - int(self._most[index]))
        self._most[index] = max(so_far, self._most[index])
        if self._window_bytes >= PROGRESS_BYTES:
            self.last_progress_s = self._window_s = now
            self._window_bytes = 0
        source.bytes_in += count
        source.watched_bytes += count
        source.rate_bytes += count
        if (window_s := now - source.rate_since_s) >= _RATE_WINDOW_S:
            rate = source.rate_bytes / window_s
            source.best_bytes_per_s = max(source.best_bytes_per_s, rate)
            source.bytes_per_s += 0.5 * (rate - source.bytes_per_s)
            source.rate_since_s, source.rate_bytes = now, 0

    def arrived(self, request: Request, index: int) -> bool:
        """Note a chunk that a request brought and that was kept; True when another request may begin."""
        source = self.sources[request.source]
        if not self._held[index]:
            self._held[index] = True
            self.last_progress_s = max(self.last_progress_s, source.last_byte_s)
        source.failures, source.stalls = 0, max(source.stalls - 1, 0)
        if request.number not in source.left:
            return True
        source.left[request.number] -= 1
        return source.left[request.number] <= 1 or not source.keeps_pace

    def ended(self, request: Request) -> None:
        """Note that a request is over, however it ended; what it did not bring is asked for again."""
        source = self.sources[request.source]
        if source.calls.pop(request.number, None) is not None:
            del source.left[request.number]
            self._asked[list(request.indices)] -= 1

    def failed(self, name: str, now: float) -> None:
        """Note that a source went away, refused or stalled: it is asked again later."""
        source = self.sources[name]
        source.retry_at_s = now + min(_FIRST_PAUSE_S * 2 ** min(source.failures, 8), _MOST_PAUSE_S)
        source.failures += 1

    def wrong(self, name: str, what: str) -> None:
        """Note that a source sent something wrong: it is asked for nothing more.

        The origin is forgiven with the next transfer, because no one else makes new versions.
        """
        self._wrong[name] = what
        if name != ORIGIN:
            self._culprits[name] = what

    def retry_s(self, now: float) -> float:
        """Return seconds until something may change although nothing happens."""
        due = [s.retry_at_s for s in self.sources.values() if s.retry_at_s > now]
        due += [s.last_byte_s + self._patience_s(s) for s in self.sources.values() if s.calls]
        return max(0.001, min([self._stall_s / 4, *(at_s - now for at_s in due)]))

    def _limit_s(self, source: Source) -> float:
        limit_s = self._stall_s if source.bytes_in else self._first_stall_s
        return limit_s * ALONE if self._is_alone(source) else limit_s

    def _patience_s(self, source: Source) -> float:
        """Return after how many silent seconds the requests of a source are given up.

        Those of the origin stay open for long while others are asked too: where all are slow, the link of
        this worker is, and what is half here would be lost.
        """
        if source.name != ORIGIN:
            return self._limit_s(source)
        return self._limit_s(source) * (1 if self._is_alone(source) else ALONE) * (1 << source.stalls)

    def _is_alone(self, source: Source) -> bool:
        return all(self._avoided(name) for name in self.sources if name != source.name)

    def _parents(self) -> list[Source]:
        return [self.sources[name] for name in self._assignment.parents]

    def _avoided(self, name: str) -> bool:
        return name in self._wrong or name in self._culprits

    def _usable(self, source: Source, now: float) -> bool:
        return not self._avoided(source.name) and source.retry_at_s <= now

    def _active(self, now: float) -> list[Source]:
        """Return whom to ask now, the preferred first."""
        usable = [s for s in self.sources.values() if self._usable(s, now)]
        found = []
        for source in usable:
            if source.upstream:
                found.append(source)
                if source.keeps_pace:
                    return found
        # No parent is left that keeps the pace, so anyone that holds something is asked too.
        return found + [s for s in usable if not s.upstream]

    def _choose(self, source: Source) -> tuple[int, ...]:
        free = ~self._held & (self._asked == 0)
        chosen = np.flatnonzero(free)
        if not len(chosen):
            chosen = self._late(source)
        if source.failures and source.upstream:
            return tuple(map(int, chosen[-1:]))
        if source.failures:
            # It holds none of the first; of some from everywhere it sends what it holds.
            return tuple(map(int, chosen[:: -(-len(chosen) // MOST_IN_REQUEST) or 1]))
        ahead = source.bytes_per_s * AHEAD_S / self._chunk_bytes / source.calls_at_once
        fair = -(-len(chosen) // source.calls_at_once)  # the end is shared by all streams
        return tuple(map(int, chosen[: max(1, min(int(ahead), fair, MOST_IN_REQUEST))]))

    def _late(self, source: Source) -> npt.NDArray[np.int64]:
        """Return chunks that only those were asked for who are slow or on trial, and worse than `source`."""
        late, due = np.zeros(len(self._held), np.bool_), ~self._held
        for other in self.sources.values():
            for request in other.calls.values():
                if other is source or not _is_worse(other, source):
                    due[list(request.indices)] = False
                else:
                    late[list(request.indices)] = True
        late &= due
        return np.flatnonzero(late)


def _is_worse(one: Source, other: Source) -> bool:
    """Return whether `other` should be asked too for what `one` was asked for."""
    if other.failures:
        return one.slow
    return not one.keeps_pace and (other.keeps_pace or 2 * one.bytes_per_s < other.bytes_per_s)
