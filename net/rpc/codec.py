"""Wire codec: a record and the message with the same field names, translated by one table.

What a field is stands in the message: a repeated field is a tuple of the record, a map a dict in the
order of its keys, a message a record. `codec` makes both directions of a kind of record and remembers
them, so that messages that hold this kind find them. Records whose messages look different are
translated by hand and remembered with `by_hand`.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_type_hints

Message = Any
Pair = tuple[Callable[[Any], Message], Callable[[Message], Any]]
"""To a message, and from it."""

_R = TypeVar("_R")
_M = TypeVar("_M")
_KNOWN: dict[str, Pair] = {}
"""Full name of a message -> how its record is written and read."""


class Fields:
    """How the fields of one kind of message are written and read."""

    def __init__(
        self,
        message: type[Message],
        names: Sequence[str],
        optional: Collection[str],
        given: Mapping[str, Pair],
    ) -> None:
        """Look at the message once, so that nothing is looked up for a value; every field must be named.

        Args:
            message: its class.
            names: its fields, in the order in which values are wanted.
            optional: fields that are None where the message does not have them.
            given: how the values of some fields are translated, each of them where there are several.
        """
        assert set(names) == set(message.DESCRIPTOR.fields_by_name), f"{message.__name__} has other fields"
        self._names = tuple(names)
        self._message = message
        self._get: Callable[[Any], Sequence[Any]] = (
            attrgetter(*names) if len(names) > 1 else lambda x: [getattr(x, name) for name in names]
        )
        self._write: list[tuple[str, Callable[[Any], Any]]] = []
        self._read: list[tuple[int, Callable[[Any], Any]]] = []
        self._optional: list[tuple[int, str]] = []
        for index, name in enumerate(names):
            field = message.DESCRIPTOR.fields_by_name[name]
            write, read = _translation(field, given.get(name))
            if name in optional:
                self._optional.append((index, name))
                write = None if write is None else _unless_none(write)
                read = None if read is None else _unless_none(read)
            if write is not None:
                self._write.append((name, write))
            if read is not None:
                self._read.append((index, read))

    def write(self, source: Any) -> Message:
        """Return the message of what has attributes of these names."""
        return self.write_values(self._get(source))

    def write_values(self, values: Sequence[Any]) -> Message:
        """Return the message of values in the order of the names."""
        found = dict(zip(self._names, values))  # noqa: B905 - the check costs as much as the pairs
        for name, write in self._write:
            found[name] = write(found[name])
        return self._message(**found)

    def read(self, m: Message) -> list[Any]:
        """Return the values of a message in the order of the names."""
        values = list(self._get(m))
        for index, name in self._optional:
            if not m.HasField(name):
                values[index] = None
        for index, read in self._read:
            values[index] = read(values[index])
        return values


def codec(
    record: type[_R],
    message: type[_M],
    check: Callable[[Message], None] | None = None,
    **given: Pair,
) -> tuple[Callable[[_R], _M], Callable[[_M], _R]]:
    """Return how a record becomes its message and back; reading what was written gives an equal record.

    Args:
        record: a dataclass; its fields have the names of the message's.
        message: the message's class.
        check: raises ContractError for a message that is invalid.
        given: how the values of some fields are translated; by default, messages as their own codec
            does, and everything else stands as it is.
    """
    hints = get_type_hints(record)
    names = [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
    optional = {name for name in names if type(None) in get_args(hints[name])}
    fields = Fields(message, names, optional, given)

    def from_proto(m: _M) -> _R:
        if check is not None:
            check(m)
        return record(*fields.read(m))

    by_hand(message, fields.write, from_proto)
    return fields.write, from_proto


def by_hand(
    message: type[Message], to_proto: Callable[[Any], Message], from_proto: Callable[[Any], Any]
) -> None:
    """Remember how a kind of record is written and read where no table says it."""
    _KNOWN[message.DESCRIPTOR.full_name] = to_proto, from_proto


def known(message: type[Message]) -> Pair | None:
    """Return how the record of a message is written and read; None for one that stands for no record."""
    return _KNOWN.get(message.DESCRIPTOR.full_name)


def _translation(
    field: Any, given: Pair | None
) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """Return how a field's value is written and read; None where it stands as it is."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return None, _sorted
    if given is None and kind is not None:
        given = _KNOWN[kind.full_name]
    if not field.is_repeated:
        return given or (None, None)
    return (None, tuple) if given is None else (_each(given[0]), _each(given[1]))


def _sorted(found: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(found.items()))


def _each(translate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: tuple([translate(value) for value in values]) if values else ()


def _unless_none(translate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else translate(value)
