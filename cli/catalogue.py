"""Catalogue: docs/catalogue.md, written from the words that the code itself carries.

Metrics, journal events, verbs and errors are listed from their own declarations, so that a new
one is on the page or a test fails.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Sequence

from antiphon.cli.app import app
from antiphon.core import errors
from antiphon.core.loop.events import JournalEvent
from antiphon.core.metrics import (
    BATCH_METRICS,
    DRAFTING_METRICS,
    LEARNER_METRICS,
    ORDER_METRICS,
    PLAN_METRICS,
    STALENESS_METRICS,
    SUMMARY_METRICS,
    SYSTEM_METRICS,
    TOTAL_METRICS,
    Metric,
    staleness_metric,
)
from antiphon.core.reporting.alarms import ALARMS
from antiphon.lineage.tracking.charts import SECTIONS

INTRODUCTION = """\
# Catalogue

Generated from the code by `scripts/docs`; a test compares the two.
"""


def verbs() -> list[tuple[str, str]]:
    """Return every verb of the command line with its help, by name."""
    return [(name, str(app[name].help)) for name in sorted(app) if not name.startswith("-")]


def event_classes() -> list[type[JournalEvent]]:
    """Return the class of every journal event, by kind."""
    # A dataclass with slots is made twice; only the second one was given its kind.
    classes = [cls for cls in JournalEvent.__subclasses__() if hasattr(cls, "kind")]
    return sorted(classes, key=lambda cls: cls.kind)


def catalogue_page() -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION, "## Metrics\n"]
    for title, metrics in (
        ("What a learner step reports", LEARNER_METRICS),
        ("What a commit says of its batch", BATCH_METRICS),
        ("What it says of the order of leasing, where `loop.order` is `by_length`", ORDER_METRICS),
        ("What it says of drafting, where an engine drafts", DRAFTING_METRICS),
    ):
        parts.append(f"{title}:\n\n{_metric_table(metrics)}")
    rows = [(f"`{name}/`", ", ".join(f"`{n}`" for n in drawn.split())) for name, drawn in SECTIONS.items()]
    parts.append(
        "MLflow draws them in sections, such as `learning/loss`; those of drafting and order are in "
        f"`rollout/`, those of one staleness in `staleness/`:\n\n{table(('section', 'metrics'), rows)}"
    )
    example = staleness_metric("kl_k3", 2)
    split = [dataclasses.replace(m, name=f"{m.name}.staleness_N") for m in STALENESS_METRICS]
    parts.append(
        f"And for each staleness N that occurs in the batch, such as `{example}`:\n\n{_metric_table(split)}"
    )
    for title, prefix, metrics in (
        ("In MLflow also, at the step that has the version's number", "", TOTAL_METRICS),
        ("Plan and measurement, at each step", "", PLAN_METRICS),
        ("At the end of a run", "summary/", SUMMARY_METRICS),
        ("Of the machine, while it runs", "system/", SYSTEM_METRICS),
    ):
        named = [dataclasses.replace(metric, name=prefix + metric.name) for metric in metrics]
        parts.append(f"{title}:\n\n{_metric_table(named)}")
    parts.append(
        "## Journal events\n\nWhat happened to a run, by kind; its state is their fold\n"
        "(`core/loop/events.py`).\n"
    )
    events = [(f"`{cls.kind}`", _first(cls), _fields(cls)) for cls in event_classes()]
    parts.append(table(("kind", "meaning", "fields"), events))
    parts.append(
        "## Alarms\n\nWhat a run says of itself when its metrics need a person\n"
        "(`core/reporting/alarms.py`).\n"
    )
    parts.append(table(("alarm", "means", "to do"), [(f"`{a.name}`", a.meaning, a.fix) for a in ALARMS]))
    parts.append("## Verbs\n\n`antiphon VERB --help` says more.\n")
    parts.append(table(("verb", "does"), [(f"`antiphon {name}`", text) for name, text in verbs()]))
    parts.append("## Errors\n\nHow to read them: [operations](operations.md#errors).\n")
    classes = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.AntiphonError)
    ]
    tree = [(f"`{cls.__name__}`", str(cls.exit_code), _first(cls)) for cls in classes]
    parts.append(table(("class", "exit code", "meaning"), tree))
    return "\n".join(parts)


def _metric_table(metrics: Iterable[Metric]) -> str:
    return table(("name", "unit", "meaning"), [(f"`{m.name}`", m.unit, m.meaning) for m in metrics])


def _fields(cls: type) -> str:
    return ", ".join(f"`{field.name}`" for field in dataclasses.fields(cls))


def _first(cls: type) -> str:
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells may hold pipes."""
    lines = [_row(head), "|" + "---|" * len(head), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
