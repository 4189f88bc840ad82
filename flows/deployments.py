"""Deployments: which flows a Prefect server offers, with which form, schedule and place to run.

`prefect.yaml` says it, for `antiphon deploy` and for Prefect's own `prefect deploy --all`.
Everything that fills a machine goes to one work queue whose limit keeps a second run waiting.
Deploying again changes what changed and keeps the schedules that were switched on or off.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.workers.process import ProcessWorker

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.flows.form import form_of

MACHINE_QUEUE = "machine"
"""Work queue of flows that fill a machine; its limit is how many of them run at once."""

SILENCE_S = 300
"""A flow run silent for so long, ten heartbeats, counts as crashed, so that it no longer holds its place."""

WATCH_NAME = "antiphon: a flow run that fell silent has crashed"
"""The automation that says so."""

TABLE = Path(__file__).resolve().parents[1] / "prefect.yaml"
"""In a checkout its own file, in a wheel a copy beside the packages."""

DEPLOYMENTS: tuple[dict[str, Any], ...] = tuple(
    yaml.safe_load(TABLE.read_text(encoding="utf-8"))["deployments"]
)
"""What is deployed, as prefect.yaml has it."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """What the server holds now."""

    name: str
    """flow/deployment, as `prefect deployment run` takes it."""
    identity: UUID
    created: bool
    """Whether it was not there before."""
    schedule: str
    """The schedule as text; empty without one."""


def deploy(
    project: Path, home: Path, pool: str = "antiphon", limit: int = 1, schedules: bool | None = None
) -> list[Deployed]:
    """Create or update pool, queue, automation and every deployment on the server of PREFECT_API_URL.

    Args:
        project: folder that flow runs work in; relative paths of configurations start here.
        home: ANTIPHON_HOME of the flow runs.
        pool: work pool of type process.
        limit: runs of the machine queue at once; none of them knows of the others, so one for each machine.
        schedules: switch all schedules on or off; None keeps each as it is, off when it is new.

    Raises:
        ConfigError: when the pool exists with another type, or the server refuses a value.
        UnavailableError: when the server does not answer.
    """
    if limit < 1:
        raise ConfigError(f"--limit {limit} lets nothing run; give 1 for each machine")
    with _server() as client:
        _ensure_pool(client, pool)
        _ensure_limit(client, pool, limit)
        _ensure_watch(client)
        return [
            _deploy_one(client, planned, project, home, pool, schedules)
            for planned in DEPLOYMENTS
            if is_installed(planned)
        ]


def is_installed(planned: Mapping[str, Any]) -> bool:
    """Tell whether a deployment's flow is here: benchmarks are part of a checkout and not of a wheel."""
    try:
        return importlib.util.find_spec(planned["entrypoint"].rpartition(".")[0]) is not None
    except ModuleNotFoundError:
        return False


def load_flow(planned: Mapping[str, Any]) -> Any:
    """Import the flow that a deployment names."""
    module, _, function = planned["entrypoint"].rpartition(".")
    return getattr(importlib.import_module(module), function)


def _deploy_one(
    client: SyncPrefectClient,
    planned: Mapping[str, Any],
    project: Path,
    home: Path,
    pool: str,
    switch: bool | None,
) -> Deployed:
    flow, place = load_flow(planned), planned["work_pool"]
    name = f"{flow.name}/{planned['name']}"
    try:
        known = client.read_deployment_by_name(name)
        active = {schedule.slug: schedule.active for schedule in known.schedules}
    except ObjectNotFound:
        known, active = None, {}
    schedules, said = [], []
    for schedule in planned.get("schedules", ()):
        slug, cron, zone = schedule["slug"], schedule["cron"], schedule["timezone"]
        on = active.get(slug, False) if switch is None else switch
        when = CronSchedule(cron=cron, timezone=zone)
        schedules.append(DeploymentScheduleCreate(schedule=when, active=on, slug=slug))
        said.append(f"{slug} ({cron} {zone}), {'on' if on else 'off'}")
    variables = place["job_variables"]
    environment = variables["env"] | {"ANTIPHON_HOME": str(home)}
    identity = client.create_deployment(
        flow_id=client.create_flow_from_name(flow.name),
        name=planned["name"],
        description=planned["description"],
        entrypoint=planned["entrypoint"],
        parameters=planned.get("parameters", {}),
        parameter_openapi_schema=form_of(flow),
        enforce_parameter_schema=True,
        schedules=schedules,
        tags=planned["tags"],
        work_pool_name=pool,
        work_queue_name=place["work_queue_name"],
        job_variables=variables | {"working_dir": str(project), "env": environment},
        path=str(project),
        pull_steps=[],
    )
    return Deployed(name, identity, known is None, ", ".join(said))


def _ensure_pool(client: SyncPrefectClient, name: str) -> None:
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
        return
    if pool.type != "process":
        raise ConfigError(
            f"work pool {name} is of type {pool.type}; give --pool another name, or deploy to it "
            "with prefect.yaml (see docs/guides/deployments.md)"
        )


def _ensure_limit(client: SyncPrefectClient, pool: str, limit: int) -> None:
    try:
        queue = client.read_work_queue_by_name(MACHINE_QUEUE, work_pool_name=pool)
    except ObjectNotFound:
        client.create_work_queue(name=MACHINE_QUEUE, work_pool_name=pool, concurrency_limit=limit)
        return
    if queue.concurrency_limit != limit:
        client.update_work_queue(queue.id, concurrency_limit=limit)


def _ensure_watch(client: SyncPrefectClient) -> None:
    """Have the server end flow runs whose machine or worker died: nothing else would ever report it."""
    if client.read_automations_by_name(WATCH_NAME):
        return
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    trigger = EventTrigger(
        posture=Posture.Proactive,
        match={"prefect.resource.id": ["prefect.flow-run.*"]},
        for_each={"prefect.resource.id"},
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *ends},
        threshold=1,
        within=timedelta(seconds=SILENCE_S),
    )
    crash = ChangeFlowRunState(
        state=StateType.CRASHED,
        name="Crashed",
        message=f"No sign of life for {SILENCE_S} s; start it again to continue it.",
    )
    description = "Made by `antiphon deploy`; switch it off here if you do not want it."
    client.create_automation(
        AutomationCore(name=WATCH_NAME, description=description, trigger=trigger, actions=[crash])
    )


@contextmanager
def _server() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        try:
            yield client
        except (httpx.HTTPStatusError, PrefectException) as error:
            said = error.response.text if isinstance(error, httpx.HTTPStatusError) else str(error)
            reason = " ".join(said.split())[:300]
            raise ConfigError(f"the Prefect server at {client.api_url} refused: {reason}") from error
        except (httpx.HTTPError, OSError) as error:
            raise UnavailableError(
                f"no Prefect server answers at {client.api_url} ({error or type(error).__name__}); "
                "start one with `antiphon up`, or let PREFECT_API_URL name one"
            ) from error
