"""File disk: the journal of a simulated run in a real SQLite file, as slow as the machine's disk.

In memory a transaction is whole because nothing can come between its statements; here it is the
database that must keep that, and find again what it kept, whenever a coordinator dies. The same
seed gives the same run in both, so one of them checks the other.
"""

from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.services.coordinator.journal.databases import open_sql_store
from antiphon.services.coordinator.journal.sql_store import SqlStore
from antiphon.services.coordinator.journal.store import (
    HistoryRow,
    JournalStore,
    StateRow,
    StoredEvent,
    StoreTotals,
    WriteBatch,
    Written,
)
from antiphon.simulator.virtual.disk import RUN_ID, JournalDisk, check_space
from antiphon.simulator.virtual.loop import Process, current_process


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
        return _FileStore(self, self._store)

    def written(self) -> list[StoredEvent]:
        return [] if self._store is None else self._store.events(0, 1 << 40)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class _FileStore(JournalStore):
    """The production store; a dead coordinator reaches the file no more."""

    def __init__(self, disk: FileDisk, store: SqlStore) -> None:
        self._disk = disk
        self._store = store

    @property
    def place(self) -> str:
        return self._store.place

    @property
    def epoch(self) -> int:
        return self._store.epoch

    def is_ours(self) -> bool:
        return self._store.is_ours()

    def last_seq(self) -> int:
        return self._store.last_seq()

    def totals(self) -> StoreTotals:
        return self._store.totals()

    def events(self, after: int, limit: int) -> list[StoredEvent]:
        return self._store.events(after, limit)

    def snapshots(self) -> list[StateRow]:
        return self._store.snapshots()

    def entries(self, name: str, after: int, limit: int) -> list[str]:
        return self._store.entries(name, after, limit)

    def history(self, after: int, limit: int) -> list[tuple[int, HistoryRow]]:
        return self._store.history(after, limit)

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
