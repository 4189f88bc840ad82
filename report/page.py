"""Report: a run on one page that needs nothing else, no network and no server.

It shows what made the run, what was learned, how sound the learner's steps were, how far the stages
overlapped, how stale the data was, where the seconds went, what became of the work, and which artifacts,
by digest, every version came from.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup
from pydantic import ValidationError

from antiphon.core.capacity.measured import measure
from antiphon.core.config_sections import LoopSection
from antiphon.core.dissemination.plan import ORIGIN
from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.drafting.statistics import drafting_summary
from antiphon.core.errors import AntiphonError, InfeasibleError
from antiphon.core.loop.work_account import Use
from antiphon.core.reporting.figures import UNKNOWN, RunFigures, seconds, share
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import RunStatus
from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.run_figures import read_figures
from antiphon.lineage.run_log import read_steps
from antiphon.lineage.samples import Explain, Sample, SampleFiles, first_and_last
from antiphon.lineage.starts import read_starts
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.report import run_charts as draw
from antiphon.report.charts import plain_charts
from antiphon.report.cpu_section import cpu_rows
from antiphon.report.pictures import pictures
from antiphon.report.render import render
from antiphon.system.files import write_atomically

SHORT_DIGEST = 12
"""Digits of a digest that the page prints; the whole one shows when pointed at."""
DELIVERY_ROWS = 40
"""Deliveries in the table of weights, the newest."""
SOURCES = 4
"""Sources that one row names, those that sent most."""
DELIVERY_COLUMNS = (
    *("version", "worker", "MB", "from, MB", "first chunk, s", "last chunk, s", "verified, s", "loaded, s"),
    "sent wrong",
)
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
    config, figures = read_run_config(run_dir), read_figures(run_dir)
    bound = config.get("loop", {}).get("max_staleness")
    drawn = {
        "learning": draw.learning_curve(view),
        "timeline": draw.timeline(view),
        "timeline-zoom": draw.timeline_zoom(view),
        "staleness": draw.staleness(figures.staleness_histogram, bound),
        "busy": draw.busy(_busy(view, figures)),
        "throughput": draw.throughput(view),
        "work": draw.work(status.worker_seconds, status.tokens_by_use),
        "drafting": draw.drafting(view),
        "deliveries": draw.deliveries(view.deliveries),
    }
    learner = draw.learner_panels(view)
    charts = [*drawn.values(), *(panel.chart for panel in learner)]
    page = render(
        "report.html",
        title=status.run_id,
        brand="Antiphon run",
        heading=status.run_id,
        facts=_facts(status, view, config),
        origin=_origin(run_dir),
        cards=_cards(figures, bound),
        drawn=drawn,
        charts=plain_charts(charts),
        learner=learner,
        starting=_starting(status) + _paid(status) + _expected(run_dir, config),
        samples=samples_section(run_dir, store, explain),
        drafting=_drafting(view),
        cpu=cpu_rows(run_dir),
        delivery_columns=DELIVERY_COLUMNS,
        deliveries=[_delivery(one) for one in reversed([*view.deliveries.newest][-DELIVERY_ROWS:])],
        versions=_versions(view),
        configuration=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        notes=_notes(view, status, store, figures),
    )
    write_atomically(out, page.encode("utf-8"))
    return pictures(charts)


def _facts(status: RunStatus, view: RunView, config: Mapping[str, Any]) -> list[str]:
    loop, environment = config.get("loop", {}), config.get("environment", {})
    state = "finished" if status.finished or len(view.steps) >= status.steps_total else "not finished"
    if status.paused_reason and state != "finished":
        state = f"paused: {status.paused_reason}"
    facts = [
        environment.get("name"),
        f"mode {loop['mode']}" if "mode" in loop else None,
        f"S = {loop['max_staleness']}" if "max_staleness" in loop else None,
        f"{len(view.steps)} of {status.steps_total} steps",
        state,
    ]
    return [fact for fact in facts if fact]


def _origin(run_dir: Path) -> list[tuple[str, Markup, str]]:
    """Return (name, value, more) of what made the run, as far as it is known."""
    starts = read_starts(run_dir)
    if not starts:
        return []
    first, *later = starts
    again = f"continued {_times(len(later))}" if later else ""
    rows = [("command", Markup("{}").format(first.command), again)] if first.command else []
    for start, name in ((first, "git commit"), (starts[-1], "continued with")):
        if start.commit and (name == "git commit" or start.commit != first.commit):
            commit = Markup('<span title="{}">{}</span>').format(start.commit, start.commit[:SHORT_DIGEST])
            rows.append((name, commit, "with uncommitted changes" if start.modified else ""))
    return rows


def _starting(status: RunStatus) -> str:
    started_s = status.worker_seconds.get(Use.STARTING, 0.0)
    said = f" The {seconds(started_s)} until their first leases, in which engines started, are left out."
    return said if started_s else ""


def _paid(status: RunStatus) -> str:
    """Return what the work cost by use and by class; "" for nothing."""
    uses = {use: usd for use, usd in status.dollars_by_use.items() if usd > 0.0}
    total = sum(uses.values())
    by_use = ", ".join(f"{use} ${usd:,.2f}" for use, usd in uses.items())
    by_class = ", ".join(
        f"{name or 'others'} {status.seconds_by_class[name] / 3600.0:,.2f} h for ${usd:,.2f}"
        for name, usd in status.dollars_by_class.items()
    )
    return f" It cost ${total:,.2f}: {by_use}. Workers: {by_class}." if total else ""


def _expected(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Return what the capacity model expects by all steps of the run, as `antiphon plan` does."""
    try:
        loop = LoopSection.model_validate(config["loop"])
        found = measure(read_steps(run_dir), loop).expected(loop).describe()
    except (KeyError, ValidationError, InfeasibleError):  # an older version's, or nothing was trained
        return ""
    return f" By what was measured, {found}."


