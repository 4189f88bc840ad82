"""Unary calls: one rule maps the methods of a contract to the calls of a .proto file, both ways.

The call `PullBatch` is the method `pull_batch`. A request that is a record's message is the method's
only argument; otherwise its fields are the arguments, by name. A reply that is a record's message is
the result, one with a single field holds the result, and an empty one stands for None.
"""

import functools
import inspect
import re
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from google.protobuf.message_factory import GetMessageClass

from antiphon.services.rpc.serving import answers_errors, call
from antiphon.services.wire import codec

Message = Any
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Form:
    """A message as arguments of a method, or as its result."""

    def __init__(self, descriptor: Any) -> None:
        self.message = GetMessageClass(descriptor)
        self.record = codec.known(self.message)
        optional = [field.name for field in descriptor.fields if field.has_presence]
        names = [field.name for field in descriptor.fields]
        self.fields = None if self.record else codec.Fields(self.message, names, optional, {})

    def write(self, values: tuple[Any, ...]) -> Message:
        return self.record[0](*values) if self.record else self.fields.write_values(values)  # type: ignore[union-attr]

    def read(self, m: Message) -> list[Any]:
        return [self.record[1](m)] if self.record else self.fields.read(m)  # type: ignore[union-attr]


class UnaryCall:
    """One call: its request as arguments, its reply as a result."""

    def __init__(self, descriptor: Any, like: Callable[..., Any]) -> None:
        """Join a call with the method of the contract that it stands for.

        Args:
            descriptor: of the call, from the .proto file.
            like: the method; its parameters must be the request's fields, in any order.
        """
        self.name: str = descriptor.name
        self.method = like.__name__
        self.signature = inspect.signature(like)
        self.request, self.reply = _Form(descriptor.input_type), _Form(descriptor.output_type)
        _, *parameters = self.signature.parameters
        if self.request.fields is not None:
            assert set(parameters) == set(self.request.fields.names), f"{self.name} and {self.method} differ"

    def to_request(self, arguments: dict[str, Any]) -> Message:
        """Return the request that carries the arguments."""
        fields = self.request.fields
        return self.request.write(
            tuple(arguments[name] for name in (arguments if fields is None else fields.names))
        )

    async def answer(self, contract: Any, request: Message) -> Message:
        """Call the method of a contract with what a request says and return its reply."""
        values, fields = self.request.read(request), self.request.fields
        method = getattr(contract, self.method)
        result = await (
            method(*values) if fields is None else method(**dict(zip(fields.names, values, strict=True)))
        )
        return self.reply.write(
            () if self.reply.fields is not None and not self.reply.fields.names else (result,)
        )

    def result(self, reply: Message) -> Any:
        """Return what a reply says."""
        return next(iter(self.reply.read(reply)), None)


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


class Caller(Protocol):
    """The asking side: a stub, and the deadline of each call in seconds."""

    _stub: Any
    _timeout_s: float


def asks(
    calls: dict[str, UnaryCall], like: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return the method `like` of a contract as a client's: a call with a deadline.

    An argument `wait_s` comes on top of the deadline. Errors arrive as the classes that the service raised.
    """
    unary = calls[like.__name__]

    @functools.wraps(like)
    async def ask(self: Caller, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        bound = unary.signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *given = bound.arguments.items()
        arguments = dict(given)
        timeout_s = self._timeout_s + arguments.get("wait_s", 0.0)
        reply = await call(getattr(self._stub, unary.name), unary.to_request(arguments), timeout_s)
        return unary.result(reply)  # type: ignore[no-any-return]

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
