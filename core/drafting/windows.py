"""Windows: how many tokens may be drafted next for each request, learned from what was accepted.

Three rules behind one interface. They decide speed alone: every draft is verified, so no rule can
change a token. A request is known by its slot, a small integer that its engine reuses once the
request has ended. Legend: B rows of one step, each a different slot that was opened before.
"""

import math
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ContractError

Int64Array = npt.NDArray[np.int64]
WindowKind = Literal["gain", "doubling", "additive"]

START_WINDOW = 2
"""First window of a request, and the least one, under both published rules."""
MEMORY = 0.9
"""What a settled draft keeps of the older evidence of its request: about ten drafts count."""
PRIOR_TRIALS = 4.0
"""Evidence a fresh request starts with, in drafted tokens; one early rejection must not end it."""
PRIOR_ACCEPTANCE = 0.9
"""Acceptance that evidence claims: high, so that the draft's own probabilities decide at first."""
LEAST_REACH = 0.05
"""`gain` ends a draft where, by the request's own record, fewer than one in twenty gets so far."""

SHARES = 1024
"""Steps of the table from acceptance to limit; a table, because logarithms cost more than a step has."""


class WindowController(Protocol):
    """The length of the next draft of each slot. Slots of one call are distinct."""

    def open(self, slot: int) -> None:
        """Begin a new request in `slot`; what an earlier one left there is forgotten."""
        ...

    def limits(self, slots: Int64Array) -> Int64Array:
        """Return [B] the most tokens to draft next, each in 1..max_window, for `slots` [B]."""
        ...

    def settle(self, slots: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Take in how drafts fared: [B] tokens drafted and, of these, [B] accepted from the front.

        Rows with nothing drafted change nothing.
        """
        ...


class _Windows:
    """One window per slot; room grows as slots are opened."""

    def __init__(self, slots: int, max_window: int) -> None:
        self._start = min(START_WINDOW, max_window)
        self._most = max_window
        self._window = np.full(max(slots, 1), self._start, np.int64)

    def open(self, slot: int) -> None:
        """Begin a new request in `slot`."""
        if slot >= len(self._window):
            self._grow(max(slot + 1, 2 * len(self._window)))
        self._window[slot] = self._start

    def limits(self, slots: Int64Array) -> Int64Array:
        """Return [B] the most tokens to draft next."""
        return self._window.take(slots)

    def _grow(self, size: int) -> None:
        grown = np.full(size, self._start, np.int64)
        grown[: len(self._window)] = self._window
        self._window = grown


class AdditiveWindow(_Windows):
    """RhymeRL's rule (arXiv 2508.18588): start at 2, +2 when all was accepted, else back to 2."""

    def settle(self, slots: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Take in [B] drafted and accepted tokens."""
        window = self._window.take(slots)
        grown = np.minimum(window + 2, self._most)
        moved = np.where(accepted >= drafted, grown, self._start)
        self._window[slots] = np.where(drafted > 0, moved, window)


class DoublingWindow(_Windows):
    """The public code's rule (verl recipe specRL): start at 2, x2 when all was accepted, else /2."""

    def settle(self, slots: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Take in [B] drafted and accepted tokens."""
        window = self._window.take(slots)
        grown = np.minimum(window * 2, self._most)
        shrunk = np.maximum(window // 2, self._start)
        moved = np.where(accepted >= drafted, grown, shrunk)
        self._window[slots] = np.where(drafted > 0, moved, window)


class GainWindow(_Windows):
    """Room up to max_window, less where a request's own record says that drafts do not reach so far.

    The length that pays is decided token by token, by the floor of `core/drafting/gate.py` on the path
    probability. This rule guards against probabilities that are wrong for one request. Of a draft of
    n tokens with a accepted, min(a + 1, n) were tried, since nothing is tried after a rejection.
    With p the request's accepted share of tried tokens (older evidence fading by `MEMORY` a draft),
    the limit is the largest k with p^k >= LEAST_REACH: 16 or more at p = 0.83, 6 at 0.65, 4 at 0.5;
    it never falls below 1, so that a request can recover.
    """

    def __init__(self, slots: int, max_window: int) -> None:
        super().__init__(slots, max_window)
        self._start = max_window
        self._window[:] = max_window
        shares = (np.arange(SHARES) + 0.5) / SHARES
        reach = np.clip(math.log(LEAST_REACH) / np.log(shares), 1, max_window).astype(np.int64)
        self._reach = np.append(reach, max_window)
        self._tried = np.full(len(self._window), PRIOR_TRIALS)
        self._kept = np.full(len(self._window), PRIOR_TRIALS * PRIOR_ACCEPTANCE)

    def open(self, slot: int) -> None:
        """Begin a new request in `slot`, with room for a whole draft."""
        super().open(slot)
        self._tried[slot] = PRIOR_TRIALS
        self._kept[slot] = PRIOR_TRIALS * PRIOR_ACCEPTANCE

    def settle(self, slots: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Take in [B] drafted and accepted tokens."""
        some = drafted > 0
        # A row without a draft adds nothing and forgets nothing, so its limit stays too.
        fade = np.where(some, MEMORY, 1.0)
        tried = self._tried.take(slots) * fade + np.minimum(accepted + some, drafted)
        kept = self._kept.take(slots) * fade + accepted
        self._tried[slots] = tried
        self._kept[slots] = kept
        self._window[slots] = self._reach.take((kept / tried * SHARES).astype(np.int64))

    def _grow(self, size: int) -> None:
        more = size - len(self._window)
        super()._grow(size)
        self._tried = np.append(self._tried, np.full(more, PRIOR_TRIALS))
        self._kept = np.append(self._kept, np.full(more, PRIOR_TRIALS * PRIOR_ACCEPTANCE))


def make_window(kind: WindowKind, slots: int, max_window: int) -> WindowController:
    """Return the controller named `kind` with room for `slots` requests, which grows on demand.

    Raises ContractError when `max_window` is below 1 or `kind` is unknown.
    """
    if max_window < 1:
        raise ContractError(f"max_window={max_window} leaves no room for a draft; give at least 1")
    match kind:
        case "additive":
            return AdditiveWindow(slots, max_window)
        case "doubling":
            return DoublingWindow(slots, max_window)
        case "gain":
            return GainWindow(slots, max_window)
    raise ContractError(f"window={kind!r} is not known; choose gain, doubling or additive")
