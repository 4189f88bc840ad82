"""Tracking: the run, its versions, batches and scores in MLflow, without anybody waiting for it.

Everything happens on one writer thread, the import and the first migration of the database
included. A run that goes on after a break continues the same MLflow run, and what is there
already is not written again. MLflow being away delays records; it never stops the loop. Where
it refuses for good, one sentence says why, and the run goes on without it.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.lineage.tracking.champion import crown
from antiphon.lineage.tracking.plot_files import plot_files
from antiphon.lineage.tracking.system_metrics import SystemSample
from antiphon.lineage.tracking.totals import VersionTotals
from antiphon.lineage.tracking.traces import SampledTrajectory, log_trace
from antiphon.lineage.tracking.tracked_run import (
    HELDOUT,
    RunPlan,
    TrackedRun,
    model_name,
    open_tracked_run,
)
from antiphon.lineage.writer import FIRST_PAUSE_S, Writer, WriterReport

__all__ = ["HELDOUT", "Tracker", "model_name"]

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


class Tracker:
    """One MLflow run, written from one thread."""

    def __init__(
        self,
        run_dir: Path,
        home: Path,
        experiment: str,
        run_id: str,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Prepare a run; nothing is imported or opened before the first call is queued.

        Args:
            run_dir: keeps `mlflow.json`, which says which MLflow run this is.
            home: its `mlflow` folder holds the database and the artifacts, unless
                MLFLOW_TRACKING_URI names another place.
            experiment: MLflow experiment, and the registered model whose alias `champion`
                evaluations move.
            run_id: our run id; the MLflow run's name.
            first_pause_s: pause before a second attempt; it doubles with each further one.
        """
        self._mapping = run_dir / "mlflow.json"
        self._folder = home / "mlflow"
        self._experiment = experiment
        self.run_id = run_id
        own = f"sqlite:///{(self._folder / 'mlflow.db').absolute()}"
        self.tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._is_own = self.tracking_uri == own
        self._writer = Writer("mlflow", first_pause_s)
        self._run: TrackedRun | None = None
        self._uncertain = False
        """A call got no answer, so what MLflow has must be read before the next one."""
        self._refusal = ""
        """Why nothing more is written; said once."""

    @property
    def writer_cpu_s(self) -> float:
        """CPU seconds of the writer thread so far, the import of MLflow included."""
        return self._writer.report().cpu_s

    def report(self) -> WriterReport:
        """Return what was written, what failed and what waits."""
        return self._writer.report()

    def start_run(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Open the MLflow run, or the one an earlier process opened; the first call to make."""
        root = self._folder / "artifacts" if self._is_own else None
        plan = RunPlan(self._experiment, self.run_id, dict(params), dict(tags), root)
        self._writer.put("run", lambda: self._open(plan))

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        at: float,
        totals: Sequence[VersionTotals] = (),
        samples: Sequence[SystemSample] = (),
    ) -> None:
        """Log the metrics of a step in one call, also for the logged model that it made.

        Args:
            step: the step; its model is that of version `step + 1`.
            metrics: name -> value.
            at: Unix seconds of the commit.
            totals: what versions had cost that are known by now.
            samples: looks at the machine since the last call.
        """
        self._put(f"step {step}", lambda run: run.log_step(step, metrics, at, totals, samples))

    def log_version(self, version: int, params: Mapping[str, str], step: int) -> None:
        """Register a policy version as a logged model of the run, ready for comparison."""
        self._put(f"version {version}", lambda run: run.create_model(version, params))
        self._put(f"version {version} link", lambda run: run.finish_model(version, step))

    def log_batch(
        self, name: str, digest: str, source: Mapping[str, Any], profile: Mapping[str, Any]
    ) -> None:
        """Note a rollout batch as a dataset that the run trained on."""
        self._put(f"dataset {name}", lambda run: run.log_input(name, digest, source, profile))

    def log_evaluation(self, version: int, metrics: Mapping[str, float], prompts: int, at: float) -> None:
        """Log the held-out scores of a version, and let it be champion if none scored as high.

        Args:
            version: the policy version.
            metrics: name -> value; `HELDOUT` is the score that champions are compared by.
            prompts: held-out prompts that were rewarded.
            at: Unix seconds of the evaluation's end.
        """
        reward = metrics.get(HELDOUT)
        label = f"evaluation {version}"
        self._put(label, lambda run: run.log_evaluation(version, metrics, prompts, at))
        if reward is not None:
            self._put(f"{label} champion", lambda run: crown(run, self._experiment, version, reward, prompts))

    def log_traces(self, version: int, at: float, read: Callable[[], Sequence[SampledTrajectory]]) -> None:
        """Show a few trajectories of a version as traces of its evaluation.

        Args:
            version: the policy version that sampled them.
            at: Unix seconds of their end.
            read: gives the trajectories; called by the writer, at most once when all goes well.
        """

        def write(run: TrackedRun) -> None:
            if version in run.traced:
                return
            found = read()
            child, model_id = run.evaluation_run(version, at), run.models.get(model_name(version))
            for trajectory in found:
                log_trace(run.uri, run.experiment_id, child, model_id, trajectory, at)
            run.mark_traced(version, len(found))

        self._put(f"trajectories of version {version}", write)

    def log_summary(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log what the run says of itself after `step` steps, for tables of runs."""
        self._put("summary", lambda run: run.log_summary(step, metrics, at))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Attach a file to the run, in a folder of its artifacts if one is named."""
        self._put(f"artifact {path.name}", lambda run: run.client.log_artifact(run.run_id, str(path), folder))

    def log_figures(self, report: Path) -> None:
        """Attach the figures of a report page as files of their own, under `figures/`."""

        def write(run: TrackedRun) -> None:
            for name, text in plot_files(report.read_text(encoding="utf-8")).items():
                run.client.log_text(run.run_id, text, f"figures/{name}")

        self._put(f"figures of {report.name}", write)

    def set_status(self, status: str) -> None:
        """Close the MLflow run as FINISHED, FAILED or KILLED; a resumed run opens it again."""
        self._put("status", lambda run: run.client.set_terminated(run.run_id, status))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is dealt with; False when the time runs out."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float) -> WriterReport:
        """Write what is queued, for at most `timeout_s` seconds, and say what was left."""
        return self._writer.close(timeout_s)

    def _put(self, label: str, call: Callable[[TrackedRun], object]) -> None:
        def job() -> None:
            if self._refusal:
                return  # the first refusal said why and made the records incomplete
            run = self._run
            if run is None:
                raise ContractError("no MLflow run was opened; start_run comes first")
            if self._uncertain:
                with self._in_words():
                    run.reload()
                self._uncertain = False
            try:
                with self._in_words():
                    call(run)
            except UnavailableError:
                self._uncertain = True
                raise
            except ContractError as error:
                self._find_refusal(run)
                if self._refusal:
                    raise ContractError(self._refusal) from error
                raise

        self._writer.put(label, job)

    def _open(self, plan: RunPlan) -> None:
        if self._is_own:
            self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with self._in_words():
                self._run = open_tracked_run(
                    _client(self.tracking_uri), self.tracking_uri, plan, self._mapping
                )
        except ContractError as error:
            self._refusal = self._refusal or f"{error}; the run goes on without MLflow"
            raise ContractError(self._refusal) from error

    def _find_refusal(self, run: TrackedRun) -> None:
        if self._refusal:
            return
        with self._in_words():
            gone = run.why_gone()
        if gone:
            self._refusal = f"{gone}; the run goes on without MLflow"

    @contextmanager
    def _in_words(self) -> Iterator[None]:
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
                    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; the run goes on without MLflow"
                )
                raise ContractError(self._refusal) from error
            if error.error_code in _PERMANENT:
                raise ContractError(f"MLflow at {uri} refused: {words}") from error
            raise UnavailableError(f"MLflow at {uri} failed: {words}; it is tried again") from error
        except (SQLAlchemyError, OSError) as error:
            words = " ".join(str(error).split())[:_WORDS]
            raise UnavailableError(f"cannot reach MLflow at {uri}: {words}; it is tried again") from error


_IMPORTING = threading.Lock()


def _load() -> None:
    """Import MLflow, in one thread at a time: two that import at once would see half of it."""
    for name, value in _DEFAULTS.items():  # before the import, which reads some of them
        os.environ.setdefault(name, value)
    with _IMPORTING:
        import mlflow.tracking  # noqa: F401
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _client(uri: str) -> Any:
    _load()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)
