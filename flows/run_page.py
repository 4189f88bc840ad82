"""Run page: what the Prefect page of a flow run shows of it: progress, versions, plan, links and log.

A thread of its own looks at the run every few seconds and rewrites the same three artifacts,
so a long run leaves no pile of them, no stage ever waits for a page, and a server that is away
gets the newest state when it is back.
"""

import json
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self
from uuid import UUID

import httpx
import structlog
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException, PrefectHTTPStatusError

from antiphon.core.errors import AntiphonError
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import StepCommit
from antiphon.core.reporting.figures import RunFigures, figures_of, score, score_name
from antiphon.core.reporting.run_display import status_rows
from antiphon.core.reporting.run_view import RunView
from antiphon.flows.told import ToldView
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.run_overview import note_cancelled
from antiphon.lineage.tracking.description import nearest_example
from antiphon.lineage.tracking.pages import mlflow_links
from antiphon.runs.directory import is_finished
from antiphon.runs.live_run import LiveRun
from antiphon.runs.outcome import StageSpan
from antiphon.system.set_up import program_name

_log = structlog.get_logger(__name__)

PAGE_S = 5.0
"""Seconds between two looks at the run; each costs the server two to four small requests of some 15 ms."""

CANCEL_REASON = "cancelled from Prefect"

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
_REFUSED = (400, 413, 422)
"""Statuses of lines that a server would refuse again."""


class RunPage:
    """Keeps artifacts, name and log of one flow run up to date while it is entered, and at its end.

    A run whose flow run was cancelled on its page is stopped.
    """

    def __init__(self, run: LiveRun, told: ToldView, flow_run_id: UUID) -> None:
        """Show a run that is claimed, whose services may be up later or no more."""
        self._run, self._told, self._flow_run_id = run, told, flow_run_id
        self._figures = RunFigures()
        self._steps = self._scores = 0
        self._artifacts: dict[str, tuple[UUID, str]] = {}
        self._unsent: list[dict[str, Any]] = []
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
                self._try(lambda: self.heed(client))
                self._try(partial(self._look, client, whole=looks % SLOW_LOOKS == 0))
                looks += 1
            self._try(lambda: self._look(client, whole=True))

    def heed(self, client: SyncPrefectClient) -> None:
        """Stop the run when its flow run was cancelled, unless it has its outcome.

        What is left of the end of a run that has it must not be missing.
        """
        run, state = self._run, client.read_flow_run(self._flow_run_id).state
        cancelled = state is not None and (state.is_cancelling() or state.is_cancelled())
        if cancelled and not run.stop_reason and not is_finished(run.run_dir):
            run.stop(CANCEL_REASON)
            note_cancelled(run.run_dir)

    def _look(self, client: SyncPrefectClient, whole: bool) -> None:
        run = self._run
        self._say_news()
        if whole and (self._over.is_set() or len(run.view.steps) > FIGURES_GROWTH * self._figures.steps):
            with suppress(AntiphonError):  # the followers of the records say what is wrong with the run log
                self._figures = figures_of(read_steps(run.run_dir), read_evaluations(run.run_dir), run.config)
        self._try(lambda: self._write(client, whole))
        self._try(lambda: self._send(client))

    def _say_news(self) -> None:
        """Keep a line for each new step and score."""
        view = self._run.view
        for step in view.steps[self._steps :]:
            self._steps += 1
            self._told.say(step_line(step.commit, self._run.config.run.steps, view.reward_range))
        for found in view.evaluations[self._scores :]:
            self._scores += 1
            said, name = score(found.reward_mean, view.reward_range), score_name(view.reward_range)
            self._told.say(f"held-out {name} of version {found.version}: {said}")

    def _send(self, client: SyncPrefectClient) -> None:
        lines = self._told.lines
        while self._unsent or lines:
            flow_run = {"flow_run_id": str(self._flow_run_id)}
            while lines and len(self._unsent) < LINES_SENT:
                self._unsent.append(lines.popleft() | flow_run)
            try:
                client.create_logs(self._unsent)
            except PrefectHTTPStatusError as error:
                if error.response.status_code not in _REFUSED:
                    raise
                _log.warning("prefect.lines_refused", lines=len(self._unsent), error=str(error)[:200])
            self._unsent.clear()

    def _write(self, client: SyncPrefectClient, whole: bool) -> None:
        run = self._run
        percent = round(100.0 * len(run.view.steps) / run.config.run.steps, 1)
        self._put(client, "progress", "progress", percent, "Steps committed")
        if whole:
            plan = plan_of(run, self._figures, self._told)
            self._put(client, "plan", "markdown", plan, "What was asked, how it goes, what came of it")
            table = json.dumps(versions_of(run.view))
            self._put(client, "versions", "table", table, "Policy versions, newest first")

    def _put(self, client: SyncPrefectClient, name: str, kind: str, data: Any, description: str) -> None:
        known, shown = self._artifacts.get(name, (None, ""))
        if known is None:
            key = artifact_key(name, self._run.run_id)
            made = ArtifactCreate(
                key=key, type=kind, data=data, description=description, flow_run_id=self._flow_run_id
            )
            known = client.create_artifact(made).id
        elif shown != str(data):
            client.update_artifact(known, ArtifactUpdate(data=data))
        self._artifacts[name] = (known, str(data))

    def _try(self, request: Any) -> None:
        try:
            request()
        except _AWAY as error:
            if not self._away:
                _log.warning("prefect.unreachable", error=str(error)[:200])
            self._away = True
        except Exception as error:  # noqa: BLE001 - a cancellation must be heeded whatever the page lacks
            _log.error("page.failed", exc_info=error)
        else:
            self._away = False


