"""Audit: whether sampled tokens are the ones that weights, seed and sampling parameters give.

An auditor scores a completion by teacher forcing under the very version that is said to have
sampled it, and reports a few numbers for each trajectory and each worker that sampled a part of it.
With position-keyed sampling each token must fall where its own uniform says; a token is *missed* when
that uniform lies outside the token's interval of the cumulative distribution by more than the rounding
band, *near* when it lies outside by a hundredth of that or more, and *gross* when by ten times that.
Tokens of other weights, another temperature or another seed are missed at a rate near the distance of
the two distributions, honest ones at the rate of rounding, and gross ones are not rounding at all. The
reported logprobs are compared with the auditor's own, against a band measured on workers one trusts.

Legend: T tokens of a trajectory, n tokens of all trajectories looked at.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHIPPED_MISS_RATE = 2e-3
"""Missed tokens that rounding may explain, per token: twenty times what float32 engines show."""
SHIPPED_NEAR_RATE = 6e-3
"""Near tokens that rounding may explain, per token: four times what bfloat16 engines show."""
GROSS_RATE = 1e-8
"""Gross tokens that an honest worker may have, per token: faults of machines, for rounding makes none."""
GROSS_PROOF = 2
"""Gross tokens of one worker in one group that are proof; one is a strike."""
SHIPPED_DRIFT = 0.02
"""Mean |auditor - worker| logprob of a trajectory that rounding may explain, nats: four times what
a bfloat16 engine shows, a tenth of what published systems tolerate."""
CERTAIN = 1e-9
"""Probability under honesty below which a group is proof."""
DOUBTFUL = 1e-5
"""Probability under honesty below which a group counts as a strike: misses of one group come together, so
that of 2,000 honest groups under a band measured on trusted workers one lay below 1e-4."""
ENOUGH_TRUSTED = 200
"""Trajectories of trusted workers from which on the band is theirs, even where it is narrower."""
NARROWEST_MISS_RATE = 2e-4
NARROWEST_NEAR_RATE = 2e-4
NARROWEST_DRIFT = 1e-3
"""No band is narrower, however well the trusted workers agree with the auditor."""
BAND_FACTOR = 4.0
"""The band reaches this far beyond the worst of the trusted trajectories but one in a hundred."""


@dataclass(frozen=True, slots=True)
class AuthoredSpan:
    """Tokens [start, stop) of one completion that another worker sampled than the one that handed it in."""

    sample_index: int
    worker_id: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What an auditor found about those tokens of one trajectory that one worker sampled."""

    sample_index: int
    tokens: int
    """Tokens scored; those of versions that are gone are left out."""
    missed: int
    """Tokens whose uniform lies outside their interval by more than the rounding band."""
    impossible: int
    """Tokens that top-k or top-p had cut off."""
    drift: float
    """Mean |auditor - worker| logprob, nats; not finite counts as infinite."""
    near: int = 0
    """Tokens whose uniform lies outside their interval by a hundredth of the rounding band or more."""
    gross: int = 0
    """Tokens that lie outside by ten times the band, or whose logprob no rounding explains."""
    author: str = ""
    """Id of the worker that sampled these tokens; empty for the one that handed the group in."""
    kept_cache: int = 0
    """Tokens left out because their engine kept its cache over a swap: no clean pass gives their logprobs,
    and the intervals that their uniforms had to fall into are not known."""


class Sums(NamedTuple):
    """What audits found about many tokens of one worker."""

    tokens: int = 0
    missed: int = 0
    near: int = 0
    gross: int = 0

    @classmethod
    def of(cls, samples: Iterable[SampleStatistics]) -> "Sums":
        """Add up what was found.

        >>> Sums.of([SampleStatistics(0, 8, 2, 0, 0.0), SampleStatistics(1, 5, 0, 0, 0.0)])
        Sums(tokens=13, missed=2, near=0, gross=0)
        """
        counts = [(s.tokens, s.missed, s.near, s.gross) for s in samples]
        return cls(*map(sum, zip(*counts, strict=True))) if counts else cls()

    def plus(self, other: "Sums") -> "Sums":
        return Sums(*map(sum, zip(self, other, strict=True)))


NOTHING = Sums()


