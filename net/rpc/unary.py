"""Unary calls: records as messages, and the methods of a contract as the calls of a .proto file, both ways.

A record and the message with the same field names are translated by one table. What a field is stands in the
message: a repeated field is a tuple of the record, a map a dict in the order of its keys, a message a record.
`codec` makes both directions of a kind of record and remembers them, so that messages that hold this kind
find them. Records whose messages look different are translated by hand and remembered with `by_hand`.

The call `OpenStep` is the method `open_step`. A request that is a record's message is the method's
only argument; otherwise its fields are the arguments, by name. A reply that is a record's message is
the result, one with a single field holds the result, and an empty one stands for None.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_type_hints

from google.protobuf.message_factory import GetMessageClass

from antiphon.net.rpc.serving import answers_errors, call, open_channel
from antiphon.net.security.credentials import Credentials

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


_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Form:
    """A message as values: the arguments of a method in their order, or its result."""

    def __init__(self, descriptor: Any, names: Iterable[str]) -> None:
        message = GetMessageClass(descriptor)
        self.write: Callable[[Sequence[Any]], Message]
        self.read: Callable[[Message], Sequence[Any]]
        if (record := known(message)) is not None:
            to_proto, from_proto = record
            self.write, self.read = lambda values: to_proto(*values), lambda m: [from_proto(m)]
        else:
            optional = {field.name for field in descriptor.fields if field.has_presence}
            fields = Fields(message, tuple(names), optional, {})
            self.write, self.read = fields.write_values, fields.read


class UnaryCall:
    """One call: its request as arguments, its reply as a result."""

    def __init__(self, descriptor: Any, method: Callable[..., Any]) -> None:
        """Join a call with the method that it stands for, whose parameters are the request's fields."""
        self.name: str = descriptor.name
        self.signature = inspect.signature(method)
        self._method = method.__name__
        _, *parameters = self.signature.parameters
        self.request = _Form(descriptor.input_type, parameters)
        self.reply = _Form(descriptor.output_type, descriptor.output_type.fields_by_name)

    async def answer(self, contract: Any, request: Message) -> Message:
        """Call the method of a contract with what a request says and return its reply."""
        result = await getattr(contract, self._method)(*self.request.read(request))
        return self.reply.write([result])


def unary_calls(service: Any, contract: type) -> dict[str, UnaryCall]:
    """Return the unary calls of a service by the name of the method.

    Args:
        service: the service's descriptor.
        contract: a class with a method for each of them.
    """
    found = {}
    for descriptor in service.methods:
        if not (descriptor.client_streaming or descriptor.server_streaming):
            method = re.sub(r"(?<!^)([A-Z])", r"_\1", descriptor.name).lower()
            found[method] = UnaryCall(descriptor, getattr(contract, method))
    return found


class Client:
    """The asking side of a service; every call has a deadline."""

    def __init__(
        self, stub: Callable[[Any], Any], address: str, credentials: Credentials | None, channel: Any
    ) -> None:
        """Open a channel to host:port, unless one is given; nothing is sent yet."""
        self._channel = open_channel(address, credentials) if channel is None else channel
        self._stub = stub(self._channel)

    async def close(self) -> None:
        await self._channel.close()


def asks(
    calls: dict[str, UnaryCall],
    like: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]],
    timeout: str = "_timeout_s",
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return the method `like` of a contract as a client's: a call with a deadline.

    The client's attribute `timeout` holds the deadline in seconds; an argument `wait_s` comes on top of
    it. Errors arrive as the classes that the service raised.
    """
    unary = calls[like.__name__]

    @functools.wraps(like)
    async def ask(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        bound = unary.signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *values = bound.arguments.values()
        timeout_s = getattr(self, timeout) + bound.arguments.get("wait_s", 0.0)
        reply = await call(getattr(self._stub, unary.name), unary.request.write(values), timeout_s)
        return next(iter(unary.reply.read(reply)), None)  # type: ignore[return-value]

    return ask  # type: ignore[return-value]


def answer_all(servicer: type, calls: dict[str, UnaryCall], contract: str) -> None:
    """Let a servicer answer the unary calls that it does not answer by itself.

    Args:
        servicer: its class.
        calls: of its service.
        contract: name of the attribute that holds what answers.
    """
    for unary in calls.values():
        if unary.name not in vars(servicer):
            setattr(servicer, unary.name, _answers(unary, contract))


def _answers(unary: UnaryCall, contract: str) -> Callable[..., Any]:
    @answers_errors
    async def answer(self: Any, request: Message, context: Any) -> Message:
        return await unary.answer(getattr(self, contract), request)

    return answer
