"""Regressions: whether a commit made a figure worse than the one before, beyond its own noise.

Two tables are compared figure by figure over the cases they share (a case is a configuration
with its seed, or a script with its arguments). Each pair gives a relative change, signed so
that positive is worse. The figure got worse when the median change exceeds the allowance and
most of the pairs agree in direction; got better is the same rule the other way round.

The allowance is the largest of three things: what the figure is allowed to move, three times
the standard error that the spread of the pairs themselves shows, and three times the usual
distance between successive commits in the history. With fewer than three pairs there is no
spread to speak of, and the figure is allowed to move twice as far.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import isfinite, sqrt
from statistics import median
from typing import Any

MAD_TO_DEVIATION = 1.4826
"""Standard deviations in a median absolute deviation, for normal noise."""

NOISE_FACTOR = 3.0
"""Standard errors, and usual distances between commits, that are taken for noise."""

AGREEING_SHARE = 0.75
"""Share of the pairs that must point the same way."""

FEW_PAIRS = 3
"""With fewer pairs than this, the tolerance counts twice."""

HISTORY_COMMITS = 10
"""Newest earlier tables that the usual distance is taken from."""

SIZE = re.compile(r"c?\d+")
"""Part of a figure's name that says at which size it was measured."""


class Direction(StrEnum):
    """Which way a figure should go."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"
    """Shown, never rewarded."""


class Verdict(StrEnum):
    """What became of a figure."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    """No change beyond noise."""
    UNREWARDED = "unrewarded"
    """Nothing to compare with, or a figure that has no better side."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity of a benchmark table."""

    name: str
    better: Direction = Direction.NEITHER
    tolerance: float = 0.05
    """Relative change that nobody minds."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of two tables."""

    figure: Figure
    verdict: Verdict
    pairs: int
    """Cases that both tables have."""
    before: float | None
    """Median of the shared cases in the earlier table, in the figure's unit."""
    after: float | None
    change: float | None
    """Median relative change of the pairs, positive when the figure grew."""
    allowance: float | None
    """Relative change up to which it counts as noise."""


def flatten(nested: Mapping[str, Any]) -> dict[str, float]:
    """Return every finite number of nested objects under its path; truth values and lists are none.

    >>> flatten({"ratio": {"4": 0.97, "64": 1.2}, "pairs": 7, "equal": True, "each": [1, 2]})
    {'ratio.4': 0.97, 'ratio.64': 1.2, 'pairs': 7.0}
    """
    found: dict[str, float] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": number for inner, number in flatten(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            found[name] = float(value)
    return found


def figure_for(name: str) -> Figure:
    """Return which way a figure should go, told by its name; unknown names are only shown.

    Of a dotted name the last part decides that is no size such as `64` or `c64`.

    >>> [figure_for(name).better.value for name in ("loop_s", "pairs_per_s", "ratio.c64", "s3.missing")]
    ['lower', 'higher', 'higher', 'lower']
    """
    parts = [part for part in name.split(".") if not SIZE.fullmatch(part)]
    said = parts[-1] if parts else name
    if said in KNOWN:
        return replace(KNOWN[said], name=name)
    if said.endswith(("_per_second", "_per_s", "_per_cpu_s")):
        return Figure(name, Direction.HIGHER, 0.10)
    if said.endswith(("_s", "_ms", "_seconds", "_gb", "_mib")) or said.startswith("seconds_per"):
        return Figure(name, Direction.LOWER, 0.10)
    return Figure(name)


def compare(
    figure: Figure,
    before: Mapping[str, float],
    after: Mapping[str, float],
    history: Sequence[Mapping[str, float]] = (),
) -> Comparison:
    """Compare one figure of two tables.

    Args:
        figure: the figure, with its better side.
        before: case -> value in the earlier table.
        after: case -> value in the later table.
        history: the tables before `before`, oldest first.
    """
    shared = [c for c in sorted(before) if c in after and isfinite(before[c]) and isfinite(after[c])]
    if not shared:
        return Comparison(figure, Verdict.UNREWARDED, 0, None, None, None, None)
    changes = _changes([before[c] for c in shared], [after[c] for c in shared])
    middle = median(changes)
    allowance = allowed_change(figure, changes, [*history, before])
    return Comparison(
        figure,
        _verdict(figure.better, changes, middle, allowance),
        len(shared),
        median(before[c] for c in shared),
        median(after[c] for c in shared),
        middle,
        allowance,
    )


def allowed_change(figure: Figure, changes: Sequence[float], history: Sequence[Mapping[str, float]]) -> float:
    """Return the relative change up to which a figure counts as unchanged.

    Args:
        figure: the figure.
        changes: relative changes of the pairs, at least one.
        history: case -> value of earlier tables, oldest first.
    """
    tolerance = figure.tolerance if len(changes) >= FEW_PAIRS else 2.0 * figure.tolerance
    middle = median(changes)
    deviation = MAD_TO_DEVIATION * median(abs(change - middle) for change in changes)
    spread = deviation / sqrt(len(changes))
    return max(tolerance, NOISE_FACTOR * spread, NOISE_FACTOR * usual_distance(history))


