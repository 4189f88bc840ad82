"""Journal: an append-only event log; what was acknowledged is on the disk.

One process owns a journal. Events get their number when they are enqueued, in the order in
which the state saw them; everything that waits goes into one transaction with a full sync, so
concurrent requests share the cost. A payload stands in the transaction of its event, so that no
event ever points at a missing one. While its place cannot take anything (no space, a database
that is away) a journal says so and keeps trying; nothing is acknowledged meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, IntegrityError, UnavailableError
from antiphon.core.loop.events import JournalEvent, TurnAnswered, TurnSampled, dump_event, load_event
from antiphon.core.loop.run_state import RunState
from antiphon.services.coordinator.journal.databases import open_sql_store
from antiphon.services.coordinator.journal.state_codec import (
    FORM,
    StateDump,
    dump_entries,
    dump_state,
    load_state,
)
from antiphon.services.coordinator.journal.store import (
    HistoryEdit,
    HistoryRow,
    JournalStore,
    StateRow,
    StoredEvent,
    StoreTotals,
    TrainedRow,
    WriteBatch,
    Written,
)
from antiphon.system import failpoints
from antiphon.system.clock import wall_clock
from antiphon.system.wakeup import Wakeup

JOURNAL_NAME = "journal.db"
"""The journal's file in the folder of the run, unless `coordinator.journal_url` names a database."""
GATHER_S = 0.02
"""Least pause between two transactions. An event after a quiet time is written at once; while events keep
coming they share a transaction, each of which costs milliseconds of a core whatever it holds."""
URGENT, URGENT_S = (TurnAnswered, TurnSampled), 0.004
"""Events that a sample waits for, and the pause before a transaction with one."""
RETRY_S = 1.0
"""Pause before a transaction that found no place is tried again."""
LONGEST_WAIT_S = 3600.0
"""How long a journal waits for its place to take something; then the coordinator ends."""
_PAGE = 1000
"""Events that are read at once."""

_log = structlog.get_logger("coordinator")
_T = TypeVar("_T")

__all__ = [
    "JOURNAL_NAME",
    "HistoryEdit",
    "HistoryRow",
    "Journal",
    "StoredEvent",
    "TrainedRow",
    "journal_place",
]


def journal_place(config: RunConfig, run_dir: Path) -> Path | str:
    """Return where a run's journal lies: a file in its folder, or the database of its configuration.

    A run that was pulled from another machine has its journal in a file here, whatever it had there.
    """
    file = run_dir / JOURNAL_NAME
    return file if file.exists() else config.coordinator.journal_url or file


