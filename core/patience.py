"""Patience: how long the counter of someone who is waited for has stood still.

Work that may take long counts what it does: tokens, bytes, micro-batches, steps. What waits for it
counts the seconds since the last change, so what takes an hour and moves is never given up, and what
moves no more is given up after the same time whatever it is.
"""


class Patience:
    """Seconds without a change of one counter; the caller gives the time."""

    def __init__(self, now: float) -> None:
        """Begin to wait at `now`, seconds on a clock that never goes back."""
        self._counter: object = None
        self._at = now
        self._still_s = {False: 0.0, True: 0.0}

    def still_s(self, counter: object, now: float, absent: bool = False) -> float:
        """Take a look, and return for how many seconds the counter has stood still.

        Seconds in which no one was there who could have moved it (`absent`) are counted apart: the answer
        is of the kind that is asked for, and only a change of the counter begins both again.

        >>> patience = Patience(0.0)
        >>> patience.still_s(7, 1.0), patience.still_s(7, 5.0), patience.still_s(8, 6.0)
        (0.0, 4.0, 0.0)
        >>> patience.still_s(8, 8.0, absent=True), patience.still_s(8, 9.0)
        (2.0, 1.0)
        """
        if counter == self._counter:
            self._still_s[absent] += now - self._at
        else:
            self._counter, self._still_s = counter, {False: 0.0, True: 0.0}
        self._at = now
        return self._still_s[absent]

    def excuse(self, seconds: float) -> None:
        """Leave out seconds in which nothing could move, since the last look."""
        self._at += seconds
