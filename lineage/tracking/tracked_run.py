"""Tracked run: one run of ours as MLflow keeps it, as its sink holds it.

Every call may be repeated: what was written before is known from MLflow itself, and what is
written again carries the same names, steps and clocks, so that nothing is there twice.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.reporting.deliveries import VersionDeliveries
from antiphon.core.reporting.figures import VersionTotals
from antiphon.lineage.tracking.charts import HELDOUT, STEP_METRIC, chart_name
from antiphon.lineage.tracking.system_metrics import SystemSample
from antiphon.lineage.tracking.totals import total_metrics
from antiphon.lineage.tracking.traces import SampledTrajectory, log_trace

DATASET_DIGEST_DIGITS = 32
"""MLflow keeps at most 36 characters; the whole digest stands in the dataset's source."""
METRICS_PER_CALL = 1000
"""MLflow's limit for one batch of metrics."""
VERSIONS_PER_CALL = 200
"""Versions whose deliveries go in one call."""
DELIVERIES = "weights"
"""Section of deliveries, by its letters after all others: what is learned comes first."""
PAGE = 100
"""Logged models and evaluation runs read at once when a run is resumed."""

VERSION_TAG = "antiphon.version"
TRACES_TAG = "antiphon.traces"
PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
"""Tag of a run or an experiment that its page shows as a text."""
MODEL_METRICS = frozenset(
    map(
        chart_name,
        (
            "completion_tokens_mean",
            "drafting_gain",
            "gradient_norm",
            "kl_k3",
            "loss",
            "reward_mean",
            "staleness_max",
            "staleness_mean",
        ),
    )
)
"""Metrics of a step that its logged model carries too; each costs a second row in MLflow."""


@dataclass(frozen=True, slots=True)
class BatchNote:
    """A rollout batch, a dataset that the run trained on."""

    name: str
    digest: str
    source: Mapping[str, object]
    profile: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class VersionNote:
    """A policy version, a logged model that a step made."""

    version: int
    step: int
    params: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StepNote:
    """A step's metrics, the totals of versions known by then, and looks at the machine meanwhile."""

    step: int
    metrics: Mapping[str, float]
    at: float
    totals: Sequence[VersionTotals] = ()
    samples: Sequence[SystemSample] = ()


Note = BatchNote | VersionNote | StepNote


