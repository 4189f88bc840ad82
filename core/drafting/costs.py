"""Draft costs: what a step that verifies drafts takes beyond one that does not, learnt step by step."""

import math

MOST_FIXED_ROWS = 4096.0
"""A step whose time does not grow with the batch at all counts as this many rows."""


class Surplus:
    """Seconds d + c x of a drafted step beyond an undrafted one: a two-state Kalman filter.

    Residuals are cut at three standard deviations, so that a step during which the process was
    descheduled moves nothing much; the noise is estimated from the cut residuals, so that a lasting
    change is followed after some ten steps.
    """

    __slots__ = ("covariance", "fixed_s", "fixed_variance", "noise", "row_s", "row_variance")

    def __init__(self, row_s: float, undrafted_s: float, fixed_s: float = 0.0) -> None:
        self.fixed_s = fixed_s
        self.row_s = row_s
        self.fixed_variance = (0.1 * undrafted_s) ** 2
        self.row_variance = row_s * row_s
        self.covariance = 0.0
        self.noise = 0.05**2
        """Variance of a step's seconds, relative to the square of the undrafted step's."""

    def learn(self, drafted: int, seconds: float, undrafted_s: float) -> float:
        """Take in a drafted step; return its seconds with the excess of an outlier cut off."""
        self.fixed_variance = min(self.fixed_variance + (0.001 * undrafted_s) ** 2, (0.1 * undrafted_s) ** 2)
        self.row_variance += (0.01 * self.row_s) ** 2
        # The cap moves with the batch; without this the three could stop being a covariance.
        most = 0.99 * math.sqrt(self.fixed_variance * self.row_variance)
        self.covariance = min(max(self.covariance, -most), most)
        predicted = undrafted_s + self.fixed_s + self.row_s * drafted
        fixed_part = self.fixed_variance + drafted * self.covariance
        row_part = self.covariance + drafted * self.row_variance
        variance = fixed_part + drafted * row_part + self.noise * undrafted_s * undrafted_s
        bound = 3.0 * math.sqrt(variance)
        residual = min(max(seconds - predicted, -bound), bound)
        fixed_gain, row_gain = fixed_part / variance, row_part / variance
        self.fixed_s = max(self.fixed_s + fixed_gain * residual, 0.0)
        self.row_s = max(self.row_s + row_gain * residual, 1e-4 * undrafted_s / MOST_FIXED_ROWS)
        self.fixed_variance = max(self.fixed_variance - fixed_gain * fixed_part, 0.0)
        self.covariance -= fixed_gain * row_part
        self.row_variance = max(self.row_variance - row_gain * row_part, 0.0)
        relative = residual / undrafted_s
        self.noise = max(self.noise + (relative * relative - self.noise) / 32.0, 1e-6)
        return min(seconds, max(2.0 * predicted, predicted + bound))
