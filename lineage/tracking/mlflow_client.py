"""MLflow's library: its import, where it keeps runs, its errors in our words, and a home's own database.

MLflow makes a few dozen tables one by one in the file that it will use. A process that is killed meanwhile
leaves some of them, and MLflow never again gets past the first that is there already. That takes more than a
CPU second, so a home begins with a copy of the empty one that set-up made, where there is one.
"""

import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError

from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.system.files import sqlite_url
from antiphon.system.set_up import empty_database
from antiphon.system.spared import without

_PERMANENT = frozenset(
    {
        "BAD_REQUEST",
        "ENDPOINT_NOT_FOUND",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "NOT_FOUND",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
    }
)
"""MLflow's error codes that another attempt would only repeat."""
_STRANGERS = frozenset({"CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED", "UNAUTHENTICATED"})
"""And those that every further call would repeat."""
_DEFAULTS = {
    # No usage statistics, and no wait of minutes for a server that is gone.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "GIT_PYTHON_REFRESH": "quiet",
}
_WORDS = 300
"""Characters of a foreign error that are quoted."""
_VERSION_TABLE = "alembic_version"
"""MLflow writes it after all tables; until then it has stored nothing."""

_ARTIFACTS = "/mlflow/artifacts"
_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
"""Columns in which MLflow keeps where artifacts lie."""
_IMPORTING, _MAKING = threading.Lock(), threading.Lock()
"""Alembic, which makes the tables, knows one migration of a process at a time."""

_log = structlog.get_logger("antiphon.lineage")


def load_mlflow() -> None:
    """Import all that the writer of a run needs of MLflow.

    In one thread at a time: two that import at once would see half of it.
    """
    for name, value in _DEFAULTS.items():  # before the import, which reads some of them
        os.environ.setdefault(name, value)
    with _IMPORTING, without("pandas"):  # a third of the import; nothing here is a data frame
        if "mlflow.tracking" not in sys.modules:
            import mlflow.tracking
        if not os.environ.get("MLFLOW_TRACKING_URI"):  # then its client loads what keeps a database
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def client_at(uri: str) -> Any:
    """Return MLflow's client."""
    load_mlflow()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def tracking_uri(home: Path) -> tuple[str, bool]:
    """Return where MLflow keeps runs, and whether that is the home's own database."""
    own = sqlite_url((home / "mlflow" / "mlflow.db").absolute())
    uri = os.environ.get("MLFLOW_TRACKING_URI") or own
    return uri, uri == own


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turn what MLflow at `uri` raises into errors of ours.

    Raises:
        UnavailableError: where another attempt may help.
        ConfigError: where the user is refused.
        ContractError: where the call is refused.
    """
    load_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        words = " ".join(str(error).split())[:_WORDS]
        if error.error_code in _STRANGERS:
            raise ConfigError(
                f"MLflow at {uri} refused the user or the password ({error.error_code}); set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; the run continues without MLflow"
            ) from error
        if error.error_code in _PERMANENT:
            raise ContractError(f"MLflow at {uri} refused: {words}") from error
        raise UnavailableError(f"MLflow at {uri} failed: {words}; it is tried again") from error
    except (SQLAlchemyError, OSError) as error:
        words = " ".join(str(error).split())[:_WORDS]
        raise UnavailableError(f"cannot reach MLflow at {uri}: {words}; it is tried again") from error


def make_own_database(home: Path) -> None:
    """Make MLflow's database of a home unless there is one; one that was left half-made is set aside.

    Processes may do so at the same time: the first one's stays.

    Raises:
        UnavailableError: when the home cannot be written, or what is there cannot be read.
    """
    path = home / "mlflow" / "mlflow.db"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _MAKING:
            if not path.exists() or _is_unfinished(path):
                _make(path)
        _put_places_right(path)
    except (SQLAlchemyError, OSError) as error:
        raise UnavailableError(f"MLflow's database {path} cannot be used: {error}") from error


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
    load_mlflow()
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
    engine = create_engine(sqlite_url(path))
    try:
        with engine.connect() as connection:
            wanted = f"SELECT COUNT(*) FROM sqlite_master WHERE name = '{_VERSION_TABLE}'"
            if not connection.exec_driver_sql(wanted).scalar():
                return True
            return not connection.exec_driver_sql(f"SELECT COUNT(*) FROM {_VERSION_TABLE}").scalar()
    finally:
        engine.dispose()
