"""State codec: a run's state as JSON and back, by the types of its fields.

A snapshot has one text for what changes and an entry for each part of a long run that never changes
again, so that a later one adds entries and repeats none. A new field needs nothing here. A group stands in
`RunState.groups` once; those that wait for a worker are named by their ids.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.core.loop.run_state import RunState

MEANING = 3
"""Raise it when an event changes the state in another way than before, though no field changed."""
_NOT_STORED = ("group_size", "payload_retention_steps", "_places", "open_groups")
"""Fields that come from the configuration of the process that reads, or are made of others."""


def _complete(state: RunState) -> int:
    whole = takewhile(lambda found: found.finished, state.evaluations.values())
    return sum(1 for _ in whole)


GROWING: dict[str, Callable[[RunState], int]] = {
    "sealed": lambda state: len(state.commits),  # until then a batch may be voided
    "commits": lambda state: len(state.commits),
    "snapshots": lambda state: len(state.snapshots),
    "evaluations": _complete,
}
"""Fields that grow with the run -> how many of their first entries will never change again."""


@dataclass(frozen=True, slots=True)
class StateDump:
    """A state at one event."""

    body: str
    """JSON of all that may change, and how many entries the growing fields had; empty: entries alone."""
    entries: tuple[tuple[str, int, str], ...]
    """(field, place, JSON) of the entries that became final since the dump before."""

    @property
    def digest(self) -> str:
        return digest_bytes(self.body.encode())


def dump_entries(state: RunState, known: Mapping[str, int]) -> StateDump:
    """Return what became final; `known` says how many entries of each growing field were returned before."""
    return StateDump("", tuple(_entries(state, known, _final(state))))


def dump_state(state: RunState, known: Mapping[str, int]) -> StateDump:
    """Return a state as text, and what became final, as `dump_entries` does."""
    final = _final(state)
    fields = {name: _part(getattr(state, name), final.get(name, 0)) for name in _STORED}
    whole = {"final": final, "open_groups": list(state.open_groups), "fields": fields}
    return StateDump(_WHOLE.dump_json(whole).decode(), tuple(_entries(state, known, final)))


def load_state(body: str, entries: Callable[[str, int], Iterable[str]], state: RunState) -> dict[str, int]:
    """Make `state` what it was when it was dumped; return how many entries each growing field had.

    Args:
        body: as `dump_state` returned it, from a state of the same `FORM`.
        entries: returns the first entries of a growing field, given its name and how many are wanted.
        state: changed in place, all or nothing; what the configuration decides stays.

    Raises:
        IntegrityError: when it cannot be read.
    """
    try:
        whole = _WHOLE.validate_json(body)
        fields, final = whole["fields"], {name: whole["final"][name] for name in GROWING}
        for name, count in final.items():
            rows = [_ENTRY[name].validate_json(row)["entry"] for row in entries(name, count)]
            if len(rows) != count:
                raise IntegrityError(f"{len(rows)} entries of {name} are there, not {count}")
            grown = fields[name]
            fields[name] = [*rows, *grown] if isinstance(grown, list) else {**dict(rows), **grown}
        waiting = {group_id: fields["groups"][group_id] for group_id in whole["open_groups"]}
    except (KeyError, ValidationError) as error:
        raise IntegrityError(f"the snapshot of the state cannot be read: {error!r}") from error
    for name, value in fields.items():
        setattr(state, name, value)
    state.open_groups = waiting
    return final


def _final(state: RunState) -> dict[str, int]:
    return {name: count(state) for name, count in GROWING.items()}


def _part(value: Any, start: int, stop: int | None = None) -> Any:
    """Return the part of a list or mapping between two places."""
    if not start and stop is None:
        return value
    return value[start:stop] if isinstance(value, list) else dict(islice(value.items(), start, stop))


def _entries(
    state: RunState, known: Mapping[str, int], final: Mapping[str, int]
) -> Iterator[tuple[str, int, str]]:
    for name, stop in final.items():
        start = min(known.get(name, 0), stop)
        added = _part(getattr(state, name), start, stop)
        for place, one in enumerate(added if isinstance(added, list) else added.items(), start):
            yield name, place, _ENTRY[name].dump_json({"entry": one}).decode()


def _stored(fields: dict[str, Any]) -> Any:
    """Return the type of a record of these fields, whose floats may be anything that a float can be."""
    kind: Any = TypedDict("_Stored", fields)  # type: ignore[misc]
    return with_config(ConfigDict(ser_json_inf_nan="constants"))(kind)


_HINTS = get_type_hints(RunState)
_STORED = [field.name for field in dataclasses.fields(RunState) if field.name not in _NOT_STORED]
_FIELDS = _stored({name: _HINTS[name] for name in _STORED})
_WHOLE: TypeAdapter[Any] = TypeAdapter(
    _stored({"final": dict[str, int], "open_groups": list[str], "fields": _FIELDS})
)


def _entry(kind: Any) -> Any:
    """Return the type of one entry of a list, or of a mapping: a pair."""
    return get_args(kind)[0] if get_origin(kind) is list else tuple[get_args(kind)]  # type: ignore[misc]


_ENTRY: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(_stored({"entry": _entry(_HINTS[name])})) for name in GROWING
}
FORM = digest_bytes(json.dumps([MEANING, _WHOLE.json_schema(mode="serialization")]).encode())[:16]
"""Names what a dump looks like; only one of the same form can be read."""
