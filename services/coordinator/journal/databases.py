"""SQL places: a file beside the run, or a PostgreSQL database that several machines can reach.

A place is claimed for as long as it is open: the file by a lock file, the database by an
advisory lock of the session, which the server drops with the connection. The claim keeps a
second coordinator from starting; that a fenced one never commits is the epoch's doing.
"""

import contextlib
import fcntl
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.services.coordinator.journal.sql_store import SqlStore

CLAIM_MS = 3000
"""How long the server waits for the session of a coordinator that has just died to go away."""
CONNECT_S = 10
_KEEPALIVES = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""Seconds, seconds, probes, milliseconds: a server that vanished is noticed within about ten seconds."""


def open_sql_store(place: Path | str, run_id: str) -> SqlStore:
    """Open or create a run's journal.

    Args:
        place: path of an SQLite file, or a URL postgresql://...
        run_id: the run that it must belong to.

    Raises:
        ConfigError: when another process has it open, it belongs to another run, or the URL is none.
        IntegrityError: when it is no journal, or another version wrote it.
        UnavailableError: when it cannot be reached or written.
    """
    if isinstance(place, Path):
        return SqlStore(_File(place, run_id), run_id)
    return SqlStore(_Server(place, run_id), run_id)


class _File:
    """An SQLite database in write-ahead mode, every commit synced in full."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.name = str(path)
        self._path = path
        self._run_id = run_id
        self._claim: Any = None

    def connect(self) -> sa.Connection:
        """Claim the lock file and open the database."""
        if self._claim is None:
            self._claim = _lock(self._path, self._run_id)
        engine = sa.create_engine(
            f"sqlite:///{self._path}",
            poolclass=sa.pool.NullPool,
            # The driver must not begin transactions by itself: it would leave changes of the schema out.
            connect_args={"check_same_thread": False, "timeout": 10.0, "isolation_level": None},
        )
        sa.event.listen(engine, "connect", _set_up_file)
        sa.event.listen(engine, "begin", _begin_immediate)
        try:
            return engine.connect()
        except sa.exc.SQLAlchemyError as error:
            self.release()
            raise self.explained(error) from error

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

    def release(self) -> None:
        """Drop the lock."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


class _Server:
    """A schema of its own in a PostgreSQL database; the session holds an advisory lock."""

    def __init__(self, url: str, run_id: str) -> None:
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
            with connection.begin():
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {CLAIM_MS}")
                connection.execute(sa.select(sa.func.pg_advisory_lock(_lock_key(self._schema))))
        except sa.exc.OperationalError as error:
            connection.close()
            if getattr(error.orig, "sqlstate", None) == "55P03":
                raise ConfigError(
                    f"run {self._run_id} already has a coordinator (a session holds it in {self.name}); "
                    "use that one, or stop it first"
                ) from None
            raise self.explained(error) from error
        return connection

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

    def release(self) -> None:
        """The lock goes with the session."""

    def _engine(self, search_path: str) -> sa.Engine:
        return sa.create_engine(
            self._url,
            poolclass=sa.pool.NullPool,
            connect_args={
                "connect_timeout": CONNECT_S,
                "application_name": f"antiphon {self._run_id}"[:60],
                "options": f"-c search_path={search_path} -c synchronous_commit=on",
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


def _lock(path: Path, run_id: str) -> Any:
    lock_path = path.with_suffix(".lock")
    try:
        lock = open(lock_path, "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the journal
    except OSError as error:
        raise UnavailableError(
            f"the journal of run {run_id} cannot be opened in {path.parent}: {error.strerror}; "
            "check that the folder exists and may be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(
            f"run {run_id} already has a coordinator (process {owner} holds {path.name}); "
            "use that one, or stop it first"
        ) from None
    with contextlib.suppress(OSError):  # on a full disk the number is missing; the lock itself needs no space
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    return lock
