"""Configuration errors: what is wrong with a tree of plain values, in one plain sentence for each field."""

import difflib
import json
import re
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from antiphon.core.errors import ConfigError

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_WORDS = {
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "dict_type": "it must hold keys with values, such as {{min_terms: 3}}",
    "finite_number": "it must be a finite number",
    "float_parsing": "it must be a number, such as 0.5",
    "float_type": "it must be a number, such as 0.5",
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "int_from_float": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it is too large",
    "int_type": "it must be a whole number",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be at most {le}",
    "literal_error": "it must be {expected}",
    "string_type": "it must be text; quote it",
    "tuple_type": "it must be a list, such as [a, b]",
}
"""Kind of an error -> what is asked for instead, with pydantic's limits."""

_READ_OTHERWISE = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads to the base of 8 or 60."""
MOST_SHOWN = 60
"""Characters of a wrong value that are repeated."""


def read_yaml(text: str, place: str = "") -> Any:
    """Read one YAML document in which every value is what it looks like.

    Args:
        text: the document.
        place: the key that it is the value of, for what is said; a value of a key holds no comment.

    Raises:
        ConfigError: for a key that stands twice, what holds itself, or what YAML reads as something else.
        yaml.YAMLError: when it is no YAML.
    """
    try:
        node = yaml.compose(text, Loader=LOADER)
        _check_keys(node, place, ())
        if place and "#" in (cut := text[0 if node is None else node.end_mark.index :]):
            raise ConfigError(f"{place}: YAML leaves out {cut.strip()!r} as a comment; quote the whole value")
        return yaml.load(text, Loader=LOADER)
    except (ValueError, RecursionError) as error:  # a day that no calendar has, a number of 5,000 digits
        raise yaml.YAMLError(str(error)) from error


def _check_keys(node: yaml.Node | None, place: str, outer: tuple[yaml.Node, ...]) -> None:
    if any(node is one for one in outer):
        raise ConfigError(f"{place} holds itself; write its values out instead of an alias")
    numbers = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    if isinstance(node, yaml.ScalarNode) and node.tag in numbers and _READ_OTHERWISE.fullmatch(node.value):
        read = yaml.load(node.value, Loader=LOADER)
        raise ConfigError(
            f"{place}={node.value} is {read} in YAML; write {read} if that is meant, else a plain number"
        )
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value, place, (*outer, node))
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = f"{place}.{key.value}" if place else str(key.value)
            if ":" in str(key.value) and value.value == "" and not (key.style or value.style):
                raise ConfigError(f"{name} is a key without a value; write a blank after the colon")
            line = key.start_mark.line + 1
            if name in lines:
                where = f"lines {lines[name]} and {line}" if lines[name] != line else f"line {line}"
                raise ConfigError(f"{name} is set twice, in {where}; keep one of them")
            lines[name] = line
            _check_keys(value, name, (*outer, node))


def sentences(error: ValidationError, root: type[BaseModel]) -> str:
    """Say what is wrong with each field of `root` that `error` names."""
    return "; ".join(_sentence(item, root) for item in error.errors())


def _sentence(item: ErrorDetails, root: type[BaseModel]) -> str:
    location, kind = item["loc"], item["type"]
    where = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"unknown key {where}{_suggest(location, root)}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    shown = _shown(item.get("input"))
    if kind == "invalid_key":
        return f"unknown key {where}; names are words, see docs/configuration.md"
    if kind == "model_type":
        if not location:
            return f"a configuration holds sections, such as run and loop, not {shown}"
        field = next(iter(_section(location, root).model_fields))
        return f"{where}={shown} is not possible: {where} is a section of fields; write {where}.{field}=..."
    limits = {name: _number(value) for name, value in item.get("ctx", {}).items()}
    wanted = _WORDS.get(kind, "see its type in docs/configuration.md").format(**limits)
    return f"{where}={shown} is not possible: {wanted}"


def _section(location: tuple[int | str, ...], root: type[BaseModel]) -> type[BaseModel]:
    """Return the deepest section on the way to a field."""
    for part in location:
        field = root.model_fields.get(str(part))
        annotation = None if field is None else field.annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        root = annotation
    return root


def places_of(field: str, root: type[BaseModel]) -> list[str]:
    """Return where in the sections of `root` a field of this name stands, as section.field."""
    return [f"{name}.{field}" for name in root.model_fields if field in _section((name,), root).model_fields]


def _suggest(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    if len(location) == 1 and (places := places_of(str(location[0]), root)):
        return f"; did you mean {' or '.join(places)}?"
    known = list(_section(location[:-1], root).model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    prefix = "".join(f"{part}." for part in location[:-1])
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known here: {', '.join(known)}"


def _number(value: object) -> str:
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else f"{value}"
    )


def _shown(value: object) -> str:
    """Spell a value as YAML does, cut short.

    >>> _shown(None), _shown("a b"), _shown(0.5), _shown([True])
    ('null', "'a b'", '0.5', '[true]')
    """
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    said = repr(value) if plain else json.dumps(value, default=str, skipkeys=True)
    return said if len(said) <= MOST_SHOWN else f"{said[:MOST_SHOWN]}..."
