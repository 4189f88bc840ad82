"""Calls: the methods of a contract as the calls of a .proto file, both ways.

The call `OpenStep` is the method `open_step`. A request that is a record's message is the method's
only argument; otherwise its fields are the arguments, by name. A reply that is a record's message is
the result, one with a single field holds the result, and an empty one stands for None.
"""

import functools
import inspect
import re
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_type_hints

import grpc
from google.protobuf.message_factory import GetMessageClass

from antiphon.net.rpc.codec import Message, values_codec
from antiphon.net.rpc.serving import open_channel
from antiphon.net.rpc.statuses import error_of
from antiphon.net.security.credentials import Credentials
from antiphon.system import failpoints

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Call:
    """One call: its request as the arguments of a method, its reply as the result."""

    def __init__(
        self, name: str, request: Any, reply: Any, method: Callable[..., Any], failpoint: str = ""
    ) -> None:
        """Join the descriptors of two messages with a method, whose parameters are the request's fields.

        `name` is what a stub or a stream calls it; a test may end the process at `failpoint`, before the
        answer.
        """
        self.name, self.method, self.failpoint = name, method.__name__, failpoint
        self.signature, types = inspect.signature(method), get_type_hints(method)
        result = dict.fromkeys(reply.fields_by_name, types.pop("return"))
        self.write_request, self.read_request = values_codec(GetMessageClass(request), types)
        self.write_reply, self.read_reply = values_codec(GetMessageClass(reply), result)

    async def answer(self, contract: Any, request: Message, context: object = None) -> Message:
        """Call the method of a contract with what a request says and return its reply."""
        result = await getattr(contract, self.method)(*self.read_request(request))
        failpoints.reach(self.failpoint)
        return self.write_reply(result)


def unary_calls(service: Any, contract: type, failpoints: dict[str, str]) -> dict[str, Call]:
    """Return the calls of a service that have one request and one reply, by the name of the method.

    Args:
        service: the service's descriptor.
        contract: a class with a method for each of them.
        failpoints: of some methods.
    """
    found = {}
    for descriptor in service.methods:
        if not (descriptor.client_streaming or descriptor.server_streaming):
            name = re.sub(r"(?<!^)([A-Z])", r"_\1", descriptor.name).lower()
            method = getattr(contract, name)
            messages = descriptor.input_type, descriptor.output_type
            found[name] = Call(descriptor.name, *messages, method, failpoints.get(name, ""))
    return found


def serve_contract(
    server: Any, service: Any, calls: dict[str, Call], contract: Any, **streams: Callable[..., Any]
) -> None:
    """Add a service to a server that was not started yet.

    Args:
        server: the server, or what stands before it.
        service: the service's descriptor.
        calls: its unary calls, which `contract` answers.
        contract: has a method for each of them.
        streams: what answers each other call: takes the request, or their stream, and the call's context.
    """
    answers = {call.name: functools.partial(call.answer, contract) for call in calls.values()} | streams
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    handlers = {
        method.name: kinds[method.client_streaming, method.server_streaming](
            answers[method.name],
            GetMessageClass(method.input_type).FromString,
            GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
    }
    server.add_registered_method_handlers(service.full_name, handlers)


class Client:
    """The asking side of a service; every call has a deadline."""

    _timeout_s = 10.0

    def __init__(
        self, stub: Callable[[Any], Any], address: str, credentials: Credentials | None, channel: Any
    ) -> None:
        """Open a channel to host:port, unless one is given; nothing is sent yet."""
        self._channel = open_channel(address, credentials) if channel is None else channel
        self._stub = stub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()


def asks(
    calls: dict[str, Call], like: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return the method `like` of a contract as a client's: a call with a deadline.

    An argument `wait_s` comes on top of the client's deadline. Errors arrive as the classes that the service
    raised.
    """
    unary = calls[like.__name__]

    @functools.wraps(like)
    async def ask(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        bound = unary.signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *values = bound.arguments.values()
        timeout_s = self._timeout_s + bound.arguments.get("wait_s", 0.0)
        method = getattr(self._stub, unary.name)
        try:
            reply = await method(unary.write_request(*values), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, method, timeout_s) from None
        return next(iter(unary.read_reply(reply)), None)  # type: ignore[return-value]

    return ask  # type: ignore[return-value]