@dataclass(slots=True)
class TrackedRun:
    """The MLflow run and what is known to be in it."""

    client: Any
    uri: str
    experiment_id: str
    run_id: str
    models: dict[str, str] = field(default_factory=dict)
    """Logged model's name -> its id."""
    digests: dict[str, str] = field(default_factory=dict)
    """Logged model's name -> digest of its weights."""
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
        wanted = f"source_run_id = '{self.run_id}'"
        for model in _pages(
            lambda token: client.search_logged_models(
                [self.experiment_id], filter_string=wanted, max_results=PAGE, page_token=token
            )
        ):
            self.models[model.name] = model.model_id
            self.digests[model.name] = model.params.get("weights_digest", "")
        wanted = f"tags.`{PARENT_TAG}` = '{self.run_id}'"
        for child in _pages(
            lambda token: client.search_runs(
                [self.experiment_id], filter_string=wanted, max_results=PAGE, page_token=token
            )
        ):
            version = int(child.data.tags[VERSION_TAG])
            self.evaluation_runs[version] = child.info.run_id
            if TRACES_TAG in child.data.tags:
                self.traced.add(version)

    def why_gone(self) -> str:
        """Say in one sentence that the run or its experiment was deleted; empty if it was not."""
        experiment = self.client.get_experiment(self.experiment_id)
        if experiment.lifecycle_stage == "deleted":
            return deleted_experiment(experiment, self.uri)
        if self.client.get_run(self.run_id).info.lifecycle_stage == "deleted":
            return _deleted_run(self.run_id, self.uri)
        return ""

    def log_notes(self, notes: Sequence[Note]) -> None:
        """Log what was said of batches, versions and steps, in as few calls as MLflow allows."""
        self._log_batches([note for note in notes if isinstance(note, BatchNote)])
        versions = [note for note in notes if isinstance(note, VersionNote)]
        for note in versions:
            self._create_model(note)
        self._finish_models(versions)
        self._log_steps([note for note in notes if isinstance(note, StepNote)])

    def tell(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        for name, value in tags.items():
            self.client.set_tag(self.run_id, name, value)

    def log_summary(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log what the run says of itself after `step` steps."""
        self.client.log_batch(self.run_id, metrics=_metrics(metrics, step, at, None))

    def log_evaluation(self, version: int, metrics: Mapping[str, float], prompts: int, at: float) -> None:
        """Log held-out scores in a nested run of their own, and at the version's step in the run."""
        from mlflow.entities import Param, RunTag

        if version in self.evaluations:
            return
        child, name = self.evaluation_run(version, at), model_name(version)
        entries = _metrics(metrics, version, at, self.models.get(name))
        self.client.log_batch(
            child,
            metrics=entries,
            params=[
                Param("version", str(version)),
                Param("weights_digest", self.digests.get(name, "")),
                Param("prompts", str(prompts)),
            ],
            tags=[RunTag("antiphon.reward", f"{metrics.get(HELDOUT, 0.0):.4f}")],
        )
        self.client.set_terminated(child, "FINISHED", end_time=_milliseconds(at))
        self.client.log_batch(self.run_id, metrics=entries)
        self.evaluations.add(version)

    def log_deliveries(self, versions: Sequence[VersionDeliveries]) -> None:
        """Log how versions came to the workers, each once, at the step of its number."""
        points = self.client.get_metric_history(self.run_id, f"{DELIVERIES}/workers")
        known = {point.step for point in points}
        new = [version for version in versions if version.version not in known]
        for start in range(0, len(new), VERSIONS_PER_CALL):
            entries = [
                entry
                for version in new[start : start + VERSIONS_PER_CALL]
                for entry in _metrics(_delivery_metrics(version), version.version, version.at, None)
            ]
            self.client.log_batch(self.run_id, metrics=entries)

    def evaluation_run(self, version: int, at: float) -> str:
        """Return the id of a version's nested run, which is opened when there is none."""
        if version not in self.evaluation_runs:
            tags = {PARENT_TAG: self.run_id, VERSION_TAG: str(version)}
            name = f"evaluate v{version}"
            child = self.client.create_run(
                self.experiment_id, start_time=_milliseconds(at), tags=tags, run_name=name
            )
            self.evaluation_runs[version] = child.info.run_id
        return self.evaluation_runs[version]

    def log_traces(self, version: int, trajectories: Sequence[SampledTrajectory], at: float) -> None:
        """Show trajectories of a version as traces of its evaluation, which ended at `at`."""
        child, model_id = self.evaluation_run(version, at), self.models.get(model_name(version))
        for trajectory in trajectories:
            log_trace(self.uri, self.experiment_id, child, model_id, trajectory, at)
        self.client.set_tag(child, TRACES_TAG, str(len(trajectories)))
        self.traced.add(version)

    def _create_model(self, note: VersionNote) -> None:
        """Make the logged model of a policy version; its parent's digest is filled in."""
        name, version = model_name(note.version), note.version
        if name in self.models:
            return
        parent = self.digests.get(model_name(version - 1), "") if version else ""
        model = self.client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=self.run_id,
            params={"parent_digest": parent, **note.params},
            model_type="policy",
        )
        self.models[name] = model.model_id
        self.digests[name] = note.params.get("weights_digest", "")

    def _finish_models(self, notes: Sequence[VersionNote]) -> None:
        """Make logged models ready and outputs of the run."""
        from mlflow.entities import LoggedModelOutput

        made = {self.models[model_name(note.version)]: note.step for note in notes}
        new = {model_id: step for model_id, step in made.items() if model_id not in self.linked}
        for model_id in new:
            self.client.finalize_logged_model(model_id, "READY")
        if new:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(*entry) for entry in new.items()])
        self.linked |= set(new)

    def _log_batches(self, notes: Sequence[BatchNote]) -> None:
        """Note rollout batches as datasets that the run trained on."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new = {note.name: note for note in notes if note.name not in self.inputs}
        entries = [
            DatasetInput(
                Dataset(
                    name,
                    note.digest[:DATASET_DIGEST_DIGITS],
                    "local",
                    json.dumps(note.source, sort_keys=True),
                    profile=json.dumps(note.profile, sort_keys=True),
                ),
                [InputTag("mlflow.data.context", "training")],
            )
            for name, note in new.items()
        ]
        if entries:
            self.client.log_inputs(self.run_id, datasets=entries)
        self.inputs |= set(new)

    def _log_steps(self, notes: Sequence[StepNote]) -> None:
        """Log metrics of steps, also for the logged models that they made.

        All of one step goes in one call: from one metric of it, `reload` knows that the others are there.
        """
        calls: list[list[Any]] = [[]]
        for note in notes:
            entries = self._step_entries(note)
            if len(calls[-1]) + len(entries) > METRICS_PER_CALL:
                calls.append([])
            calls[-1] += entries
        for entries in filter(None, calls):
            self.client.log_batch(self.run_id, metrics=entries)
        for note in notes:
            self.steps.add(note.step)
            self.totals |= {known.version for known in note.totals}

    def _step_entries(self, note: StepNote) -> list[Any]:
        """Return the metrics of a step that are new.

        With its own, and those of the logged model that it made, go what versions had cost, each at the step
        of its number, and samples of the machine, each at the second of the run.
        """
        entries = [entry for s in note.samples for entry in _metrics(s.metrics, s.second, s.at, None)]
        if note.step not in self.steps:
            own = {name: value for name, value in note.metrics.items() if name in MODEL_METRICS}
            rest = {name: value for name, value in note.metrics.items() if name not in MODEL_METRICS}
            entries += _metrics(own, note.step, note.at, self.models.get(model_name(note.step + 1)))
            entries += _metrics(rest, note.step, note.at, None)
        for known in note.totals:
            if known.version not in self.totals:
                model_id = self.models.get(model_name(known.version))
                entries += _metrics(total_metrics(known), known.version, known.at, model_id)
        return entries


def model_name(version: int) -> str:
    """Return the logged model's name of a policy version.

    >>> model_name(7)
    'policy-v7'
    """
    return f"policy-v{version}"


def _delivery_metrics(version: VersionDeliveries) -> dict[str, float]:
    return {
        f"{DELIVERIES}/seconds_to_last": version.seconds_to_last,
        f"{DELIVERIES}/bytes": float(version.bytes),
        f"{DELIVERIES}/relayed_share": version.relayed_share,
        f"{DELIVERIES}/workers": float(version.workers),
    }


def deleted_experiment(experiment: Any, uri: str) -> str:
    """Say that an experiment was deleted, and what brings it back."""
    return (
        f"experiment {experiment.name!r} (id {experiment.experiment_id}) was deleted in MLflow at {uri}; "
        f"`mlflow experiments restore -x {experiment.experiment_id}` brings it back, and the run's next "
        "start writes what is missing"
    )


def _deleted_run(run_id: str, uri: str) -> str:
    return (
        f"MLflow run {run_id} was deleted in MLflow at {uri}; `mlflow runs restore --run-id {run_id}` brings "
        "it back, and the run's next start writes what is missing"
    )


def _metrics(metrics: Mapping[str, float], step: int, at: float, model_id: str | None) -> list[Any]:
    from mlflow.entities import Metric

    # The clock is the record's, not the writer's: late points stand where they belong, and one
    # that is written again after an unanswered call is the same point to MLflow.
    when = _milliseconds(at)
    return [Metric(name, float(value), when, step, model_id=model_id) for name, value in metrics.items()]


def _milliseconds(at: float) -> int:
    return int(at * 1000)


def _pages(read: Any) -> Iterable[Any]:
    token = None
    while True:
        page = read(token)
        yield from page
        token = page.token
        if not token:
            return
