"""Tracking: the run, its versions and its batches in MLflow, without anybody waiting for it.

Everything happens on one writer thread, the import and the first migration of the database
included. A run that goes on after a break continues the same MLflow run, and what is there
already is not written again. MLflow being away delays records; it never stops the loop.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.lineage.store import write_atomically
from antiphon.lineage.writer import Writer, WriterReport

PARAMS_PER_CALL = 100
"""MLflow's limit for one batch of parameters."""
DATASET_DIGEST_DIGITS = 32
"""MLflow keeps at most 36 characters; the whole digest stands in the dataset's source."""
MODEL_PAGE = 100
"""Logged models read at once when a run is resumed."""

_PERMANENT = frozenset(
    {
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "PERMISSION_DENIED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
        "UNAUTHENTICATED",
    }
)
"""MLflow's error codes that another attempt would only repeat."""


@dataclass(slots=True)
class _Service:
    """What the writer thread holds once MLflow answered."""

    client: Any
    experiment_id: str
    run_id: str
    models: dict[str, str] = field(default_factory=dict)
    """Logged model's name -> its id."""
    linked: set[str] = field(default_factory=set)
    """Ids of logged models that the run names as its outputs."""
    steps: set[int] = field(default_factory=set)
    evaluations: set[int] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)


class Tracker:
    """One MLflow run, written from one thread."""

    def __init__(self, run_dir: Path, home: Path, experiment: str, run_id: str) -> None:
        """Prepare a run; nothing is imported or opened before the first call is queued.

        Args:
            run_dir: keeps `mlflow.json`, which says which MLflow run this is.
            home: its `mlflow` folder holds the database and the artifacts, unless
                MLFLOW_TRACKING_URI names another place.
            experiment: MLflow experiment.
            run_id: our run id; the MLflow run's name.
        """
        self._mapping = run_dir / "mlflow.json"
        self._folder = home / "mlflow"
        self._experiment = experiment
        self._run_id = run_id
        own = f"sqlite:///{(self._folder / 'mlflow.db').absolute()}"
        self.tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._is_own = self.tracking_uri == own
        self._writer = Writer("mlflow")
        self._service: _Service | None = None

    @property
    def writer_cpu_s(self) -> float:
        """CPU seconds of the writer thread so far, the import of MLflow included."""
        return self._writer.report().cpu_s

    def report(self) -> WriterReport:
        """Return what was written, what failed and what waits."""
        return self._writer.report()

    def start_run(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Open the MLflow run, or the one an earlier process opened; the first call to make."""
        self._writer.put("run", lambda: self._open(dict(params), dict(tags)))

    def log_step(self, step: int, metrics: Mapping[str, float], model: str | None = None) -> None:
        """Log the metrics of a step in one call, also for the logged model that it made."""
        self._put(f"step {step}", lambda s: _log_step(s, step, metrics, model))

    def log_version(self, version: int, params: Mapping[str, str], step: int) -> None:
        """Register a policy version as a logged model of the run, ready for comparison."""
        name = model_name(version)
        self._put(f"version {version}", lambda s: _create_model(s, name, params))
        self._put(f"version {version} link", lambda s: _finish_model(s, name, step))

    def log_batch(
        self, name: str, digest: str, source: Mapping[str, Any], profile: Mapping[str, Any]
    ) -> None:
        """Note a rollout batch as a dataset that the run trained on."""
        self._put(f"dataset {name}", lambda s: _log_input(s, name, digest, source, profile))

    def log_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Log the held-out scores of a version, at the step of that number."""
        self._put(f"evaluation {version}", lambda s: _log_evaluation(s, version, metrics))

    def log_artifact(self, path: Path) -> None:
        """Attach a file to the run."""
        self._put(f"artifact {path.name}", lambda s: s.client.log_artifact(s.run_id, str(path)))

    def set_status(self, status: str) -> None:
        """Close the MLflow run as FINISHED, FAILED or KILLED; a resumed run opens it again."""
        self._put("status", lambda s: s.client.set_terminated(s.run_id, status))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is dealt with; False when the time runs out."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float) -> WriterReport:
        """Write what is queued, for at most `timeout_s` seconds, and say what was left."""
        return self._writer.close(timeout_s)

    def _put(self, label: str, call: Callable[[_Service], object]) -> None:
        def job() -> None:
            if self._service is None:
                raise ContractError("no MLflow run was opened; see the first failure of this writer")
            with _in_words(self.tracking_uri):
                call(self._service)

        self._writer.put(label, job)

    def _open(self, params: dict[str, str], tags: dict[str, str]) -> None:
        if self._is_own:
            self._folder.mkdir(parents=True, exist_ok=True)
        with _in_words(self.tracking_uri):
            client = _client(self.tracking_uri)
            service = self._find_run(client)
            if service is None:
                experiment_id = self._experiment_id(client)
                run = client.create_run(experiment_id, tags=tags, run_name=self._run_id)
                service = _Service(client, experiment_id, run.info.run_id)
                known = {"tracking_uri": self.tracking_uri, "run_id": service.run_id}
                write_atomically(self._mapping, json.dumps(known, indent=2).encode() + b"\n")
                _log_params(service, params)
            self._service = service

    def _experiment_id(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        place = (self._folder / "artifacts" / self._experiment).absolute().as_uri() if self._is_own else None
        return str(client.create_experiment(self._experiment, artifact_location=place))

    def _find_run(self, client: Any) -> _Service | None:
        from mlflow.exceptions import MlflowException

        if not self._mapping.is_file():
            return None
        known = json.loads(self._mapping.read_text(encoding="utf-8"))
        if known["tracking_uri"] != self.tracking_uri:
            return None
        try:
            run = client.get_run(known["run_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None  # somebody cleared the database: begin anew
            raise
        client.update_run(run.info.run_id, status="RUNNING")
        service = _Service(client, run.info.experiment_id, run.info.run_id)
        service.linked = {output.model_id for output in run.outputs.model_outputs}
        service.inputs = {entry.dataset.name for entry in run.inputs.dataset_inputs}
        service.steps = {m.step for m in client.get_metric_history(service.run_id, "version")}
        service.evaluations = {m.step for m in client.get_metric_history(service.run_id, "heldout/pass_at_1")}
        token = None
        while True:
            page = client.search_logged_models(
                [service.experiment_id],
                filter_string=f"source_run_id = '{service.run_id}'",
                max_results=MODEL_PAGE,
                page_token=token,
            )
            service.models |= {model.name: model.model_id for model in page}
            token = page.token
            if not token:
                return service


def model_name(version: int) -> str:
    """Return the logged model's name of a policy version.

    >>> model_name(7)
    'policy-v7'
    """
    return f"policy-v{version}"


def _client(uri: str) -> Any:
    # Before the import: no usage statistics, and no wait of minutes for a server that is gone.
    for name, value in (
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("DO_NOT_TRACK", "true"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "20"),
        ("GIT_PYTHON_REFRESH", "quiet"),
    ):
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _log_params(service: _Service, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    entries = [Param(name, value) for name, value in params.items()]
    for start in range(0, len(entries), PARAMS_PER_CALL):
        service.client.log_batch(service.run_id, params=entries[start : start + PARAMS_PER_CALL])


def _log_step(service: _Service, step: int, metrics: Mapping[str, float], model: str | None) -> None:
    if step in service.steps:
        return
    _log_metrics(service, step, metrics, service.models.get(model or ""))
    service.steps.add(step)


def _log_evaluation(service: _Service, version: int, metrics: Mapping[str, float]) -> None:
    if version in service.evaluations:
        return
    _log_metrics(service, version, metrics, service.models.get(model_name(version)))
    service.evaluations.add(version)


def _log_metrics(service: _Service, step: int, metrics: Mapping[str, float], model_id: str | None) -> None:
    from mlflow.entities import Metric

    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    entries = [Metric(name, float(value), now_ms, step, model_id=model_id) for name, value in metrics.items()]
    service.client.log_batch(service.run_id, metrics=entries)


def _create_model(service: _Service, name: str, params: Mapping[str, str]) -> None:
    if name in service.models:
        return
    model = service.client.create_logged_model(
        service.experiment_id,
        name=name,
        source_run_id=service.run_id,
        params=dict(params),
        model_type="policy",
    )
    service.models[name] = model.model_id


def _finish_model(service: _Service, name: str, step: int) -> None:
    from mlflow.entities import LoggedModelOutput

    model_id = service.models.get(name)
    if model_id is None or model_id in service.linked:
        return
    service.client.finalize_logged_model(model_id, "READY")
    service.client.log_outputs(service.run_id, [LoggedModelOutput(model_id, step)])
    service.linked.add(model_id)


def _log_input(
    service: _Service, name: str, digest: str, source: Mapping[str, Any], profile: Mapping[str, Any]
) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if name in service.inputs:
        return
    dataset = Dataset(
        name,
        digest[:DATASET_DIGEST_DIGITS],
        "local",
        json.dumps(source, sort_keys=True),
        profile=json.dumps(profile, sort_keys=True),
    )
    entry = DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
    service.client.log_inputs(service.run_id, datasets=[entry])
    service.inputs.add(name)


@contextmanager
def _in_words(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        words = " ".join(str(error).split())[:300]
        if error.error_code in _PERMANENT:
            raise ContractError(f"MLflow at {uri} refused: {words}") from error
        raise UnavailableError(f"MLflow at {uri} failed: {words}; it is tried again") from error
    except (SQLAlchemyError, OSError) as error:
        words = " ".join(str(error).split())[:300]
        raise UnavailableError(f"cannot reach MLflow at {uri}: {words}; it is tried again") from error
