"""Configuration differences: which keys of several configurations are not equal, under dotted names."""

from collections.abc import Sequence
from typing import Any

from antiphon.core.config import RunConfig


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return `section.field` -> plain value, mappings such as environment.parameters key by key.

    >>> flatten(RunConfig())["loop.max_staleness"]
    2
    """
    flat: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        else:
            flat[name] = value

    add("", config.model_dump(mode="json"))
    return flat


def differing(configs: Sequence[RunConfig]) -> dict[str, list[Any]]:
    """Return the keys in which configurations differ, each with one value a configuration, in order.

    A key that one of them lacks, such as a parameter of its environment, is None there.

    >>> from antiphon.core.config import build_config
    >>> differing([RunConfig(), build_config({"loop": {"max_staleness": 4}})])
    {'loop.max_staleness': [2, 4]}
    """
    flat = [flatten(config) for config in configs]
    names = dict.fromkeys(name for values in flat for name in values)
    found = {name: [values.get(name) for values in flat] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def set_by_hand(config: RunConfig) -> dict[str, Any]:
    """Return the keys that have other values than the defaults.

    >>> set_by_hand(RunConfig())
    {}
    """
    return {name: values[1] for name, values in differing([RunConfig(), config]).items()}
