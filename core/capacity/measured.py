"""Measured: what a run says of its task and machines, and what the capacity model expects by that.

A live run measures itself (`LoopMeasures.measured`), a recorded one is read from its log (`measure`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from antiphon.core.capacity.model import best_pace, least_staleness, pace, required_supply, shape_of
from antiphon.core.config_sections import LoopSection
from antiphon.core.errors import InfeasibleError
from antiphon.core.status import CapacityRecord

WORTH_IT = 0.005
"""Another publish interval is named where it saves this share of a step."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run gives."""

    steps: int
    trained: float
    """Completions that a step trained on."""
    seconds: tuple[float, float, float, float]
    """T, T_b, L and L_0 of the capacity model, medians."""
    completion_tokens: float
    """Sampled for each completion of training, those of evaluations shared out among them."""
    acceptance: float
    """Completions trained on over all that were rewarded or dropped."""
    workers: float
    tokens_per_s: float
    """Of one worker while its engine runs."""
    step_s: float
    """From one commit to the next, mean."""

    def expected(self, loop: LoopSection, speed: float = 1.0) -> CapacityRecord:
        """Return what is expected of this run, with engines `speed` times as fast.

        Raises:
            InfeasibleError: for what is no measurement, such as a step that took no time that a clock shows.
        """
        train_s, broadcast_s, group_s, place_s = self.seconds
        shape = shape_of(loop, train_s, broadcast_s, group_s / speed, place_s / speed, self.acceptance)
        tokens_per_s = self.tokens_per_s * self.workers * speed
        supply = tokens_per_s / self.completion_tokens
        found = pace(shape, loop.max_staleness, loop.publish_interval, supply)
        best = best_pace(shape, loop.max_staleness, supply)
        better = best.step_s < found.step_s * (1.0 - WORTH_IT)
        return CapacityRecord(
            need_tokens_per_s=required_supply(shape) * self.completion_tokens,
            supply_tokens_per_s=tokens_per_s,
            acceptance=self.acceptance,
            train_s=shape.train_s,
            broadcast_s=shape.broadcast_s,
            group_s=shape.group_s,
            place_s=shape.place_s,
            regime=found.regime.value,
            step_s=found.step_s,
            measured_step_s=self.step_s,
            publish_interval=(best if better else found).publish_interval,
            least_staleness=least_staleness(shape),
        )


def measure(lines: Sequence[Mapping[str, Any]], loop: LoopSection) -> Measured:
    """Return what the lines of a run log (`lineage.run_log`) say.

    Args:
        lines: of the steps, in order.
        loop: of that run.

    Raises:
        InfeasibleError: when they say nothing, or nothing was trained.
    """
    used = [line for line in lines if line.get("batch")]
    batches, timings = [line["batch"] for line in used], [line["timings"] for line in used]
    trained = sum(batch["trajectories"] for batch in batches)
    left_out = sum(batch["groups_filtered"] + batch["groups_dropped_stale"] for batch in batches)
    if used and not trained:
        raise InfeasibleError("that run trained on nothing, so its acceptance is 0; look at its rewards")
    known = [one for one in timings if "plan_train_s" in one]
    workers = float(median(len(one["workers"]) for one in known)) if known else 0.0
    if not workers:
        raise InfeasibleError("that run recorded no trained batch to measure by; let it train a few steps")
    walls = [float(one["wall_s"]) for one in timings]
    return Measured(
        steps=len(used),
        trained=trained / len(used),
        seconds=(
            median(one["plan_train_s"] for one in known),
            median(one["plan_broadcast_s"] for one in known),
            median(one["plan_group_s"] for one in known),
            median(one["plan_place_s"] for one in known),
        ),
        completion_tokens=fmean(_tokens(one, loop) for one in known),
        acceptance=trained / (trained + left_out * loop.group_size),
        workers=workers,
        tokens_per_s=known[-1]["plan_supply_tokens_per_s"] / workers,
        step_s=(walls[-1] - walls[0]) / max(1, len(walls) - 1),
    )


def _tokens(one: Mapping[str, float], loop: LoopSection) -> float:
    """Return the tokens per completion with which a run computed its need."""
    shape = shape_of(loop, one["plan_train_s"], 0.0, 1.0, 1.0, one["plan_acceptance"])
    return one["plan_need_tokens_per_s"] / required_supply(shape)
