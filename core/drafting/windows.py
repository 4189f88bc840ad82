"""Windows: the most tokens that may be drafted next for each request, learned from what was accepted.

They decide speed alone: every draft is verified, so no window can change a token. A request is known
by its slot, a small integer that its engine reuses once the request has ended. Legend: B rows of one
step, each a different slot that was opened before.
"""

import math

import numpy as np
import numpy.typing as npt

from antiphon.core.drafting.arena import grown
from antiphon.core.errors import ContractError

Int64Array = npt.NDArray[np.int64]

MEMORY = 0.9
"""What a learned draft keeps of the older evidence of its request: about ten drafts count."""
PRIOR_TRIALS = 4.0
"""Evidence a fresh request starts with, in drafted tokens; one early rejection must not end it."""
PRIOR_ACCEPTANCE = 0.9
"""Acceptance that evidence claims: high, so that the draft's own probabilities decide at first."""
LEAST_REACH = 0.05
"""A draft ends where, by the request's own record, fewer than one in twenty gets so far."""
SHARES = 1024
"""Steps of the table from acceptance to limit; a table, because logarithms cost more than a step has."""


class DraftWindows:
    """Room up to max_window, less where a request's own record says that drafts do not reach so far.

    The length that pays is decided token by token, by the floor of `core/drafting/gate.py` on the path
    probability. This rule guards against probabilities that are wrong for one request. Of a draft of
    n tokens with a accepted, min(a + 1, n) were tried, since nothing is tried after a rejection.
    With p the request's accepted share of tried tokens (older evidence fading by `MEMORY` a draft),
    the limit is the largest k with p^k >= LEAST_REACH: 16 or more at p = 0.83, 6 at 0.65, 4 at 0.5;
    it never falls below 1, so that a request can recover.
    """

    def __init__(self, slots: int, max_window: int) -> None:
        """Make room for `slots` requests, which grows on demand; ContractError for max_window below 1."""
        if max_window < 1:
            raise ContractError(f"max_window={max_window} leaves no room for a draft; give at least 1")
        self._most = max_window
        shares = (np.arange(SHARES) + 0.5) / SHARES
        reach = np.clip(math.log(LEAST_REACH) / np.log(shares), 1, max_window).astype(np.int64)
        self._reach = np.append(reach, max_window)
        self._limits = np.full(max(slots, 1), max_window, np.int64)
        self._tried = np.full(len(self._limits), PRIOR_TRIALS)
        self._accepted = np.full(len(self._limits), PRIOR_TRIALS * PRIOR_ACCEPTANCE)

    def open(self, slot: int) -> None:
        """Begin a new request in `slot`, with room for a whole draft; forget what an earlier one left."""
        if slot >= len(self._limits):
            size = max(slot + 1, 2 * len(self._limits))
            self._limits = grown(self._limits, size, self._most)
            self._tried = grown(self._tried, size, 0)
            self._accepted = grown(self._accepted, size, 0)
        self._limits[slot] = self._most
        self._tried[slot] = PRIOR_TRIALS
        self._accepted[slot] = PRIOR_TRIALS * PRIOR_ACCEPTANCE

    def limits(self, slots: Int64Array) -> Int64Array:
        """Return [B] the most tokens to draft next, each in 1..max_window, for `slots` [B]."""
        return self._limits.take(slots)

    def learn(self, slots: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Take in [B] drafted tokens and [B] of them accepted from the front; 0 drafted changes nothing."""
        some = drafted > 0
        # A row without a draft adds nothing and forgets nothing, so its limit stays too.
        fade = np.where(some, MEMORY, 1.0)
        tried = self._tried.take(slots) * fade + np.minimum(accepted + some, drafted)
        kept = self._accepted.take(slots) * fade + accepted
        self._tried[slots] = tried
        self._accepted[slots] = kept
        self._limits[slots] = self._reach.take((kept / tried * SHARES).astype(np.int64))
