"""Draft costs: what a step takes with drafts as a share of one without, learnt from neighbouring steps.

Other programs slow a machine down for seconds at a time, by more than drafts cost or save. So no
step is compared with one of another minute. Symbols: B requests of a step, x drafted tokens in it,
F the fixed rows of a step, n = B + F; v seconds of one row, which is the machine's speed now:

    undrafted step    v n
    drafted step      v (n (1 + f) + r x)        f, r: what drafts cost, as shares

(log v, f, r) is the state of an extended Kalman filter over log seconds (Anderson and Moore, Optimal
Filtering, 1979, section 8.2). v walks by `DRIFT` a step and f hardly, so the filter learns f where
drafted and undrafted steps meet, and follows the machine between.
"""

import math

MOST_FIXED_ROWS = 4096.0
"""A step whose time does not grow with the batch at all counts as this many rows."""
DRIFT = 0.01
"""By what share the machine's speed changes from step to step."""
MOST_DRIFT = 0.5
"""Standard deviation of log v after any time without a step."""
FIRST_NOISE = 0.05
"""Standard deviation of a step's log seconds, until it is known."""
LEAST_NOISE = 1e-3
"""Least such deviation: two steps never take the same time."""
FIRST_FIXED = 0.3
"""Standard deviation of f before the first drafted step, and at most."""
FIXED_DRIFT = 0.001
"""By how much f changes from step to step."""
ROW_DRIFT = 0.01
"""By what share r changes from step to step."""
MOST_FIXED = 1.0
"""Most f: a drafter does not take longer than the model, and a step that suggests it met something else."""
LEAST_ROW, MOST_ROW = 1e-6, 1.5
"""Least and most r: a drafted token is never quite free, and takes hardly more than a request's own row."""
TOLD = 8
"""Steps for which an undrafted step says how fast the machine is."""
OUTLIER = 3.0
"""Standard deviations from which on a step is not believed before the next one of its kind agrees."""


class StepCosts:
    """What steps of similar batch size cost; see the module's text."""

    __slots__ = (
        "_beyond",
        "_cross",
        "_drafted",
        "_log_row_s",
        "_noise",
        "_step",
        "_undrafted_at",
        "_variance",
        "fixed",
        "row",
    )

    def __init__(self, row: float = 1.0, fixed: float = 0.0) -> None:
        """Start without a step; `row` and `fixed` are first guesses of r and f."""
        self.fixed = fixed
        self.row = row
        self._log_row_s = 0.0
        self._variance = [0.0, FIRST_FIXED * FIRST_FIXED, row * row]
        """Variances of log v, f and r."""
        self._cross = [0.0, 0.0, 0.0]
        """Covariances of log v with f, of log v with r, and of f with r."""
        self._noise = FIRST_NOISE * FIRST_NOISE
        self._step = 0
        self._drafted = False
        self._undrafted_at = 0
        self._beyond = [0, 0]
        """Of the newest undrafted and the newest drafted step: the residual's sign if an outlier, else 0."""

    @property
    def row_s(self) -> float:
        """Seconds v of one row at the machine's present speed; 0 before the first step."""
        return math.exp(self._log_row_s) if self._step else 0.0

    def share(self, density: float) -> float:
        """Return the seconds of a drafted step with x / n = `density` relative to an undrafted step."""
        return 1.0 + self.fixed + self.row * density

    def error(self, density: float) -> float:
        """Return the standard error of `share`."""
        _, fixed, row = self._variance
        return math.sqrt(max(fixed + density * (2.0 * self._cross[2] + density * row), 0.0))

    def rescale(self, factor: float) -> None:
        """Restate v and r for another F, by which a row takes `factor` times the seconds."""
        self._log_row_s += math.log(factor)
        self.row /= factor
        self._variance[2] /= factor * factor
        self._cross[1] /= factor
        self._cross[2] /= factor

    def learn(self, step: int, rows: float, drafted: int | None, seconds: float) -> None:
        """Take in a step.

        Args:
            step: its number, at least 1 and never falling.
            rows: n.
            drafted: x; None for a step without drafts.
            seconds: how long it took, more than 0.
        """
        if not self._step:
            self._step, self._log_row_s, self._variance[0] = step, math.log(seconds / rows), self._noise
            return
        self._drift(step)
        units, slopes = rows, (1.0, 0.0, 0.0)
        if drafted is not None:
            units = rows * (1.0 + self.fixed) + self.row * drafted
            slopes = (1.0, rows / units, drafted / units)
        residual = math.log(seconds / units) - self._log_row_s
        covariances, variance = self._innovation(slopes)
        bound = OUTLIER * math.sqrt(variance)
        cut = min(max(residual, -bound), bound)
        self._noise = max(self._noise + (cut * cut - self._noise) / 32.0, LEAST_NOISE * LEAST_NOISE)
        kind, sign = drafted is not None, 0 if cut == residual else (1 if residual > 0.0 else -1)
        before, self._beyond[kind] = self._beyond[kind], sign
        switched, self._drafted = kind != self._drafted, kind
        if not kind:
            self._undrafted_at = step
        if sign:
            if sign != before:
                return
            # The second of its kind. Where undrafted steps have just told the machine's speed, drafts cost
            # something else than was known; otherwise the machine has another speed, or f has changed too.
            told = kind and step - self._undrafted_at <= TOLD
            if told:
                self._variance[2] = max(self._variance[2], MOST_ROW * MOST_ROW)
            else:
                self._variance[0] += residual * residual
            if told or switched:
                self._variance[1] = max(self._variance[1], FIRST_FIXED * FIRST_FIXED)
            self._beyond[kind] = 0
            covariances, variance = self._innovation(slopes)
        speed, fixed, row = (covariance / variance for covariance in covariances)
        self._log_row_s += speed * residual
        self.fixed = min(max(self.fixed + fixed * residual, 0.0), MOST_FIXED)
        self.row = min(max(self.row + row * residual, LEAST_ROW), MOST_ROW)
        for index, gain in enumerate((speed, fixed, row)):
            self._variance[index] = max(self._variance[index] - gain * covariances[index], 0.0)
        self._cross[0] -= speed * covariances[1]
        self._cross[1] -= speed * covariances[2]
        self._cross[2] -= fixed * covariances[2]

    def _drift(self, step: int) -> None:
        """Let the state be less certain, up to a bound, for the steps that went by."""
        waited, self._step = max(step - self._step, 1), step
        added = (waited * DRIFT * DRIFT, FIXED_DRIFT * FIXED_DRIFT, (ROW_DRIFT * self.row) ** 2)
        most = (MOST_DRIFT * MOST_DRIFT, FIRST_FIXED * FIRST_FIXED, self.row * self.row)
        # Nothing certain is taken away here, so that the three stay a covariance.
        for index, (more, bound) in enumerate(zip(added, most, strict=True)):
            self._variance[index] += max(min(more, bound - self._variance[index]), 0.0)

    def _innovation(self, slopes: tuple[float, float, float]) -> tuple[tuple[float, float, float], float]:
        """Return the covariances of the state with the next log seconds, and the variance of these."""
        one, two, three = slopes
        (a, b, c), (ab, ac, bc) = self._variance, self._cross
        covariances = (
            a * one + ab * two + ac * three,
            ab * one + b * two + bc * three,
            ac * one + bc * two + c * three,
        )
        variance = one * covariances[0] + two * covariances[1] + three * covariances[2]
        return covariances, max(variance, 0.0) + self._noise
