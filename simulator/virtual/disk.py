"""Disks: what survives a kill, in memory or in a file, and the production classes on top of it.

A `JournalDisk` outlives the coordinators that write to it. The journal above it is the production
one with its numbering and its group commit; only the statements of a transaction are replaced. A
transaction is there whole or not at all; what a killed coordinator had not begun to write is lost,
and what it had written without hearing of it is kept, as on a real disk. The same seed gives the same run on
a `FileDisk`, where SQLite must keep that, so one of the two checks the other.
"""

import asyncio
import errno
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.journal.databases import open_sql_store
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.journal.sql_store import SqlStore
from antiphon.services.coordinator.journal.store import (
    SNAPSHOTS_KEPT,
    HistoryRow,
    JournalStore,
    StateRow,
    StoredEvent,
    StoreTotals,
    TrainedRow,
    WriteBatch,
    Written,
)
from antiphon.simulator.virtual.loop import Process, current_process
from antiphon.system.logs import configure_logs

RUN_ID = "simulated-1"
"""Name of every simulated run."""
_T = TypeVar("_T")


class JournalDisk:
    """The tables of one run's journal."""

    def __init__(self) -> None:
        self.epoch = 0
        """How often it was opened."""
        self.events: list[StoredEvent] = []
        self.payloads: dict[str, bytes] = {}
        self.history: dict[tuple[str, int], HistoryRow] = {}
        self.snapshots: list[StateRow] = []
        self.entries: dict[tuple[str, int], str] = {}
        self.steps: dict[int, TrainedRow] = {}
        self.trained: dict[str, int] = {}
        """Group -> the step that trained on it."""
        self.on_commit: Callable[[Sequence[StoredEvent]], None] = lambda rows: None
        """Called with the events of each transaction once it is on the disk."""
        self.full: Callable[[], bool] = lambda: False
        """Asked before each transaction."""

    def open(self) -> JournalStore:
        """Open the disk as a coordinator that starts."""
        return _DiskStore(self)

    def written(self) -> list[StoredEvent]:
        return self.events

    def close(self) -> None:
        """There is nothing to let go of."""


class _DiskStore(JournalStore):
    """A `JournalDisk`, opened by one coordinator; with each opening the one before is overtaken."""

    place = "the simulated disk"

    def __init__(self, disk: JournalDisk) -> None:
        self._disk = disk
        disk.epoch += 1
        self._epoch = disk.epoch

    @property
    def epoch(self) -> int:
        return self._epoch

    def is_ours(self) -> bool:
        return self._disk.epoch == self._epoch

    def last_seq(self) -> int:
        return len(self._disk.events)

    def totals(self) -> StoreTotals:
        return StoreTotals(len(self._disk.steps), len(self._disk.trained))

    def events(self, after: int, limit: int) -> list[StoredEvent]:
        return self._disk.events[after : after + limit]

    def snapshots(self) -> list[StateRow]:
        return self._disk.snapshots[::-1]

    def entries(self, name: str, after: int, limit: int) -> list[str]:
        places = ((name, place) for place in range(after, after + limit))
        return [self._disk.entries[key] for key in places if key in self._disk.entries]

    def history(self, after: int, limit: int) -> list[tuple[int, HistoryRow]]:
        return list(enumerate(self._disk.history.values(), 1))[after : after + limit]

    def payload(self, name: str) -> bytes | None:
        return self._disk.payloads.get(name)

    def write(self, batch: WriteBatch) -> Written:
        """Write everything or, for a coordinator that is dead or overtaken, nothing.

        Raises:
            IntegrityError: for a second writer, or a group that is trained twice.
            UnavailableError: while the disk is full.
        """
        if not _alive():
            return Written.DONE
        disk = self._disk
        check_space(disk.full)
        if disk.epoch != self._epoch:
            return Written.OVERTAKEN
        if batch.events and batch.events[0].seq != len(disk.events) + 1:
            raise IntegrityError(
                f"event {batch.events[0].seq} was written after event {len(disk.events)}; "
                "the journal has one writer"
            )
        for row in batch.trained:
            twice = [group for group in row.group_ids if group in disk.trained]
            if row.step in disk.steps or twice:
                raise IntegrityError(f"step {row.step} is there already, or trains again on {twice}")
            disk.steps[row.step] = row
            disk.trained |= dict.fromkeys(row.group_ids, row.step)
        disk.payloads.update(batch.payloads)
        disk.events.extend(batch.events)
        disk.entries.update(batch.entries)
        disk.snapshots = [*disk.snapshots, *batch.snapshots][-SNAPSHOTS_KEPT:]
        for name in batch.forgotten:
            disk.payloads.pop(name, None)
        for key, kept in batch.history.items():
            disk.history.pop(key, None)
            if kept is not None:
                disk.history[key] = kept
        disk.on_commit(batch.events)
        return Written.DONE

    def close(self) -> None:
        pass


