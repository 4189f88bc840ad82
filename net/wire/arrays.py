"""Wire arrays: what the other modules here share; arrays travel as little-endian bytes."""

from typing import Any

import numpy as np

from antiphon.core import records as r
from antiphon.core.errors import ContractError

_FINISH_REASONS = {reason.value: reason for reason in r.FinishReason}


def optional(message: Any, field: str) -> Any:
    """Return a field of a message, or None when it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def finish_reason_from_text(text: str) -> r.FinishReason:
    """Return the reason that a message names.

    Raises:
        ContractError: for an unknown one.
    """
    try:
        return _FINISH_REASONS[text]
    except KeyError:
        raise ContractError(f"finish_reason={text[:40]!r} is unknown; expected stop or length") from None


def logprobs_to_bytes(logprobs: r.FloatArray) -> bytes:
    """Return [T] float32 as little-endian bytes."""
    return np.ascontiguousarray(logprobs, dtype="<f4").tobytes()


def logprobs_from_bytes(payload: bytes) -> r.FloatArray:
    """Return [T] float32 from little-endian bytes.

    Raises:
        ContractError: when the length is no multiple of four.
    """
    _check_length(payload, "float32")
    return np.frombuffer(payload, dtype="<f4").astype(np.float32)


def tokens_to_bytes(tokens: r.IntArray) -> bytes:
    """Return [T] int32 as little-endian bytes."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def tokens_from_bytes(payload: bytes) -> r.IntArray:
    """Return [T] int32 from little-endian bytes.

    Raises:
        ContractError: when the length is no multiple of four.
    """
    _check_length(payload, "int32")
    return np.frombuffer(payload, dtype="<i4").astype(np.int32)


def _check_length(payload: bytes, kind: str) -> None:
    if len(payload) % 4:
        raise ContractError(f"{len(payload)} bytes are no {kind} array; expected a multiple of 4")
