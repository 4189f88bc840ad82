"""Writes the generated pages under docs/; with --check only tells whether they are current.

docs/configuration.md comes from the configuration's own words. docs/catalogue.md lists metrics, journal
events, alarms, verbs and errors from their own declarations, so that none is left out. docs/gpu.md is a
template with the figures that `antiphon doctor --gpu --out docs/data/gpu.json` kept.
"""

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import jinja2
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from antiphon.cli.verbs import VERBS, help_of
from antiphon.core import errors
from antiphon.core.config import RunConfig
from antiphon.core.loop.events import JournalEvent
from antiphon.core.metrics import (
    BATCH_METRICS,
    DRAFTING_METRICS,
    LEARNER_METRICS,
    ORDER_METRICS,
    PLAN_METRICS,
    REFERENCE_METRICS,
    REWARD_LEVELS,
    STALENESS_METRICS,
    SUMMARY_METRICS,
    SYSTEM_METRICS,
    TOTAL_METRICS,
    Metric,
    staleness_metric,
)
from antiphon.core.reporting.alarms import ALARMS
from antiphon.core.reporting.figures import FIGURES
from antiphon.lineage.tracking.charts import SECTIONS
from antiphon.runs.gpu.checks import CHECKS
from antiphon.runs.gpu.conformance import ENGINE

ROOT = Path(__file__).resolve().parents[1]

CATALOGUE = """\
# Catalogue

Generated from the code by `scripts/docs`; a test compares the two.
"""


def event_classes() -> list[type[JournalEvent]]:
    """Return the class of every journal event, by kind."""
    # A dataclass with slots is made twice; only the second one was given its kind.
    classes = [cls for cls in JournalEvent.__subclasses__() if hasattr(cls, "kind")]
    return sorted(classes, key=lambda cls: cls.kind)


def catalogue_page() -> str:
    """Return the page as Markdown."""
    parts = [CATALOGUE, "## Metrics\n"]
    for title, metrics in (
        ("What a learner step reports", LEARNER_METRICS),
        ("What it reports where a reference model scored its batch", REFERENCE_METRICS),
        ("What a commit says of its batch", BATCH_METRICS),
        ("What it says of the order of leasing, where `loop.order` is `by_length`", ORDER_METRICS),
        ("What it says of drafting, where an engine drafts", DRAFTING_METRICS),
    ):
        parts.append(f"{title}:\n\n{_metric_list(metrics)}")
    drawn = _list(
        (f"`{name}/`", ", ".join(f"`{n}`" for n in names.split())) for name, names in SECTIONS.items()
    )
    parts.append(
        "MLflow draws them in sections, such as `learning/loss`; those of drafting and order are in "
        f"`rollout/`, those of one staleness in `staleness/`:\n\n{drawn}"
    )
    example = staleness_metric("kl_k3", 2)
    split = [dataclasses.replace(m, name=f"{m.name}.staleness_N") for m in STALENESS_METRICS]
    parts.append(
        f"And for each staleness N that occurs in the batch, such as `{example}`:\n\n{_metric_list(split)}"
    )
    for title, prefix, metrics in (
        ("In MLflow also, at the step that has the version's number", "", TOTAL_METRICS),
        ("Plan and measurement, at each step", "", PLAN_METRICS),
        (
            "At the end of a run each [figure](concepts/figures.md) as `summary/NAME`, and for the rewards R "
            f"of {', '.join(f'{level:g}' for level in REWARD_LEVELS)}",
            "summary/",
            _beside_figures(),
        ),
        ("Of the machine, while it runs", "system/", SYSTEM_METRICS),
    ):
        named = [dataclasses.replace(metric, name=prefix + metric.name) for metric in metrics]
        parts.append(f"{title}:\n\n{_metric_list(named)}")
    parts.append(
        "## Journal events\n\nWhat happened to a run, by kind; its state is their fold. Their fields:\n"
        "`core/loop/events.py`.\n"
    )
    parts.append(_list((f"`{cls.kind}`", _first(cls)) for cls in event_classes()))
    parts.append(
        "## Alarms\n\nWhat a run says of itself when its metrics need a person\n"
        "(`core/reporting/alarms.py`).\n"
    )
    parts.append(_list((f"`{a.name}`", f"{a.meaning}. {a.fix[:1].upper()}{a.fix[1:]}") for a in ALARMS))
    parts.append("## Verbs\n\n`antiphon VERB --help` says more.\n")
    parts.append(_list((f"`antiphon {name}`", help_of(name).partition("\n")[0]) for name in sorted(VERBS)))
    parts.append(
        "## Errors\n\nWith their exit codes; how to read them: [operations](operations.md#errors).\n"
    )
    classes = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.AntiphonError)
    ]
    parts.append(_list((f"`{cls.__name__}` ({cls.exit_code})", _first(cls)) for cls in classes))
    return "\n".join(parts)


def _beside_figures() -> list[Metric]:
    """Return what a summary has besides the figures, once for all levels of reward."""
    first = f"{REWARD_LEVELS[0]:g}"
    return [
        dataclasses.replace(m, name=m.name.replace(first, "R"), meaning=m.meaning.replace(first, "R"))
        for m in SUMMARY_METRICS[len(FIGURES) :]
        if "_to_reward_" not in m.name or m.name.endswith(f"_{first}")
    ]


def _metric_list(metrics: Iterable[Metric]) -> str:
    units = {"1": ""}
    return _list((f"`{m.name}`{units.get(m.unit, f' ({m.unit})')}", m.meaning) for m in metrics)