def check_space(full: Callable[[], bool]) -> None:
    """Raise UnavailableError where `full` says so."""
    if full():
        raise UnavailableError("no space is left on the simulated disk; free some, and the run continues")


class _DiskLog(io.StringIO):
    """The log of simulated processes: nobody reads it, but no line of it fits on a full disk."""

    def __init__(self, full: Callable[[], bool]) -> None:
        super().__init__()
        self._full = full

    def write(self, line: str) -> int:
        if self._full():
            raise OSError(errno.ENOSPC, "no space is left on the simulated disk")
        return len(line)


@contextmanager
def logs_beside(journal: JournalDisk) -> Iterator[None]:
    """Have the log lines of this process, warnings and worse, go to a journal's disk."""
    before = structlog.get_config() if structlog.is_configured() else None
    configure_logs("warning", _DiskLog(lambda: journal.full()))
    try:
        yield
    finally:
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)


class MemoryJournal(Journal):
    """The production journal over a `JournalDisk`; how long a transaction takes is the loop's affair."""

    def __init__(self, disk: JournalDisk, wall_clock: Callable[[], float]) -> None:
        super().__init__(disk.open(), RUN_ID, wall_clock, threaded=False)

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


class MemoryStore(ArtifactStore):
    """An artifact store without files."""

    def __init__(self, full: Callable[[], bool] = lambda: False) -> None:
        """Take nothing while `full` says so."""
        self.objects: dict[str, bytes] = {}
        self._full = full

    def put(self, payload: bytes) -> str:
        check_space(self._full)
        digest = digest_bytes(payload)
        self.objects[digest] = payload
        return digest

    def get(self, digest: str) -> bytes:
        payload = self.objects.get(digest)
        if payload is None:
            raise UnavailableError(f"object {digest} is not in the simulated store")
        return payload


class FileDisk(JournalDisk):
    """The tables of one run's journal, in a file."""

    def __init__(self, path: Path) -> None:
        """Begin with a file that is not there yet.

        Raises:
            ConfigError: when it is there, or its folder is not.
        """
        super().__init__()
        if path.exists():
            raise ConfigError(f"--journal: {path} is there already; remove it or name another folder")
        if not path.parent.is_dir():
            raise ConfigError(f"--journal: the folder {path.parent} does not exist; make it first")
        self._path = path
        self._store: SqlStore | None = None
        self._owner: Process | None = None
        """The coordinator that opened it last."""

    def open(self) -> JournalStore:
        """Open the file as a coordinator that starts; one before it that lives still is deposed."""
        hangs = self._owner is not None and self._owner.alive
        if not hangs:
            self.close()  # as the kernel does for a process that died
        self._store = open_sql_store(self._path, RUN_ID, hung_s=0.0 if hangs else None)
        self._owner = current_process()
        return cast("JournalStore", _FileStore(self, self._store))

    def written(self) -> list[StoredEvent]:
        return [] if self._store is None else self._store.events(0, 1 << 40)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class _FileStore:
    """The production store; a dead coordinator reaches the file no more."""

    def __init__(self, disk: FileDisk, store: SqlStore) -> None:
        self._disk = disk
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def payload(self, name: str) -> bytes | None:
        return self._store.payload(name) if _alive() else None

    def write(self, batch: WriteBatch) -> Written:
        """Write everything in one transaction or, for a coordinator that is dead, nothing."""
        if not _alive():
            return Written.DONE
        check_space(self._disk.full)
        written = self._store.write(batch)
        if written is Written.DONE:
            self._disk.on_commit(batch.events)
        return written

    def close(self) -> None:
        """Let go of the file, unless a successor has it."""
        if _alive():
            self._store.close()


def _alive() -> bool:
    process = current_process()
    return process is None or process.alive
