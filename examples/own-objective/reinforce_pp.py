"""REINFORCE++ with a baseline: Hu and others, arXiv 2501.03262.

A reward is compared with the mean of its group. The deviation by which it is divided is that of the whole
batch, not of the group: a group of almost equal rewards gets no huge advantages.
"""

import numpy as np
import numpy.typing as npt


def reinforce_pp(
    rewards: npt.NDArray[np.float64], group: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the advantage of each trajectory; [B], [B], [B] -> [B]."""
    means = np.bincount(group, rewards) / np.bincount(group)
    centred = rewards - means[group]
    return (centred - centred.mean()) / (centred.std() + 1e-8)