def _list(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f"- {name}: {meaning}\n" for name, meaning in entries)


def _first(cls: type) -> str:
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())


CONFIGURATION = """\
# Configuration

Generated from `core/config.py` by `scripts/docs`; a test compares the two.

One YAML file gives the sections below; whatever it leaves out has the default shown, of the type shown. On
the command line, `section.field=value` replaces a field (the value is read as YAML). `antiphon config FILE
[section.field=value ...]` prints the whole tree. Everything is checked before anything starts: an unknown
key, an impossible value or an invalid combination is one sentence and exit code 2.
"""


def configuration_page() -> str:
    """Return the page as Markdown, one list for each section."""
    parts = [CONFIGURATION]
    for name, info in RunConfig.model_fields.items():
        section = info.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        parts.append(f"## {name}\n\n{inspect.cleandoc(section.__doc__ or '')}\n")
        parts.append("\n".join(_field_rows(name, section)) + "\n")
    return "\n".join(parts)


def _field_rows(name: str, section: type[BaseModel]) -> list[str]:
    found = []
    for field, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += _field_rows(f"{name}.{field}", inner)
        else:
            found.append(_field_row(name, field, info))
    return found


def _field_row(section: str, field: str, info: FieldInfo) -> str:
    default = yaml.safe_dump(info.get_default(call_default_factory=True), default_flow_style=True)
    default = default.replace("...", "").strip()
    meaning = " ".join((info.description or "").split())
    kind = _kind(info)
    return f"- `{section}.{field}`: `{default}`{f' ({kind})' if kind else ''}: {meaning}"


def _kind(info: FieldInfo) -> str:
    limits: dict[str, str] = {}
    pattern = None
    for rule in info.metadata:
        for bound in ("ge", "gt", "le", "lt"):
            limit = getattr(rule, bound, None)
            if limit is not None:
                whole = isinstance(limit, int) and bound == "lt"
                bound, limit = ("le", limit - 1) if whole else (bound, limit)
                limits[bound] = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
        pattern = getattr(rule, "pattern", pattern)
    # A default shows its type; null, and one of several words, does not.
    shown = info.annotation in (bool, int, float, str) or get_origin(info.annotation) in (dict, tuple)
    parts = [] if shown else [_type_words(info.annotation)]
    if limits.keys() == {"ge", "le"}:
        parts.append(f"{limits['ge']}..{limits['le']}")
    else:
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        parts += [f"{signs[bound]} {limit}" for bound, limit in limits.items()]
    if pattern is not None:
        parts.append(f"`{pattern}`")
    return ", ".join(parts)


def _type_words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type_words(part) for part in get_args(annotation))
    names = {int: "integer", float: "number", str: "text", bool: "boolean", type(None): "none"}
    if origin is dict:
        return "mapping"
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


NOT_RUN = "not run"


def gpu_page(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown; a figure that the record lacks is "not run".

    Args:
        record: as `conform` returned it.
    """

    def figures(check: str) -> dict[str, Any]:
        found: dict[str, Any] = record["checks"].get(check, {}).get("figures", {})
        return found

    def figure(check: str, name: str, mode: str | None = None) -> str:
        found = figures(check).get(name)
        if mode is not None:  # milliseconds, of both precisions where a name is without one
            both = [figures(check).get(f"{name} {dtype}") for dtype in ("float32", "bfloat16")]
            times = [one[mode]["ms"] for one in both if one and not isinstance(one[mode], str)]
            one = found and found.get(mode)
            found = sorted(times) if times else one["ms"] if isinstance(one, dict) else one and "refused"
        if isinstance(found, list):
            return " to ".join(map(_number, (found[0], found[-1])))
        return NOT_RUN if found is None else found if isinstance(found, str) else _number(found)

    def most(check: str, part: str) -> str:
        return _number(max((x for name, x in figures(check).items() if part in name), default=None))

    lock = (ROOT / "requirements" / "cuda.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([\w-]+)==([\w.]+)", lock, re.MULTILINE))
    versions = {name: told for name, told in record.items() if isinstance(told, str)}
    without = [
        (name, check.shows, ENGINE if check.work is None else record["skipped"].get(name, NOT_RUN))
        for name, check in CHECKS.items()
        if not figures(name)
    ]
    template = (ROOT / "docs" / "data" / "gpu.md.j2").read_text(encoding="utf-8")
    strict = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return strict.from_string(template).render(
        {name.replace("-", "_"): told for name, told in versions.items()},
        vllm=versions.get("vllm"),
        moved=[
            name for name, told in versions.items() if locked.get(name) not in (None, told.partition("+")[0])
        ],
        failed=record["failed"],
        without=without,
        figures=figures,
        f=figure,
        most=most,
    )


def _number(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.3g}".replace("e-0", "e-")


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with --check name the first one that is not current."""
    docs = ROOT / "docs"
    record = json.loads((docs / "data" / "gpu.json").read_text(encoding="utf-8"))
    for name, page in (
        ("configuration.md", configuration_page()),
        ("catalogue.md", catalogue_page()),
        ("gpu.md", gpu_page(record)),
    ):
        if list(arguments) != ["--check"]:
            (docs / name).write_text(page, encoding="utf-8")
        elif (docs / name).read_text(encoding="utf-8") != page:
            print(f"docs/{name} is not current; run scripts/docs", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
