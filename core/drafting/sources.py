"""Draft sources: which texts can be drafted from, and what is believed of drafts before any was verified."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.records import IntArray

LONGEST_DOCUMENT = 1 << 18
"""Completions beyond this are dropped and longer requests are not followed beyond it, tokens."""
PROMPT_TOKENS = 8_192
"""Of a longer prompt only the last tokens serve as a document."""
PRIOR_CHANCES = (
    (0.10, 0.12, 0.14, 0.16, 0.18),
    (0.15, 0.28, 0.28, 0.42, 0.42),
    (0.30, 0.36, 0.44, 0.55, 0.55),
    (0.37, 0.50, 0.60, 0.75, 0.75),
    (0.62, 0.66, 0.66, 0.75, 0.78),
    (0.26, 0.80, 0.86, 0.92, 0.98),
)
"""Acceptance by vote share (down) and length of match (across) in replays of recorded responses."""
PRIOR_POWERS = (1.2, 1.0, 0.7)
"""Exponent of it for one, a few and many candidates that agree."""
PRIOR_OUTCOMES = 8.0
"""How many outcomes the guess for a kind of token weighs before any was observed."""


def prior() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the hits and misses every kind of token starts with, [BUCKETS] float64 each."""
    chances = np.array(PRIOR_CHANCES)[:, :, None] ** np.array(PRIOR_POWERS)
    return chances.ravel() * PRIOR_OUTCOMES, (1.0 - chances.ravel()) * PRIOR_OUTCOMES


def known_tokens(prompt: Sequence[int], vocabulary: int) -> IntArray:
    """Return the end of a prompt as int32, with separators where an id is outside the vocabulary.

    >>> known_tokens([3, 9, -4, 2], vocabulary=5).tolist()
    [3, -1, -1, 2]
    """
    least = min(vocabulary, 2**31 - 1)
    return np.array([t if 0 <= t < least else -1 for t in prompt[-PROMPT_TOKENS:]], dtype=np.int32)


def usable(token_ids: Any, weight: float, vocabulary: int) -> IntArray | None:
    """Return a completion's tokens, or None where nothing could be drafted from them."""
    tokens = np.asarray(token_ids)
    sound = (
        tokens.ndim == 1
        and 0 < tokens.size <= LONGEST_DOCUMENT
        and tokens.dtype.kind in "iu"
        and math.isfinite(weight)
        and weight > 0.0
    )
    if sound and tokens.dtype == np.int32:  # a negative id is a large one without its sign
        return tokens if int(tokens.view(np.uint32).max()) < min(vocabulary, 2**31 - 1) else None
    if not sound or int(tokens.min()) < 0 or int(tokens.max()) >= min(vocabulary, 2**31 - 1):
        return None
    return tokens.astype(np.int32, copy=False)


def contiguous(array: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """Return the array itself where it has the kernels' layout: another would compile them anew."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, dtype=dtype)
