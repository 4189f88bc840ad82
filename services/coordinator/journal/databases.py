"""SQL places: a file beside the run, or a PostgreSQL database that several machines can reach.

A place is claimed for as long as it is open: the file by a lock file, the database by an
advisory lock of the session, which the server drops with the connection. The claim keeps a
second coordinator from starting; that a fenced one never commits is the epoch's doing. A holder that
hangs keeps its claim, so a successor watches for signs of life: a holder that uses the place leaves
one every few seconds. Where none comes, the successor takes the claim away, and the epoch does the rest.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
import structlog

from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.services.coordinator.journal.sql_store import SqlPlace, SqlStore
from antiphon.system.files import sqlite_url

_log = structlog.get_logger("coordinator")

CLAIM_S = 3.0
"""How long the session of a coordinator that has just died may take to go away."""
CONNECT_S = 10
_KEEPALIVES = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""Seconds, seconds, probes, milliseconds: a server that vanished is noticed within about ten seconds."""
_SERVER_OPTIONS = (
    "-c synchronous_commit=on -c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3"
    " -c tcp_user_timeout=10000"
)
"""The same at the server, whose own defaults would leave the lock of a vanished machine for two hours."""
HUNG_S = 30.0
"""How long a holder may leave no sign of life before a successor takes its claim away."""
LOOK_S = 0.2
"""Pause between two looks at a claim that another process holds."""
_HOLDER = sa.text(
    """SELECT a.pid, a.pid || ' ' || a.backend_start || ' ' || a.state_change
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (l.classid::bigint << 32) | l.objid::bigint = :key"""
)
"""The session with the lock, and what changes whenever it is used."""


def open_sql_store(place: Path | str, run_id: str, hung_s: float | None = None) -> SqlStore:
    """Open or create a run's journal.

    Args:
        place: path of an SQLite file, or a URL postgresql://...
        run_id: the run that it must belong to.
        hung_s: take the place from a holder that leaves no sign of life for this many seconds; None: never.

    Raises:
        ConfigError: when another process has it open, it belongs to another run, or the URL is none.
        IntegrityError: when it is no journal, or another version wrote it.
        UnavailableError: when it cannot be reached or written.
    """
    return SqlStore(sql_place(place, run_id, hung_s), run_id)


def sql_place(place: Path | str, run_id: str, hung_s: float | None = None) -> SqlPlace:
    """Return the database that `open_sql_store` would claim.

    Raises:
        ConfigError: when the URL is none.
    """
    return _File(place, run_id, hung_s) if isinstance(place, Path) else _Server(place, run_id, hung_s)


class _Watched:
    """A claim that another process holds, looked at until it shows that it lives or that it hangs."""

    def __init__(self, hung_s: float) -> None:
        self._hung_s = hung_s
        self._sign: object = None
        self._since = time.monotonic()

    def hangs(self, sign: object) -> bool | None:
        """Take the present sign of life: False when it changed, True when it did not for too long."""
        if self._sign is None:
            self._sign, self._since = sign, time.monotonic()
        if sign != self._sign:
            return False
        return True if time.monotonic() - self._since >= self._hung_s else None