class Journal:
    """The journal of one run, open for writing by this process alone."""

    def __init__(
        self,
        place: Path | str | JournalStore,
        run_id: str,
        wall_clock: Callable[[], float] = wall_clock,
        *,
        threaded: bool = True,
        retry_s: float = RETRY_S,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        """Open or create the journal.

        Args:
            place: a database file, whose folder must exist; a database's URL; or an open store.
            run_id: the run that the journal must belong to.
            wall_clock: Unix seconds, for display.
            threaded: write in a thread of its own. Under virtual time everything stays in the loop.
            retry_s: pause before a transaction that found no place is tried again.
            longest_wait_s: seconds for which that is repeated before the journal fails for good.

        Raises:
            ConfigError: when another process has it open, or it belongs to another run.
            IntegrityError: when it is no journal, or another version wrote it.
            UnavailableError: when it cannot be reached or written.
        """
        self.wall_clock = wall_clock
        self._retry_s, self._longest_wait_s = retry_s, longest_wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal") if threaded else None
        self._pending = WriteBatch()
        self._pending_for: list[asyncio.Future[None]] = []
        """Who waits for what is pending; each has a future of its own, so giving up disturbs no other."""
        self._flushing: asyncio.Task[None] | None = None
        self._writing_for: list[asyncio.Future[None]] | None = None
        """Who waits for the transaction under way; None without one."""
        self._next_write = 0.0
        self._urgent = asyncio.Event()
        """A sample waits for what is to be written."""
        self.failure: AntiphonError | None = None
        """Why nothing can be written any more, or None."""
        self.blocked: UnavailableError | None = None
        """Why nothing can be written at the moment, or None; it is tried again."""
        self.on_failure: Callable[[AntiphonError], None] | None = None
        """Called once when writing failed for good."""
        self.grown = Wakeup()
        """Notified when events reached the disk."""
        try:
            if isinstance(place, Path | str):
                self._store: JournalStore = self._wait_for(open_sql_store, place, run_id)
            else:
                self._store = place
            self._next_seq = self._wait_for(self._store.last_seq) + 1
        except AntiphonError:
            if self._thread is not None:
                self._thread.shutdown()
            raise

    @property
    def empty(self) -> bool:
        """Return whether nothing was ever recorded."""
        return self._next_seq == 1

    def totals(self) -> StoreTotals:
        """Count what the store holds as trained; call it before anything is appended."""
        return self._wait_for(self._store.totals)

    @property
    def last_seq(self) -> int:
        """Return the number of the newest event that was enqueued, 0 for none."""
        return self._next_seq - 1

    def silent_s(self) -> float:
        """Return the seconds on the wall clock since the newest event that has a time, 0 for none.

        What a session did after that event is in none of its times. Call it before anything is appended.
        """
        for after in range(self.last_seq - _PAGE, -_PAGE, -_PAGE):
            first = max(0, after)
            rows = self._wait_for(self._store.events, first, after + _PAGE - first)
            for row in reversed(rows):
                if getattr(load_event(row.kind, row.body), "at_s", None) is not None:
                    return max(0.0, self.wall_clock() - row.at)
        return 0.0

    def snapshots(self) -> list[StateRow]:
        """Return the kept snapshots of the state, newest first; call it before anything is appended."""
        return self._wait_for(self._store.snapshots)

    def entries(self, name: str, count: int) -> Iterator[str]:
        """Yield the first `count` entries of a list of the state that only grows; fewer if some are lost."""
        for after in range(0, count, 1000):
            yield from self._wait_for(self._store.entries, name, after, min(1000, count - after))

    def replay(self, after: int = 0) -> Iterator[JournalEvent]:
        """Yield every event after number `after`, in order; call it before anything is appended.

        Raises:
            IntegrityError: when an event is missing.
        """
        while rows := self._wait_for(self._store.events, after, _PAGE):
            for row in rows:
                if row.seq != after + 1:
                    raise IntegrityError(
                        f"the journal {self._store.place} lacks event {after + 1}; restore it from a copy"
                    )
                after = row.seq
                yield load_event(row.kind, row.body)

    def history(self) -> Iterator[HistoryRow]:
        """Yield the history in the order in which it was kept; call it before anything is appended."""
        after = 0
        while rows := self._wait_for(self._store.history, after, 100):
            yield from (row for _, row in rows)
            after = rows[-1][0]

    def enqueue(
        self,
        events: Sequence[JournalEvent],
        payloads: Mapping[str, bytes] | None = None,
        forget: Sequence[str] = (),
        history: HistoryEdit | None = None,
        trained: TrainedRow | None = None,
        dump: StateDump | None = None,
    ) -> "asyncio.Future[None]":
        """Take events for the next transaction; await the result to know that they are on disk.

        All of it goes into one transaction: events in order, payloads to keep by name, names of payloads
        to forget, what changes in the history, the step that was committed with what it used up, and
        the state after the last of the events, of which there must be one then. Giving up waiting never
        disturbs others who wait for the same transaction.

        Raises:
            AntiphonError: when an earlier write failed or has no known end, or an event cannot be written,
                such as text that is no UTF-8; nothing is taken after that.
        """
        self._check()
        failpoints.reach("coordinator.enqueue.before")
        batch, at = self._pending, self.wall_clock()
        try:
            bodies = [dump_event(event) for event in events]
        except (ValueError, TypeError) as error:  # the state has them already, the journal never will
            kinds = ", ".join(event.kind for event in events)
            broke = f"the journal {self._store.place} cannot hold {kinds}: {error}"
            self._fail(IntegrityError(f"{broke}; a restart continues"))
            self._check()
        for event, body in zip(events, bodies, strict=True):
            batch.events.append(StoredEvent(self._next_seq, at, event.kind, body))
            self._next_seq += 1
        batch.keep(payloads or {})
        batch.forget(forget)
        if history is not None:
            batch.edit(history)
        if trained is not None:
            batch.trained.append(trained)
        if dump is not None:
            if dump.body:
                batch.snapshots.append(StateRow(self.last_seq, FORM, dump.digest, dump.body))
            batch.entries.update({(name, place): body for name, place, body in dump.entries})
        if any(type(event) in URGENT for event in events):
            self._urgent.set()
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._pending_for.append(done)
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush())
        failpoints.reach("coordinator.enqueue.after")
        return done

    def written(self) -> "asyncio.Future[None]":
        """Return what is done when everything that was enqueued before is on the disk.

        Raises:
            AntiphonError: as `enqueue`.
        """
        self._check()
        done = asyncio.get_running_loop().create_future()
        if self._pending_for:
            self._pending_for.append(done)
        elif self._writing_for is not None:
            self._writing_for.append(done)
        else:
            done.set_result(None)
        return done

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._writing_for is not None and self._flushing is None:
            raise IntegrityError(
                f"nobody knows whether the last events of the journal {self._store.place} are on the disk; "
                "start the run again"
            )

    async def payload(self, name: str) -> bytes | None:
        """Return a kept payload, or None when it was forgotten or never there."""
        return await self._in_thread(self._store.payload, name)

    async def beat(self) -> bool:
        """Use the place once, by which a successor sees that its holder works; False once another has it.

        Raises:
            AntiphonError: when the place was lost to another process, or cannot be reached now.
        """
        return self.blocked is not None or await self._in_thread(self._store.is_ours)

    async def read(self, after_seq: int, limit: int) -> list[StoredEvent]:
        """Return up to `limit` events with a number greater than `after_seq`, from the disk."""
        return await self._in_thread(self._store.events, after_seq, limit)

    async def close(self) -> None:
        """Write what waits, then let go of the place; what finds no place now was never acknowledged."""
        self._longest_wait_s = 0.0
        if self._flushing is not None:
            await self._flushing
        await self._in_thread(self._store.close)
        if self._thread is not None:
            self._thread.shutdown()

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._pending_for:
                await self._gather(loop)
                self._urgent.clear()
                batch, self._pending = self._pending, WriteBatch()
                self._writing_for, self._pending_for = self._pending_for, []
                try:
                    await self._write(batch)
                except AntiphonError as error:
                    self._fail(error)
                    return
                except BaseException as error:  # a waiting caller must not wait for ever
                    broke = f"the journal {self._store.place} broke ({error!r}); the log has the details"
                    self._fail(IntegrityError(f"{broke}, and a restart continues"))
                    _log.error("journal.broke", exc_info=error)
                    raise
                written, self._writing_for = self._writing_for, None
                self._next_write = loop.time() + GATHER_S
                for done in written:
                    if not done.done():  # its caller hung up
                        done.set_result(None)
                self.grown.notify()
        finally:
            self._flushing = None

    async def _gather(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the time of the next transaction, which comes earlier when a sample waits for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._next_write - loop.time())):
                await self._urgent.wait()
        await asyncio.sleep(max(0.0, self._next_write - GATHER_S + URGENT_S - loop.time()))

    async def _write(self, batch: WriteBatch) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            try:
                written = await self._in_thread(self._store.write, batch)
            except UnavailableError as error:
                if loop.time() - since >= self._longest_wait_s:
                    raise
                news, self.blocked = self.blocked is None, error
                if news:
                    _log.error("journal.blocked", reason=str(error))
            else:
                break
            await asyncio.sleep(self._retry_s)
        if self.blocked is not None:
            self.blocked = None
            _log.info("journal.unblocked", blocked_s=round(loop.time() - since, 1))
        if written is Written.OVERTAKEN:
            raise self.overtaken()

    def overtaken(self) -> UnavailableError:
        """Return what is wrong once another process has opened the place."""
        return UnavailableError(
            f"this coordinator lost its place: another one opened {self._store.place} after it "
            f"(epoch {self._store.epoch} was overtaken); it stops, call the new one"
        )

    def _fail(self, error: AntiphonError) -> None:
        self.failure = error
        for done in (*(self._writing_for or ()), *self._pending_for):
            if not done.done():
                done.set_exception(error)
                done.exception()  # seen: callers that do not wait for the disk get it on their next call
        self._pending, self._pending_for = WriteBatch(), []
        if self.on_failure is not None:
            self.on_failure(error)
        self.grown.notify()

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        if self._thread is None:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _wait_for(self, work: Callable[..., _T], *arguments: Any) -> _T:
        if self._thread is None:
            return work(*arguments)
        return self._thread.submit(work, *arguments).result()


