"""Tracked run: one run of ours as MLflow keeps it, as its sink holds it.

Every call may be repeated: what was written before is known from MLflow itself, and what is
written again carries the same names, steps and clocks, so that nothing is there twice.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import ContractError
from antiphon.core.metrics import TOTAL_METRICS
from antiphon.core.reporting.deliveries import VersionDeliveries
from antiphon.lineage.rollout_table import decode_batch, decode_timings
from antiphon.lineage.tracking.charts import HELDOUT, STEP_METRIC, chart_name
from antiphon.lineage.tracking.mlflow_client import client_at, explained, make_own_database, tracking_uri
from antiphon.lineage.tracking.traces import log_trace, pick_rows
from antiphon.system.files import write_atomically

DATASET_DIGEST_DIGITS = 32
"""MLflow keeps at most 36 characters; the whole digest stands in the dataset's source."""
VERSIONS_PER_CALL = 200
"""Versions whose deliveries go in one call, of at most 1,000 metrics."""
PARAMS_PER_CALL = 100
"""MLflow's limit for one batch of parameters."""
DELIVERIES = "weights"
"""Section of deliveries, by its letters after all others: what is learned comes first."""
PAGE = 100
"""Logged models and evaluation runs read at once when a run is resumed."""

RECORD_TAG = "antiphon.record"
"""Tag by which a run is found again whose creation was not confirmed."""
VERSION_TAG = "antiphon.version"
TRACES_TAG = "antiphon.traces"
PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
"""Tag of a run or an experiment that its page shows as a text."""
_OF_STEPS = (
    *("completion_tokens_mean", "drafting_gain", "gradient_norm", "kl_k3", "loss", "reward_mean"),
    *("staleness_max", "staleness_mean"),
)
MODEL_METRICS = frozenset(
    {
        *map(chart_name, _OF_STEPS),
        *(metric.name for metric in TOTAL_METRICS),
        *(HELDOUT, "heldout/tokens_mean"),
    }
)
"""Metrics that the logged model of a version carries too; each costs a second row in MLflow."""


