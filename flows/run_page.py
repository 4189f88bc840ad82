"""Run page: what the Prefect page of a flow run shows of it: progress, versions, plan and links.

A thread of its own looks at the run every few seconds and rewrites the same three artifacts,
so a long run leaves no pile of them, no stage ever waits for a page, and a server that is away
gets the newest state when it is back.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

import httpx
import structlog
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.records import StepCommit
from antiphon.core.reporting.figures import RunFigures, share
from antiphon.core.status import RunStatus
from antiphon.runs.context import RunContext, StageSpan

_log = structlog.get_logger(__name__)

PAGE_S = 5.0
"""Seconds between two looks at the run; each costs one question and one or three small requests."""

SLOW_LOOKS = 3
"""Every so many looks the table and the plan are rewritten too."""

ANSWER_S = 5.0
"""Longest wait for an answer of the coordinator."""

TABLE_VERSIONS = 50
"""Newest versions in the table; the report has them all."""

RECENT_STEPS = 20
"""Steps that measured seconds are the median of."""

_AWAY = (PrefectException, httpx.HTTPError, OSError)


@dataclass(frozen=True, slots=True)
class PageContent:
    """What the three artifacts say."""

    percent: float
    """Committed steps of all, 0..100."""
    versions: list[dict[str, Any]]
    plan: str
    """Markdown."""


class RunPage:
    """Keeps the artifacts of one flow run up to date until it is closed."""

    def __init__(self, run: RunContext, flow_run_id: UUID, home: Path) -> None:
        """Name the flow run after the run and begin to write its page.

        In the home directory `antiphon up` says what it serves.
        """
        self._run = run
        self._flow_run_id = flow_run_id
        self._home = home
        self._commits: list[StepCommit] = []
        self._artifacts: dict[str, tuple[UUID, str]] = {}
        self._over = threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._work, name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the page a last time and stop."""
        self._over.set()
        self._thread.join(4 * ANSWER_S)

    def _work(self) -> None:
        with get_client(sync_client=True) as client:
            looks = 0
            self._try(lambda: client.update_flow_run(self._flow_run_id, name=self._run.run_id))
            while not self._over.wait(PAGE_S if looks else 0.0):
                self._look(client, whole=looks % SLOW_LOOKS == 0)
                looks += 1
            self._look(client, whole=True)

    def _look(self, client: SyncPrefectClient, whole: bool) -> None:
        run = self._run
        try:
            status = run.clients.run(run.coordinator.status(), ANSWER_S)
            more = True
            while more:
                after = self._commits[-1].step if self._commits else -1
                page = run.clients.run(run.coordinator.commits_after(after), ANSWER_S)
                self._commits += page.commits
                more = page.more
        except UnavailableError:
            return  # the stages notice and say so; the page just waits
        except AntiphonError as error:
            _log.warning("page.failed", error=str(error))
            return
        figures = RunFigures() if run.recorder is None else run.recorder.figures()
        found = links(run.run_dir, self._home)
        content = page_content(run.config, status, self._commits, list(run.spans), found, figures)
        self._try(lambda: self._write(client, content, whole))

    def _write(self, client: SyncPrefectClient, content: PageContent, whole: bool) -> None:
        self._put(client, "progress", "progress", content.percent, "Steps committed")
        if whole:
            versions = json.dumps(content.versions)
            self._put(client, "versions", "table", versions, "Policy versions, newest first")
            self._put(client, "plan", "markdown", content.plan, "Plan, measured seconds and links")

    def _put(self, client: SyncPrefectClient, name: str, kind: str, data: Any, description: str) -> None:
        known = self._artifacts.get(name)
        if known is None:
            made = client.create_artifact(
                ArtifactCreate(
                    key=artifact_key(name, self._run.run_id),
                    type=kind,
                    data=data,
                    description=description,
                    flow_run_id=self._flow_run_id,
                )
            )
            self._artifacts[name] = (made.id, str(data))
        elif known[1] != str(data):
            client.update_artifact(known[0], ArtifactUpdate(data=data))
            self._artifacts[name] = (known[0], str(data))

    def _try(self, request: Any) -> None:
        try:
            request()
        except _AWAY as error:
            if not self._away:
                _log.warning("prefect.unreachable", error=str(error)[:200])
            self._away = True
        else:
            self._away = False