SNAPSHOT_EVERY = 40_000
"""Events between two snapshots; a restart folds this many within half a second."""
PARTS = 20
"""Of the events between two snapshots: after each, what became final is written, so that no call pays
for all of it."""

_log = structlog.get_logger("coordinator")


class StateSnapshots:
    """The fold of the journal's events, kept in the journal every this many of them.

    A restart reads the newest snapshot and the events after it, so it takes as long after ten million events
    as after ten thousand. A snapshot stands in the transaction of its last event; whatever is wrong with it,
    the events are the truth, and the state is folded from them again.
    """

    def __init__(self, journal: Journal, state: RunState, every: int = SNAPSHOT_EVERY) -> None:
        self._journal, self._state, self._every = journal, state, every
        self._seq = self._part = 0
        """The last event of the newest snapshot, and of the newest part."""
        self._known: dict[str, int] = {}
        """How many entries of each growing list the journal has."""

    def restore(self) -> int:
        """Make the state that of the newest snapshot that can be read; return the number of its last event.

        Without one the state stays as it is, and the number is 0.
        """
        for row in self._journal.snapshots():
            try:
                self._known = self._load(row)
            except IntegrityError as error:
                _log.warning("state_snapshot.unreadable", seq=row.seq, reason=str(error))
            else:
                self._seq = row.seq
                return row.seq
        return 0

    def due(self, events: int) -> StateDump | None:
        """Return what is to be kept with the last of this many events, or None while it is too early."""
        seq = self._journal.last_seq + events
        if not events or seq - max(self._seq, self._part) < max(1, self._every // PARTS):
            return None
        whole = seq - self._seq >= self._every
        dump = (dump_state if whole else dump_entries)(self._state, self._known)
        self._part = seq
        if whole:
            self._seq = seq
        for name, place, _ in dump.entries:
            self._known[name] = place + 1
        return dump

    def _load(self, row: StateRow) -> dict[str, int]:
        if row.form != FORM:
            raise IntegrityError(f"another version wrote it (form {row.form}, not {FORM})")
        if digest_bytes(row.body.encode()) != row.digest or row.seq > self._journal.last_seq:
            raise IntegrityError("it is damaged")
        return load_state(row.body, self._journal.entries, self._state)
