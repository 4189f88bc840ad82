"""Reference: docs/configuration.md, written from the configuration's own words."""

import inspect
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from antiphon.cli.catalogue import table
from antiphon.core.config import RunConfig

INTRODUCTION = """\
# Configuration

Generated from `core/config.py` by `scripts/docs`; a test compares the two.

One YAML file gives the sections below; whatever it leaves out has the default shown. On the command
line, `section.field=value` replaces a field (the value is read as YAML). `antiphon config FILE
[section.field=value ...]` prints the whole tree, and everything is checked before anything starts: an
unknown key, an impossible value or an invalid combination is one sentence and exit code 2.
"""


def configuration_page() -> str:
    """Return the page as Markdown, one table for each section."""
    parts = [INTRODUCTION]
    for name, info in RunConfig.model_fields.items():
        section = info.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        parts.append(f"## {name}\n\n{inspect.cleandoc(section.__doc__ or '')}\n")
        rows = [_row(name, field, detail) for field, detail in section.model_fields.items()]
        parts.append(table(("field", "type", "default", "meaning"), rows))
    return "\n".join(parts)


def _row(section: str, field: str, info: FieldInfo) -> tuple[str, str, str, str]:
    default = yaml.safe_dump(info.get_default(call_default_factory=True), default_flow_style=True)
    default = default.replace("...", "").strip()
    meaning = " ".join((info.description or "").split())
    return f"`{section}.{field}`", _kind(info), f"`{default}`", meaning


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
    parts = [_type_words(info.annotation)]
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
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type_words(part) for part in get_args(annotation))
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "none"}
    if origin is dict:
        return "mapping"
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
