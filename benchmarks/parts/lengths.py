"""Lengths of completions as they were recorded on mathematics problems."""

import math

import numpy as np

from antiphon.core.lengths.memory import ComparedGroup

RECORDED = (
    0.16, 0.42, 0.49, 0.59, 0.71, 0.75, 0.82, 0.91, 1.0, 1.1, 1.16, 1.32, 1.46, 1.69, 2.25, 3.08, 3.92,
)  # fmt: skip
"""Quantiles 0, 1/16 .. 1 of recorded completion lengths, over their median."""
WITHIN = 0.15
"""Standard deviation of the logarithm of lengths within a group, as recorded."""
BETWEEN_EPOCHS = 0.25
"""Of a prompt's lengths from one epoch to the next, assumed: their rank correlation is then about 0.9.
Between two models far apart in training 0.44 and 0.78 were recorded."""


def recorded_quantile(share: float) -> float:
    """Return the recorded length, over the median, that this share of completions does not exceed.

    >>> recorded_quantile(0.5), recorded_quantile(1.0)
    (1.0, 3.92)
    """
    return float(np.interp(share, np.linspace(0.0, 1.0, len(RECORDED)), RECORDED))


def draw_groups(count: int, samples: int, median_tokens: float, seed: int) -> list[ComparedGroup]:
    """Return groups of recorded lengths, with what remembered lengths would predict of them."""
    random = np.random.default_rng(seed)
    groups = []
    for _ in range(count):
        base = median_tokens * recorded_quantile(random.random())
        counts = tuple(max(1, round(base * math.exp(WITHIN * x))) for x in random.standard_normal(samples))
        predicted = max(counts) * math.exp(BETWEEN_EPOCHS * random.standard_normal())
        groups.append(ComparedGroup(predicted, counts))
    return groups
