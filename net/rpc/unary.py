"""Unary calls: one rule maps the methods of a contract to the calls of a .proto file, both ways.

The call `OpenStep` is the method `open_step`. A request that is a record's message is the method's
only argument; otherwise its fields are the arguments, by name. A reply that is a record's message is
the result, one with a single field holds the result, and an empty one stands for None.
"""

import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.protobuf.message_factory import GetMessageClass

from antiphon.net.rpc import codec
from antiphon.net.rpc.serving import answers_errors, call, open_channel
from antiphon.net.security.credentials import Credentials

Message = Any
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Form:
    """A message as values: the arguments of a method in their order, or its result."""

    def __init__(self, descriptor: Any, names: Iterable[str]) -> None:
        message = GetMessageClass(descriptor)
        self.write: Callable[[Sequence[Any]], Message]
        self.read: Callable[[Message], Sequence[Any]]
        if (record := codec.known(message)) is not None:
            to_proto, from_proto = record
            self.write, self.read = lambda values: to_proto(*values), lambda m: [from_proto(m)]
        else:
            optional = {field.name for field in descriptor.fields if field.has_presence}
            fields = codec.Fields(message, tuple(names), optional, {})
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
