"""Wire of drafting: histories and statistics to protos and back, forgiving where the others are strict.

Neither can change a token or a batch. So a history that cannot be read is no history, impossible
statistics are no statistics, and a log line says so.
"""

import math

import structlog

from antiphon.core import records as r
from antiphon.core.drafting.history_codec import EncodedHistory, decode_history, encode_history
from antiphon.protos import records_pb2

_COUNTS = ("tokens", "passes", "drafted", "covered", "accepted", "with_history", "completions")
_MEASURES = ("drafter_s", "sampler_s", "gain")

_log = structlog.get_logger(__name__)


def prompt_history_to_proto(x: r.PromptHistory) -> records_pb2.PromptHistory:
    """Translate, tokens compressed; whoever sends it has cut it to its limit before."""
    encoded = encode_history(x)
    assert encoded is not None  # only a limit leaves something out
    return records_pb2.PromptHistory(
        prompt_key=encoded.prompt_key,
        epoch=encoded.epoch,
        lengths=encoded.lengths,
        versions=encoded.versions,
        epochs=encoded.epochs,
        sample_indices=encoded.sample_indices,
        rewards=encoded.rewards,
        tokens=encoded.tokens,
    )


def prompt_history_from_proto(m: records_pb2.PromptHistory) -> r.PromptHistory | None:
    """Translate; None, and a line in the log, when it cannot be read."""
    history, reason = decode_history(
        EncodedHistory(
            prompt_key=m.prompt_key,
            epoch=m.epoch,
            lengths=tuple(m.lengths),
            versions=tuple(m.versions),
            epochs=tuple(m.epochs),
            sample_indices=tuple(m.sample_indices),
            rewards=tuple(m.rewards),
            tokens=m.tokens,
        )
    )
    if history is None:
        _log.warning("history.unreadable", prompt=m.prompt_key[:80], reason=reason)
    return history


def drafting_statistics_to_proto(x: r.DraftingStatistics) -> records_pb2.DraftingStatistics:
    """Translate."""
    return records_pb2.DraftingStatistics(**{name: getattr(x, name) for name in (*_COUNTS, *_MEASURES)})


def drafting_statistics_from_proto(m: records_pb2.DraftingStatistics) -> r.DraftingStatistics | None:
    """Translate; None, and a line in the log, when a number is negative or not finite."""
    values = {name: getattr(m, name) for name in (*_COUNTS, *_MEASURES)}
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            _log.warning("drafting.unreadable", field=name, value=value)
            return None
    return r.DraftingStatistics(**values)
