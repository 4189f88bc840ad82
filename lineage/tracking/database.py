"""MLflow's own database of a home: made whole or not at all.

MLflow makes a few dozen tables one by one in the file that it will use. A process that is killed meanwhile
leaves some of them, and MLflow never again gets past the first that is there already. That takes more than a
CPU second, so a home begins with a copy of the empty one that set-up made, where there is one.
"""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import structlog
from sqlalchemy import create_engine

from antiphon.system.files import sqlite_url
from antiphon.system.set_up import empty_database

_VERSION_TABLE = "alembic_version"
"""MLflow writes it after all tables; until then it has stored nothing."""

_ARTIFACTS = "/mlflow/artifacts"
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
"""Columns in which MLflow keeps where artifacts lie."""
_MAKING = threading.Lock()
"""Alembic, which makes the tables, knows one migration of a process at a time."""

_log = structlog.get_logger("antiphon.lineage")


def prepare_database(path: Path) -> None:
    """Make MLflow's database at `path` unless there is one; one that was left half-made is set aside.

    Processes may do so at the same time: the first one's stays.

    Raises:
        OSError: when the folder cannot be written.
        sqlalchemy.exc.SQLAlchemyError: when the file there cannot be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _MAKING:
        if not path.exists() or _is_unfinished(path):
            _make(path)
    _put_places_right(path)


def _put_places_right(path: Path) -> None:
    """Let what a database says of its own artifacts name the folder beside it: the home may have moved."""
    here = (path.absolute().parent / "artifacts").as_uri()
    engine = create_engine(sqlite_url(path))
    try:
        with engine.begin() as connection:
            for table, column in _PLACES:
                connection.exec_driver_sql(
                    f"UPDATE {table} SET {column} = ? || substr({column}, instr({column}, ?) + ?) "
                    f"WHERE {column} LIKE 'file:%/mlflow/artifacts/%' AND instr({column}, ? || '/') != 1",
                    (here, _ARTIFACTS, len(_ARTIFACTS), here),
                )
    finally:
        engine.dispose()


def make_tables(path: Path) -> None:
    """Let MLflow make its tables in a new file, which is half-made meanwhile."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(sqlite_url(path))
    try:
        _initialize_tables(engine)
    finally:
        engine.dispose()


def _make(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=path.parent) as folder:
        made, kept = Path(folder) / path.name, empty_database("mlflow")
        if kept.exists():
            shutil.copyfile(kept, made)
        else:
            make_tables(made)
        if path.exists() and _is_unfinished(path):
            aside = path.with_suffix(".unfinished")
            os.replace(path, aside)
            _log.warning("mlflow.set_aside", file=str(aside), reason="a killed process left it half-made")
        try:
            os.link(made, path)
        except FileExistsError:
            return
        except OSError:  # no links here
            os.replace(made, path)


def _is_unfinished(path: Path) -> bool:
    """Return whether a database was begun and never held anything."""
    from mlflow.store.db.utils import create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(sqlite_url(path))
    try:
        with engine.connect() as connection:
            wanted = f"SELECT COUNT(*) FROM sqlite_master WHERE name = '{_VERSION_TABLE}'"
            if not connection.exec_driver_sql(wanted).scalar():
                return True
            return not connection.exec_driver_sql(f"SELECT COUNT(*) FROM {_VERSION_TABLE}").scalar()
    finally:
        engine.dispose()