@dataclass(slots=True)
class TrackedRun:
    """The MLflow run and what is known to be in it."""

    client: Any
    uri: str
    experiment_id: str
    run_id: str
    models: dict[int, str] = field(default_factory=dict)
    """Version -> id of its logged model."""
    digests: dict[int, str] = field(default_factory=dict)
    """Version -> digest of its weights."""
    linked: set[str] = field(default_factory=set)
    """Ids of logged models that the run names as its outputs."""
    steps: set[int] = field(default_factory=set)
    totals: set[int] = field(default_factory=set)
    """Versions whose totals are logged."""
    evaluations: set[int] = field(default_factory=set)
    evaluation_runs: dict[int, str] = field(default_factory=dict)
    """Version -> id of its nested run."""
    traced: set[int] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)

    def reload(self) -> None:
        """Read from MLflow what the run has; after this everything missing can be written."""
        client, run = self.client, self.client.get_run(self.run_id)
        self.linked = {output.model_id for output in run.outputs.model_outputs}
        self.inputs = {entry.dataset.name for entry in run.inputs.dataset_inputs}
        for name, known in ((STEP_METRIC, "steps"), ("wall_s", "totals"), (HELDOUT, "evaluations")):
            setattr(self, known, {point.step for point in client.get_metric_history(self.run_id, name)})
        for model in self._search(client.search_logged_models, f"source_run_id = '{self.run_id}'"):
            if "version" in model.params:  # one that we made
                version = int(model.params["version"])
                self.models[version] = model.model_id
                self.digests[version] = model.params.get("weights_digest", "")
        for child in self._search(client.search_runs, f"tags.`{PARENT_TAG}` = '{self.run_id}'"):
            version = int(child.data.tags[VERSION_TAG])
            self.evaluation_runs[version] = child.info.run_id
            if TRACES_TAG in child.data.tags:
                self.traced.add(version)

    def _search(self, search: Callable[..., Any], wanted: str) -> Iterable[Any]:
        token = None
        while True:
            page = search([self.experiment_id], filter_string=wanted, max_results=PAGE, page_token=token)
            yield from page
            if not (token := page.token):
                return

    def why_gone(self) -> str:
        """Say in one sentence that the run or its experiment was deleted; empty if it was not."""
        experiment = self.client.get_experiment(self.experiment_id)
        if experiment.lifecycle_stage == "deleted":
            return _deleted_experiment(experiment, self.uri)
        if self.client.get_run(self.run_id).info.lifecycle_stage == "deleted":
            return (
                f"MLflow run {self.run_id} was deleted in MLflow at {self.uri}; `mlflow runs restore "
                f"--run-id {self.run_id}` brings it back, and the run's next start writes what is missing"
            )
        return ""

    def log_summary(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log what the run says of itself after `step` steps."""
        self.client.log_batch(self.run_id, metrics=points(metrics, step, at))

    def log_batches(self, batches: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Note rollout batches as datasets that the run trained on: name -> `source` and `profile`."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new = {name: batch for name, batch in batches.items() if name not in self.inputs}
        if not new:
            return
        entries = [
            DatasetInput(
                Dataset(
                    name,
                    batch["source"]["digest"][:DATASET_DIGEST_DIGITS],
                    "local",
                    json.dumps(batch["source"], sort_keys=True),
                    profile=json.dumps(batch["profile"], sort_keys=True),
                ),
                [InputTag("mlflow.data.context", "training")],
            )
            for name, batch in new.items()
        ]
        self.client.log_inputs(self.run_id, datasets=entries)
        self.inputs |= set(new)

    def log_versions(self, versions: Mapping[int, Mapping[str, str]]) -> None:
        """Make a logged model of each policy version, an output of the run: version -> its parameters."""
        from mlflow.entities import LoggedModelOutput

        for version, params in versions.items():
            if version not in self.models:
                parent = self.digests.get(version - 1, "")
                model = self.client.create_logged_model(
                    self.experiment_id,
                    name=f"policy-v{version}",
                    source_run_id=self.run_id,
                    params={"parent_digest": parent, **params},
                    model_type="policy",
                )
                self.models[version], self.digests[version] = model.model_id, params["weights_digest"]
        made = {self.models[version]: max(0, version - 1) for version in versions}
        new = {model_id: step for model_id, step in made.items() if model_id not in self.linked}
        for model_id in new:
            self.client.finalize_logged_model(model_id, "READY")
        if new:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(*entry) for entry in new.items()])
        self.linked |= set(new)

    def log_evaluation(self, version: int, metrics: Mapping[str, float], prompts: int, at: float) -> None:
        """Log held-out scores in a nested run of their own, and at the version's step in the run."""
        from mlflow.entities import Param, RunTag

        if version in self.evaluations:
            return
        child = self._evaluation_run(version, at)
        entries = points(metrics, version, at, self.models.get(version))
        facts = {"version": version, "weights_digest": self.digests.get(version, ""), "prompts": prompts}
        self.client.log_batch(
            child,
            metrics=entries,
            params=[Param(name, str(value)) for name, value in facts.items()],
            tags=[RunTag("antiphon.reward", f"{metrics.get(HELDOUT, 0.0):.4f}")],
        )
        self.client.set_terminated(child, "FINISHED", end_time=_milliseconds(at))
        self.client.log_batch(self.run_id, metrics=entries)
        self.evaluations.add(version)

    def log_deliveries(self, versions: Sequence[VersionDeliveries]) -> None:
        """Log how versions came to the workers, each once, at the step of its number."""
        logged = self.client.get_metric_history(self.run_id, f"{DELIVERIES}/workers")
        known = {point.step for point in logged}
        new = [version for version in versions if version.version not in known]
        for start in range(0, len(new), VERSIONS_PER_CALL):
            entries = []
            for found in new[start : start + VERSIONS_PER_CALL]:
                metrics = {
                    f"{DELIVERIES}/seconds_to_last": found.seconds_to_last,
                    f"{DELIVERIES}/bytes": found.bytes,
                    f"{DELIVERIES}/relayed_share": found.relayed_share,
                    f"{DELIVERIES}/workers": found.workers,
                }
                entries += points(metrics, found.version, found.at)
            self.client.log_batch(self.run_id, metrics=entries)

    def log_traces(
        self,
        version: int,
        step: int,
        files: tuple[bytes, bytes],
        count: int,
        decode: Callable[[Iterable[int]], str],
        at: float,
    ) -> None:
        """Show up to `count` trajectories of a version as traces of its evaluation, which ended at `at`.

        `files` are those of the batch of `step`: rows and timings.

        Raises:
            IntegrityError: when the bytes are no batch or no timings.
        """
        rows, timings = decode_batch(files[0]), decode_timings(files[1])
        child, picked = self._evaluation_run(version, at), pick_rows(rows, version, count)
        for i in picked:
            place = self.uri, self.experiment_id, child, self.models.get(version), version, step
            log_trace(*place, rows[i], timings[i], decode, at)
        self.client.set_tag(child, TRACES_TAG, str(len(picked)))
        self.traced.add(version)

    def _evaluation_run(self, version: int, at: float) -> str:
        """Return the id of a version's nested run, which is opened when there is none."""
        if version not in self.evaluation_runs:
            tags = {PARENT_TAG: self.run_id, VERSION_TAG: str(version)}
            name = f"evaluate v{version}"
            child = self.client.create_run(
                self.experiment_id, start_time=_milliseconds(at), tags=tags, run_name=name
            )
            self.evaluation_runs[version] = child.info.run_id
        return self.evaluation_runs[version]


def points(metrics: Mapping[str, float], step: int, at: float, model_id: str | None = None) -> list[Any]:
    """Return metrics, drawn at `step`, as MLflow's client takes them; a logged model gets MODEL_METRICS too.

    `at` is the record's clock, not the writer's: late points stand where they belong, and one that is written
    again after an unanswered call is the same point to MLflow.
    """
    from mlflow.entities import Metric

    when = _milliseconds(at)
    return [
        Metric(name, float(value), when, step, model_id=model_id if name in MODEL_METRICS else None)
        for name, value in metrics.items()
    ]


def open_run(
    home: Path,
    mapping: Path,
    experiment: str,
    name: str,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    experiment_tags: Mapping[str, str] | None = None,
) -> TrackedRun:
    """Continue the MLflow run that `mapping` names, or begin one: at MLFLOW_TRACKING_URI, else in the home.

    A file beside it gets a mark before the run is created, so that a creation which was never confirmed is
    found again instead of repeated. A new run gets `params` and `tags`, the experiment its tags each time.

    Raises:
        ContractError: when it or its experiment was deleted, or MLflow refuses.
        ConfigError: when MLflow refuses the user.
        UnavailableError: when MLflow does not answer.
    """
    uri, own = tracking_uri(home)
    if own:
        make_own_database(home)
    marking = mapping.with_suffix(".mark")

    def noted(path: Path) -> dict[str, str]:
        # About another server nothing is known. The home's own is the same wherever the home was then.
        known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        there = known.get("tracking_uri", "")
        return known if there == uri or (own and there.startswith("sqlite:")) else {}

    def note(path: Path, **known: str) -> None:
        write_atomically(path, json.dumps({"tracking_uri": uri, **known}, indent=2).encode() + b"\n")

    with explained(uri):
        from mlflow.entities import Param

        client = client_at(uri)
        run = _find_run(client, experiment, noted(mapping).get("run_id"), noted(marking).get("mark"))
        if run is None:
            place = (home / "mlflow" / "artifacts" / experiment).absolute().as_uri() if own else None
            experiment_id, mark = _experiment_id(client, uri, experiment, place), secrets.token_hex(8)
            note(marking, mark=mark)
            run = client.create_run(experiment_id, tags={**tags, RECORD_TAG: mark}, run_name=name)
            tracked = TrackedRun(client, uri, experiment_id, run.info.run_id)
        else:
            tracked = TrackedRun(client, uri, run.info.experiment_id, run.info.run_id)
            if gone := tracked.why_gone():
                raise ContractError(gone)
            client.update_run(tracked.run_id, status="RUNNING")
            tracked.reload()
        known = client.get_experiment(tracked.experiment_id).tags if experiment_tags else {}
        for tag, value in (experiment_tags or {}).items():
            if known.get(tag) != value:
                client.set_experiment_tag(tracked.experiment_id, tag, value)
        entries = [] if run.data.params else [Param(field, value) for field, value in params.items()]
        for start in range(0, len(entries), PARAMS_PER_CALL):
            client.log_batch(tracked.run_id, params=entries[start : start + PARAMS_PER_CALL])
        note(mapping, experiment_id=tracked.experiment_id, run_id=tracked.run_id)
    return tracked


def _find_run(client: Any, experiment: str, run_id: str | None, mark: str | None) -> Any:
    from mlflow.exceptions import MlflowException

    if run_id is not None:
        try:
            return client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None  # the database was cleared: begin again
            raise
    known = client.get_experiment_by_name(experiment) if mark is not None else None
    if known is None:
        return None
    wanted = f"tags.`{RECORD_TAG}` = '{mark}'"
    return next(iter(client.search_runs([known.experiment_id], filter_string=wanted, max_results=1)), None)


def _experiment_id(client: Any, uri: str, name: str, place: str | None) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        known = client.get_experiment_by_name(name)  # another run of the same name was first
    if known.lifecycle_stage == "deleted":
        raise ContractError(_deleted_experiment(known, uri))
    return str(known.experiment_id)


def _deleted_experiment(experiment: Any, uri: str) -> str:
    return (
        f"experiment {experiment.name!r} (id {experiment.experiment_id}) was deleted in MLflow at {uri}; "
        f"`mlflow experiments restore -x {experiment.experiment_id}` brings it back, and the run's next "
        "start writes what is missing"
    )


def _milliseconds(at: float) -> int:
    return int(at * 1000)
