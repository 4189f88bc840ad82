"""Batch sizes: what a gate knows about drafting in batches of similar size."""

import math
from dataclasses import dataclass, field

from antiphon.core.drafting.costs import MOST_FIXED_ROWS, StepCosts

HORIZON = 16
"""Drafted steps over which the gain is smoothed."""
FIRST_BASELINE = 3
"""Undrafted steps before the first draft at a batch size: of three, one may be an outlier."""
COMPARISON = 0.005
"""Share of the drafted rate that undrafted steps for comparison may cost while drafting."""
LEAST_INTERVAL, MOST_INTERVAL = 16, 64
"""Drafted steps between two undrafted ones: few where the gain is small, for there it matters most."""
UNSURE_INTERVAL = 4
"""The same while the error of the cost leaves open whether drafts pay."""
STALE_INTERVAL = 256
"""Steps of any batch size after which one is compared again that was seldom met."""
LEAST_TRIAL = 4
"""Drafted steps before the gain may close the gate."""
CONFIDENCE = 1.5
"""Standard errors by which the gain must lie below 1 for the gate to close."""


@dataclass(slots=True)
class BatchSize:
    """What is known about batches of one octave of sizes: 1, 2-3, 4-7, ..."""

    costs: StepCosts = field(default_factory=StepCosts)
    requests: float = 0.0
    """Mean requests of the newest steps; 0 before the first."""
    owed: int = FIRST_BASELINE
    """Undrafted steps still needed before the first draft."""
    undrafted_at: int = 0
    drafted_steps: int = 0
    """Drafted steps since the last undrafted one."""
    open: bool = True
    changed_at: int = 0
    """Step of the last opening or closing."""
    wait: int = 0
    """Steps to wait while closed; 0 before the first closing."""
    trials: int = 0
    """Drafted steps that the means below speak of."""
    mean_worth: float = 0.0
    """Tokens of a drafted step relative to those of an undrafted one."""
    mean_square: float = 0.0
    """Mean square of the same."""
    mean_density: float = 0.0
    """Drafted tokens of a step relative to its n."""

    @property
    def met(self) -> bool:
        """Whether any step had a batch of this size."""
        return self.requests > 0.0

    @property
    def gain(self) -> float:
        """Worth over cost of this trial's steps; 0 before the first."""
        return self.mean_worth / self.costs.share(self.mean_density) if self.trials else 0.0

    def meet(self, requests: int) -> None:
        """Note a step of `requests`."""
        self.requests += (requests - self.requests) / (HORIZON if self.met else 1)

    def rescale(self, before: float, after: float) -> None:
        """Restate what is known for another F."""
        if self.met:
            factor = (self.requests + before) / (self.requests + after)
            self.costs.rescale(factor)
            self.mean_density *= factor

    def due(self, step: int) -> bool:
        """Return whether an undrafted step must come, so that costs stay known."""
        if self.owed or step - self.undrafted_at >= STALE_INTERVAL:
            return True
        if self.trials < HORIZON:
            return self.drafted_steps >= LEAST_INTERVAL
        surplus = self.mean_worth - self.costs.share(self.mean_density)
        if abs(surplus) < CONFIDENCE * self.costs.error(self.mean_density):
            return self.drafted_steps >= UNSURE_INTERVAL
        return self.drafted_steps >= min(max((self.gain - 1.0) / COMPARISON, LEAST_INTERVAL), MOST_INTERVAL)

    def restart(self) -> None:
        """Forget the gain: a new trial counts by its own steps."""
        self.trials = 0
        self.mean_worth = self.mean_square = self.mean_density = 0.0

    def weigh(self, worth: float, density: float) -> None:
        """Take in a drafted step."""
        self.trials += 1
        share = 1.0 / min(self.trials, HORIZON)
        self.mean_worth += share * (worth - self.mean_worth)
        self.mean_square += share * (worth * worth - self.mean_square)
        self.mean_density += share * (density - self.mean_density)

    def loses(self, requests: int, rows: float) -> bool:
        """Return whether the gain lies below 1 by `CONFIDENCE` standard errors; `rows`: n of such a step."""
        if self.trials < LEAST_TRIAL:
            return False
        # Wins are rare and large: until one was seen, the spread of the sample says too little, so
        # the number of tokens of a request is taken to spread by at least 1. But a drafted token wins one
        # at most: where hardly any is found, nothing more is to be learnt of a trial.
        drafted = min(self.mean_density * rows, requests)
        spread = drafted / (requests * requests)
        variance = max(self.mean_square - self.mean_worth * self.mean_worth, spread)
        effective = min(self.trials, 2 * HORIZON - 1)
        error = math.sqrt(variance / effective + self.costs.error(self.mean_density) ** 2)
        return self.costs.share(self.mean_density) - self.mean_worth > CONFIDENCE * error


def fixed_rows(sizes: list[BatchSize], fixed: float) -> float:
    """Fit u(B) = a + b B through the sizes, each counting by its relative error, and return F = a / b.

    `fixed` is F so far, which is returned where there are too few sizes to tell.
    """
    points = [(s.requests, s.costs.row_s * (s.requests + fixed)) for s in sizes if s.met and not s.owed]
    if len(points) < 2 or points[-1][0] < 2.0 * points[0][0]:
        return fixed
    weight = sum(1.0 / (s * s) for _, s in points)
    mean_b = sum(b / (s * s) for b, s in points) / weight
    mean_s = sum(1.0 / s for _, s in points) / weight
    slope = sum((b - mean_b) * (s - mean_s) / (s * s) for b, s in points)
    slope /= sum((b - mean_b) ** 2 / (s * s) for b, s in points)
    if slope <= 0.0:
        return MOST_FIXED_ROWS
    return min(max((mean_s - slope * mean_b) / slope, 0.0), MOST_FIXED_ROWS)
