"""Opening: the MLflow run that continues what an earlier process began, or a new one."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import ContractError
from antiphon.lineage.tracking.tracked_run import TrackedRun, deleted_experiment
from antiphon.system.files import write_atomically

PARAMS_PER_CALL = 100
"""MLflow's limit for one batch of parameters."""
RECORD_TAG = "antiphon.record"
"""Tag by which a run is found again whose creation was not confirmed."""


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


def open_tracked_run(client: Any, uri: str, plan: RunPlan, mapping: Path) -> TrackedRun:
    """Continue the MLflow run that `mapping` names, or begin one and name it there.

    A file beside it gets a mark before the run is created, so that a creation which was never
    confirmed is found again instead of repeated.

    Raises:
        ContractError: when the run or its experiment was deleted in MLflow.
    """
    marking = mapping.with_suffix(".mark")
    own = plan.artifact_root is not None
    run = _find_run(
        client, plan, _read(mapping, uri, own).get("run_id"), _read(marking, uri, own).get("mark")
    )
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
                return None  # the database was cleared: begin again
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
        raise ContractError(deleted_experiment(found, uri))
    return str(found.experiment_id)


def _tag_experiment(client: Any, experiment_id: str, tags: Mapping[str, str]) -> None:
    known = client.get_experiment(experiment_id).tags if tags else {}
    for name, value in tags.items():
        if known.get(name) != value:
            client.set_experiment_tag(experiment_id, name, value)


def _log_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    entries = [Param(name, value) for name, value in params.items()]
    for start in range(0, len(entries), PARAMS_PER_CALL):
        client.log_batch(run_id, params=entries[start : start + PARAMS_PER_CALL])


def _read(path: Path, uri: str, own: bool) -> dict[str, str]:
    """Return what was noted about the server at `uri`; nothing about another one.

    The home's `own` database is the same wherever the home was when it was noted.
    """
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    noted = known.get("tracking_uri", "")
    return known if noted == uri or (own and noted.startswith("sqlite:")) else {}


def _write(mapping: Path, known: Mapping[str, str]) -> None:
    write_atomically(mapping, json.dumps(known, indent=2).encode() + b"\n")
