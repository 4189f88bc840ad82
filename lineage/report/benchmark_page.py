"""Benchmark page: the newest table, what got worse or better since the one before, and the history.

One self-contained HTML file in the reports' style; every figure has its history drawn, the
range over the cases behind the median.
"""

import html
from collections.abc import Sequence
from pathlib import Path

from antiphon.core.reporting.regressions import Comparison, Direction, Verdict
from antiphon.lineage.report.benchmark_table import BenchmarkTable, ComparedTable
from antiphon.lineage.report.style import STYLE
from antiphon.lineage.store.artifact_store import write_atomically

WIDTH, HEIGHT, EDGE = 220.0, 44.0, 4.0
"""Size of a figure's history and the room around it, in CSS pixels."""

HISTORY_SHOWN = 30
"""Newest tables drawn."""

OWN_STYLE = """
.worse{color:var(--red);font-weight:600}.better{color:var(--green);font-weight:600}.same{color:var(--muted)}
td:first-child,th:first-child,td.words{text-align:left}
td svg{width:220px;height:44px;display:inline-block;vertical-align:middle}
""".strip()

WORDS = {
    Verdict.WORSE: "worse",
    Verdict.BETTER: "better",
    Verdict.SAME: "within noise",
    Verdict.UNREWARDED: "not rewarded",
}
"""What the page says of each verdict."""


