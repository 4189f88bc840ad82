"""Message sizes: how many bytes groups take on the wire, so that no message exceeds the largest one.

Whole groups travel when they are handed in, rewarded, audited and continued by another worker. A
configuration whose largest group would not fit one message is refused; where several groups travel
together, as many go as fit. All sizes are upper bounds.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

MESSAGE_BYTES = 64 << 20
"""Largest message that any party accepts; batches and weights travel as files and chunks instead."""
MARGIN_BYTES = 1 << 20
"""Of each message, left for what stands around the groups."""
PAGE_BYTES = 16 << 20
"""Of a message with several groups, after which none is added."""
TOKEN_BYTES = 8
"""Of a completion's token: its id and its log-probability, 4 bytes each."""
TRAJECTORY_BYTES = 4096
"""Of a completion besides its tokens: seed, reason and a version span for each version within any bound."""
MOST_SPANS = 256
"""Version spans of one completion; more would be beyond any bound on staleness."""
PROMPT_TOKEN_BYTES = 5
"""Of a prompt's token, as a varint."""

_T = TypeVar("_T")


def group_bytes(samples: int, tokens: int, prompt_tokens: int) -> int:
    """Return the most bytes of a group with this many completions, which have `tokens` tokens in all."""
    return samples * TRAJECTORY_BYTES + tokens * TOKEN_BYTES + prompt_tokens * PROMPT_TOKEN_BYTES


def fits(group: int) -> bool:
    """Return whether a group of this many bytes can travel in one message."""
    return group <= MESSAGE_BYTES - MARGIN_BYTES


def page(items: Sequence[_T], size: Callable[[_T], int]) -> list[_T]:
    """Return the first items that go into one message together: one in any case."""
    found: list[_T] = []
    used = 0
    for item in items:
        used += size(item)
        if found and used > PAGE_BYTES:
            break
        found.append(item)
    return found
