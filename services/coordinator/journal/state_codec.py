"""State codec: a run's state as JSON and back, by the types of its fields.

A snapshot has one text for what changes and an entry for each part of a long run that never changes
again, so that a later one adds entries and repeats none. A new field needs nothing here; one of a type
that is not known is refused when this module is loaded. A group stands in `RunState.groups`
once; wherever else the state has it, its id stands in its place.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, takewhile
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.run_state import RunState

MEANING = 2
"""Raise it when an event changes the state in another way than before, though no field changed."""
_NOT_STORED = ("group_size", "payload_retention_steps", "_places")
"""Fields that come from the configuration of the process that reads, or are counted from others."""
_PLAIN = (str, int, float, bool)

_Groups = dict[str, GroupState]


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


@dataclass(frozen=True, slots=True)
class _Codec:
    """How values of one type are written and read; None where JSON has them as they are."""

    form: str
    dump: Callable[[Any], Any] | None = None
    load: Callable[[Any, _Groups], Any] | None = None


def dump_entries(state: RunState, known: Mapping[str, int]) -> StateDump:
    """Return what became final; `known` says how many entries of each growing field were returned before."""
    return StateDump("", tuple(_entries(state, known, _final(state))))


def dump_state(state: RunState, known: Mapping[str, int]) -> StateDump:
    """Return a state as text, and what became final, as `dump_entries` does."""
    final = _final(state)
    values = {
        name: _written(codec, _rest(getattr(state, name), final.get(name, 0)))
        for name, codec in _FIELDS.items()
    }
    body = json.dumps({"final": final, "fields": values})
    return StateDump(body, tuple(_entries(state, known, final)))


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
        content = json.loads(body)
        final = {name: int(content["final"][name]) for name in GROWING}
        groups: _Groups = {}
        found = {"groups": _read(_FIELDS["groups"], content["fields"]["groups"], groups)}
        groups.update(found["groups"])
        for name, codec in _FIELDS.items():
            if name in GROWING:
                rows = [json.loads(row) for row in entries(name, final[name])]
                if len(rows) != final[name]:
                    raise IntegrityError(f"{len(rows)} entries of {name} are there, not {final[name]}")
                found[name] = _read(codec, [*rows, *content["fields"][name]], groups)
            elif name != "groups":
                found[name] = _read(codec, content["fields"][name], groups)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"the snapshot of the state cannot be read: {error!r}") from error
    for name, value in found.items():
        setattr(state, name, value)
    return final


def _final(state: RunState) -> dict[str, int]:
    return {name: count(state) for name, count in GROWING.items()}


def _rest(value: Any, start: int, stop: int | None = None) -> Any:
    """Return the part of a list or mapping between two places."""
    if not start and stop is None:
        return value
    if isinstance(value, list):
        return value[start:stop]
    return dict(islice(value.items(), start, stop))


def _entries(
    state: RunState, known: Mapping[str, int], final: Mapping[str, int]
) -> Iterator[tuple[str, int, str]]:
    for name, stop in final.items():
        start = min(known.get(name, 0), stop)
        added = _written(_FIELDS[name], _rest(getattr(state, name), start, stop))
        yield from ((name, place, json.dumps(entry)) for place, entry in enumerate(added, start))


def _written(codec: _Codec, value: Any) -> Any:
    return value if codec.dump is None else codec.dump(value)


def _read(codec: _Codec, value: Any, groups: _Groups) -> Any:
    return value if codec.load is None else codec.load(value, groups)


def _codec(kind: Any, place: str) -> _Codec:
    """Return how values of a type are written; `place` names the field in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _Codec(kind.__name__)
    if origin in (Union, UnionType):
        return _optional([part for part in arguments if part is not NoneType], place)
    if origin is list:
        return _sequence(_codec(arguments[0], place), list)
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _sequence(_codec(arguments[0], place), tuple)
    if origin is tuple:
        return _fixed([_codec(part, place) for part in arguments])
    if origin is set:
        return _sequence(_codec(arguments[0], place), set)
    if origin is dict:
        return _mapping(_codec(arguments[0], place), _codec(arguments[1], place), arguments[0] is str)
    if kind is GroupState:
        return _Codec("group", lambda group: group.group_id, lambda group_id, groups: groups[group_id])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Codec(f"{kind.__name__}", lambda member: member.value, lambda value, _: kind(value))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"{place} has type {kind}, which the state codec cannot write; teach it there")


