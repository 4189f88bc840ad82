"""Advantages: each trajectory's reward compared with its own group, in float64.

Legend: G trajectories of one group.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that nearly equal rewards give no huge advantages."""


def has_variance(rewards: npt.NDArray[np.float64]) -> bool:
    """Return whether the rewards [G] of a group differ; without that a group teaches nothing.

    >>> has_variance(np.array([1.0, 1.0])), has_variance(np.array([1.0, 0.0]))
    (False, True)
    """
    return bool(rewards.size) and bool(rewards.max() > rewards.min())


def group_advantages(
    rewards: npt.NDArray[np.float64],
    normalise: bool,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    counted: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.float64]:
    """Return the advantages [G]: reward minus baseline, over the group's deviation if asked.

    The deviation is that of a sample (divided by n - 1). The baseline `leave_one_out` is the mean of the
    group's other rewards (RLOO; Ahmadian and others, arXiv 2402.14740): r_i - mean_(j != i) r_j =
    n / (n - 1) * (r_i - mean r). A group without variance gives exact zeros.

    Args:
        rewards: [G] float64, finite.
        normalise: divide by the group's standard deviation.
        baseline: what a reward is compared with.
        counted: [G]; the others, cut off or not scored, get 0 and have no part in baseline, deviation or
            n. None counts all.

    >>> group_advantages(np.array([1.0, 0.0]), normalise=False)
    array([ 0.5, -0.5])
    >>> group_advantages(np.array([1.0, 0.0, 0.5]), False, "leave_one_out", np.array([True, True, False]))
    array([ 1., -1.,  0.])
    """
    found = np.zeros_like(rewards)
    among = np.ones(rewards.shape, dtype=np.bool_) if counted is None else counted
    kept = rewards[among]
    if not has_variance(kept):
        return found
    centred = kept - float(kept.mean())
    if baseline == "leave_one_out":
        centred *= kept.size / (kept.size - 1)
    scale = float(kept.std(ddof=1)) + STD_FLOOR if normalise else 1.0
    found[among] = centred / scale
    return found
