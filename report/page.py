"""Report: a run on one page that needs nothing else, no network and no server.

It shows what made the run, what was learned, how sound the learner's steps were, how far the stages
overlapped, how stale the data was, where the seconds went, what became of the work, and which artifacts,
by digest, every version came from.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup
from pydantic import ValidationError

from antiphon.core.capacity.measured import measure
from antiphon.core.client_records import CLIENT
from antiphon.core.config_sections import LoopSection
from antiphon.core.dissemination.plan import ORIGIN
from antiphon.core.drafting.statistics import drafting_summary
from antiphon.core.errors import AntiphonError, InfeasibleError
from antiphon.core.loop.work_account import Use
from antiphon.core.reporting.figures import score, score_name
from antiphon.core.reporting.run_view import RunView
from antiphon.core.reporting.shortcuts import LONGER
from antiphon.core.reporting.suite_scores import SUITE_HEAD
from antiphon.core.status import RunStatus
from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.hosts import read_gateway
from antiphon.lineage.judgements import judgement_lines
from antiphon.lineage.run_log import read_steps
from antiphon.lineage.run_overview import read_figures
from antiphon.lineage.samples import Explain, Sample, SampleFiles, read_samples
from antiphon.lineage.starts import read_starts
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.suite_records import read_results
from antiphon.report import run_charts as draw
from antiphon.report.charts import plain_charts
from antiphon.report.cpu_section import cpu_rows
from antiphon.report.pictures import pictures
from antiphon.report.render import render
from antiphon.system.files import write_atomically
from antiphon.system.ports import ROLLOUTS_PORT

DELIVERY_ROWS = 40
"""Deliveries in the table of weights, the newest."""
SPLITS = {"heldout": "Held-out answers", "train": "Completions of training groups"}
LONGEST_SAMPLE = 4000
"""Characters of a prompt or an answer on the page; `antiphon evaluate --samples` has all."""


def build_report(
    run_dir: Path,
    store: ArtifactStore,
    view: RunView,
    status: RunStatus,
    out: Path,
    explain: Explain | None = None,
) -> dict[str, str]:
    """Write the report of a run as one self-contained HTML file; return its charts, file name -> SVG.

    The configuration and the run's figures come from `run_dir`, completions from there and the store, with
    `explain`'s reasons, all else from the `view` of the journal's events and from `status`.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    config, figures, suites = read_run_config(run_dir), read_figures(run_dir), read_results(run_dir)
    bound, busy = config.get("loop", {}).get("max_staleness"), view.busy_shares()
    if figures.learner_busy_share is not None:
        busy["training"] = figures.learner_busy_share
    drawn = {
        "learning": draw.learning_curve(view, suites),
        "timeline": draw.timeline(view),
        "timeline-zoom": draw.timeline_zoom(view),
        "staleness": draw.staleness(figures.staleness_histogram, bound),
        "busy": draw.busy(busy),
        "throughput": draw.throughput(view),
        "work": draw.work(status.worker_seconds, status.tokens_by_use),
        "drafting": draw.drafting(view),
        "deliveries": draw.deliveries(view.deliveries),
    }
    learner = draw.learner_panels(view)
    charts = [*drawn.values(), *(panel.chart for panel in learner)]
    batches = {step.step: step.commit.batch_digest for step in view.steps if step.commit.batch_digest}
    page = render(
        "report.html",
        title=status.run_id,
        brand="Antiphon run",
        heading=status.run_id,
        facts=_facts(status, view, config, run_dir),
        starts=read_starts(run_dir),
        status=status,
        view=view,
        figures=figures,
        say=figures.text,
        score=partial(score, within=view.reward_range),
        score_name=score_name(view.reward_range),
        heldout_samples=config.get("evaluation", {}).get("samples", 1),
        bound=bound,
        drawn=drawn,
        charts=plain_charts(charts),
        learner=learner,
        starting_s=status.worker_seconds.get(Use.STARTING, 0.0),
        paid={use: usd for use, usd in status.dollars_by_use.items() if usd > 0.0},
        expected=_expected(run_dir, config),
        suite_head=SUITE_HEAD,
        suites=[result.texts() for result in suites],
        samples=samples_section(run_dir, store, explain),
        drafting=drafting_summary(view.drafting_by_epoch),
        cpu=cpu_rows(run_dir),
        deliveries=[*view.deliveries.newest][: -DELIVERY_ROWS - 1 : -1],
        origin=ORIGIN,
        scores={found.version: found.reward_mean for found in view.evaluations},
        configuration=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        shortcuts=[*view.by_length.lines(LONGER, "groups"), *judgement_lines(run_dir)],
        missing=[step for step, digest in batches.items() if not store.has(digest)],
    )
    write_atomically(out, page.encode("utf-8"))
    return pictures(charts)


def _facts(status: RunStatus, view: RunView, config: Mapping[str, Any], run_dir: Path) -> list[str]:
    loop, done = config.get("loop", {}), f"{len(view.steps)} of {status.steps_total} steps"
    state = "finished" if status.finished or len(view.steps) >= status.steps_total else "not finished"
    environment = config.get("environment", {}).get("name")
    if environment == CLIENT:
        done, state = f"{len(view.steps)} steps", "driven by a client"
    if status.paused_reason and state != "finished":
        state = f"paused: {status.paused_reason}"
    known = (("mode", "mode {}"), ("max_staleness", "S = {}"))
    said = [words.format(loop[name]) for name, words in known if name in loop]
    hosts = read_gateway(run_dir).lines()
    return [*([environment] if environment else ()), *said, done, state, *hosts]


def _expected(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Return what the capacity model expects by all steps of the run, as `antiphon plan` does."""
    try:
        loop = LoopSection.model_validate(config["loop"])
        return measure(read_steps(run_dir), loop).expected(loop).describe()
    except (KeyError, ValidationError, InfeasibleError):  # an older version's, or nothing was trained
        return ""


def samples_section(run_dir: Path, store: ArtifactStore, explain: Explain | None = None) -> Markup:
    """Return the section as HTML; empty for a run of which no completion is recorded yet.

    What keeps completions from being read is said there: the rest of the page does not depend on them.
    """
    if not (run_dir / "config.yaml").is_file():
        return Markup()
    problem, parts = "", []
    try:
        files = SampleFiles(run_dir, store)
        versions = files.versions()
        for split, title in SPLITS.items():
            if first := read_samples(files, versions, split, 1, explain):
                last = read_samples(files, reversed(versions), split, 1, explain)
                parts.append((title, first[0].version, last[0].version, list(_pairs(first, last))))
    except AntiphonError as error:
        problem = f"They cannot all be shown: {error}."
    if not (parts or problem):
        return Markup()
    said = {"longest": LONGEST_SAMPLE, "run": run_dir.name, "problem": problem, "port": ROLLOUTS_PORT}
    return render("samples.html", parts=parts, **said)


def _pairs(first: list[Sample], last: list[Sample]) -> Iterator[tuple[Sample | None, Sample | None]]:
    """Yield best beside best, worst beside worst and random beside random."""
    for kind in ("best", "worst", "random"):
        yield from zip_longest(
            [sample for sample in first if sample.kept_as == kind],
            [] if first[0].version == last[0].version else [s for s in last if s.kept_as == kind],
        )
