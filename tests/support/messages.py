"""Records as the messages that travel, and back."""

from typing import Any

from antiphon.net import wire as wire  # which makes their codecs known
from antiphon.net.rpc.codec import known


def written(record: Any, message: type[Any]) -> Any:
    """Return the message of a record."""
    pair = known(message)
    assert pair is not None
    return pair[0](record)


def read(message: Any) -> Any:
    """Return the record of a message."""
    pair = known(type(message))
    assert pair is not None
    return pair[1](message)
