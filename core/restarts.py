"""Restarts: whether a service that ended is started again, and after which pause.

Restarts are counted within a window, so that a run of a week may lose a service now and then. One that
ends again and again right after its start gets longer and longer pauses, because what it lacks may
come back by itself; one that had worked for a while is started again at once.
"""

from collections import deque

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
WORKED_S = 10.0
"""A service that was ready for so long is no longer taken for one that cannot work."""


class RestartRule:
    """Decides about the restarts of one service."""

    def __init__(self, limit: int, window_s: float) -> None:
        """Allow `limit` restarts within any `window_s` seconds."""
        self._limit = limit
        self._window_s = window_s
        self._restarts: deque[float] = deque()
        self._in_a_row = 0
        """Ends since the service last worked for a while."""

    def begin_anew(self) -> None:
        """Forget the restarts so far: what made the service end was taken away."""
        self._restarts.clear()
        self._in_a_row = 0

    def after_end(self, now: float, ready_s: float) -> float | None:
        """Return the seconds to wait before a service that ended is started again; None gives it up.

        Args:
            now: seconds of the caller's clock, never less than before.
            ready_s: how long it was ready; 0 when it never was.
        """
        while self._restarts and now - self._restarts[0] > self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._limit:
            return None
        self._restarts.append(now)
        self._in_a_row = 0 if ready_s >= WORKED_S else self._in_a_row + 1
        if self._in_a_row <= 1:
            return 0.0
        return float(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._in_a_row - 2, 16)))
