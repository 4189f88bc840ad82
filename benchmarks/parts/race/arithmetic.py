"""Race parts: link rates, intervals, and when a curve reaches a level, without clock and files."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
from scipy.stats import t as student


def link_rate(payload_bytes: float, workers: int, share: float, busy_s: float) -> float | None:
    """Return the origin's rate at which one version reaches all workers in a share of a step's work.

    Args:
        payload_bytes: of one version.
        workers: that fetch it, each over the same uplink.
        share: seconds of the transfer over `busy_s`; 0 is a link without a cap.
        busy_s: seconds of rollout and training of one step.

    Returns:
        Bytes per second, or None for no cap.

    >>> link_rate(2e6, 2, 0.5, 4.0), link_rate(2e6, 2, 0.0, 4.0)
    (2000000.0, None)
    """
    if share < 0 or busy_s <= 0:
        raise ValueError(
            f"a link cannot take {share:g} of {busy_s:g} s; give a share from 0 and a longer run"
        )
    return payload_bytes * workers / (share * busy_s) if share else None


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95% interval of a mean (Student's t); of two or more values."""
    quantile = float(student.ppf(0.975, len(values) - 1))
    return quantile * stdev(values) / math.sqrt(len(values))


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return mean, lower and upper end of its 95% interval; a single value has no interval.

    >>> mean_interval([0.5])
    (0.5, None, None)
    """
    if len(values) < 2:
        return fmean(values), None, None
    half = half_interval(values)
    return fmean(values), fmean(values) - half, fmean(values) + half


def reached_at(level: float, versions: Sequence[int], scores: Sequence[float]) -> float | None:
    """Return the version at which scores first reach a level, between evaluations on a straight line.

    >>> reached_at(0.7, [0, 10, 20], [0.2, 0.6, 0.8]), reached_at(0.9, [0, 10], [0.2, 0.6])
    (15.0, None)
    """
    for place, score in enumerate(scores):
        if score >= level:
            if place == 0:
                return float(versions[0])
            before, begin = scores[place - 1], versions[place - 1]
            return begin + (versions[place] - begin) * (level - before) / (score - before)
    return None


def seconds_at(version: float, seconds: Sequence[float]) -> float:
    """Return when a version was there, counted from the loop's begin.

    Args:
        version: may lie between two.
        seconds: at which step 0, 1, ... ended; the step `v - 1` makes version v.

    >>> seconds_at(1.5, [2.0, 5.0]), seconds_at(0.0, [2.0])
    (3.5, 0.0)
    """
    return float(np.interp(version, range(len(seconds) + 1), [0.0, *seconds]))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in which at least one span lasts.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total
