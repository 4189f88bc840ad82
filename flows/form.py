"""Form: the fields that a Prefect page offers for a deployment: in words, with units, the usual ones first.

Prefect draws a form from a JSON schema: an object becomes a card of its fields, and alternatives become a
row of buttons of which one is open. So what is usually left alone hides behind a button, and the values
are checked by a part of the schema that is not drawn, whose errors name the field all the same.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from prefect.utilities.callables import parameter_schema

from antiphon.core.config import RunConfig, build_config
from antiphon.lineage.documents.manifest import source_tree

USUAL: Mapping[str, tuple[str, ...]] = {
    "run": ("steps", "seed", "name"),
    "loop": ("max_staleness", "prompts_per_step", "group_size"),
    "learner": ("learning_rate",),
    "model": ("path",),
    "environment": ("name", "parameters"),
}
"""Section -> fields that the form shows at once; all others are behind a button."""
TITLES = {
    "config": "Configuration",
    "more": "Further fields",
    "run_id": "Run to continue",
    "max_staleness": "Staleness bound S, versions",
    "prompts_per_step": "Prompts of one step",
    "group_size": "Group size, trajectories",
    "publish_interval": "Publish interval, steps",
    "interval": "Interval, versions",
    "train_size": "Training prompts",
    "heldout_size": "Held-out prompts",
    "patch_ladder": "Patch ladder, versions back",
    "compress_full": "Compressed full snapshots",
    "dtype": "Precision",
}
"""Fields whose names leave out the unit, or are no words."""
_UNITS = (
    ("_usd_per_hour", "US dollars per hour"),
    ("_bytes_per_s", "bytes per second"),
    ("_bytes", "bytes"),
    ("_mib", "MiB"),
    ("_kib", "KiB"),
    ("_tokens", "tokens"),
    ("_steps", "steps"),
    ("_s", "seconds"),
)
_WORDS = {
    "kv": "KV",
    "mlflow": "MLflow",
    "dvc": "DVC",
    "url": "URL",
    "zero": "ZeRO",
    "id": "id",
    "micro": "micro-",
}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "minLength", "maxLength"}
_CLOSED: dict[str, Any] = {"title": "as they are", "type": "object", "properties": {}}
"""The button behind which nothing is drawn; any object fits it."""
_TEXT: dict[str, Any] = {"title": "JSON", "type": "object"}
"""The button behind which the whole value is typed as a text; any object fits it."""


def label(name: str) -> str:
    """Return a field's name in words, with its unit.

    >>> [label(name) for name in ("kv_cache_mib", "stall_timeout_s", "uplink_bytes_per_s", "max_staleness")]
    ['KV cache, MiB', 'Stall timeout, seconds', 'Uplink, bytes per second', 'Staleness bound S, versions']
    """
    if name in TITLES:
        return TITLES[name]
    stem, unit = next(
        ((name.removesuffix(end), unit) for end, unit in _UNITS if name.endswith(end)), (name, "")
    )
    words = [_WORDS.get(word, word) for word in stem.split("_")]
    said = " ".join(words).replace("- ", "-")
    return f"{said[:1].upper()}{said[1:]}" + (f", {unit}" if unit else "")


def form_schema(flow: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a flow's form; a run's starts from the quickstart, others from `parameters`."""
    schema: dict[str, Any] = parameter_schema(flow).model_dump(exclude_unset=True)
    definitions, checked = schema.get("definitions", {}), dict[str, Any]()
    for name, drawn in schema["properties"].items():
        drawn["title"] = label(name)
        said = drawn.get("description", "")
        drawn["description"] = f"{said[:1].upper()}{said[1:]}"
        reference = "#/definitions/RunConfig" if name == "more" else drawn.pop("$ref", "")
        kind = definitions.get(reference.rpartition("/")[2])
        if kind is None:
            continue
        checked[name] = _whole(kind, definitions)
        drawn.pop("default", None)
        start = shipped_tree() if kind["title"] == "RunConfig" else parameters[name]
        drawn["anyOf"] = _buttons(name, kind, definitions, start)
    for position, name in enumerate(dict.fromkeys([*checked, *schema["properties"]])):
        schema["properties"][name]["position"] = position
    schema.pop("definitions", None)
    if checked:
        # Drawn is what stands under `properties`; this is only checked. Of that the page keeps no bounds, of
        # this it does, so that it shows at the field what is out of bounds.
        schema["allOf"] = [{"properties": checked}]
    return schema