def _busy(view: RunView, figures: RunFigures) -> dict[str, float]:
    shares, learner = view.busy_shares(), figures.learner_busy_share
    return shares if learner is None else shares | {"training": learner}


def _cards(figures: RunFigures, bound: int | None) -> list[tuple[str, str, str]]:
    said, limit = figures.text, f"bound {bound}" if bound is not None else "versions"
    cards: list[tuple[str, str, str]] = []
    if figures.reward_first is not None:
        change = f"{said('reward_first')} → {said('reward_last')}"
        cards.append(("held-out pass@1", change, f"best {said('reward_best')} {said('reward_best_error')}"))
    lost = f"start-up {said('startup_s')}" + (f", breaks {said('break_s')}" if figures.breaks else "")
    used = f"{said('tokens_trained')} trained, {said('tokens_filtered')} filtered"
    return [
        *cards,
        ("time", said("wall_s"), f"{said('seconds_per_step')} per step; {lost}"),
        ("tokens sampled", said("tokens_sampled"), f"{said('tokens_per_s')} per second; {used}"),
        ("staleness", f"at most {said('staleness_max')}", f"mean {said('staleness_mean')}; {limit}"),
        ("groups filtered", said("groups_filtered_share"), f"{said('groups_filtered')} groups"),
        ("groups dropped", said("groups_dropped_stale_share"), f"{said('groups_dropped_stale')} groups"),
        ("learner busy", said("learner_busy_share"), f"idle {said('learner_idle_share')}"),
    ]


def _drafting(view: RunView) -> dict[str, Any] | None:
    """Return what the section on drafting says; None where no engine drafted."""
    summary = drafting_summary(view.drafting_by_epoch)
    if not summary:
        return None
    epochs = summary["by_epoch"]
    by_epoch = ", ".join(f"epoch {e['epoch']}: {e['history_share']:.0%}" for e in epochs)
    return {
        "history": f"Completions whose prompt came with history: {summary['history_share']:.0%}; {by_epoch}.",
        "rows": [
            (
                rates.get("epoch", "all"),
                share(rates["acceptance"]),
                share(rates["coverage"]),
                f"{rates['tokens_per_pass']:.2f}",
                f"{rates['history_share']:.0%}",
                f"{rates['tokens']:,}",
            )
            for rates in (*epochs, summary)
        ],
    }


def _versions(view: RunView) -> list[tuple[object, ...]]:
    scores = {e.version: e.reward_mean for e in view.evaluations}
    base = (0, UNKNOWN, UNKNOWN, share(scores.get(0)), *[UNKNOWN] * 4, _digest(view.base_digest))
    return [base] * bool(view.base_digest or 0 in scores) + [
        (
            step.step + 1,
            seconds(step.at_s),
            share(step.reward_mean),
            share(scores.get(step.step + 1)),
            step.tokens,
            max(step.staleness, default=0),
            _number(step.metric("loss"), 4),
            _digest(step.commit.batch_digest),
            _digest(step.commit.weights_digest),
        )
        for step in view.steps
    ]