@dataclass(frozen=True, slots=True)
class Band:
    """What honest workers show."""

    miss_rate: float = SHIPPED_MISS_RATE
    drift: float = SHIPPED_DRIFT
    near_rate: float = SHIPPED_NEAR_RATE


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
    sums = Sums.of(scored)
    # The rate that would show so few once in a hundred times, not the rate itself.
    rate, near = ((n + 2.33 * math.sqrt(n + 1.0) + 1.0) / sums.tokens for n in (sums.missed, sums.near))
    drifts = sorted(sample.drift for sample in scored)
    worst = drifts[min(len(drifts) - 1, math.ceil(0.99 * len(drifts)))]
    least = Band()
    if len(scored) >= ENOUGH_TRUSTED:
        least = Band(NARROWEST_MISS_RATE, NARROWEST_DRIFT, NARROWEST_NEAR_RATE)
    return Band(max(least.miss_rate, rate), max(least.drift, BAND_FACTOR * worst), max(least.near_rate, near))


def upper_tail(count: int, trials: int, rate: float) -> float:
    """Return the probability of `count` or more successes in `trials`, each of probability `rate`.

    >>> round(upper_tail(1, 10, 0.1), 4), upper_tail(0, 10, 0.1)
    (0.6513, 1.0)
    """
    if count > trials:
        return 0.0
    from scipy.special import bdtrc  # a tenth of a second that only a coordinator with audits needs

    return float(bdtrc(count - 1, trials, rate))


def by_author(samples: Iterable[SampleStatistics], submitter: str) -> dict[str, list[SampleStatistics]]:
    """Return what was found about a group by the worker that sampled the tokens, the submitter's first."""
    found: dict[str, list[SampleStatistics]] = {submitter: []}
    for sample in samples:
        found.setdefault(sample.author or submitter, []).append(sample)
    return found


def audit_group(
    samples: Sequence[SampleStatistics], band: Band, earlier: Sums = NOTHING
) -> tuple[Finding, ...]:
    """Return what an audit says against the worker that sampled these tokens; nothing for an honest one.

    Args:
        samples: of one group, and of tokens of one worker.
        band: what honest workers show.
        earlier: sums of the worker's groups before; together with them a small deviation that no single
            group shows becomes proof.

    >>> audit_group([SampleStatistics(0, 200, 0, 0, 1e-4)], Band())
    ()
    >>> audit_group([SampleStatistics(0, 200, 40, 0, 1e-4)], Band())[0].check
    'sampling'
    """
    sums = Sums.of(samples)
    ever = sums.plus(earlier)
    found = [
        *_counted(
            sums.missed, sums.tokens, ever.missed, ever.tokens, band.miss_rate, "where their seeds put them"
        ),
        *_counted(sums.near, sums.tokens, ever.near, ever.tokens, band.near_rate, "within their intervals"),
    ]
    if sums.gross:
        certain = sums.gross >= GROSS_PROOF or upper_tail(ever.gross, ever.tokens, GROSS_RATE) < CERTAIN
        words = f"{sums.gross} of {sums.tokens} tokens are further off than any rounding ({ever.gross} ever)"
        found.append(Finding("tokens", certain, words))
    impossible = sum(s.impossible for s in samples)
    if impossible > band.miss_rate * sums.tokens + 1:
        words = (
            f"{impossible} of {sums.tokens} tokens have no probability under the lease's sampling parameters"
        )
        found.append(Finding("support", True, words))
    drifts = [s.drift for s in samples if s.tokens]
    mean = math.fsum(drifts) / max(1, len(drifts)) if all(map(math.isfinite, drifts)) else math.inf
    if mean > band.drift:
        worst = max(drift if math.isfinite(drift) else math.inf for drift in drifts)
        words = f"logprobs differ by {mean:.3g} nats a token (worst {worst:.3g}, band {band.drift:.3g})"
        found.append(Finding("logprobs", mean > 5.0 * band.drift, words))
    return tuple(found)


def _counted(
    count: int, tokens: int, count_ever: int, tokens_ever: int, rate: float, where: str
) -> Iterable[Finding]:
    """Yield what a number of tokens says that are not where they should be."""
    probability = upper_tail(count, tokens, min(0.5, rate))
    if probability < DOUBTFUL:
        words = f"{count} of {tokens} tokens are not {where} (probability {probability:.1e})"
        yield Finding("sampling", probability < CERTAIN, words)
        return
    probability = upper_tail(count_ever, tokens_ever, min(0.5, rate))
    if probability < CERTAIN:
        words = f"{count_ever} of {tokens_ever} tokens of many groups are not {where}"
        yield Finding("sampling", True, f"{words} (probability {probability:.1e})")
