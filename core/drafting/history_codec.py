"""History codec: a prompt's history as small numbers and one compressed run of tokens, and back.

What was encoded decodes to the same history. Bytes that were damaged, or made to harm, give no
history and the reason; they never raise, and never take more memory than is declared
and allowed. Completions that do not fit a limit stay behind, the oldest first.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

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


def encode_history(history: PromptHistory, limit_bytes: int | None = None) -> EncodedHistory | None:
    """Encode a history, or as much of it as fits `limit_bytes`; None when nothing does."""
    fitting = history if limit_bytes is None else fit_history(history, limit_bytes)[0]
    if fitting is None:
        return None
    rows = [_raw(past.token_ids) for past in fitting.completions]
    return EncodedHistory(
        prompt_key=fitting.prompt_key,
        epoch=fitting.epoch,
        lengths=tuple(int(past.token_ids.size) for past in fitting.completions),
        versions=tuple(past.version for past in fitting.completions),
        epochs=tuple(past.epoch for past in fitting.completions),
        sample_indices=tuple(past.sample_index for past in fitting.completions),
        rewards=tuple(past.reward for past in fitting.completions),
        tokens=zlib.compress(b"".join(rows), _LEVEL),
    )


def fit_history(history: PromptHistory, limit_bytes: int) -> tuple[PromptHistory | None, int]:
    """Return what of a history fits, and at most how many bytes it takes encoded.

    Completions are considered in their order, newest epoch first; one that does not fit stays
    behind, and a shorter one after it may still go along. Nothing is compressed where everything
    fits however badly it compresses.
    """
    worst = most_bytes(history)
    if worst <= min(limit_bytes, DECODED_BYTES):
        return history, worst
    packer, raw, taken = zlib.compressobj(_LEVEL), 0, []
    used = HEAD_BYTES + len(history.prompt_key.encode())
    for past in history.completions:
        trial = packer.copy()
        size = len(_feed(trial, past.token_ids)) + COMPLETION_BYTES
        bytes_after = raw + 4 * past.token_ids.size
        if used + size <= limit_bytes and bytes_after <= DECODED_BYTES:
            packer, used, raw = trial, used + size, bytes_after
            taken.append(past)
    if not taken:
        return None, 0
    newest = max(past.epoch for past in taken)
    return PromptHistory(history.prompt_key, newest, tuple(taken)), used


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

    They come in order of preference.
    """
    found: list[PromptHistory | None] = []
    for history in histories:
        fitting, used = None, 0
        if history is not None:
            fitting, used = fit_history(history, min(limit_bytes, budget_bytes))
        budget_bytes -= used
        found.append(fitting)
    return found


def decode_history(encoded: EncodedHistory) -> tuple[PromptHistory | None, str]:
    """Return (history, "") or (None, why it cannot be read); no bytes make this raise."""
    lengths, count = encoded.lengths, len(encoded.lengths)
    rows = (encoded.versions, encoded.epochs, encoded.sample_indices, encoded.rewards)
    if not count:
        return None, "it holds no completions"
    if any(len(row) != count for row in rows):
        return None, f"{count} lengths, but rows of {[len(row) for row in rows]} elements"
    if min(lengths) < 0:
        return None, f"a completion has {min(lengths)} tokens"
    if not all(map(math.isfinite, encoded.rewards)):
        return None, "a reward is not finite"
    declared = 4 * sum(lengths)
    if declared > DECODED_BYTES:
        return None, f"it declares {declared} bytes of tokens; {DECODED_BYTES} are allowed"
    tokens, reason = _unpack(encoded.tokens, declared)
    if tokens is None:
        return None, reason
    cuts = np.cumsum(lengths[:-1], dtype=np.int64)
    completions = tuple(
        PastCompletion(*facts)
        for facts in zip(
            np.split(tokens, cuts),
            encoded.versions,
            encoded.epochs,
            encoded.sample_indices,
            encoded.rewards,
            strict=True,
        )
    )
    return PromptHistory(encoded.prompt_key, encoded.epoch, completions), ""


def _feed(packer: "zlib._Compress", token_ids: IntArray) -> bytes:
    """Compress one completion up to a byte boundary, so that its size is known at once."""
    return packer.compress(_raw(token_ids)) + packer.flush(zlib.Z_SYNC_FLUSH)


def _raw(token_ids: IntArray) -> bytes:
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()


def _unpack(payload: bytes, declared: int) -> tuple[IntArray | None, str]:
    unpacker = zlib.decompressobj()
    try:
        # One byte more than declared is enough to know a bomb from a history.
        raw = unpacker.decompress(payload, declared + 1)
    except zlib.error as error:
        return None, f"its tokens do not decompress ({error})"
    if len(raw) != declared or not unpacker.eof or unpacker.unused_data:
        return None, f"its tokens do not fill exactly the {declared} bytes declared"
    tokens = np.frombuffer(raw, dtype="<i4").astype(np.int32)
    tokens.flags.writeable = False
    return tokens, ""
