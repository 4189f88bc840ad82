"""Tracked run: one run of ours as MLflow keeps it, as the writer thread holds it.

Every call may be repeated: what was written before is known from MLflow itself, and what is
written again carries the same names, steps and clocks, so that nothing is there twice.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import ContractError
from antiphon.core.reporting.figures import VersionTotals
from antiphon.lineage.tracking.charts import HELDOUT, chart_name
from antiphon.lineage.tracking.system_metrics import SystemSample
from antiphon.lineage.tracking.totals import total_metrics
from antiphon.lineage.tracking.traces import SampledTrajectory, log_trace
from antiphon.system.files import write_atomically

PARAMS_PER_CALL = 100
"""MLflow's limit for one batch of parameters."""
DATASET_DIGEST_DIGITS = 32
"""MLflow keeps at most 36 characters; the whole digest stands in the dataset's source."""
PAGE = 100
"""Logged models and evaluation runs read at once when a run is resumed."""

RECORD_TAG = "antiphon.record"
"""Tag by which a run is found again whose creation was not confirmed."""
VERSION_TAG = "antiphon.version"
TRACES_TAG = "antiphon.traces"
PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
"""Tag of a run or an experiment that its page shows as a text."""
STEP_METRIC = chart_name("loss")
"""A metric that every recorded step has."""
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
class RunPlan:
    """What the MLflow run is to be called and to say."""

    experiment: str
    run_id: str
    """The MLflow run's name."""
    params: Mapping[str, str]
    tags: Mapping[str, str]
    artifact_root: Path | None
    """Folder of the artifacts of a local database; None leaves the place to the server."""
    experiment_tags: Mapping[str, str] = field(default_factory=dict)
    """What the experiment is to say; set again where it says something else."""


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
            return _deleted_experiment(experiment, self.uri)
        if self.client.get_run(self.run_id).info.lifecycle_stage == "deleted":
            return _deleted_run(self.run_id, self.uri)
        return ""

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        at: float,
        totals: Sequence[VersionTotals] = (),
        samples: Sequence[SystemSample] = (),
    ) -> None:
        """Log a step's metrics in one call, also for the logged model that it made.

        In the same call go what versions had cost, each at the step of its number, and samples
        of the machine, each at the second of the run.
        """
        entries = [entry for s in samples for entry in _metrics(s.metrics, s.second, s.at, None)]
        if step not in self.steps:
            own = {name: value for name, value in metrics.items() if name in MODEL_METRICS}
            rest = {name: value for name, value in metrics.items() if name not in MODEL_METRICS}
            entries += _metrics(own, step, at, self.models.get(model_name(step + 1)))
            entries += _metrics(rest, step, at, None)
        new = [known for known in totals if known.version not in self.totals]
        for known in new:
            model_id = self.models.get(model_name(known.version))
            entries += _metrics(total_metrics(known), known.version, known.at, model_id)
        if entries:
            self.client.log_batch(self.run_id, metrics=entries)
        self.steps.add(step)
        self.totals |= {known.version for known in new}

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

    def create_model(self, version: int, params: Mapping[str, str]) -> None:
        """Make the logged model of a policy version; its parent's digest is filled in."""
        name = model_name(version)
        if name in self.models:
            return
        parent = self.digests.get(model_name(version - 1), "") if version else ""
        model = self.client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=self.run_id,
            params={"parent_digest": parent, **params},
            model_type="policy",
        )
        self.models[name] = model.model_id
        self.digests[name] = params.get("weights_digest", "")

    def finish_model(self, version: int, step: int) -> None:
        """Make a logged model ready and an output of the run."""
        from mlflow.entities import LoggedModelOutput

        model_id = self.models.get(model_name(version))
        if model_id is None or model_id in self.linked:
            return
        self.client.finalize_logged_model(model_id, "READY")
        self.client.log_outputs(self.run_id, [LoggedModelOutput(model_id, step)])
        self.linked.add(model_id)

    def log_input(
        self, name: str, digest: str, source: Mapping[str, Any], profile: Mapping[str, Any]
    ) -> None:
        """Note a rollout batch as a dataset that the run trained on."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if name in self.inputs:
            return
        dataset = Dataset(
            name,
            digest[:DATASET_DIGEST_DIGITS],
            "local",
            json.dumps(source, sort_keys=True),
            profile=json.dumps(profile, sort_keys=True),
        )
        entry = DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
        self.client.log_inputs(self.run_id, datasets=[entry])
        self.inputs.add(name)


def model_name(version: int) -> str:
    """Return the logged model's name of a policy version.

    >>> model_name(7)
    'policy-v7'
    """
    return f"policy-v{version}"


def open_tracked_run(client: Any, uri: str, plan: RunPlan, mapping: Path) -> TrackedRun:
    """Continue the MLflow run that `mapping` names, or begin one and name it there.

    A file beside it gets a mark before the run is created, so that a creation which was never
    confirmed is found again instead of repeated.

    Raises:
        ContractError: when the run or its experiment was deleted in MLflow.
    """
    marking = mapping.with_suffix(".mark")
    run = _find_run(client, plan, _read(mapping, uri).get("run_id"), _read(marking, uri).get("mark"))
    if run is None:
        experiment_id = _experiment_id(client, uri, plan)
        mark = secrets.token_hex(8)
        _write(marking, {"tracking_uri": uri, "mark": mark})
        run = client.create_run(experiment_id, tags={**plan.tags, RECORD_TAG: mark}, run_name=plan.run_id)
        tracked = TrackedRun(client, uri, experiment_id, run.info.run_id)
    else:
        tracked = TrackedRun(client, uri, run.info.experiment_id, run.info.run_id)
        gone = tracked.why_gone()
        if gone:
            raise ContractError(gone)
        client.update_run(tracked.run_id, status="RUNNING")
        tracked.reload()
    _tag_experiment(client, tracked.experiment_id, plan.experiment_tags)
    if not run.data.params:
        _log_params(client, tracked.run_id, plan.params)
    _write(mapping, {"tracking_uri": uri, "experiment_id": tracked.experiment_id, "run_id": tracked.run_id})
    return tracked


def _find_run(client: Any, plan: RunPlan, run_id: str | None, mark: str | None) -> Any:
    from mlflow.exceptions import MlflowException

    if run_id is not None:
        try:
            return client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None  # the database was cleared: begin anew
            raise
    experiment = client.get_experiment_by_name(plan.experiment) if mark is not None else None
    if experiment is None:
        return None
    wanted = f"tags.`{RECORD_TAG}` = '{mark}'"
    found = client.search_runs([experiment.experiment_id], filter_string=wanted, max_results=1)
    return found[0] if found else None


def _experiment_id(client: Any, uri: str, plan: RunPlan) -> str:
    from mlflow.exceptions import MlflowException

    place = None
    if plan.artifact_root is not None:
        place = (plan.artifact_root / plan.experiment).absolute().as_uri()
    found = client.get_experiment_by_name(plan.experiment)
    if found is None:
        try:
            return str(client.create_experiment(plan.experiment, artifact_location=place))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(plan.experiment)  # another run of the same name was first
    if found.lifecycle_stage == "deleted":
        raise ContractError(_deleted_experiment(found, uri))
    return str(found.experiment_id)


def _tag_experiment(client: Any, experiment_id: str, tags: Mapping[str, str]) -> None:
    known = client.get_experiment(experiment_id).tags if tags else {}
    for name, value in tags.items():
        if known.get(name) != value:
            client.set_experiment_tag(experiment_id, name, value)


def _deleted_experiment(experiment: Any, uri: str) -> str:
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


def _log_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    entries = [Param(name, value) for name, value in params.items()]
    for start in range(0, len(entries), PARAMS_PER_CALL):
        client.log_batch(run_id, params=entries[start : start + PARAMS_PER_CALL])


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


def _read(path: Path, uri: str) -> dict[str, str]:
    """Return what was noted about the server at `uri`; nothing about another one."""
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return known if known.get("tracking_uri") == uri else {}


def _write(mapping: Path, known: Mapping[str, str]) -> None:
    write_atomically(mapping, json.dumps(known, indent=2).encode() + b"\n")
