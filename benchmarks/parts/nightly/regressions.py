"""Regressions: whether a commit made a number worse than the one before, beyond its own noise.

Two tables are compared measure by measure over the cases they share (a case is a configuration
with its seed, or a script with its arguments). Each pair gives a relative change, signed so
that positive is worse. A measure got worse when the median change exceeds the allowance and
most of the pairs agree in direction; got better is the same rule the other way round.

The allowance is the largest of three things: what the measure is allowed to move, three times
the standard error that the spread of the pairs themselves shows, and three times the usual
distance between successive commits in the history. With fewer than three pairs there is no
spread to speak of, and the measure is allowed to move twice as far.
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
"""Part of a measure's name that says at which size it was measured."""


class Direction(StrEnum):
    """Which way a measure should go."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"
    """Shown, never compared."""


class Verdict(StrEnum):
    """What became of a measure."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    """No change beyond noise."""
    UNDECIDED = "undecided"
    """Nothing to compare with, or a measure that has no better side."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured quantity of a benchmark table."""

    name: str
    better: Direction = Direction.NEITHER
    tolerance: float = 0.05
    """Relative change that counts for nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of two tables."""

    measure: Measure
    verdict: Verdict
    pairs: int
    """Cases that both tables have."""
    before: float | None
    """Median of the shared cases in the earlier table, in the measure's unit."""
    after: float | None
    change: float | None
    """Median relative change of the pairs, positive when the measure grew."""
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


def measure_for(name: str) -> Measure:
    """Return which way a measure should go, by its name; unknown names are only shown.

    Of a dotted name the last part decides that is no size such as `64` or `c64`.

    >>> [measure_for(name).better.value for name in ("loop_s", "pairs_per_s", "ratio.c64", "s3.missing")]
    ['lower', 'higher', 'higher', 'lower']
    """
    parts = [part for part in name.split(".") if not SIZE.fullmatch(part)]
    said = parts[-1] if parts else name
    if said in KNOWN:
        return replace(KNOWN[said], name=name)
    if said.endswith(("_per_second", "_per_s", "_per_cpu_s")):
        return Measure(name, Direction.HIGHER, 0.10)
    if said.endswith(("_s", "_ms", "_seconds", "_gb", "_mib")) or said.startswith("seconds_per"):
        return Measure(name, Direction.LOWER, 0.10)
    return Measure(name)


def compare(
    measure: Measure,
    before: Mapping[str, float],
    after: Mapping[str, float],
    history: Sequence[Mapping[str, float]] = (),
) -> Comparison:
    """Compare one measure of two tables, case -> value each; `history`: the tables before, oldest first."""
    shared = [c for c in sorted(before) if c in after and isfinite(before[c]) and isfinite(after[c])]
    if not shared:
        return Comparison(measure, Verdict.UNDECIDED, 0, None, None, None, None)
    changes = _changes([before[c] for c in shared], [after[c] for c in shared])
    middle = median(changes)
    allowance = allowed_change(measure, changes, [*history, before])
    return Comparison(
        measure,
        _verdict(measure.better, changes, middle, allowance),
        len(shared),
        median(before[c] for c in shared),
        median(after[c] for c in shared),
        middle,
        allowance,
    )


def allowed_change(
    measure: Measure, changes: Sequence[float], history: Sequence[Mapping[str, float]]
) -> float:
    """Return the relative change up to which a measure counts as unchanged.

    `changes`: of the pairs, at least one; `history`: case -> value of earlier tables, oldest first.
    """
    tolerance = measure.tolerance if len(changes) >= FEW_PAIRS else 2.0 * measure.tolerance
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
        return Verdict.UNDECIDED
    if abs(middle) <= allowance:
        return Verdict.SAME
    agreeing = sum(1 for change in changes if change * middle > 0.0)
    if agreeing < AGREEING_SHARE * len(changes):
        return Verdict.SAME
    grew = middle > 0.0
    return Verdict.BETTER if grew == (better is Direction.HIGHER) else Verdict.WORSE


_SIDES = (
    # Broken promises, where any growth is a regression, and kept ones, where any fall is.
    (
        Direction.LOWER,
        0.0,
        "lost twice beyond_bound wrong wrong_tokens postgres_wrong other_exits violations",
    ),
    (Direction.LOWER, 0.0, "crashes state_changes missing doubled damaged not_completed false_positives"),
    (Direction.LOWER, 0.0, "metrics_missing versions_missing batches_missing"),
    (Direction.HIGHER, 0.0, "steps_equal_share logprobs_equal_share identical_share"),
    (Direction.HIGHER, 0.05, "ratio_min unhelpful unhelpful_to_keyed no_history"),
    (Direction.HIGHER, 0.08, "pass_after pass_last_three"),
    (Direction.HIGHER, 0.10, "ratio ratio_over_stage_sum ratio_demo_model greedy sampled"),
    (Direction.HIGHER, 0.10, "drafting_acceptance tokens_per_pass drafting_tokens_per_pass"),
    (Direction.HIGHER, 0.15, "pass_gain"),
    (Direction.LOWER, 0.20, "learner_idle_share idle_share heartbeats_core_share"),
    (Direction.LOWER, 0.50, "dropped_stale_share stale_share idle_share_overlapped"),
    (Direction.LOWER, 0.50, "wall_share cpu_share wasted_share lost_throughput"),
    # What was asked for, whatever its name ends with: shown, never rewarded.
    (Direction.NEITHER, 0.0, "down_s idle_workers heartbeats_per_s virtual_hours"),
)
KNOWN = {name: Measure(name, side, tolerance) for side, tolerance, names in _SIDES for name in names.split()}
"""Measures whose name alone does not show their better side."""
