"""Run page: what the Prefect page of a flow run shows of it: progress, versions, plan, links and log.

A thread of its own looks at the run every few seconds and rewrites the same three artifacts,
so a long run leaves no pile of them, no stage ever waits for a page, and a server that is away
gets the newest state when it is back.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self
from uuid import UUID

import httpx
import structlog
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate, LogCreate
from prefect.exceptions import PrefectException

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError
from antiphon.core.records import StepCommit
from antiphon.core.reporting.figures import RunFigures, figures_of, share
from antiphon.core.reporting.run_display import status_rows
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import RunStatus
from antiphon.flows.told import ToldView
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.tracking.description import nearest_example
from antiphon.lineage.tracking.pages import mlflow_links
from antiphon.runs.live_run import LiveRun
from antiphon.runs.outcome import StageSpan

_log = structlog.get_logger(__name__)

PAGE_S = 5.0
"""Seconds between two looks at the run; each costs the server one or three small requests."""

SLOW_LOOKS = 3
"""Looks from one rewriting of the table and the plan to the next."""

CLOSE_S = 20.0
"""Longest wait for the page to be written a last time."""

FIGURES_GROWTH = 1.02
"""Growth of the run from one reading of its log to the next."""

TABLE_VERSIONS = 50
"""Newest versions in the table; the report has them all."""

LINES_SENT = 200
"""Lines of the log in one request."""

RECENT_STEPS = 20
"""Steps that measured seconds are the median of."""

_LINKED = ("report: ", "look around: ", "beside another run: ", "beside other runs: ")
"""Sentences of an outcome whose places the page links to."""

_AWAY = (PrefectException, httpx.HTTPError, OSError)


class RunPage:
    """Keeps artifacts, name and log of one flow run up to date while it is entered, and at its end."""

    def __init__(self, run: LiveRun, told: ToldView, flow_run_id: UUID) -> None:
        """Show a run that is claimed, whose services may be up later or no more."""
        self._run, self._told, self._flow_run_id = run, told, flow_run_id
        self._figures = RunFigures()
        self._steps = self._scores = 0
        self._artifacts: dict[str, tuple[UUID, str]] = {}
        self._over = threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._work, name="page", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        with get_client(sync_client=True) as client:
            self._try(lambda: client.update_flow_run(self._flow_run_id, name=self._run.run_id))
            looks = 0
            while not self._over.wait(PAGE_S if looks else 0.0):
                self._look(client, whole=looks % SLOW_LOOKS == 0)
                looks += 1
            self._look(client, whole=True)

    def _look(self, client: SyncPrefectClient, whole: bool) -> None:
        run, told = self._run, self._told
        self._say_news()
        if whole and (self._over.is_set() or len(run.view.steps) > FIGURES_GROWTH * self._figures.steps):
            with suppress(AntiphonError):  # the followers of the records say what is wrong with the run log
                self._figures = figures_of(read_steps(run.run_dir), read_evaluations(run.run_dir), run.config)
        facts = PageFacts(
            run_id=run.run_id,
            config=run.config,
            status=run.status,
            view=run.view,
            spans=tuple(run.spans),
            links=links(run.run_dir, run.home),
            alarms=tuple(told.alarms),
            figures=self._figures,
            outcome=tuple(line for line in told.outcome if not line.startswith(_LINKED)),
        )
        self._try(lambda: self._write(client, facts, whole))
        self._try(lambda: self._send(client))

    def _say_news(self) -> None:
        """Keep a line for each new step and score."""
        view = self._run.view
        for step in view.steps[self._steps :]:
            self._steps += 1
            self._told.say(step_line(step.commit, self._run.config.run.steps))
        for score in view.evaluations[self._scores :]:
            self._scores += 1
            self._told.say(f"held-out pass@1 of version {score.version}: {share(score.reward_mean)}")

    def _send(self, client: SyncPrefectClient) -> None:
        while lines := self._told.take(LINES_SENT):
            client.create_logs(
                LogCreate(
                    name="antiphon",
                    level=line.level,
                    message=line.text,
                    timestamp=line.at,
                    flow_run_id=self._flow_run_id,
                )
                for line in lines
            )
            self._told.drop(lines)

    def _write(self, client: SyncPrefectClient, facts: "PageFacts", whole: bool) -> None:
        self._put(client, "progress", "progress", facts.percent, "Steps committed")
        if whole:
            said = "What was asked, how it goes, what came of it"
            self._put(client, "plan", "markdown", facts.plan(), said)
            self._put(
                client, "versions", "table", json.dumps(facts.versions()), "Policy versions, newest first"
            )

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


@dataclass(frozen=True, slots=True)
class PageFacts:
    """All that a run's page is drawn from."""

    run_id: str
    config: RunConfig
    status: RunStatus | None = None
    """The newest look; None before the services were up."""
    view: RunView = field(default_factory=RunView)
    spans: Sequence[StageSpan] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    alarms: Sequence[str] = ()
    figures: RunFigures = field(default_factory=RunFigures)
    """Up to the last recorded step."""
    outcome: Sequence[str] = ()
    """Sentences of what came of it; empty before its end."""

    @property
    def percent(self) -> float:
        """Committed steps of all, 0..100."""
        return round(100.0 * len(self.view.steps) / self.config.run.steps, 1)

    def versions(self) -> list[dict[str, Any]]:
        """Return the rows of the newest versions, the newest first."""
        scores = {score.version: score.reward_mean for score in self.view.evaluations}
        return [_row(step.commit, scores) for step in reversed(self.view.steps[-TABLE_VERSIONS:])]

    def plan(self) -> str:
        """Return what was asked, how it goes and what came of it, as Markdown."""
        base, fields = nearest_example(self.config)
        state = "the services are starting; this usually takes less than two minutes"
        rows = [] if self.status is None else status_rows(self.status)
        now = [(row.label, row.text) for row in rows] or [("state", state)]
        parts = [
            f"# {self.run_id}",
            "\n".join(f"- {line}" for line in self.outcome),
            "" if self.outcome else _table("now", now),
            "\n".join(f"- **{line}**" for line in self.alarms),
            _table("figures up to the last recorded step", self.figures.rows() if self.figures.steps else ()),
            _table("asked for", _asked(self.config).items()),
            _table(f"differs from {base or 'the defaults'} in", fields.items()),
            _table(
                f"median of the last {RECENT_STEPS} steps, waiting included",
                [(stage, f"{seconds:.2f} s") for stage, seconds in stage_seconds(self.spans).items()],
            ),
            _table("where", self.links.items()),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def step_line(commit: StepCommit, steps: int) -> str:
    """Say in one line what a step did.

    >>> step_line(StepCommit(0, 1, "", "", {"reward_mean": 0.25, "staleness_max": 1.0, "train_s": 2.0}), 9)
    'step 1 of 9: training reward 25.0%, staleness at most 1, 2.0 s of training'
    """
    metrics = commit.metrics
    parts = [f"step {commit.step + 1} of {steps}: training reward {share(metrics.get('reward_mean'))}"]
    parts += [f"staleness at most {metrics.get('staleness_max', 0.0):.0f}"]
    return ", ".join([*parts, f"{metrics.get('train_s', 0.0):.1f} s of training"])


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


def _asked(config: RunConfig) -> dict[str, str]:
    loop = config.loop
    return {
        "policy": config.model.path,
        "task": config.environment.name,
        "steps": str(config.run.steps),
        "trajectories in a step": f"{loop.prompts_per_step} prompts x {loop.group_size}",
        "staleness bound": f"{loop.max_staleness} versions, {loop.mode} mode",
        "objective": f"{config.algorithm.objective}, learning rate {config.learner.learning_rate}",
        "a snapshot every": f"{loop.publish_interval} steps",
        "workers here": f"{config.rollout.workers}, {config.rollout.concurrent_groups} groups each",
    }


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
    """Return where more of a run is: its folder, its report, and its pages in MLflow if they are served."""
    found, pages = {"folder": f"`{run_dir}`"}, mlflow_links(run_dir, home)
    report = run_dir / "report.html"
    if report.exists():
        # A browser opens no file from a page of a server, so the copy in MLflow is the one to click on.
        found["report"] = f"`{report}`" + (f", [in MLflow]({pages['report']})" if pages else "")
    if pages:
        found["MLflow"] = f"[this run]({pages['run']}), [beside the others]({pages['comparison']})"
    elif (run_dir / "mlflow.json").exists():
        found["MLflow"] = "`./antiphon up` serves its page"
    return found
