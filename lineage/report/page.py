"""Report: a run on one page that needs nothing else, no network and no server.

It shows what was learned, how far the planes overlapped, how stale the data was, where the
seconds went, what became of the work, and which artifacts, by digest, every version came from.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from antiphon.core.drafting.statistics import drafting_summary
from antiphon.core.status import RunStatus
from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.report import plots as draw
from antiphon.lineage.report.render import render, standalone
from antiphon.lineage.report.samples_section import samples_section
from antiphon.lineage.report.timeline import RunPicture, find_value
from antiphon.lineage.samples import Explain
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.system.files import write_atomically

SHORT_DIGEST = 12
"""Digits of a digest that the page prints; the whole one shows when pointed at."""


def build_report(
    run_dir: Path,
    store: ArtifactStore,
    picture: RunPicture,
    status: RunStatus,
    out: Path,
    explain: Explain | None = None,
) -> dict[str, str]:
    """Write the report of a run as one self-contained HTML file; return its plots, file name -> SVG.

    The configuration comes from `run_dir`, completions from there and the store, with `explain`'s reasons,
    all else from the `picture` of the journal's events and from `status`.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    config = read_run_config(run_dir)
    bound = config.get("loop", {}).get("max_staleness")
    histogram: Counter[int] = Counter()
    for step in picture.steps:
        histogram.update(step.staleness)
    plots = {
        "learning": draw.learning_curve(picture),
        "timeline": draw.timeline(picture),
        "timeline-zoom": draw.timeline_zoom(picture),
        "staleness": draw.staleness(histogram, bound),
        "busy": draw.busy(picture),
        "throughput": draw.throughput(picture),
        "length": draw.completion_length(picture),
        "work": draw.work(status.worker_seconds, status.tokens_by_use),
        "drafting": draw.drafting(picture),
    }
    page = render(
        "report.html",
        title=status.run_id,
        brand="Antiphon run",
        heading=status.run_id,
        facts=_facts(status, picture, config),
        cards=_cards(picture, status, histogram, bound),
        plots=plots,
        samples=samples_section(run_dir, store, explain),
        drafting=_drafting(picture),
        versions=_versions(picture),
        configuration=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        notes=_notes(picture, status, store),
    )
    write_atomically(out, page.encode("utf-8"))
    return {f"{name}.svg": standalone(svg) for name, svg in plots.items() if svg}


def _facts(status: RunStatus, picture: RunPicture, config: Mapping[str, Any]) -> list[str]:
    loop, environment = config.get("loop", {}), config.get("environment", {})
    state = "finished" if status.finished or len(picture.steps) >= status.steps_total else "not finished"
    if status.paused_reason and state != "finished":
        state = f"paused: {status.paused_reason}"
    facts = [
        environment.get("name"),
        f"mode {loop['mode']}" if "mode" in loop else None,
        f"S = {loop['max_staleness']}" if "max_staleness" in loop else None,
        f"{len(picture.steps)} of {status.steps_total} steps",
        state,
    ]
    return [fact for fact in facts if fact]


def _cards(
    picture: RunPicture, status: RunStatus, histogram: Mapping[int, int], bound: int | None
) -> list[tuple[str, str, str]]:
    start, stop = picture.window
    seconds = max(stop - start, 1e-9)
    tokens = sum(count for _, count in picture.generated)
    shares = picture.busy_shares()
    groups = picture.counts.get("group.submitted", 0)
    limit = f"bound {bound}" if bound is not None else "versions"
    cards: list[tuple[str, str, str]] = []
    if picture.evaluations:
        first, last = picture.evaluations[0].reward_mean, picture.evaluations[-1].reward_mean
        cards.append(("held-out pass@1", f"{first:.2f} → {last:.2f}", f"{100 * (last - first):+.0f} points"))
    cards += [
        ("time", f"{seconds:.0f} s", f"{seconds / max(1, len(picture.steps)):.1f} s per step"),
        ("sampled tokens", f"{tokens:,}", f"{tokens / seconds:,.0f} per second"),
        ("staleness", f"at most {max(histogram, default=0)}", limit),
        ("dropped as stale", f"{status.groups_dropped_stale}", f"of {groups} groups"),
        ("learner busy", f"{100 * shares['training']:.0f}%", "of the time above"),
    ]
    return cards


