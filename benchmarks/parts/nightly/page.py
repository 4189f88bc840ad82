"""Benchmark page: the newest table, what got worse or better since the one before, and the history.

One self-contained HTML file in the reports' style; every metric has its history drawn, the
range over the cases behind the median.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from antiphon.benchmarks.parts.nightly.regressions import Comparison, Verdict
from antiphon.benchmarks.parts.nightly.table import BenchmarkTable, ComparedTable
from antiphon.report.render import render
from antiphon.system.files import write_atomically

WIDTH, HEIGHT, EDGE = 220.0, 44.0, 4.0
"""Size of a metric's history and the room around it, in CSS pixels."""

HISTORY_SHOWN = 30
"""Newest tables drawn."""

WORDS = {
    Verdict.WORSE: "worse",
    Verdict.BETTER: "better",
    Verdict.SAME: "within noise",
    Verdict.UNDECIDED: "undecided",
}
"""What the page says of each verdict."""


def build_benchmark_page(compared: ComparedTable, tables: Sequence[BenchmarkTable], out: Path) -> Path:
    """Write the page of the newest table to `out` and return its path; `tables` has all, oldest first.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    table = compared.table
    alike = [t.like(table) for t in tables if t.machine == table.machine]
    same_machine = [t for t in alike if t.cases][-HISTORY_SHOWN:]
    earlier = next((t for t in reversed(tables) if t.commit == compared.before), None)
    counts = Counter(comparison.verdict for comparison in compared.comparisons)
    order = list(WORDS)
    before = f"compared with {compared.before}" if compared.before else "nothing to compare with yet"
    page = render(
        "benchmarks.html",
        title=f"Benchmarks {table.commit}",
        brand="Antiphon benchmarks",
        heading=table.commit,
        facts=[table.at, table.machine, before],
        cards=[
            ("worse", counts[Verdict.WORSE], "metrics beyond noise"),
            ("better", counts[Verdict.BETTER], "metrics beyond noise"),
            ("within noise", counts[Verdict.SAME], "metrics"),
            ("cases", len(table.cases), f"{len(table.failed)} failed"),
        ],
        metrics=[
            _row(comparison, table, same_machine)
            for comparison in sorted(compared.comparisons, key=lambda c: order.index(c.verdict))
        ],
        names=table.judged(),
        cases=[
            (case, *(_number(values.get(name)) for name in table.judged()))
            for case, values in table.cases.items()
        ],
        differing=[
            (case, name, before, now)
            for case, fields in compared.differing.items()
            for name, (before, now) in fields.items()
        ],
        failed=table.failed,
        notes=_notes(compared, earlier),
    )
    write_atomically(out, page.encode("utf-8"))
    return out


def _row(comparison: Comparison, table: BenchmarkTable, tables: Sequence[BenchmarkTable]) -> list[str]:
    name, direction = comparison.measure.name, comparison.measure.better
    now = comparison.after if comparison.after is not None else table.medians()[name]
    verdict = Markup('<span class="{}">{}</span>').format(comparison.verdict.value, WORDS[comparison.verdict])
    return [
        name,
        direction.value,
        _number(comparison.before),
        _number(now),
        change_words(comparison.change),
        noise_words(comparison.allowance),
        str(comparison.pairs or ""),
        verdict,
        history_plot(name, tables),
    ]


def history_plot(name: str, tables: Sequence[BenchmarkTable]) -> str:
    """Return one metric's history as SVG, oldest commit left; empty when it was measured once.

    All `tables` are of one kind of machine, oldest first.
    """
    points = [(t, sorted(t.metric(name).values()), t.medians()[name]) for t in tables if name in t.names()]
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
    line = [place(i, middle) for i, (_, _, middle) in enumerate(points)]
    return render(
        "history.svg",
        name=name,
        width=f"{WIDTH:g}",
        height=f"{HEIGHT:g}",
        band=[*upper, *reversed(lower)],
        line=line,
        marks=[
            (*spot.split(","), f"{t.commit}: {_number(middle)}")
            for spot, (t, _, middle) in zip(line, points, strict=True)
        ],
    )


def _notes(compared: ComparedTable, earlier: BenchmarkTable | None) -> list[str]:
    notes = [
        "A metric is worse when the median change of its pairs goes the wrong way by more than the noise, "
        "and at least three of four pairs agree.",
        "Noise is the largest of the metric's tolerance (twice that with fewer than three pairs), three "
        "standard errors of the pairs' spread, and three times the usual distance between commits.",
        "Only tables of the same kind of machine are compared, and of these only cases with equal "
        "configurations; fields that only say where things lie do not count.",
        "A change is relative to the value before. Changes and noise are weighed relative to the larger of "
        "the two values, so that a change and its way back weigh the same.",
    ]
    changed = compared.other_weights(earlier)
    if changed:
        notes.append(
            f"Other final weights than before: {', '.join(changed)}. In fixed mode this means that the "
            "numerics changed; in elastic mode it is ordinary."
        )
    return notes


def change_words(change: float | None) -> str:
    """Write a comparison's change relative to the value before; one from nothing has no number.

    >>> change_words(0.5), change_words(-0.5), change_words(0.0), change_words(1.0)
    ('+100.0%', '-50.0%', '0.0%', 'from 0')
    """
    if change is None:
        return ""
    # Comparisons weigh a change and its way back alike: it is relative to the larger of the two values.
    if change >= 1.0:
        return "from 0"
    return f"{100 * (change / (1.0 - change) if change > 0 else change):{'+' if change else ''}.1f}%"


def noise_words(allowance: float | None) -> str:
    """Write how far a metric may rise and fall without being judged.

    >>> noise_words(0.2), noise_words(0.0), noise_words(1.0)
    ('+25.0% or -20.0%', 'none', 'any')
    """
    if allowance is None:
        return ""
    if 0.0 < allowance < 1.0:
        return f"{change_words(allowance)} or {change_words(-allowance)}"
    return "any" if allowance else "none"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
