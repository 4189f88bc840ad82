"""Form: the fields that a Prefect page offers for a deployment: in words, with units, the usual ones first.

Prefect draws a form from the types of a flow's parameters: an object becomes a card of its fields, and
alternatives become a row of buttons of which one is open. So the fields that are usually changed are one
type, made from the configuration's own, and all others are another one that stands behind a button.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from functools import cache
from typing import Any, get_type_hints

import yaml
from prefect.utilities.callables import parameter_schema
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic.config import JsonDict

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


def form_of(flow: Any) -> dict[str, Any]:
    """Return the JSON schema that the server draws a flow's form from, with parameters named in words.

    What is drawn has no bounds, since a value out of them would close the button that it stands behind. The
    schema of the whole configuration has them and is only checked: so the page shows at the field what is out
    of bounds.
    """
    schema: dict[str, Any] = parameter_schema(flow).model_dump(exclude_unset=True)
    for name, drawn in schema["properties"].items():
        said = drawn.get("description", "")
        drawn["title"], drawn["description"] = label(name), f"{said[:1].upper()}{said[1:]}"
    hints = get_type_hints(flow.fn) | ({"more": RunConfig} if "more" in schema["properties"] else {})
    kinds = {name: kind for name, kind in hints.items() if isinstance(kind, type(BaseModel))}
    checked = {
        name: kind.model_json_schema() | {"$id": f"antiphon:{name}", "type": ["object", "null"]}
        for name, kind in kinds.items()
    }
    return schema | ({"allOf": [{"properties": checked}]} if checked else {})


def filled(given: Any) -> Any:
    """Return the fields of a form, or of a command, over the quickstart's; a whole configuration as it is."""
    return _over(shipped_tree(), given) if isinstance(given, Mapping) else given


def with_fields(config: RunConfig, more: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with further fields, section -> field -> value.

    Raises:
        ConfigError: with one sentence per wrong field.
    """
    return build_config(_over(config.model_dump(mode="json"), more)) if more else config


@cache
def shipped_tree() -> dict[str, Any]:
    """Return examples/quickstart.yaml as it is."""
    path = source_tree() / "examples" / "quickstart.yaml"
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tree


def _cards(form: str, fields: Mapping[str, Iterable[str]]) -> type[BaseModel]:
    """Return a type with a card for each section of `fields`, section -> its fields.

    The quickstart's values take the place of the configuration's defaults.
    """
    tree, cards = shipped_tree(), dict[str, Any]()
    for position, (section, names) in enumerate(fields.items()):
        kind: Any = RunConfig.model_fields[section].annotation
        made: dict[str, Any] = {}
        for place, name in enumerate(names):
            field = copy(kind.model_fields[name])
            if name in tree.get(section, {}):
                field.default, field.default_factory = tree[section][name], None
            field.metadata, field.json_schema_extra = [], {"position": place}
            made[name] = (field.annotation, field)
        settings = ConfigDict(title=label(section), field_title_generator=_title)
        card = create_model(f"{form}_{section}", __config__=settings, __doc__=kind.__doc__, **made)
        extra: JsonDict = {"position": position}
        about = Field(default_factory=card, description=card.__doc__, json_schema_extra=extra)
        cards[section] = (card, about)
    return create_model(form, __config__=ConfigDict(title=form, field_title_generator=_title), **cards)


def _title(name: str, _: Any) -> str:
    return label(name)


def _further() -> dict[str, list[str]]:
    """Return the fields that are not usual, section -> fields."""
    found = {
        section: [name for name in info.annotation.model_fields if name not in USUAL.get(section, ())]  # type: ignore[union-attr]
        for section, info in RunConfig.model_fields.items()
    }
    return {section: names for section, names in found.items() if names}


def _over(tree: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with sections of fields laid over it; a section that is no mapping is refused later."""
    found = dict(tree)
    for section, given in fields.items():
        known = found.get(section)
        both = isinstance(known, Mapping) and isinstance(given, Mapping)
        found[section] = {**known, **given} if both else given  # type: ignore[dict-item]
    return found


UsualFields = BeforeValidator(filled, json_schema_input_type=_cards("usual", USUAL))
"""What a flow's parameter of type RunConfig is filled in with on its page."""
FurtherFields = BeforeValidator(
    lambda given: given, json_schema_input_type=_cards("as they are", {}) | _cards("change", _further())
)
"""The same of all other fields, behind a button."""
