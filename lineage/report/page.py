"""Report: a run on one page that needs nothing else, no network and no server.

It tells what was learned, how far the planes overlapped, how stale the data was, where the
seconds went, what became of the work, and which artifacts, by digest, every version came from.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from antiphon.lineage.documents.manifest import read_run_config
from antiphon.lineage.report import plots as figures
from antiphon.lineage.report.drafting import drafting_section
from antiphon.lineage.report.style import STYLE
from antiphon.lineage.report.timeline import JournalEntry, RunPicture, fold
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.system.files import write_atomically

SHORT_DIGEST = 12
"""Digits of a digest that the page prints; the whole one shows when pointed at."""


class Status(Protocol):
    """The run at a glance, as the coordinator reports it."""

    @property
    def run_id(self) -> str:
        """The run."""

    @property
    def steps_total(self) -> int:
        """Steps asked for."""

    @property
    def groups_dropped_stale(self) -> int:
        """Finished groups dropped beyond the bound."""

    @property
    def groups_requeued(self) -> int:
        """Groups offered again after a lost lease."""

    @property
    def worker_seconds(self) -> Mapping[str, float]:
        """What became of the workers' seconds, by use."""

    @property
    def tokens_by_use(self) -> Mapping[str, int]:
        """What became of the completion tokens."""

    @property
    def paused_reason(self) -> str:
        """Why the run is paused; empty while it goes on."""

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""


def build_report(
    run_dir: Path, store: ArtifactStore, events: Sequence[JournalEntry], status: Status, out: Path
) -> Path:
    """Write the report of a run as one self-contained HTML file and return its path.

    Args:
        run_dir: the run's directory; its configuration is printed.
        store: the artifact store, asked whether each batch is still there.
        events: the run's journal, in order.
        status: the run at a glance.
        out: the file to write.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    picture = fold(events)
    config = read_run_config(run_dir)
    bound = config.get("loop", {}).get("max_staleness")
    histogram: dict[int, int] = {}
    for step in picture.steps:
        for stale, count in step.staleness.items():
            histogram[stale] = histogram.get(stale, 0) + count
    parts = [
        _header(status, picture, config),
        _cards(picture, status, histogram, bound),
        _section("What was learned", figures.learning_curve(picture)),
        _section(
            "How the stages overlapped",
            figures.timeline(picture),
            "Every lane is a plane of the loop against the same clock; where bars stand above each other, "
            "the planes worked at the same time.",
        ),
        _section(
            "A few steps from close by",
            figures.timeline_zoom(picture),
            "In the rollout lanes each thin bar is one group, its shade the policy version that its worker "
            "held; numbers are learner steps and policy versions.",
        ),
        _pair(
            ("Staleness of what was trained", figures.staleness(histogram, bound)),
            ("Where the seconds went", figures.busy(picture)),
        ),
        _pair(
            ("Throughput", figures.throughput(picture)),
            ("Completion length", figures.completion_length(picture)),
        ),
        _section(
            "What became of the work",
            figures.work(status.worker_seconds, status.tokens_by_use),
            "Useful is what the learner trained on or an evaluation needed; open is not decided yet; idle "
            "workers held no lease. Everything else was in vain, and for this reason.",
        ),
        drafting_section(picture),
        _versions(picture),
        _configuration(config),
        _notes(picture, status, store),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(status.run_id)} - Antiphon</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    write_atomically(out, page.encode("utf-8"))
    return out


def _header(status: Status, picture: RunPicture, config: Mapping[str, Any]) -> str:
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
    line = " · ".join(html.escape(str(fact)) for fact in facts if fact)
    return (
        f"<header><p class=brand>Antiphon run</p><h1>{html.escape(status.run_id)}</h1><p>{line}</p></header>"
    )


def _cards(picture: RunPicture, status: Status, histogram: Mapping[int, int], bound: int | None) -> str:
    start, stop = picture.window
    seconds = max(stop - start, 1e-9)
    tokens = sum(count for _, count in picture.generated)
    shares = picture.busy_shares()
    groups = picture.counts.get("group.submitted", 0)
    cards: list[tuple[str, str, str]] = []
    if picture.evaluations:
        first, last = picture.evaluations[0], picture.evaluations[-1]
        gain = 100 * (last.reward_mean - first.reward_mean)
        cards.append(
            ("held-out pass@1", f"{first.reward_mean:.2f} → {last.reward_mean:.2f}", f"{gain:+.0f} points")
        )
    cards += [
        ("time", f"{seconds:.0f} s", f"{seconds / max(1, len(picture.steps)):.1f} s per step"),
        ("sampled tokens", f"{tokens:,}", f"{tokens / seconds:,.0f} per second"),
        (
            "staleness",
            f"at most {max(histogram, default=0)}",
            f"bound {bound}" if bound is not None else "versions",
        ),
        ("dropped as stale", f"{status.groups_dropped_stale}", f"of {groups} groups"),
        ("learner busy", f"{100 * shares['training']:.0f}%", "of the time above"),
    ]
    body = "".join(
        f"<div class=card><p>{html.escape(name)}</p><b>{html.escape(value)}</b>"
        f"<small>{html.escape(more)}</small></div>"
        for name, value, more in cards
    )
    return f"<section class=cards>{body}</section>"


def _section(title: str, figure: str, text: str = "") -> str:
    if not figure:
        return ""
    words = f"<p>{html.escape(text)}</p>" if text else ""
    return f"<section><h2>{html.escape(title)}</h2>{words}<figure>{figure}</figure></section>"


def _pair(*figures_: tuple[str, str]) -> str:
    return f"<div class=pair>{''.join(_section(title, figure) for title, figure in figures_)}</div>"


def _versions(picture: RunPicture) -> str:
    scores = {e.version: e.reward_mean for e in picture.evaluations}
    heads = ("version", "seconds", "reward", "pass@1", "tokens", "stale", "loss", "batch", "weights")
    rows = []
    for step in picture.steps:
        loss = next((v for k, v in step.metrics.items() if k.rpartition("/")[2] == "loss"), None)
        cells = [
            str(step.step + 1),
            f"{step.at_s:.1f}",
            _number(step.reward_mean),
            _number(scores.get(step.step + 1)),
            str(step.tokens),
            str(max(step.staleness, default=0)),
            _number(loss, 4),
            _digest(step.batch_digest),
            _digest(step.weights_digest),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        "<section><h2>Versions and what they came from</h2><p>Each row is the policy version that a step "
        "made: its weights, and the batch that made it. Digests are blake3 and name the files in the "
        f"store.</p><div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
        "</table></div></section>"
    )


def _configuration(config: Mapping[str, Any]) -> str:
    text = html.escape(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
    return f"<section><details><summary>Configuration</summary><pre>{text}</pre></details></section>"


def _notes(picture: RunPicture, status: Status, store: ArtifactStore) -> str:
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
    if status.groups_requeued or lost:
        notes.append(
            f"{status.groups_requeued} groups were offered again after a lease was lost; "
            f"{lost} times a worker was lost or replaced."
        )
    if resumed:
        notes.append(f"The journal was opened again {resumed} times; gaps in the timeline are such breaks.")
    if len(picture.steps) < status.steps_total:
        notes.append(f"The run has {len(picture.steps)} of {status.steps_total} steps: figures are partial.")
    if missing:
        notes.append(f"The batch files of steps {missing[:10]} are no longer in the store.")
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<section><h2>How to read this</h2><ul>{items}</ul></section>"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _digest(digest: str) -> str:
    return (
        f'<code title="{html.escape(digest)}">{html.escape(digest[:SHORT_DIGEST])}</code>' if digest else ""
    )
