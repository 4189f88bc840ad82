"""Codec: records as protobuf messages and back, by two functions compiled once for each kind of record.

A record and its message have the same field names. What a field is stands in the message and in the record's
types: a repeated field is a tuple, a map a dict in the order of its keys, a message the record that its own
codec makes, bytes may be an array of little-endian numbers, a text may be a member of an enum, and what may
be None is None where the message does not have it. The compiled functions are what one would write by hand,
so nothing is looked up for a value. Records whose messages look different are translated by hand and
remembered with `by_hand`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from antiphon.core.errors import ContractError

Message = Any
Pair = tuple[Callable[..., Message], Callable[[Message], Any]]
"""To a message, and from it."""

_R = TypeVar("_R")
_M = TypeVar("_M")
_KNOWN: dict[str, Pair] = {}
"""Full name of a message -> how its record is written and read."""


def codec(
    record: type[_R],
    message: type[_M],
    check: Callable[[Message], None] | None = None,
    **given: Pair | None,
) -> tuple[Callable[[_R], _M], Callable[..., _R]]:
    """Return how a record becomes its message and back; reading what was written gives an equal record.

    Args:
        record: a dataclass; its fields have the names of the message's.
        message: the message's class.
        check: raises ContractError for a message that is invalid.
        given: how the values of some fields are translated, each of them where there are several; None for
            a field that the message lacks: an argument of the reader, by default None.
    """
    hints, names = get_type_hints(record), [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
    types = {name: hints[name] for name in names if given.get(name, ()) is not None}
    scope, write, read = _expressions(message, types, {k: pair for k, pair in given.items() if pair})
    scope["Record"], scope["check"] = record, check
    written = ", ".join(f"{name}={expression.format(f'x.{name}')}" for name, expression in write.items())
    made = f"Record({', '.join(f'{name}={read.get(name, name)}' for name in names)})"
    arguments = ", ".join(["m", *(f"{name}=None" for name in names if name not in types)])
    pair = (
        _compiled(f"lambda x: Message({written})", scope),
        _compiled(f"lambda {arguments}: {made if check is None else f'(check(m), {made})[1]'}", scope),
    )
    by_hand(message, *pair)
    return pair


def by_hand(
    message: type[Message], to_proto: Callable[[Any], Message], from_proto: Callable[[Any], Any]
) -> None:
    """Remember how a kind of record is written and read where no table says it."""
    _KNOWN[message.DESCRIPTOR.full_name] = to_proto, from_proto


def known(message: type[Message]) -> Pair | None:
    """Return how the record of a message is written and read; None for one that stands for no record."""
    return _KNOWN.get(message.DESCRIPTOR.full_name)


def values_codec(message: type[Message], types: Mapping[str, Any]) -> Pair:
    """Return how some values, by name and type, become a message, and how it becomes a tuple of them.

    A message that has a record stands for one value, that record.
    """
    if (record := known(message)) is not None:
        return record[0], _compiled("lambda m: (read(m),)", {"read": record[1]})
    scope, write, read = _expressions(message, types, {})
    written = ", ".join(f"{name}={expression.format(name)}" for name, expression in write.items())
    return (
        _compiled(f"lambda {', '.join(types) or '*_'}: Message({written})", scope),
        _compiled(f"lambda m: ({''.join(f'{expression}, ' for expression in read.values())})", scope),
    )


def array_from_bytes(payload: bytes, dtype: np.dtype[Any]) -> Any:
    """Return the array [T] of little-endian bytes.

    Raises:
        ContractError: when the length is no multiple of an item's.
    """
    if len(payload) % dtype.itemsize:
        raise ContractError(
            f"{len(payload)} bytes are no {dtype.name} array; expected a multiple of {dtype.itemsize}"
        )
    return np.frombuffer(payload, dtype).astype(dtype.type)


def reader_of(kind: type[StrEnum], name: str) -> Callable[[str], Any]:
    """Return what makes a member of an enum of the text in the field `name` of a message.

    It raises ContractError for one that only another version knows.
    """
    members = {member.value: member for member in kind}

    def read(text: str) -> Any:
        if (member := members.get(text)) is None:
            raise ContractError(
                f"{name}={text[:40]!r} is unknown here; expected {' or '.join(kind)}, so use the same "
                "version of Antiphon on both sides"
            )
        return member

    return read


def _compiled(source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    return eval(compile(source, f"<{scope.get('Message', source)}>", "eval"), scope)  # type: ignore[no-any-return]


def _expressions(
    message: type[Message], types: Mapping[str, Any], given: Mapping[str, Pair]
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return the names that expressions use; by field, what writes a value `{0}` and what reads it of m."""
    fields = message.DESCRIPTOR.fields_by_name
    assert set(types) == set(fields), f"{message.__name__} has other fields"
    scope: dict[str, Any] = {"Message": message}
    writing, reading = {}, {}
    for name, hint in types.items():
        field, write, read = fields[name], "{0}", f"m.{name}"
        optional = type(None) in get_args(hint)
        pair = given.get(name) or _pair(field, hint)
        if pair is not None:
            scope[f"write_{name}"], scope[f"read_{name}"] = pair
        if _is_map(field):
            read = f"dict(sorted({read}.items()))"
        elif field.is_repeated:
            write = "{0}" if pair is None else f"[write_{name}(value) for value in {{0}}]"
            read = f"tuple({read})" if pair is None else f"tuple([read_{name}(value) for value in {read}])"
        elif pair is not None:
            write = f"write_{name}({{0}})"
            read = f"read_{name}({read})"
        if optional:
            write = "{0}" if write == "{0}" else f"None if {{0}} is None else {write}"
            read = f"{read} if m.HasField('{name}') else None"
        writing[name], reading[name] = write, read
    return scope, writing, reading


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _pair(field: Any, hint: Any) -> Pair | None:
    """Return how one value of a field is translated; None where it stands as it is."""
    if field.message_type is not None:
        return None if _is_map(field) else _KNOWN[field.message_type.full_name]
    while get_origin(hint) in (Union, UnionType, tuple, Sequence):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is np.ndarray:
        dtype = np.dtype(get_args(get_args(hint)[1])[0]).newbyteorder("<")
        write = _compiled("lambda x: asarray(x, dtype).tobytes()", {"asarray": np.asarray, "dtype": dtype})
        return write, partial(array_from_bytes, dtype=dtype)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return str, reader_of(hint, field.name)
    return None
