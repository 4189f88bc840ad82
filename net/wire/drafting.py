"""Wire of drafting: histories and statistics to protos and back, forgiving where the others are strict.

Neither can change a token or a batch. So a history that cannot be read is no history, impossible
statistics are no statistics, and a log line says so.
"""

import dataclasses
import math

import structlog

from antiphon.core import records as r
from antiphon.core.drafting.history_codec import EncodedHistory, decode_history, encode_history
from antiphon.net.rpc.codec import by_hand, codec
from antiphon.protos import records_pb2

_log = structlog.get_logger(__name__)


_encoded_to_proto, _encoded_from_proto = codec(EncodedHistory, records_pb2.PromptHistory)
drafting_statistics_to_proto, _statistics_from_proto = codec(
    r.DraftingStatistics, records_pb2.DraftingStatistics
)
_NUMBERS = tuple(field.name for field in dataclasses.fields(r.DraftingStatistics))


def prompt_history_to_proto(x: r.PromptHistory) -> records_pb2.PromptHistory:
    """Return the message, tokens compressed; whoever sends it has cut it to its limit before."""
    encoded = encode_history(x)
    assert encoded is not None  # only a limit leaves something out
    return _encoded_to_proto(encoded)


def prompt_history_from_proto(m: records_pb2.PromptHistory) -> r.PromptHistory | None:
    """Return the record; None, and a line in the log, when it cannot be read."""
    history, reason = decode_history(_encoded_from_proto(m))
    if history is None:
        _log.warning("history.unreadable", prompt=m.prompt_key[:80], reason=reason)
    return history


def drafting_statistics_from_proto(m: records_pb2.DraftingStatistics) -> r.DraftingStatistics | None:
    """Return the record; None, and a line in the log, when a number is negative or not finite."""
    found = _statistics_from_proto(m)
    for name in _NUMBERS:
        value = getattr(found, name)
        if not (math.isfinite(value) and value >= 0):
            _log.warning("drafting.unreadable", field=name, value=value)
            return None
    return found


by_hand(records_pb2.PromptHistory, prompt_history_to_proto, prompt_history_from_proto)
by_hand(records_pb2.DraftingStatistics, drafting_statistics_to_proto, drafting_statistics_from_proto)