class _File:
    """An SQLite database in write-ahead mode, every commit synced in full."""

    def __init__(self, path: Path, run_id: str, hung_s: float | None = None) -> None:
        self._hung_s = hung_s
        self.name = str(path)
        self._path = path
        self._run_id = run_id
        self._claim: Any = None
        self._files: tuple[Path, ...] = (path, path.with_name(f"{path.name}-wal"))
        self._opened: list[os.stat_result] = []
        """What the names of the database and its log stood for when it was first used."""

    def connect(self) -> sa.Connection:
        """Claim the lock file and open the database."""
        if self._claim is None:
            self._claim = _lock(self._path, self._run_id, self._hung_s)
        engine = sa.create_engine(
            sqlite_url(self._path),
            poolclass=sa.pool.NullPool,
            # The driver must not begin transactions by itself: it would leave changes of the schema out.
            connect_args={"check_same_thread": False, "timeout": 10.0, "isolation_level": None},
        )
        sa.event.listen(engine, "connect", _set_up_file)
        sa.event.listen(engine, "begin", _begin_immediate)
        self._opened = []
        try:
            return engine.connect()
        except sa.exc.SQLAlchemyError as error:
            self.release()
            raise self.explained(error) from error

    def connect_to_read(self) -> sa.Connection | None:
        """Open a database that no one holds, without writing; None where there is none."""
        if not self._path.is_file():
            return None
        with contextlib.suppress(FileNotFoundError):
            self._claim = self._path.with_suffix(".lock").open(encoding="utf-8")
            if not _locked(self._claim, fcntl.LOCK_SH):
                self.release()
                raise _taken(self._run_id, f"a process holds {self._path.name}")
        # Without a log nothing of it is missing, and the file is read as it is.
        log = self._path.with_name(f"{self._path.name}-wal")
        how = "mode=ro" if log.exists() else "mode=ro&immutable=1"
        # Two read it: SQLAlchemy the URL, and SQLite the file's within.
        url = f"{sqlite_url(Path('file:' + quote(str(self._path.absolute()))))}?{how}&uri=true"
        return sa.create_engine(url, poolclass=sa.pool.NullPool).connect()

    def explained(self, error: sa.exc.SQLAlchemyError) -> AntiphonError:
        cause = str(getattr(error, "orig", None) or error)
        if "full" in cause or "disk I/O" in cause:
            return UnavailableError(
                f"no space is left for the journal {self.name} ({cause}); free some, and the run continues"
            )
        if "readonly" in cause or "unable to open" in cause:
            return UnavailableError(
                f"the journal {self.name} cannot be written ({cause}); check that its folder exists "
                "and may be written"
            )
        if "not a database" in cause or "malformed" in cause:
            return IntegrityError(f"{self.name} is damaged or no journal ({cause}); restore it from a copy")
        return UnavailableError(f"the journal {self.name} cannot be used: {cause}; start the run again")

    def show_life(self) -> None:
        """Touch the lock file, and see that the database has its name still: else what is written is lost."""
        try:
            self._opened = self._opened or [file.stat() for file in self._files]
            there = all(map(_is_at, self._files, self._opened))
        except FileNotFoundError:
            there = False
        if not there:
            raise journal_gone(self._path)
        if self._claim is not None:
            with contextlib.suppress(OSError):  # the next use shows it
                os.utime(self._claim.fileno())

    def release(self) -> None:
        """Drop the lock."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


class _Server:
    """A schema of its own in a PostgreSQL database; the session holds an advisory lock."""

    def __init__(self, url: str, run_id: str, hung_s: float | None = None) -> None:
        self._hung_s = hung_s
        try:
            self._url = sa.make_url(url).set(drivername="postgresql+psycopg")
        except sa.exc.ArgumentError as error:
            raise ConfigError(
                f"coordinator.journal_url={url!r} is no URL; write postgresql://HOST/DATABASE"
            ) from error
        self.name = self._url.set(drivername="postgresql").render_as_string(hide_password=True)
        self._run_id = run_id
        self._schema = schema_name(run_id)

    def connect(self) -> sa.Connection:
        """Make the schema if it is missing, open a session in it and take the lock."""
        try:
            with self._engine("public").connect() as connection:
                self._create_schema(connection)
                connection.engine.dispose()
            connection = self._engine(self._schema).connect()
        except ImportError as error:
            raise ConfigError(
                f"coordinator.journal_url={self.name} needs the psycopg library; install antiphon[postgres]"
            ) from error
        except sa.exc.SQLAlchemyError as error:
            raise self.explained(error) from error
        try:
            self._take_lock(connection)
        except sa.exc.SQLAlchemyError as error:
            connection.close()
            raise self.explained(error) from error
        except AntiphonError:
            connection.close()
            raise
        self._hung_s = None  # a holder that lost the place afterwards was deposed, and deposes no other
        return connection

    def _take_lock(self, connection: sa.Connection) -> None:
        key = _lock_key(self._schema)
        watched = None if self._hung_s is None else _Watched(self._hung_s)
        deadline = time.monotonic() + CLAIM_S
        while True:
            with connection.begin():
                if connection.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar():
                    return
                holder = connection.execute(_HOLDER, {"key": key}).one_or_none()
            hangs = None
            if holder is not None and holder[1] is None:
                watched = None  # another user's session, which this one may not look at
            elif holder is not None and watched is not None:
                hangs = watched.hangs(holder[1])
            if holder is not None and hangs:
                _log.warning("journal.deposed", place=self.name, holder=holder[0])
                with connection.begin():
                    connection.execute(sa.select(sa.func.pg_terminate_backend(holder[0])))
                watched = None
                deadline = time.monotonic() + CLAIM_S
            elif (hangs is False or watched is None) and time.monotonic() > deadline:
                raise _taken(self._run_id, f"a session holds it in {self.name}")
            time.sleep(LOOK_S)

    def explained(self, error: sa.exc.SQLAlchemyError) -> AntiphonError:
        cause = " ".join(str(getattr(error, "orig", None) or error).split())
        state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
        if state == "53100":
            return UnavailableError(
                f"no space is left for the journal in {self.name} ({cause}); free some, and the run continues"
            )
        if state == "42501":
            return UnavailableError(
                f"the journal in {self.name} may not be written ({cause}); "
                "grant its user CREATE on the database"
            )
        return UnavailableError(
            f"the journal in {self.name} cannot be reached or used ({cause}); see whether the server runs "
            "and PGUSER, PGPASSWORD or PGPASSFILE are right"
        )

    def connect_to_read(self) -> sa.Connection | None:
        """Open a session that cannot write in a schema that no one holds; None where there is none."""
        connection = self._engine(self._schema, " -c default_transaction_read_only=on").connect()
        there = connection.execute(sa.select(sa.func.to_regclass(f"{self._schema}.events"))).scalar()
        key = _lock_key(self._schema)
        free = connection.execute(sa.select(sa.func.pg_try_advisory_lock_shared(key))).scalar()
        if there is None or not free:
            connection.close()
        if not free:
            raise _taken(self._run_id, f"a session holds it in {self.name}")
        return None if there is None else connection

    def show_life(self) -> None:
        """The server notes when a session is used."""

    def release(self) -> None:
        """The lock goes with the session."""

    def _engine(self, search_path: str, options: str = "") -> sa.Engine:
        return sa.create_engine(
            self._url,
            poolclass=sa.pool.NullPool,
            connect_args={
                "connect_timeout": CONNECT_S,
                "application_name": f"antiphon {self._run_id}"[:60],
                "options": f"-c search_path={search_path} {_SERVER_OPTIONS}{options}",
                **_KEEPALIVES,
            },
        )

    def _create_schema(self, connection: sa.Connection) -> None:
        there = sa.text("SELECT 1 FROM pg_namespace WHERE nspname = :name")
        with connection.begin():
            if connection.execute(there, {"name": self._schema}).scalar() is None:
                connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")


def schema_name(run_id: str) -> str:
    """Return the PostgreSQL schema of a run: readable, and no two runs share one.

    >>> schema_name("demo-s0-1")
    'antiphon_demo_s0_1_5a1ef7d3'
    """
    readable = re.sub(r"[^a-z0-9]+", "_", run_id.lower())[:40].strip("_")
    return f"antiphon_{readable}_{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def _lock_key(schema: str) -> int:
    return int.from_bytes(hashlib.sha256(schema.encode()).digest()[:8], "big", signed=True)


def _set_up_file(connection: Any, record: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _lock(path: Path, run_id: str, hung_s: float | None) -> Any:
    lock_path = path.with_suffix(".lock")
    watched = None if hung_s is None else _Watched(hung_s)
    while True:
        try:
            lock = open(lock_path, "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the journal
        except OSError as error:
            raise UnavailableError(
                f"the journal of run {run_id} cannot be opened in {path.parent}: {error.strerror}; "
                "check that the folder exists and may be written"
            ) from error
        status = os.fstat(lock.fileno())
        locked = _locked(lock)
        if locked and _is_at(lock_path, status):
            break
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        hangs = False if watched is None else watched.hangs((status.st_ino, status.st_mtime_ns))
        if hangs is False and not locked:
            raise _taken(run_id, f"process {owner} holds {path.name}")
        if hangs and _is_at(lock_path, status):
            # The lock stays with the process that hangs; the next holder has a file of its own.
            _log.warning("journal.deposed", place=str(path), holder=owner)
            lock_path.unlink(missing_ok=True)
        time.sleep(LOOK_S)
    with contextlib.suppress(OSError):  # on a full disk the number is missing; the lock itself needs no space
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    return lock


def journal_gone(path: Path) -> IntegrityError:
    """Return what is wrong when a journal that was written is no longer where it was."""
    return IntegrityError(
        f"the journal {path} or its log was removed or replaced while the run used it, and nothing is "
        "acknowledged any more; put a copy of it back and start the run again, or start another run"
    )


def _taken(run_id: str, who: str) -> ConfigError:
    return ConfigError(f"run {run_id} already has a coordinator ({who}); use that one, or stop it first")


def _locked(file: Any, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Return whether the file is still the one of that name."""
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False
