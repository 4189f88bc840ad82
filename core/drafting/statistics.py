"""Drafting statistics: added up as they are, and believed only where they can be true.

Drafts never change a token, so no group is refused for statistics about them: a group whose statistics
contradict themselves or its trajectories is accepted, and its statistics are left out whole.
What is believed is finite and bounded, so no sum of it overflows and no share of it is NaN.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from antiphon.core.records import DraftingStatistics, GroupSubmission

COUNTS = ("tokens", "passes", "drafted", "covered", "accepted", "with_history", "promising", "rested")
"""Counts of the statistics that a worker reports."""
EPOCH_RATES = ("acceptance", "coverage", "tokens_per_pass", "history_share")
"""The rates that are reported epoch by epoch."""
PROMISING = 0.8
"""Where a larger share of the newest drafted tokens was right, drafts are expected to pay."""
MOST_COUNT = 2**40
"""No count of one group is larger; sums over a run stay exact in int64."""
MOST_SECONDS = 1e9
"""No time of one group is longer."""
MOST_GAIN = 1e6
"""No engine gains more by drafting."""


def add_statistics(parts: Iterable[DraftingStatistics | None]) -> DraftingStatistics | None:
    """Add up statistics; None where no part has any.

    The gain of the sum is the mean of the parts' gains, weighted by their tokens; parts that
    have not compared themselves yet (gain 0) do not count in it.

    >>> one = DraftingStatistics(8, 4, 6, 5, 4, 1, 0.0, 0.0, gain=2.0)
    >>> two = add_statistics([one, None, one])
    >>> two.tokens, two.accepted, two.completions, two.gain
    (16, 8, 2, 2.0)
    """
    total = StatisticsSum()
    for part in parts:
        if part is not None:
            total.add(part)
    return total.total()


class StatisticsSum:
    """The exact sum of statistics that come one by one, rounded once, so that their order does not matter."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys((*COUNTS, "completions"), 0)
        self._drafter_s = self._sampler_s = self._gains = Fraction()
        self._parts = self._weight = 0

    def add(self, part: DraftingStatistics) -> None:
        """Add the statistics of some completions."""
        self._parts += 1
        for name in self._counts:
            self._counts[name] += int(getattr(part, name))
        self._drafter_s += Fraction(part.drafter_s)
        self._sampler_s += Fraction(part.sampler_s)
        if part.gain > 0:
            self._gains += Fraction(part.gain * max(1, part.tokens))
            self._weight += max(1, part.tokens)

    def total(self) -> DraftingStatistics | None:
        """Return the sum so far as `add_statistics` does; None before the first."""
        if not self._parts:
            return None
        return DraftingStatistics(
            **self._counts,
            drafter_s=float(self._drafter_s),
            sampler_s=float(self._sampler_s),
            gain=float(self._gains) / self._weight if self._weight else 0.0,
        )


def believed_statistics(submission: GroupSubmission) -> DraftingStatistics | None:
    """Return the statistics a submission carries, or None where they cannot be true.

    They can be true when every count is a whole number in [0, MOST_COUNT],
    accepted <= covered <= min(drafted, tokens), rested <= promising <= tokens, tokens are no more than the
    trajectories have,
    with_history no more than there are trajectories, and times and gain are finite and in
    [0, MOST_SECONDS] and [0, MOST_GAIN]. How many completions there are is counted here.
    """
    statistics, trajectories = submission.drafting, submission.trajectories
    if statistics is None or not _is_possible(statistics):
        return None
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
    if statistics.tokens > sampled or statistics.with_history > len(trajectories):
        return None
    if statistics.completions == len(trajectories):
        return statistics
    return dataclasses.replace(statistics, completions=len(trajectories))


def _is_possible(statistics: DraftingStatistics) -> bool:
    counts = [getattr(statistics, name) for name in COUNTS]
    limits = (
        (statistics.drafter_s, MOST_SECONDS),
        (statistics.sampler_s, MOST_SECONDS),
        (statistics.gain, MOST_GAIN),
    )
    return (
        all(type(count) is int and 0 <= count <= MOST_COUNT for count in counts)
        # A comparison with NaN is false, so that NaN is out of every bound.
        and all(isinstance(value, int | float) and 0 <= value <= most for value, most in limits)
        and statistics.accepted <= statistics.covered <= min(statistics.drafted, statistics.tokens)
        and statistics.rested <= statistics.promising <= statistics.tokens
    )


def drafting_rates(statistics: DraftingStatistics) -> dict[str, float]:
    """Return what the counts mean, every value finite; a share of nothing is 0.

    Keys: acceptance (accepted / drafted), coverage (covered / tokens), tokens_per_pass,
    history_share (completions with history / completions), rested_share (rested / promising),
    drafter_ms and sampler_ms (milliseconds per forward pass of a completion), gain.
    """
    return {
        "acceptance": _share(statistics.accepted, statistics.drafted),
        "coverage": _share(statistics.covered, statistics.tokens),
        "tokens_per_pass": _share(statistics.tokens, statistics.passes),
        "history_share": _share(statistics.with_history, statistics.completions),
        "rested_share": _share(statistics.rested, statistics.promising),
        "drafter_ms": _share(1e3 * statistics.drafter_s, statistics.passes),
        "sampler_ms": _share(1e3 * statistics.sampler_s, statistics.passes),
        "gain": statistics.gain,
    }


def drafting_summary(by_epoch: Mapping[int, DraftingStatistics]) -> dict[str, Any]:
    """Return a run's drafting in plain values: totals, and the rates of each epoch in order.

    Args:
        by_epoch: epoch -> sum of the statistics of its training groups.

    Returns:
        {} without statistics; else the rates and counts of the run, and under `by_epoch` one dict
        with epoch, acceptance, coverage, tokens_per_pass, history_share and tokens for each.
    """
    whole = add_statistics(by_epoch.values())
    if whole is None:
        return {}
    epochs = []
    for epoch, statistics in sorted(by_epoch.items()):
        rates = drafting_rates(statistics)
        kept = {name: rates[name] for name in EPOCH_RATES}
        epochs.append({"epoch": epoch, **kept, "tokens": statistics.tokens})
    counts = {name: getattr(whole, name) for name in COUNTS if name != "with_history"}
    return {**drafting_rates(whole), **counts, "completions": whole.completions, "by_epoch": epochs}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
