"""Statuses: an error of our tree crosses the wire as a gRPC status, and arrives as the class that it was."""

from typing import Any

import grpc

from antiphon.core.errors import (
    AntiphonError,
    BlockedError,
    ConfigError,
    ContractError,
    IntegrityError,
    RefusedError,
    UnavailableError,
)
from antiphon.core.trust.access_tokens import Denial, Refusal

_STATUS_OF: dict[type[AntiphonError], grpc.StatusCode] = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    ContractError: grpc.StatusCode.FAILED_PRECONDITION,
    RefusedError: grpc.StatusCode.OUT_OF_RANGE,
    IntegrityError: grpc.StatusCode.DATA_LOSS,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    BlockedError: grpc.StatusCode.ABORTED,
    AntiphonError: grpc.StatusCode.UNKNOWN,
}
_STATUS_OF_DENIAL = {
    Denial.UNKNOWN: grpc.StatusCode.UNAUTHENTICATED,
    Denial.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Denial.BUSY: grpc.StatusCode.UNAVAILABLE,  # what a caller tries again by itself
}
_ERROR_OF: dict[grpc.StatusCode, type[AntiphonError]] = {
    **{status: error for error, status in _STATUS_OF.items()},
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    # No server of ours answers it: grpc.aio reports a write into a stream that has just broken this way.
    grpc.StatusCode.INTERNAL: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ContractError,
    grpc.StatusCode.UNIMPLEMENTED: ContractError,
    grpc.StatusCode.UNAUTHENTICATED: ContractError,
    grpc.StatusCode.PERMISSION_DENIED: ContractError,
}
_NOT_BELIEVED = ("certificate", "hostname verification", "ssl handshake failed", "ssl_error", "tls")
"""Words in a failed connection's details that no repetition fixes."""
_CUT_OFF = ("recvmsg", "reset by peer", "socket closed", "timed out")
"""Words in the details of a connection that ended before either side was believed: a service that dies."""

_HUNG_UP = ("failed to connect", "socket closed")
"""Words in the details of a connection that was accepted and closed before encryption was agreed on."""


def error_to_code(error: AntiphonError) -> int:
    """Return the number of the status that an error leaves a server as."""
    return int(status_of(error).value[0])


def error_from_code(number: int, details: str) -> AntiphonError:
    """Return the error that a status number and its sentence came from."""
    kinds = {status.value[0]: kind for status, kind in _ERROR_OF.items()}
    return kinds.get(number, AntiphonError)(details)


def status_of(error: AntiphonError) -> grpc.StatusCode:
    """Return the status that an error leaves a server as."""
    if isinstance(error, Refusal):
        return _STATUS_OF_DENIAL[error.denial]
    return _STATUS_OF.get(type(error), grpc.StatusCode.UNKNOWN)


def label_of(method: Any) -> str:
    """Return the name of the call that a stub's method makes."""
    name = getattr(method, "_method", b"")
    return name.decode() if isinstance(name, bytes) else str(name)


def error_of(error: grpc.aio.AioRpcError, method: Any, timeout_s: float) -> AntiphonError:
    """Return the error of our tree that a failed call of a stub's method stands for."""
    code, label = error.code(), label_of(method)
    details = " ".join((error.details() or "").split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(f"{label} did not answer within {timeout_s:g} s")
    said = details.lower() if code is grpc.StatusCode.UNAVAILABLE else ""
    if any(word in said for word in _NOT_BELIEVED) and not any(word in said for word in _CUT_OFF):
        return ContractError(
            f"{label}: the two sides do not believe each other's certificates ({details[:200]}); use bundles "
            "of one authority, an address that the services' certificate names, and clocks that are right"
        )
    if said and all(word in said for word in _HUNG_UP):
        return UnavailableError(
            f"{label}: the other side hung up at once ({details[:200]}); it may want credentials "
            "(--credentials FOLDER or ANTIPHON_CREDENTIALS), or those of another run"
        )
    kind = _ERROR_OF.get(code, AntiphonError)
    return kind(details or f"{label} failed with {code.name}")
