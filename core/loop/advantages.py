"""Advantages: each trajectory's reward compared with its own group, in float64.

Legend: G trajectories of one group.
"""

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


def group_advantages(rewards: npt.NDArray[np.float64], normalise: bool) -> npt.NDArray[np.float64]:
    """Return the advantages [G]: reward minus the group's mean, over its deviation if asked.

    The deviation is that of a sample (divided by G - 1). A group without variance gives exact
    zeros.

    Args:
        rewards: [G] float64, finite.
        normalise: divide by the group's standard deviation.

    >>> group_advantages(np.array([1.0, 0.0]), normalise=False)
    array([ 0.5, -0.5])
    """
    if not has_variance(rewards):
        return np.zeros_like(rewards)
    centred = rewards - float(rewards.mean())
    scale = float(rewards.std(ddof=1)) + STD_FLOOR if normalise else 1.0
    return np.asarray(centred / scale, dtype=np.float64)
