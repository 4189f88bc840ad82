"""Rate limit: a bucket that fills at a steady rate, and no one takes more than is in it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """A steady rate and how far it may be exceeded at once."""

    per_s: float
    """Units per second in the long run."""
    burst: float
    """Most units at one moment."""


class TokenBucket:
    """One caller's bucket; the caller passes the time, in seconds that never go back."""

    def __init__(self, rate: Rate) -> None:
        """Begin full."""
        self._rate = rate
        self._held = rate.burst
        self._at_s: float | None = None

    def take(self, units: float, now: float) -> float:
        """Take `units` and return 0, or take nothing and return the seconds until they are there.

        More than the burst is granted from a full bucket and leaves a debt: the long-run rate
        holds, and no message is too large for ever.

        >>> bucket = TokenBucket(Rate(per_s=2.0, burst=4.0))
        >>> bucket.take(4.0, now=10.0), bucket.take(1.0, now=10.0), bucket.take(1.0, now=10.5)
        (0.0, 0.5, 0.0)
        """
        if self._at_s is not None:
            filled = self._held + max(0.0, now - self._at_s) * self._rate.per_s
            self._held = min(self._rate.burst, filled)
        self._at_s = now if self._at_s is None else max(self._at_s, now)
        needed = min(units, self._rate.burst)
        if self._held < needed:
            return (needed - self._held) / self._rate.per_s
        self._held -= units
        return 0.0
