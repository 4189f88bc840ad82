"""MLflow writer: the one thread that talks to MLflow, so that no one waits for it.

The import and the first migration of the database happen there too. A run that continues after
a break continues the same MLflow run. MLflow being away delays records; it never stops the
loop. Where it refuses for good, one sentence says why, and the run continues without it.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.lineage.tracking.database import make_tables, prepare_database
from antiphon.lineage.tracking.notes import Gathering, Note
from antiphon.lineage.tracking.opening import RunPlan, open_tracked_run
from antiphon.lineage.tracking.tracked_run import TrackedRun
from antiphon.lineage.writer import FIRST_PAUSE_S, Writer
from antiphon.system.files import sqlite_url
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
REST_S = 5.0
"""Seconds that records wait for others which are written together with them."""
_WORDS = 300
"""Characters of a foreign error that are quoted."""


class MlflowWriter(Writer):
    """The writer of one MLflow run."""

    def __init__(
        self,
        run_dir: Path,
        home: Path,
        experiment: str,
        run_id: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        first_pause_s: float = FIRST_PAUSE_S,
        experiment_tags: Mapping[str, str] | None = None,
        begin: threading.Event | None = None,
    ) -> None:
        """Open the MLflow run, or the one that an earlier process opened, as the first job.

        Args:
            run_dir: keeps `mlflow.json`, which says which MLflow run this is.
            home: its `mlflow` folder holds the database and the artifacts, unless
                MLFLOW_TRACKING_URI names another place.
            experiment, run_id, params, tags: see `RunPlan`.
            first_pause_s: pause before a second attempt; it doubles with each further one.
            experiment_tags: what the experiment is to say.
            begin: nothing is opened before it is set (see `Writer`).
        """
        super().__init__("mlflow", first_pause_s, begin, REST_S)
        self._mapping = run_dir / "mlflow.json"
        self._folder = home / "mlflow"
        own = sqlite_url((self._folder / "mlflow.db").absolute())
        self.tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._is_own = self.tracking_uri == own
        self._run: TrackedRun | None = None
        self._gathering: Gathering | None = None
        """Takes the next note, unless it is being written."""
        self._uncertain = False
        """A call got no answer, so what MLflow has must be read before the next one."""
        self._refusal = ""
        """Why nothing more is written; said once."""
        root = self._folder / "artifacts" if self._is_own else None
        plan = RunPlan(experiment, run_id, dict(params), dict(tags), root, dict(experiment_tags or {}))
        self.put("run", lambda: self._open(plan))

    def write(self, label: str, call: Callable[[TrackedRun], object]) -> None:
        """Queue a call, which must be repeatable; `label` names it in reports."""
        self._gathering = None
        self.put(label, lambda: self._write(call))

    def note(self, label: str, note: Note) -> None:
        """Queue a note; it is written together with those that come before anything else is queued."""
        if self._gathering is None or not self._gathering.add(note):
            gathering = Gathering()
            gathering.add(note)
            self.put(f"{label} and what came with it", lambda: self._write_notes(gathering.take()))
            self._gathering = gathering

    def summarise(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log what the run says of itself after `step` steps, at `at` Unix seconds."""
        self.write("summary", lambda run: run.log_summary(step, metrics, at))

    def attach(self, path: Path) -> None:
        """Attach a file to the run."""
        self.write(f"artifact {path.name}", lambda run: run.client.log_artifact(run.run_id, str(path)))

    def end(self, status: str) -> None:
        """Close the MLflow run as FINISHED or KILLED; a run that continues opens it again."""
        self.write("status", lambda run: run.client.set_terminated(run.run_id, status))

    def _write(self, call: Callable[[TrackedRun], object]) -> None:
        if self._refusal or self._run is None:
            return  # the first refusal said why and made the records incomplete
        run = self._run
        if self._uncertain:
            with self._explained():
                run.reload()
            self._uncertain = False
        try:
            with self._explained():
                call(run)
        except UnavailableError:
            self._uncertain = True
            raise
        except ContractError as error:
            self._find_refusal(run)
            if self._refusal:
                raise ContractError(self._refusal) from error
            raise

    def _write_notes(self, notes: Sequence[Note]) -> None:
        try:
            self._write(lambda run: run.log_notes(notes))
        except ContractError:
            if len(notes) == 1 or self._refusal:
                raise
            refused = []
            for note in notes:  # one that MLflow refuses keeps no other out
                try:
                    self._write_notes([note])
                except ContractError as error:
                    refused.append(error)
            if refused:
                raise refused[0] from None

    def _open(self, plan: RunPlan) -> None:
        uri = self.tracking_uri
        try:
            with self._explained():
                if self._is_own:
                    prepare_database(self._folder / "mlflow.db")
                self._run = open_tracked_run(_client(uri), uri, plan, self._mapping)
        except ContractError as error:
            self._refusal = self._refusal or f"{error}; the run continues without MLflow"
            raise ContractError(self._refusal) from error

    def _find_refusal(self, run: TrackedRun) -> None:
        if self._refusal:
            return
        with self._explained():
            gone = run.why_gone()
        if gone:
            self._refusal = f"{gone}; the run continues without MLflow"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        _load()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        uri = self.tracking_uri
        try:
            yield
        except MlflowException as error:
            words = " ".join(str(error).split())[:_WORDS]
            if error.error_code in _STRANGERS:
                self._refusal = (
                    f"MLflow at {uri} refused the user or the password ({error.error_code}); set "
                    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; the run continues without MLflow"
                )
                raise ContractError(self._refusal) from error
            if error.error_code in _PERMANENT:
                raise ContractError(f"MLflow at {uri} refused: {words}") from error
            raise UnavailableError(f"MLflow at {uri} failed: {words}; it is tried again") from error
        except (SQLAlchemyError, OSError) as error:
            words = " ".join(str(error).split())[:_WORDS]
            raise UnavailableError(f"cannot reach MLflow at {uri}: {words}; it is tried again") from error


def make_own_database(home: Path) -> None:
    """Make the database of a home, before something else would make it table by table.

    Raises:
        UnavailableError: when the home cannot be written, or what is there cannot be read.
    """
    _load()
    from sqlalchemy.exc import SQLAlchemyError

    path = home / "mlflow" / "mlflow.db"
    try:
        prepare_database(path)
    except (SQLAlchemyError, OSError) as error:
        raise UnavailableError(f"MLflow's database {path} cannot be used: {error}") from error


def make_empty_database(path: Path) -> None:
    """Make a database of no home at `path`, with all of MLflow's tables."""
    _load()
    make_tables(path)


_IMPORTING = threading.Lock()


def load_mlflow() -> None:
    """Import all that the writer of a run needs of MLflow; one that begins meanwhile waits for it."""
    _load(store=not os.environ.get("MLFLOW_TRACKING_URI"))


def _load(store: bool = False) -> None:
    """Import MLflow, in one thread at a time: two that import at once would see half of it.

    With `store` also what it keeps in a database of its own, which its client would load.
    """
    for name, value in _DEFAULTS.items():  # before the import, which reads some of them
        os.environ.setdefault(name, value)
    with _IMPORTING, without("pandas"):  # a third of the import; nothing here is a data frame
        if "mlflow.tracking" not in sys.modules:
            import mlflow.tracking
        if store:
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _client(uri: str) -> Any:
    _load()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)
