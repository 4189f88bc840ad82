"""Drafting report: what drafts did in a run, epoch by epoch, as a part of the page."""

from collections.abc import Mapping
from typing import Any

from antiphon.core.drafting.statistics import drafting_summary
from antiphon.lineage.report import plots as figures
from antiphon.lineage.report.timeline import RunPicture

_HEADS = ("epoch", "acceptance", "coverage", "tokens per pass", "with history", "tokens")


def drafting_section(picture: RunPicture) -> str:
    """Return the section as HTML; empty where no engine drafted."""
    summary = drafting_summary(picture.drafting_by_epoch)
    if not summary:
        return ""
    return (
        "<section><h2>What drafting did</h2><p>Acceptance is the share of drafted tokens that were right, "
        "coverage the share of sampled tokens at whose place a draft stood. Drafts change the number of "
        "passes and never a token; a dotted line is the first step that rewarded a group of an epoch.</p>"
        f"<figure>{figures.drafting(picture)}</figure><p>{history_words(summary)}</p>{_table(summary)}</section>"
    )


def history_words(summary: Mapping[str, Any]) -> str:
    """Say which share of completions had history to draft from, by epoch.

    >>> history_words({"history_share": 0.5, "by_epoch": [
    ...     {"epoch": 0, "history_share": 0.0}, {"epoch": 1, "history_share": 1.0}]})
    'Completions whose prompt came with history: 50%; epoch 0: 0%, epoch 1: 100%.'
    """
    epochs = ", ".join(f"epoch {e['epoch']}: {e['history_share']:.0%}" for e in summary["by_epoch"])
    return f"Completions whose prompt came with history: {summary['history_share']:.0%}; {epochs}."


def _table(summary: Mapping[str, Any]) -> str:
    rows = [_row(str(epoch["epoch"]), epoch) for epoch in summary["by_epoch"]]
    rows.append(_row("all", summary))
    head = "".join(f"<th>{name}</th>" for name in _HEADS)
    return (
        f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(name: str, rates: Mapping[str, Any]) -> str:
    cells = (
        name,
        f"{rates['acceptance']:.1%}",
        f"{rates['coverage']:.1%}",
        f"{rates['tokens_per_pass']:.2f}",
        f"{rates['history_share']:.0%}",
        f"{rates['tokens']:,}",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