def artifact_key(name: str, run_id: str) -> str:
    """Return the key of a run's artifact, in the letters that Prefect allows.

    >>> artifact_key("versions", "demo_2.x-s0-ab12-1")
    'versions-demo-2-x-s0-ab12-1'
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{name}-{run_id}".lower()).strip("-")


def versions_of(view: RunView) -> list[dict[str, Any]]:
    """Return the rows of the newest versions, the newest first."""
    scores, within = {found.version: found.reward_mean for found in view.evaluations}, view.reward_range
    rows = []
    for commit in (step.commit for step in reversed(view.steps[-TABLE_VERSIONS:])):
        metrics = commit.metrics
        loss, train_s = metrics.get("loss"), metrics.get("train_s")
        rows.append(
            {
                "version": commit.version,
                "reward": score(metrics.get("reward_mean"), within),
                f"held-out {score_name(within)}": score(scores.get(commit.version), within),
                "loss": None if loss is None else round(loss, 4),
                "largest staleness": int(metrics.get("staleness_max", 0)),
                "tokens": int(metrics.get("completion_tokens", 0)),
                "training seconds": None if train_s is None else round(train_s, 4),
                "weights": commit.weights_digest[:12],
                "batch": commit.batch_digest[:12],
            }
        )
    return rows


def plan_of(run: LiveRun, figures: RunFigures, told: ToldView) -> str:
    """Return what was asked, how it goes and what came of it, as Markdown.

    `figures` are those up to the last recorded step; `told` has alarms and, at its end, the outcome.
    """
    config, loop = run.config, run.config.loop
    base, fields = nearest_example(config)
    asked = {
        "policy": config.model.path,
        "task": config.environment.name,
        "steps": str(config.run.steps),
        "trajectories in a step": f"{loop.prompts_per_step} prompts x {loop.group_size}",
        "staleness bound": f"{loop.max_staleness} versions, {loop.mode} mode",
        "objective": f"{config.algorithm.objective}, learning rate {config.learner.learning_rate}",
        "a snapshot every": f"{loop.publish_interval} steps",
        "workers here": f"{config.rollout.workers}, {config.rollout.concurrent_groups} groups each",
    }
    state = "the services are starting; this usually takes less than two minutes"
    now = [("state", state)] if run.status is None else [(r.label, r.text) for r in status_rows(run.status)]
    parts = [
        f"# {run.run_id}",
        "\n".join(f"- {line}" for line in told.outcome if not line.startswith(_LINKED)),
        "" if told.outcome else _table("now", now),
        "\n".join(f"- **{line}**" for line in tuple(told.alarms)),
        _table("figures up to the last recorded step", figures.rows() if figures.steps else ()),
        _table("asked for", asked.items()),
        _table(f"differs from {base or 'the defaults'} in", fields.items()),
        _table(
            f"median of the last {RECENT_STEPS} steps, waiting included",
            [(stage, f"{seconds:.2f} s") for stage, seconds in stage_seconds(run.spans).items()],
        ),
        _table("where", links(run.run_dir, run.home).items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def step_line(commit: StepCommit, steps: int, within: RewardRange = UNIT_RANGE) -> str:
    """Say in one line what a step did; `within` is the range of rewards.

    >>> step_line(StepCommit(0, 1, "", "", {"reward_mean": 0.25, "staleness_max": 1.0, "train_s": 2.0}), 9)
    'step 1 of 9: training reward 25.0%, staleness at most 1, 2.0 s of training'
    """
    metrics = commit.metrics
    reward = score(metrics.get("reward_mean"), within)
    parts = [f"step {commit.step + 1} of {steps}: training reward {reward}"]
    parts += [f"staleness at most {metrics.get('staleness_max', 0.0):.0f}"]
    return ", ".join([*parts, f"{metrics.get('train_s', 0.0):.1f} s of training"])


def stage_seconds(spans: Sequence[StageSpan]) -> dict[str, float]:
    """Return the median seconds of each stage over its newest spans, waiting included.

    >>> stage_seconds([StageSpan("step", 0, 0.0, 2.0), StageSpan("step", 1, 2.0, 3.0)])
    {'step': 1.5}
    """
    seconds: dict[str, list[float]] = {}
    for span in tuple(spans):
        seconds.setdefault(span.stage, []).append(span.ended_s - span.started_s)
    return {stage: median(seconds[stage][-RECENT_STEPS:]) for stage in sorted(seconds)}


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
        found["MLflow"] = f"`{program_name()} up` serves its page"
    return found
