"""Audit: whether sampled tokens are the ones that weights, seed and sampling parameters give.

An auditor scores a completion by teacher forcing under the very version that is said to have
sampled it, and reports three numbers a trajectory. With position-keyed sampling each token must
fall where its own uniform says; a token is *missed* when that uniform lies outside the token's
interval of the cumulative distribution by more than the rounding band. Tokens of other weights,
another temperature or another seed are missed at a rate near the distance of the two
distributions; honest ones at the rate of rounding. The reported logprobs are compared with the
auditor's own, against a band measured on workers one trusts.

Legend: T tokens of a trajectory, n tokens of all trajectories looked at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHIPPED_MISS_RATE = 2e-3
"""Missed tokens that rounding may explain, per token: twenty times what float32 engines show."""
SHIPPED_DRIFT = 0.02
"""Mean |auditor - worker| logprob of a trajectory that rounding may explain, nats: four times what
a bfloat16 engine shows, a tenth of what published systems tolerate."""
CERTAIN = 1e-9
"""Probability under honesty below which one trajectory is proof."""
DOUBTFUL = 1e-4
"""Probability under honesty below which a trajectory counts as a strike."""
ENOUGH_TRUSTED = 200
"""Trajectories of trusted workers from which on the band is theirs, even where it is narrower."""
NARROWEST_MISS_RATE = 2e-4
NARROWEST_DRIFT = 1e-3
"""No band is narrower, however well the trusted workers agree with the auditor."""
BAND_FACTOR = 4.0
"""The band reaches this far beyond the worst of the trusted trajectories but one in a hundred."""


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What an auditor found about one trajectory."""

    sample_index: int
    tokens: int
    """Tokens scored; those of versions that are gone are left out."""
    missed: int
    """Tokens whose uniform lies outside their interval by more than the rounding band."""
    impossible: int
    """Tokens that top-k or top-p had cut off."""
    drift: float
    """Mean |auditor - worker| logprob, nats; not finite counts as infinite."""


@dataclass(frozen=True, slots=True)
class Band:
    """What honest workers show."""

    miss_rate: float = SHIPPED_MISS_RATE
    drift: float = SHIPPED_DRIFT


@dataclass(frozen=True, slots=True)
class Finding:
    """What an audit says against a worker."""

    check: str
    """sampling, support or logprobs."""
    certain: bool
    """Proof by itself; else a strike."""
    words: str


def calibrate(trusted: Sequence[SampleStatistics]) -> Band:
    """Return the band that trajectories of trusted workers show.

    A few of them can only widen the shipped band; many may narrow it, and then even weights that
    were rounded to int8 stand out. Trusted workers should be of every kind of machine in the fleet.

    >>> calibrate([SampleStatistics(0, 100, 0, 0, 0.01)] * 50).drift
    0.04
    """
    scored = [sample for sample in trusted if sample.tokens]
    if not scored:
        return Band()
    tokens = sum(sample.tokens for sample in scored)
    missed = sum(sample.missed for sample in scored)
    # The rate that would show so few misses once in a hundred times, not the rate itself.
    rate = (missed + 2.33 * math.sqrt(missed + 1.0) + 1.0) / tokens
    drifts = sorted(sample.drift for sample in scored)
    worst = drifts[min(len(drifts) - 1, math.ceil(0.99 * len(drifts)))]
    least = Band(NARROWEST_MISS_RATE, NARROWEST_DRIFT) if len(scored) >= ENOUGH_TRUSTED else Band()
    return Band(max(least.miss_rate, rate), max(least.drift, BAND_FACTOR * worst))


def upper_tail(count: int, trials: int, rate: float) -> float:
    """Return the probability of `count` or more successes in `trials`, each of probability `rate`.

    >>> round(upper_tail(1, 10, 0.1), 4), upper_tail(0, 10, 0.1)
    (0.6513, 1.0)
    """
    if count <= 0:
        return 1.0
    if count > trials:
        return 0.0
    log_rate, log_rest = math.log(rate), math.log1p(-rate)
    largest = -math.inf
    logs = []
    for k in range(count, trials + 1):
        choose = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        logs.append(choose + k * log_rate + (trials - k) * log_rest)
        largest = max(largest, logs[-1])
        if logs[-1] < largest - 50.0:
            break
    return min(1.0, math.exp(largest) * math.fsum(math.exp(value - largest) for value in logs))


def audit_group(
    samples: Sequence[SampleStatistics], band: Band, earlier: tuple[int, int] = (0, 0)
) -> tuple[Finding, ...]:
    """Return what the audit of one group says against its worker; nothing for an honest one.

    Args:
        samples: the group's.
        band: what honest workers show.
        earlier: (tokens, missed) of the worker's groups that passed; together with them a small
            deviation that no single group shows becomes proof.

    >>> audit_group([SampleStatistics(0, 200, 0, 0, 1e-4)], Band())
    ()
    >>> audit_group([SampleStatistics(0, 200, 40, 0, 1e-4)], Band())[0].check
    'sampling'
    """
    found = []
    tokens, missed = sum(s.tokens for s in samples), sum(s.missed for s in samples)
    probability = upper_tail(missed, tokens, min(0.5, band.miss_rate))
    if probability < DOUBTFUL:
        found.append(
            Finding(
                "sampling",
                probability < CERTAIN,
                f"{missed} of {tokens} tokens are not where their seeds put them "
                f"(probability {probability:.1e})",
            )
        )
    else:
        tokens_ever, missed_ever = tokens + earlier[0], missed + earlier[1]
        probability = upper_tail(missed_ever, tokens_ever, min(0.5, band.miss_rate))
        if probability < CERTAIN:
            words = f"{missed_ever} of {tokens_ever} tokens of many groups are not where their seeds put them"
            found.append(Finding("sampling", True, f"{words} (probability {probability:.1e})"))
    impossible = sum(s.impossible for s in samples)
    if impossible > band.miss_rate * tokens + 1:
        words = f"{impossible} of {tokens} tokens have no probability under the lease's sampling parameters"
        found.append(Finding("support", True, words))
    worst = max((s.drift if math.isfinite(s.drift) else math.inf for s in samples if s.tokens), default=0.0)
    mean = _mean([s.drift for s in samples if s.tokens])
    if mean > band.drift:
        words = f"logprobs differ by {mean:.3g} nats a token (worst {worst:.3g}, band {band.drift:.3g})"
        found.append(Finding("logprobs", mean > 5.0 * band.drift, words))
    return tuple(found)


def _mean(drifts: Sequence[float]) -> float:
    if not drifts:
        return 0.0
    return math.fsum(drifts) / len(drifts) if all(map(math.isfinite, drifts)) else math.inf
