"""Run-ahead planner: keeps what is in flight, and in which order, up to date with what a run measures."""

import asyncio
from collections.abc import Callable

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.lengths.memory import LengthMemory
from antiphon.core.loop.loop_measures import LoopMeasures
from antiphon.core.loop.run_ahead import RunAhead, describe, first_plan, is_due, plan_anew
from antiphon.services.loop.order import OrderPlanner, WorkerSpeed

_log = structlog.get_logger("coordinator")


class RunAheadPlanner:
    """Measures the loop and chooses what elastic mode keeps in flight."""

    def __init__(
        self,
        config: RunConfig,
        clock: Callable[[], float],
        fleet: Callable[[], list[WorkerSpeed]],
        memory: Callable[[], LengthMemory],
    ) -> None:
        """Plan for a run; `fleet` returns its active workers, `memory` the lengths that it remembers."""
        self._config, self._clock, self._fleet = config, clock, fleet
        self.order = OrderPlanner(config, memory, fleet)
        self._planned, self._with_losses = 0, False
        self.active = config.loop.mode == "elastic" and config.loop.run_ahead == "measured"
        """Otherwise only the gate decides."""
        self.measuring = self.active or self.order.measures
        self.measures = LoopMeasures()
        self._plan: RunAhead | None = None

    @property
    def plan(self) -> RunAhead | None:
        """Return what may be in flight; None where only the gate decides."""
        if self._plan is None and self.active:
            return first_plan(self._config, self._places())
        return self._plan

    def _places(self) -> int:
        return sum(groups for _, _, groups in self._fleet())

    async def plan_if_due(self) -> bool:
        """Choose anew after the first steps, then now and then; return whether there is a new plan."""
        batches, places, loop = self.measures.batches, self._places(), self._config.loop
        losses = self.measures.losses
        await self.order.plan_if_due(self.measures, self._clock())
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