def _notes(view: RunView, status: RunStatus, store: ArtifactStore, figures: RunFigures) -> list[str]:
    missing = [s.step for s in view.steps if s.commit.batch_digest and not store.has(s.commit.batch_digest)]
    lost = view.counts.get("worker.lost", 0)
    notes = [
        "Seconds count from the first lease, without start-ups and breaks. A bar of the rollout lanes runs "
        "from lease to hand-in, so it contains the worker's waiting as well as its computing.",
        "A stage counts as busy while at least one of its bars covers the moment. Stages that share cores "
        "slow each other down, so busy shares say who had work, not who was fast.",
        "Training reward is measured on prompts sampled for training, by policies up to the staleness bound "
        "behind the step; held-out pass@1 samples once per prompt at the sampling temperature.",
        f"{figures.text('groups_filtered')} groups had equal rewards and were left out of the batches.",
    ]
    if figures.startup_s:
        notes.append(f"Services and engines started for {figures.text('startup_s')} before they worked.")
    if view.breaks:
        notes.append(
            f"The run was interrupted and continued {_times(len(view.breaks))}, where a dotted line says "
            f"break; for {figures.text('break_s')} no coordinator had it open."
        )
    if status.trajectories_failed:
        notes.append(
            f"{status.trajectories_failed} answers could not be scored; they trained nothing, and no mean "
            "counts them but that of held-out answers, where they solved nothing. The batch files say why."
        )
    if view.offered_again:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in view.offered_again.most_common())
        total = sum(view.offered_again.values())
        were = "1 group was" if total == 1 else f"{total} groups were"
        notes.append(
            f"{were} offered again, as a worker's lease ended without a hand-in ({reasons}). The next worker "
            "continues from what was kept; nothing trains twice."
        )
    if lost:
        notes.append(f"{_times(lost).capitalize()} a worker left, was lost or replaced.")
    notes += [
        f"{batch.operator} voided batch {batch.digest[:SHORT_DIGEST]} of step {batch.step}, "
        f"{batch.groups} groups that never trained: {batch.reason}"
        for batch in status.voided
    ]
    if len(view.steps) < status.steps_total:
        notes.append(f"The run has {len(view.steps)} of {status.steps_total} steps: metrics are partial.")
    if missing:
        notes.append(f"The batch files of steps {missing[:10]} are no longer in the store.")
    return notes


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _digest(digest: str) -> str:
    return Markup('<code title="{}">{}</code>').format(digest, digest[:SHORT_DIGEST]) if digest else ""


def _delivery(delivery: DeliveryRecord) -> tuple[object, ...]:
    wrong = "; ".join(f"{_sender(source)} {what}" for source, what in sorted(delivery.culprits.items()))
    return (
        delivery.version,
        delivery.worker_id,
        f"{delivery.bytes / 1e6:,.1f}",
        _senders(delivery),
        f"{delivery.first_chunk_s:.2f}",
        f"{delivery.seconds:.2f}",
        f"{delivery.verify_s:.2f}" if delivery.verify_s else "",
        f"{delivery.load_s:.2f}" if delivery.load_s else "",
        wrong,
    )


def _senders(delivery: DeliveryRecord) -> str:
    if not delivery.bytes_from:
        return "linked on the origin's machine"
    most = sorted(delivery.bytes_from.items(), key=lambda entry: (-entry[1], entry[0]))
    named = [f"{_sender(source)} {sent / 1e6:,.1f}" for source, sent in most[:SOURCES]]
    if others := most[SOURCES:]:
        named.append(f"{len(others)} others {sum(sent for _, sent in others) / 1e6:,.1f}")
    return ", ".join(named)


def _sender(source: str) -> str:
    return "origin" if source == ORIGIN else source


def samples_section(
    run_dir: Path, store: ArtifactStore, explain: Explain | None = None, ledgers: Path | None = None
) -> Markup:
    """Return the section as HTML; empty for a run of which no completion is recorded yet.

    What keeps completions from being read is said there: the rest of the page does not depend on them.
    """
    if not (run_dir / "config.yaml").is_file():
        return Markup()
    problem, parts = "", []
    try:
        files = SampleFiles(run_dir, store, ledgers)
        for split, title in SPLITS.items():
            first, last = first_and_last(files, split, 1, explain)
            if first:
                parts.append((title, first[0].version, last[0].version, list(_pairs(first, last))))
    except AntiphonError as error:
        problem = f"They cannot all be shown: {error}."
    if not (parts or problem):
        return Markup()
    return render("samples.html", parts=parts, longest=LONGEST_SAMPLE, run=run_dir.name, problem=problem)


def _pairs(first: list[Sample], last: list[Sample]) -> Iterator[tuple[Sample | None, Sample | None]]:
    """Yield best beside best, worst beside worst and random beside random."""
    for kind in ("best", "worst", "random"):
        yield from zip_longest(
            [sample for sample in first if sample.kept_as == kind],
            [] if first[0].version == last[0].version else [s for s in last if s.kept_as == kind],
        )