def usual_distance(history: Sequence[Mapping[str, float]]) -> float:
    """Return the median relative distance between successive tables; 0 with fewer than three.

    Two tables have one distance, and that may be the very change in question.

    >>> round(usual_distance([{"a": 10.0}, {"a": 11.0}, {"a": 10.0}]), 3)
    0.091
    """
    recent = history[-HISTORY_COMMITS:]
    distances = []
    for earlier, later in pairwise(recent):
        shared = [c for c in earlier if c in later and isfinite(earlier[c]) and isfinite(later[c])]
        if shared:
            distances.append(abs(median(_changes([earlier[c] for c in shared], [later[c] for c in shared]))))
    return median(distances) if len(distances) >= 2 else 0.0


def _changes(before: Sequence[float], after: Sequence[float]) -> list[float]:
    # The larger of the two values is the scale, so that a change and its way back weigh the same.
    return [0.0 if a == b else (a - b) / max(abs(a), abs(b)) for b, a in zip(before, after, strict=True)]


def _verdict(better: Direction, changes: Sequence[float], middle: float, allowance: float) -> Verdict:
    if better is Direction.NEITHER:
        return Verdict.UNREWARDED
    if abs(middle) <= allowance:
        return Verdict.SAME
    agreeing = sum(1 for change in changes if change * middle > 0.0)
    if agreeing < AGREEING_SHARE * len(changes):
        return Verdict.SAME
    grew = middle > 0.0
    return Verdict.BETTER if grew == (better is Direction.HIGHER) else Verdict.WORSE


MUST_BE_ZERO = (
    *("lost", "twice", "beyond_bound", "wrong", "other_exits", "violations", "crashes", "state_changes"),
    *("missing", "doubled", "damaged", "not_completed", "postgres_wrong", "wrong_tokens"),
    *("metrics_missing", "versions_missing", "batches_missing"),
)
"""Counts of broken promises: any growth is a regression."""

MUST_BE_ONE = ("steps_equal_share", "logprobs_equal_share", "identical_share")
"""Shares of kept promises: any fall is a regression."""

PARAMETERS = ("down_s", "idle_workers", "heartbeats_per_s", "virtual_hours")
"""What was asked for, or what grows with it: shown, never rewarded."""

KNOWN = {
    figure.name: figure
    for figure in (
        *(Figure(name, Direction.LOWER, 0.0) for name in MUST_BE_ZERO),
        *(Figure(name, Direction.HIGHER, 0.0) for name in MUST_BE_ONE),
        *(Figure(name) for name in PARAMETERS),
        Figure("pass_after", Direction.HIGHER, 0.08),
        Figure("pass_gain", Direction.HIGHER, 0.15),
        Figure("seconds_per_step", Direction.LOWER, 0.10),
        Figure("loop_s", Direction.LOWER, 0.10),
        Figure("total_s", Direction.LOWER, 0.10),
        Figure("learner_idle_share", Direction.LOWER, 0.20),
        Figure("dropped_stale_share", Direction.LOWER, 0.50),
        Figure("drafting_acceptance", Direction.HIGHER, 0.10),
        Figure("tokens_per_pass", Direction.HIGHER, 0.10),
        Figure("ratio", Direction.HIGHER, 0.10),
        Figure("ratio_over_stage_sum", Direction.HIGHER, 0.10),
        Figure("ratio_demo_model", Direction.HIGHER, 0.10),
        Figure("ratio_min", Direction.HIGHER, 0.05),
        Figure("greedy", Direction.HIGHER, 0.10),
        Figure("sampled", Direction.HIGHER, 0.10),
        Figure("unhelpful", Direction.HIGHER, 0.05),
        Figure("no_history", Direction.HIGHER, 0.05),
        Figure("wall_share", Direction.LOWER, 0.50),
        Figure("cpu_share", Direction.LOWER, 0.50),
        Figure("idle_share", Direction.LOWER, 0.20),
        Figure("idle_share_overlapped", Direction.LOWER, 0.50),
        Figure("stale_share", Direction.LOWER, 0.50),
        Figure("withdrawn_share", Direction.LOWER, 0.50),
        Figure("wasted_share", Direction.LOWER, 0.50),
        Figure("lost_throughput", Direction.LOWER, 0.50),
        Figure("heartbeats_core_share", Direction.LOWER, 0.20),
        Figure("false_positives", Direction.LOWER, 0.0),
    )
}
"""Figures whose better side their name alone does not tell."""
