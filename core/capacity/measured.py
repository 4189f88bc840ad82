"""Measured: what a run that was recorded says of its task and machines, for plans of others like it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from antiphon.core.errors import InfeasibleError


@dataclass(frozen=True, slots=True)
class Measured:
    """What the run log of a run gives."""

    steps: int
    train_s: float
    """Median seconds of a learner step."""
    completion_tokens: float
    acceptance: float
    """Completions trained on over all that were rewarded or dropped."""
    tokens_per_s: float | None
    """Of one worker, idle time included: at most what it could have sampled, where it had to wait."""
    broadcast_s: float | None = None


def measure(lines: Sequence[Mapping[str, Any]], group_size: int) -> Measured:
    """Return what the lines of a run log (`lineage.run_log`) say.

    Args:
        lines: of the steps, in order.
        group_size: G, completions of a group.

    Raises:
        InfeasibleError: when they say nothing, or nothing was trained.
    """
    used = [line for line in lines if line.get("batch") and "train_s" in line["timings"]]
    if not used:
        raise InfeasibleError("that run recorded no trained batch to measure by; let it train a few steps")
    batches = [line["batch"] for line in used]
    trained = sum(batch["trajectories"] for batch in batches)
    left_out = sum(batch["groups_filtered"] + batch["groups_dropped_stale"] for batch in batches) * group_size
    if not trained:
        raise InfeasibleError("that run trained on nothing, so its acceptance is 0; look at its rewards")
    sampled = trained + left_out
    tokens = sum(batch["completion_tokens_mean"] * batch["trajectories"] for batch in batches) / trained
    walls = [float(line["timings"].get("wall_s", 0.0)) for line in used]
    workers = median(len(line["timings"].get("workers") or {}) for line in used)
    passed = walls[-1] - walls[0]
    later = sum(b["trajectories"] for b in batches[1:]) / trained * sampled * tokens
    return Measured(
        steps=len(used),
        train_s=median(float(line["timings"]["train_s"]) for line in used),
        completion_tokens=tokens,
        acceptance=trained / sampled,
        tokens_per_s=later / passed / workers if passed > 0 and workers else None,
    )