def _drafting(picture: RunPicture) -> dict[str, Any] | None:
    """Return what the section on drafting says; None where no engine drafted."""
    summary = drafting_summary(picture.drafting_by_epoch)
    if not summary:
        return None
    epochs = summary["by_epoch"]
    by_epoch = ", ".join(f"epoch {e['epoch']}: {e['history_share']:.0%}" for e in epochs)
    return {
        "history": f"Completions whose prompt came with history: {summary['history_share']:.0%}; {by_epoch}.",
        "rows": [
            (
                rates.get("epoch", "all"),
                f"{rates['acceptance']:.1%}",
                f"{rates['coverage']:.1%}",
                f"{rates['tokens_per_pass']:.2f}",
                f"{rates['history_share']:.0%}",
                f"{rates['tokens']:,}",
            )
            for rates in (*epochs, summary)
        ],
    }


def _versions(picture: RunPicture) -> list[tuple[object, ...]]:
    scores = {e.version: e.reward_mean for e in picture.evaluations}
    return [
        (
            step.step + 1,
            f"{step.at_s:.1f}",
            _number(step.reward_mean),
            _number(scores.get(step.step + 1)),
            step.tokens,
            max(step.staleness, default=0),
            _number(find_value(step.metrics, "loss"), 4),
            _digest(step.batch_digest),
            _digest(step.weights_digest),
        )
        for step in picture.steps
    ]


def _notes(picture: RunPicture, status: RunStatus, store: ArtifactStore) -> list[str]:
    missing = [s.step for s in picture.steps if s.batch_digest and not store.has(s.batch_digest)]
    filtered = sum(step.groups_filtered for step in picture.steps)
    lost = picture.counts.get("worker.lost", 0)
    resumed = picture.counts.get("run.resumed", 0)
    notes = [
        "Times are the coordinator's wall clock at the moment it wrote an event; a bar of the rollout lanes "
        "runs from lease to hand-in, so it contains the worker's waiting as well as its computing.",
        "A plane counts as busy while at least one of its bars covers the moment. Planes that share cores "
        "slow each other down, so busy shares say who had work, not who was fast.",
        "Training reward is measured on prompts sampled for training, by policies up to the staleness bound "
        "behind the step; held-out pass@1 samples once per prompt at the sampling temperature.",
        f"{filtered} groups had equal rewards throughout and were left out of the batches.",
    ]
    if status.trajectories_failed:
        notes.append(
            f"{status.trajectories_failed} answers could not be scored; they trained nothing, and no mean "
            "counts them but that of held-out answers, where they solved nothing. The batch files say why."
        )
    if status.groups_requeued or lost:
        notes.append(
            f"{status.groups_requeued} groups were offered again after a lease was lost; "
            f"{lost} times a worker was lost or replaced."
        )
    notes += [
        f"{batch.operator} voided batch {batch.digest[:SHORT_DIGEST]} of step {batch.step}, "
        f"{batch.groups} groups that never trained: {batch.reason}"
        for batch in status.voided
    ]
    if resumed:
        notes.append(f"The journal was opened again {resumed} times; gaps in the timeline are such breaks.")
    if len(picture.steps) < status.steps_total:
        notes.append(f"The run has {len(picture.steps)} of {status.steps_total} steps: metrics are partial.")
    if missing:
        notes.append(f"The batch files of steps {missing[:10]} are no longer in the store.")
    return notes


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _digest(digest: str) -> str:
    return Markup('<code title="{}">{}</code>').format(digest, digest[:SHORT_DIGEST]) if digest else ""