def build_benchmark_page(compared: ComparedTable, tables: Sequence[BenchmarkTable], out: Path) -> Path:
    """Write the page and return its path.

    Args:
        compared: the newest table and its verdicts.
        tables: all tables, oldest first, the newest included.
        out: the file to write.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    table = compared.table
    same_machine = [t for t in tables if t.machine == table.machine][-HISTORY_SHOWN:]
    earlier = next((t for t in reversed(tables) if t.commit == compared.before), None)
    parts = [
        _header(compared),
        _cards(compared),
        _figures(compared, same_machine),
        _cases(table),
        _failures(table),
        _notes(compared, earlier),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Benchmarks {html.escape(table.commit)} - Antiphon</title><style>{STYLE}\n{OWN_STYLE}</style>"
        f"</head><body><main>{''.join(parts)}</main></body></html>\n"
    )
    write_atomically(out, page.encode("utf-8"))
    return out


def _header(compared: ComparedTable) -> str:
    table = compared.table
    since = f"compared with {compared.before}" if compared.before else "nothing to compare with yet"
    line = html.escape(f"{table.at} · {table.machine} · {since}")
    return (
        f"<header><p class=brand>Antiphon benchmarks</p><h1>{html.escape(table.commit)}</h1>"
        f"<p>{line}</p></header>"
    )


def _cards(compared: ComparedTable) -> str:
    counts = {verdict: 0 for verdict in Verdict}
    for comparison in compared.comparisons:
        counts[comparison.verdict] += 1
    cards = [
        ("worse", str(counts[Verdict.WORSE]), "figures beyond noise"),
        ("better", str(counts[Verdict.BETTER]), "figures beyond noise"),
        ("within noise", str(counts[Verdict.SAME]), "figures"),
        ("cases", str(len(compared.table.cases)), f"{len(compared.table.failed)} failed"),
    ]
    body = "".join(
        f"<div class=card><p>{name}</p><b>{value}</b><small>{more}</small></div>"
        for name, value, more in cards
    )
    return f"<section class=cards>{body}</section>"


def _figures(compared: ComparedTable, tables: Sequence[BenchmarkTable]) -> str:
    order = [Verdict.WORSE, Verdict.BETTER, Verdict.SAME, Verdict.UNREWARDED]
    rows = "".join(
        _figure_row(comparison, compared.table, tables)
        for comparison in sorted(compared.comparisons, key=lambda c: order.index(c.verdict))
    )
    heads = ("figure", "should be", "before", "now", "change", "noise", "pairs", "verdict", "history")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        "<section><h2>Figures</h2><p>Medians over the cases that both tables have; the change is the median "
        "of the pairs. The band of a history spans the cases, the line is their median.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _figure_row(comparison: Comparison, table: BenchmarkTable, tables: Sequence[BenchmarkTable]) -> str:
    name = comparison.figure.name
    direction = comparison.figure.better
    now = comparison.after if comparison.after is not None else table.medians()[name]
    cells = [
        html.escape(name),
        "" if direction is Direction.NEITHER else direction.value,
        _number(comparison.before),
        _number(now),
        _percent(comparison.change, signed=True),
        _percent(comparison.allowance, signed=False),
        str(comparison.pairs or ""),
        f'<span class="{comparison.verdict.value}">{WORDS[comparison.verdict]}</span>',
        history_figure(name, tables),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def history_figure(name: str, tables: Sequence[BenchmarkTable]) -> str:
    """Return one figure's history as SVG, oldest commit left; empty when it was measured once.

    Args:
        name: the figure.
        tables: oldest first, of one kind of machine.
    """
    measured = [(t, sorted(t.figure(name).values()), t.medians().get(name)) for t in tables]
    points = [(t, values, middle) for t, values, middle in measured if middle is not None]
    if len(points) < 2:
        return ""
    low = min(values[0] for _, values, _ in points)
    high = max(values[-1] for _, values, _ in points)

    def place(index: int, value: float) -> str:
        x = EDGE + index * (WIDTH - 2 * EDGE) / (len(points) - 1)
        share = (value - low) / (high - low) if high > low else 0.5
        return f"{x:.1f},{HEIGHT - EDGE - share * (HEIGHT - 2 * EDGE):.1f}"

    upper = [place(i, values[-1]) for i, (_, values, _) in enumerate(points)]
    lower = [place(i, values[0]) for i, (_, values, _) in enumerate(points)]
    line = " ".join(place(i, middle) for i, (_, _, middle) in enumerate(points) if middle is not None)
    marks = "".join(
        f'<circle cx="{spot[0]}" cy="{spot[1]}" r="2.2" fill="var(--blue)">'
        f"<title>{html.escape(t.commit)}: {_number(middle)}</title></circle>"
        for i, (t, _, middle) in enumerate(points)
        if middle is not None and (spot := place(i, middle).split(","))
    )
    band = " ".join([*upper, *reversed(lower)])
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{html.escape(name)} over commits">'
        f'<polygon points="{band}" fill="var(--blue)" opacity="0.15"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--blue)" stroke-width="1.6"/>{marks}</svg>'
    )


def _cases(table: BenchmarkTable) -> str:
    names = table.names()
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("case", *names))
    rows = "".join(
        f"<tr><td>{html.escape(case)}</td>"
        + "".join(f"<td>{_number(figures.get(name))}</td>" for name in names)
        + "</tr>"
        for case, figures in table.cases.items()
    )
    return (
        "<section><h2>Cases</h2><div class=scroll><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _failures(table: BenchmarkTable) -> str:
    if not table.failed:
        return ""
    items = "".join(
        f"<li class=worse><b>{html.escape(case)}</b>: {html.escape(reason)}</li>"
        for case, reason in table.failed.items()
    )
    return f"<section><h2>Failed</h2><ul>{items}</ul></section>"


def _notes(compared: ComparedTable, earlier: BenchmarkTable | None) -> str:
    notes = [
        "A figure is worse when the median change of its pairs goes the wrong way by more than the noise, "
        "and at least three of four pairs agree.",
        "Noise is the largest of the figure's tolerance (twice that with fewer than three pairs), three "
        "standard errors of the pairs' spread, and three times the usual distance between commits.",
        "Only tables of the same kind of machine are compared.",
    ]
    changed = compared.other_weights(earlier)
    if changed:
        notes.append(
            f"Other final weights than before: {', '.join(changed)}. In fixed mode this means that the "
            "numerics changed; in elastic mode it is ordinary."
        )
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<section><h2>How to read this</h2><ul>{items}</ul></section>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None, *, signed: bool) -> str:
    if value is None:
        return ""
    return f"{100 * value:+.1f}%" if signed else f"±{100 * value:.1f}%"