def filled(given: Any) -> Any:
    """Return the fields of a form, or of a command, over the quickstart's; a whole configuration as it is."""
    return _over(shipped_tree(), given) if isinstance(given, Mapping) else given


def with_fields(config: RunConfig, more: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with further fields, section -> field -> value.

    Raises:
        ConfigError: with one sentence per wrong field.
    """
    return build_config(_over(config.model_dump(mode="json"), more)) if more else config


def shipped_tree() -> dict[str, Any]:
    """Return examples/quickstart.yaml as it is; {} where the package was installed without a checkout."""
    path = source_tree() / "examples" / "quickstart.yaml"
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return tree


def _buttons(
    name: str, kind: Mapping[str, Any], definitions: Mapping[str, Any], start: Mapping[str, Any]
) -> list[dict[str, Any]]:
    if kind["title"] != "RunConfig":
        return [_card("Form", kind, kind["properties"], start), _TEXT]
    sections = {
        key: definitions[field["$ref"].rpartition("/")[2]] for key, field in kind["properties"].items()
    }
    if name == "config":
        cards = {
            key: _card(label(key), sections[key], fields, start.get(key, {}))
            | {"description": sections[key]["description"], "position": position}
            for position, (key, fields) in enumerate(USUAL.items())
        }
        return [_object("Form", cards), _TEXT]
    others = {
        key: [field for field in s["properties"] if field not in USUAL.get(key, ())]
        for key, s in sections.items()
    }
    folded = {
        key: {
            "title": label(key),
            "description": sections[key]["description"],
            "position": position,
            "anyOf": [_CLOSED, _card("change", sections[key], fields, start.get(key, {}))],
        }
        for position, (key, fields) in enumerate(others.items())
        if fields
    }
    return [_CLOSED, _object("change", folded)]


def _card(
    title: str, kind: Mapping[str, Any], fields: Iterable[str], start: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a card of some fields of a kind, with `start` (field -> value) in place of its defaults."""
    drawn = {}
    for position, name in enumerate(fields):
        field = {**_unbound(kind["properties"][name]), "title": label(name), "position": position}
        for choice in field.get("anyOf", ()):
            choice["title"] = "none" if choice.get("type") == "null" else "a value"
        drawn[name] = field | ({"default": start[name]} if name in start else {})
    return _object(title, drawn)


def _whole(kind: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kind with the sections that it refers to in its place."""
    found = {
        name: str(field.get("$ref", "")).rpartition("/")[2] for name, field in kind["properties"].items()
    }
    return {**kind, "properties": {n: definitions.get(found[n], f) for n, f in kind["properties"].items()}}


def _object(title: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    # Prefect calls every other field "(Optional)"; a value without one fits the other button.
    return {"title": title, "type": "object", "properties": dict(fields), "required": list(fields)}


def _unbound(field: Any) -> Any:
    """Return a field without its bounds, which are checked elsewhere: here they would close its button."""
    if isinstance(field, list):
        return [_unbound(one) for one in field]
    if not isinstance(field, Mapping):
        return field
    return {key: _unbound(value) for key, value in field.items() if key not in _BOUNDS}


def _over(tree: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with sections of fields laid over it; a section that is no mapping is refused later."""
    found = dict(tree)
    for section, given in fields.items():
        known = found.get(section)
        both = isinstance(known, Mapping) and isinstance(given, Mapping)
        found[section] = {**known, **given} if both else given  # type: ignore[dict-item]
    return found
