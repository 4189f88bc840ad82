"""Live capacity: the capacity model over what a run measures of itself, made again after each batch.

Shares, lengths and rates are moving averages over some `MEMORY` batches, seconds are medians over the last
ones, so that one slow step changes no plan.
"""

import math

from antiphon.core.capacity.model import best_pace, least_staleness, pace, required_supply, shape_of
from antiphon.core.config import RunConfig
from antiphon.core.config_sections import LoopSection
from antiphon.core.errors import InfeasibleError
from antiphon.core.loop import events as e
from antiphon.core.loop.loop_measures import LoopMeasures
from antiphon.core.status import CapacityRecord

MEMORY = 6.0
"""Batches of which a moving average remembers a share of 1 - 1/e."""
WORTH_IT = 0.005
"""Another publish interval is named where it saves this share of a step."""


def expect(
    loop: LoopSection,
    seconds: tuple[float, float, float, float],
    acceptance: float,
    tokens: float,
    tokens_per_s: float,
    measured_step_s: float,
) -> CapacityRecord:
    """Return what the capacity model expects of a run that was measured.

    Args:
        loop: as configured.
        seconds: T, T_b, L and L_0.
        acceptance: share of the rewarded groups that is trained on.
        tokens: sampled for each completion of training.
        tokens_per_s: of all workers while their engines run.
        measured_step_s: seconds per step; 0 while that is not known.

    Raises:
        InfeasibleError: for what is no measurement, such as a step that took no time that a clock shows.
    """
    shape, supply = shape_of(loop, *seconds, acceptance), tokens_per_s / tokens
    found = pace(shape, loop.max_staleness, loop.publish_interval, supply)
    best = best_pace(shape, loop.max_staleness, supply)
    better = best.step_s < found.step_s * (1.0 - WORTH_IT)
    return CapacityRecord(
        need_tokens_per_s=required_supply(shape) * tokens,
        supply_tokens_per_s=tokens_per_s,
        acceptance=acceptance,
        train_s=shape.train_s,
        broadcast_s=shape.broadcast_s,
        group_s=shape.group_s,
        place_s=shape.place_s,
        regime=found.regime.value,
        step_s=found.step_s,
        measured_step_s=measured_step_s,
        publish_interval=(best if better else found).publish_interval,
        least_staleness=least_staleness(shape),
    )


class Average:
    """A moving average; NaN before its first value."""

    def __init__(self) -> None:
        self.value = math.nan

    def take(self, value: float) -> None:
        """Take in a value.

        >>> average = Average()
        >>> for value in (1.0, 1.0, 2.0): average.take(value)
        >>> round(average.value, 3)
        1.154
        """
        weight = -math.expm1(-1.0 / MEMORY)
        self.value = value if math.isnan(self.value) else self.value + weight * (value - self.value)


class LiveCapacity:
    """Averages of a run, and the plan that follows from them; kept in memory alone."""

    def __init__(self, config: RunConfig) -> None:
        self._loop = config.loop
        self._sampled, self._trained = Average(), Average()
        self._step_s, self._supply = Average(), Average()
        self._last_commit: float | None = None
        self.record: CapacityRecord | None = None
        """The last plan; None before a batch was trained."""

    def observe(self, event: e.JournalEvent, now: float) -> None:
        """Take in an event of the run."""
        match event:
            case e.BatchSealed():
                used = len(event.group_ids)
                self._trained.take(used)
                self._sampled.take(used + event.groups_filtered + event.groups_dropped_stale)
            case e.StepCommitted():
                if self._last_commit is not None:
                    self._step_s.take(now - self._last_commit)
                self._last_commit = now

    def plan(self, measures: LoopMeasures, tokens_per_s: float) -> CapacityRecord | None:
        """Plan again with the seconds that were measured; `tokens_per_s` is what all workers can sample."""
        seconds, tokens = measures.seconds(), measures.completion_tokens()
        counted = tokens > 0.0 and not math.isnan(self._trained.value)
        if seconds is None or not counted or not 0.0 < tokens_per_s < math.inf:
            return None
        self._supply.take(tokens_per_s)
        acceptance = min(1.0, self._trained.value / max(1.0, self._sampled.value))
        measured_s = 0.0 if math.isnan(self._step_s.value) else self._step_s.value
        try:
            self.record = expect(self._loop, seconds, acceptance, tokens, self._supply.value, measured_s)
        except InfeasibleError:  # such as a step that took no time that a clock shows
            return None
        return self.record