def artifact_key(name: str, run_id: str) -> str:
    """Return the key of a run's artifact, in the letters that Prefect allows.

    >>> artifact_key("versions", "demo_2.x-s0-ab12-1")
    'versions-demo-2-x-s0-ab12-1'
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{name}-{run_id}".lower()).strip("-")


def page_content(
    config: RunConfig,
    status: RunStatus,
    commits: Sequence[StepCommit],
    spans: Sequence[StageSpan],
    links: Mapping[str, str],
    figures: RunFigures,
) -> PageContent:
    """Draw a run's page from what is known at this moment; decides nothing and waits for nothing."""
    scores = {e.version: e.reward_mean for e in status.evaluations if e.complete}
    return PageContent(
        percent=round(100.0 * status.committed_steps / max(1, status.steps_total), 1),
        versions=[_row(commit, scores) for commit in reversed(commits[-TABLE_VERSIONS:])],
        plan=_plan(config, status, spans, links, figures),
    )


def _row(commit: StepCommit, scores: Mapping[int, float]) -> dict[str, Any]:
    metrics = commit.metrics
    return {
        "version": commit.version,
        "reward": share(metrics.get("reward_mean")),
        "held-out pass@1": share(scores.get(commit.version)),
        "loss": _rounded(metrics.get("loss")),
        "largest staleness": int(metrics.get("staleness_max", 0)),
        "tokens": int(metrics.get("completion_tokens", 0)),
        "training seconds": _rounded(metrics.get("train_s")),
        "weights": commit.weights_digest[:12],
        "batch": commit.batch_digest[:12],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _plan(
    config: RunConfig,
    status: RunStatus,
    spans: Sequence[StageSpan],
    links: Mapping[str, str],
    figures: RunFigures,
) -> str:
    loop = config.loop
    asked = {
        "steps": str(config.run.steps),
        "trajectories in a step": f"{loop.prompts_per_step} prompts x {loop.group_size}",
        "staleness bound": f"{loop.max_staleness} versions, {loop.mode} mode",
        "a snapshot every": f"{loop.publish_interval} steps",
        "workers here": f"{config.rollout.workers}, {config.rollout.concurrent_groups} groups each",
    }
    now = {
        "committed": f"{status.committed_steps} of {status.steps_total} steps",
        "workers": ", ".join(f"{w.worker_id} ({w.state})" for w in status.workers) or "none",
        "waiting for": status.paused_reason or status.waiting or "nothing",
        "not scored": f"{status.trajectories_failed} answers",
    }
    measured = {stage: f"{seconds:.2f} s" for stage, seconds in stage_seconds(spans).items()}
    parts = [
        f"# {status.run_id}",
        _table("plan", asked.items()),
        _table("now", now.items()),
        _table("figures up to the last recorded step", figures.rows()),
        _table(f"median of the last {RECENT_STEPS} steps, waiting included", measured.items()),
        _table("where", links.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def stage_seconds(spans: Sequence[StageSpan]) -> dict[str, float]:
    """Return the median seconds of each stage over its newest spans, waiting included.

    >>> stage_seconds([StageSpan("step", 0, 0.0, 2.0), StageSpan("step", 1, 2.0, 3.0)])
    {'step': 1.5}
    """
    recent: dict[str, list[float]] = {}
    for span in reversed(spans):
        seconds = recent.setdefault(span.stage, [])
        if len(seconds) < RECENT_STEPS:
            seconds.append(span.ended_s - span.started_s)
    return {stage: median(recent[stage]) for stage in sorted(recent)}


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join([f"| {title} | |", "|---|---|", *lines]) if lines else ""


def links(run_dir: Path, home: Path) -> dict[str, str]:
    """Return where more of a run is: its folder, its report, and its page in MLflow if that is served."""
    found = {"folder": f"`{run_dir}`"}
    report = run_dir / "report.html"
    if report.exists():
        found["report"] = f"[report.html]({report.as_uri()})"
    mapping, served = run_dir / "mlflow.json", _served_mlflow(home)
    if mapping.exists():
        known = json.loads(mapping.read_text(encoding="utf-8"))
        base = known["tracking_uri"] if known["tracking_uri"].startswith("http") else served
        if base:
            found["MLflow"] = f"[run {known['run_id'][:8]}]({base.rstrip('/')}/#/runs/{known['run_id']})"
        else:
            found["MLflow"] = f"run `{known['run_id']}`; `antiphon up` serves its page"
    return found


def _served_mlflow(home: Path) -> str:
    up = home / "up.json"
    if not up.exists():
        return ""
    return str(json.loads(up.read_text(encoding="utf-8")).get("mlflow", {}).get("url", ""))
