"""History codec: a prompt's history as small numbers and one compressed run of tokens, and back.

What was encoded decodes to the same history. Bytes that were damaged, or made to harm, never take more memory
than is declared and allowed. Completions that do not fit a limit stay behind, the oldest first.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from antiphon.core.errors import ContractError
from antiphon.core.records import IntArray, PastCompletion, PromptHistory

DECODED_BYTES = 64 << 20
"""Most tokens of one history, as int32, that either side handles."""
HEAD_BYTES = 96
"""At most what a history costs on the wire beside its key and its completions."""
COMPLETION_BYTES = 48
"""At most what one completion costs on the wire beside its tokens."""
_LEVEL = 1
"""Token ids hardly compress beyond their unused high bytes; higher levels cost time for nothing."""


@dataclass(frozen=True, slots=True)
class EncodedHistory:
    """A history in plain types; the five rows have one element per completion."""

    prompt_key: str
    epoch: int
    lengths: tuple[int, ...]
    """Tokens of each completion; they cut the run of tokens, in order."""
    versions: tuple[int, ...]
    epochs: tuple[int, ...]
    sample_indices: tuple[int, ...]
    rewards: tuple[float, ...]
    tokens: bytes
    """zlib over little-endian int32."""


def encode_history(history: PromptHistory) -> EncodedHistory:
    """Encode a history."""
    past = history.completions
    return EncodedHistory(
        prompt_key=history.prompt_key,
        epoch=history.epoch,
        lengths=tuple(one.token_ids.size for one in past),
        versions=tuple(one.version for one in past),
        epochs=tuple(one.epoch for one in past),
        sample_indices=tuple(one.sample_index for one in past),
        rewards=tuple(one.reward for one in past),
        tokens=zlib.compress(b"".join(_raw(one.token_ids) for one in past), _LEVEL),
    )


def decode_history(encoded: EncodedHistory) -> PromptHistory:
    """Return the history.

    Raises:
        ContractError: when it cannot be read; says why.
    """
    lengths, declared = encoded.lengths, 4 * sum(encoded.lengths)
    rows = (encoded.versions, encoded.epochs, encoded.sample_indices, encoded.rewards)
    if not lengths:
        raise ContractError("it holds no completions")
    if any(len(row) != len(lengths) for row in rows):
        raise ContractError(f"{len(lengths)} lengths, but rows of {[len(row) for row in rows]} elements")
    if min(lengths) < 0:
        raise ContractError(f"a completion has {min(lengths)} tokens")
    if not all(map(math.isfinite, encoded.rewards)):
        raise ContractError("a reward is not finite")
    if declared > DECODED_BYTES:
        raise ContractError(f"it declares {declared} bytes of tokens; {DECODED_BYTES} are allowed")
    unpacker = zlib.decompressobj()
    try:
        # One byte more than declared is enough to know a bomb from a history.
        raw = unpacker.decompress(encoded.tokens, declared + 1)
    except zlib.error as error:
        raise ContractError(f"its tokens do not decompress ({error})") from None
    if len(raw) != declared or not unpacker.eof or unpacker.unused_data:
        raise ContractError(f"its tokens do not fill exactly the {declared} bytes declared")
    tokens = np.frombuffer(raw, dtype="<i4").astype(np.int32)
    tokens.flags.writeable = False
    pieces = np.split(tokens, np.cumsum(lengths[:-1], dtype=np.int64))
    completions = tuple(PastCompletion(*facts) for facts in zip(pieces, *rows, strict=True))
    return PromptHistory(encoded.prompt_key, encoded.epoch, completions)


def most_bytes(history: PromptHistory) -> int:
    """Return how many bytes a history takes at most, however badly it compresses."""
    raw = sum([past.token_ids.size for past in history.completions]) * 4
    # Deflate stores what it cannot shrink, at five bytes per block; each completion ends one.
    overhead = HEAD_BYTES + len(history.prompt_key.encode())
    return overhead + raw + raw // 1000 + (COMPLETION_BYTES + 16) * len(history.completions)


def fit_histories(
    histories: Iterable[PromptHistory | None], limit_bytes: int, budget_bytes: int
) -> list[PromptHistory | None]:
    """Cut histories, each to `limit_bytes` encoded and all together to `budget_bytes`; None stays None.

    They come in order of preference. Of one, completions are considered in their order, newest epoch first; a
    shorter one may go along after one that does not fit.
    """
    fitting: list[PromptHistory | None] = []
    for history in histories:
        kept, used = None, 0
        if history is not None:
            kept, used = _fit(history, min(limit_bytes, budget_bytes))
        budget_bytes -= used
        fitting.append(kept)
    return fitting


def _fit(history: PromptHistory, limit_bytes: int) -> tuple[PromptHistory | None, int]:
    """Return what of a history fits, and at most how many bytes it takes; None and 0 where nothing does."""
    used = most_bytes(history)
    if used <= min(limit_bytes, DECODED_BYTES):
        return history, used
    packer, raw, taken = zlib.compressobj(_LEVEL), 0, []
    used = HEAD_BYTES + len(history.prompt_key.encode())
    for past in history.completions:
        trial = packer.copy()
        # Up to a byte boundary, so that its size is known before the next one comes.
        packed = trial.compress(_raw(past.token_ids)) + trial.flush(zlib.Z_SYNC_FLUSH)
        more, bytes_after = len(packed) + COMPLETION_BYTES, raw + 4 * past.token_ids.size
        if used + more <= limit_bytes and bytes_after <= DECODED_BYTES:
            packer, used, raw = trial, used + more, bytes_after
            taken.append(past)
    if not taken:
        return None, 0
    newest = max(past.epoch for past in taken)
    return PromptHistory(history.prompt_key, newest, tuple(taken)), used


def _raw(token_ids: IntArray) -> bytes:
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
