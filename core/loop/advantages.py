"""Advantages: each trajectory's reward compared with its own group, in float64, or by the user's function.

Legend: G trajectories of one group, B of all groups of a batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ConfigError

OwnAdvantage = Callable[..., Any]
"""`function(rewards, group, lengths)` of `algorithm.advantage`: [B] float64 rewards, [B] int64, the numbers
of their groups from 0 without a gap, [B] int64 sampled tokens; returns [B] advantages. Neither the order of
trajectories nor how groups are numbered may matter. See docs/guides/own-objective.md."""

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


def batch_advantages(
    rewards: Sequence[npt.NDArray[np.float64]],
    counted: Sequence[npt.NDArray[np.bool_]],
    normalise: bool,
    baseline: Literal["mean", "leave_one_out", "batch"],
) -> list[npt.NDArray[np.float64]]:
    """Return the advantages [G] of all groups of a batch, over the deviation of all of them if asked.

    REINFORCE++ (Hu and others, arXiv 2501.03262): with the baseline `batch` as (r_i - mean r) / std r over
    the batch, with that of a group as REINFORCE++-baseline, whose mean over the batch is 0 already. The
    deviation is that of a sample. Advantages that are all equal are exact zeros.

    Args:
        rewards: [G] of each group, finite.
        counted: [G] of each group, as in `group_advantages`.
        normalise: divide by the standard deviation of the batch.
        baseline: as in `group_advantages`, or the mean of all rewards.

    >>> rewards, all_ = [np.array([1.0, 0.0]), np.array([4.0, 0.0])], [np.array([True, True])] * 2
    >>> [one.round(2).tolist() for one in batch_advantages(rewards, all_, True, "mean")]
    [[0.3, -0.3], [1.19, -1.19]]
    """
    among = np.concatenate([np.zeros(0, dtype=np.bool_), *counted])
    if baseline == "batch":
        found = group_advantages(np.concatenate([np.zeros(0), *rewards]), False, counted=among)
    else:
        own = [
            group_advantages(one, False, baseline, kept) for one, kept in zip(rewards, counted, strict=True)
        ]
        found = np.concatenate([np.zeros(0), *own])
    if normalise and has_variance(found[among]):
        found /= float(found[among].std(ddof=1)) + STD_FLOOR
    return np.split(found, np.cumsum([len(one) for one in counted])[:-1]) if counted else []


def overlong_punishment(
    lengths: npt.NDArray[np.int64], max_tokens: int, margin: int
) -> npt.NDArray[np.float64]:
    """Return the punishment [G] of completions for their lengths [G], from 0 to -1.

    DAPO's soft overlong punishment (Yu and others, arXiv 2503.14476, equation 13): with y tokens, L =
    `max_tokens` and C = `margin` it is 0 up to L - C, (L - C - y) / C up to L, and -1 beyond.

    >>> overlong_punishment(np.array([50, 90, 100, 120]), max_tokens=100, margin=20)
    array([ 0. , -0.5, -1. , -1. ])
    """
    return np.clip((max_tokens - margin - lengths) / margin, -1.0, 0.0) + 0.0


def own_advantages(
    called: str,
    function: OwnAdvantage,
    rewards: Sequence[npt.NDArray[np.float64]],
    lengths: Sequence[npt.NDArray[np.int64]],
    counted: Sequence[npt.NDArray[np.bool_]],
) -> list[npt.NDArray[np.float64]]:
    """Return the advantages that the user's function gives all groups of a batch, [G] each.

    Args:
        called: the field with its value, with which what is wrong begins.
        function: of all trajectories that count, groups numbered in their order.
        rewards: [G] of each group, finite.
        lengths: [G] of each group, sampled tokens.
        counted: [G] of each group; the others get 0, and the function does not see them.

    Raises:
        ConfigError: when it fails, or returns something else than a finite number for each.
    """
    if not counted:
        return []
    among, group = np.concatenate(counted), np.repeat(np.arange(len(counted)), [len(x) for x in counted])
    found = np.zeros(len(among))
    numbers = np.unique(group[among], return_inverse=True)[1]
    given = [np.concatenate(rewards)[among], numbers, np.concatenate(lengths)[among]]
    found[among] = _call(called, function, *given)
    return np.split(found, np.cumsum([len(one) for one in counted])[:-1])


def check_advantage(called: str, function: OwnAdvantage) -> None:
    """Try a function of the user's out on made-up rewards.

    Raises:
        ConfigError: as `own_advantages`, or when it gives others for the same trajectories in another order,
            or with their groups numbered otherwise.
    """
    rng = np.random.default_rng(0)
    group, lengths = np.repeat(np.arange(5), [4, 4, 4, 2, 1]), rng.integers(1, 40, 15)
    order, numbers = rng.permutation(15), rng.permutation(5)
    # Among them a group whose rewards are equal, and one of a single trajectory.
    mixed = np.concatenate([rng.integers(0, 2, 8), np.ones(4), rng.standard_normal(3)])
    for rewards in (mixed, np.zeros(15)):
        found = _call(called, function, rewards, group, lengths)
        other = _call(called, function, rewards[order], numbers[group[order]], lengths[order])
        if not np.allclose(other, found[order], rtol=1e-9, atol=1e-9):
            raise ConfigError(
                f"{called} gives the same trajectories other advantages in another order, or with their "
                "groups numbered otherwise; use the arguments alone, and `group` only to tell groups apart"
            )


def _call(called: str, function: OwnAdvantage, *given: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    count = len(given[0])
    if not count:
        return np.zeros(0)
    try:
        found = np.asarray(function(*given), dtype=np.float64)
    except Exception as error:  # whatever the user's code raises
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{called} raised {type(error).__name__}: {said}") from error
    if found.shape != (count,) or not np.isfinite(found).all():
        wrong = "values that are not finite" if found.shape == (count,) else f"the shape {list(found.shape)}"
        raise ConfigError(f"{called} returned {wrong} for {count} trajectories; return a number for each")
    return found