def _optional(parts: Sequence[Any], place: str) -> _Codec:
    if len(parts) != 1:
        raise TypeError(f"{place} may have values of several types; a snapshot could not tell them apart")
    inner = _codec(parts[0], place)
    dump, load = inner.dump, inner.load
    return _Codec(
        f"{inner.form}?",
        dump and (lambda value: None if value is None else dump(value)),
        load and (lambda value, groups: None if value is None else load(value, groups)),
    )


def _sequence(item: _Codec, make: type) -> _Codec:
    dump, load, form = item.dump, item.load, f"{make.__name__}[{item.form}]"
    write = (lambda values: [dump(value) for value in values]) if dump else None
    if make is set and write is None:
        write = list
    if load is not None:
        return _Codec(form, write, lambda values, groups: make(load(value, groups) for value in values))
    return _Codec(form, write, None if make is list else lambda values, _: make(values))


def _fixed(items: Sequence[_Codec]) -> _Codec:
    return _Codec(
        f"({','.join(item.form for item in items)})",
        lambda values: [_written(item, value) for item, value in zip(items, values, strict=True)],
        lambda values, groups: tuple(_read(i, v, groups) for i, v in zip(items, values, strict=True)),
    )


def _mapping(key: _Codec, value: _Codec, named: bool) -> _Codec:
    """Write a mapping by name as an object, any other as a list of pairs; both keep their order."""
    form, dump, load = f"{{{key.form}:{value.form}}}", value.dump, value.load
    if not named:
        return _Codec(
            form,
            lambda found: [(_written(key, k), _written(value, v)) for k, v in found.items()],
            lambda pairs, groups: {_read(key, k, groups): _read(value, v, groups) for k, v in pairs},
        )
    return _Codec(
        form,
        dump and (lambda found: {k: dump(v) for k, v in found.items()}),
        load and (lambda found, groups: {k: load(v, groups) for k, v in found.items()}),
    )


def _record(kind: type) -> _Codec:
    """Write a dataclass as the list of its fields' values."""
    hints = get_type_hints(kind)
    fields = [(f.name, _codec(hints[f.name], f"{kind.__name__}.{f.name}")) for f in dataclasses.fields(kind)]
    codecs = [codec for _, codec in fields]

    def dump(found: Any) -> list[Any]:
        return [
            getattr(found, name) if codec.dump is None else codec.dump(getattr(found, name))
            for name, codec in fields
        ]

    def load(values: Any, groups: _Groups) -> Any:
        return kind(
            *[
                value if codec.load is None else codec.load(value, groups)
                for codec, value in zip(codecs, values, strict=True)
            ]
        )

    return _Codec(f"{kind.__name__}({','.join(f'{name}:{c.form}' for name, c in fields)})", dump, load)


def _fields_of_state() -> dict[str, _Codec]:
    hints = get_type_hints(RunState)
    found: dict[str, _Codec] = {}
    for name in (f.name for f in dataclasses.fields(RunState)):
        if name == "groups":
            found[name] = _mapping(_Codec("str"), _record(GroupState), named=True)
        elif name not in _NOT_STORED:
            found[name] = _codec(hints[name], f"RunState.{name}")
    return found


_FIELDS = _fields_of_state()
FORM = digest_bytes(json.dumps([MEANING, {n: c.form for n, c in _FIELDS.items()}]).encode())[:16]
"""Names what a dump looks like; only one of the same form can be read."""
