"""Measured: what a run that was recorded says of its task and machines, for plans of others like it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from antiphon.core.capacity.live import expect
from antiphon.core.capacity.model import required_supply, shape_of
from antiphon.core.config_sections import LoopSection
from antiphon.core.errors import InfeasibleError
from antiphon.core.status import CapacityRecord


@dataclass(frozen=True, slots=True)
class Measured:
    """What the run log of a run gives."""

    steps: int
    trained: float
    """Completions that a step trained on."""
    train_s: float
    """T: median seconds of a learner step, with its commit where the run measured itself."""
    completion_tokens: float
    """Sampled for each completion of training, those of evaluations shared out among them."""
    acceptance: float
    """Completions trained on over all that were rewarded or dropped."""
    workers: float
    tokens_per_s: float | None
    """Of one worker while its engine runs; of a run that did not measure itself idle time included, which is
    at most what it could have sampled, where it had to wait."""
    broadcast_s: float | None = None
    group_s: float | None = None
    """L: from the lease to the rewards of the group that a batch waited for."""
    place_s: float = 0.0
    step_s: float = 0.0
    """From one commit to the next, mean; 0 where that is not known."""

    def expected(self, loop: LoopSection, speed: float = 1.0) -> CapacityRecord | None:
        """Return what is expected of this run by all of its steps, with engines `speed` times as fast.

        None if it did not measure itself.
        """
        if self.tokens_per_s is None or self.broadcast_s is None or self.group_s is None:
            return None
        seconds = (self.train_s, self.broadcast_s, self.group_s / speed, self.place_s / speed)
        supply = self.tokens_per_s * self.workers * speed
        return expect(loop, seconds, self.acceptance, self.completion_tokens, supply, self.step_s)


def measure(lines: Sequence[Mapping[str, Any]], loop: LoopSection) -> Measured:
    """Return what the lines of a run log (`lineage.run_log`) say.

    Args:
        lines: of the steps, in order.
        loop: of that run.

    Raises:
        InfeasibleError: when they say nothing, or nothing was trained.
    """
    used = [line for line in lines if line.get("batch") and "train_s" in line["timings"]]
    if not used:
        raise InfeasibleError("that run recorded no trained batch to measure by; let it train a few steps")
    batches, timings = [line["batch"] for line in used], [line["timings"] for line in used]
    trained = sum(batch["trajectories"] for batch in batches)
    left_out = sum(batch["groups_filtered"] + batch["groups_dropped_stale"] for batch in batches)
    if not trained:
        raise InfeasibleError("that run trained on nothing, so its acceptance is 0; look at its rewards")
    acceptance = trained / (trained + left_out * loop.group_size)
    walls = [float(one.get("wall_s", 0.0)) for one in timings]
    workers = float(median(len(one.get("workers") or {}) for one in timings))
    passed = walls[-1] - walls[0]
    known = [one for one in timings if "plan_train_s" in one]
    if known and workers:
        return Measured(
            steps=len(used),
            trained=trained / len(used),
            train_s=median(one["plan_train_s"] for one in known),
            completion_tokens=fmean(_tokens(one, loop) for one in known),
            acceptance=acceptance,
            workers=workers,
            tokens_per_s=known[-1]["plan_supply_tokens_per_s"] / workers,
            broadcast_s=median(one["plan_broadcast_s"] for one in known),
            group_s=median(one["plan_group_s"] for one in known),
            place_s=median(one["plan_place_s"] for one in known),
            step_s=passed / max(1, len(walls) - 1),
        )
    tokens = sum(batch["completion_tokens_mean"] * batch["trajectories"] for batch in batches) / trained
    later = sum(batch["trajectories"] for batch in batches[1:]) / acceptance * tokens
    return Measured(
        steps=len(used),
        trained=trained / len(used),
        train_s=median(float(one["train_s"]) for one in timings),
        completion_tokens=tokens,
        acceptance=acceptance,
        workers=workers,
        tokens_per_s=later / passed / workers if passed > 0 and workers else None,
    )


def _tokens(one: Mapping[str, float], loop: LoopSection) -> float:
    """Return the tokens per completion with which a run computed its need."""
    shape = shape_of(loop, one["plan_train_s"], 0.0, 1.0, 1.0, one["plan_acceptance"])
    return one["plan_need_tokens_per_s"] / required_supply(shape)
