"""Run-ahead planner: keeps what is in flight, and in which order, up to date with what a run measures."""

import asyncio
from collections.abc import Callable

import structlog

from antiphon.core.capacity.live import LiveCapacity
from antiphon.core.config import RunConfig
from antiphon.core.lengths.memory import LengthMemory
from antiphon.core.loop.events import JournalEvent
from antiphon.core.loop.loop_measures import LoopMeasures
from antiphon.core.loop.run_ahead import RunAhead, describe, first_plan, is_due, plan_anew
from antiphon.core.loop.run_state import RunState
from antiphon.core.status import CapacityRecord
from antiphon.services.coordinator.order import OrderPlanner, WorkerSpeed

_log = structlog.get_logger("coordinator")


class RunAheadPlanner:
    """Measures the loop and chooses what elastic mode keeps in flight."""

    def __init__(
        self,
        config: RunConfig,
        clock: Callable[[], float],
        fleet: Callable[[], list[WorkerSpeed]],
        memory: Callable[[], LengthMemory],
        supply: Callable[[], float],
        places: Callable[[], int],
    ) -> None:
        """Plan for a run.

        `fleet` returns its active workers, `memory` the lengths that it remembers, `supply` the tokens per
        second that the workers can sample, `places` how many groups at once.
        """
        self._config, self._clock, self._places = config, clock, places
        self.order = OrderPlanner(config, memory, fleet)
        self._supply = supply
        self._planned, self._assessed, self._with_losses = 0, 0, False
        self.active = config.loop.mode == "elastic" and config.loop.run_ahead == "measured"
        """Otherwise only the gate decides."""
        self.measures = LoopMeasures()
        self.capacity = LiveCapacity(config)
        self._plan: RunAhead | None = None

    def observe(self, event: JournalEvent, state: RunState) -> None:
        """Take in an event that is about to be applied to `state`."""
        now = self._clock()
        self.measures.observe(event, state, now)
        self.capacity.observe(event, now)

    @property
    def plan(self) -> RunAhead | None:
        """Return what may be in flight; None where only the gate decides."""
        if self._plan is None and self.active:
            return first_plan(self._config, self._places())
        return self._plan

    def assess(self) -> CapacityRecord | None:
        """Return what the capacity model expects by the batches that were trained; None before it can say."""
        if self.measures.batches > self._assessed:
            self._assessed = self.measures.batches
            self.capacity.plan(self.measures, self._supply())
        return self.capacity.record

    async def plan_if_due(self) -> bool:
        """Choose again after the first steps, then now and then; return whether there is a new plan."""
        batches, places, loop = self.measures.batches, self._places(), self._config.loop
        losses = self.measures.losses
        self.assess()
        if not self.active or not (is_due(batches, self._planned) or (losses and not self._with_losses)):
            return False
        pace = self.measures.pace(self._clock())
        if pace is None:
            return False
        self._planned, self._with_losses = batches, losses
        self._plan = plan = await asyncio.to_thread(plan_anew, pace, batches, self._config, places)
        words = describe(plan, loop.prompts_per_step, loop.max_staleness)
        _log.info("loop.planned", places=places, plan=words)
        return True
