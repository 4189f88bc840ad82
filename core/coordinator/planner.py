"""Planners: how many groups are in flight, and in which order they are leased, by what a run measures."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

from antiphon.core.capacity.loop_measures import LoopMeasures
from antiphon.core.capacity.run_ahead import RunAhead, choose, first_plan, is_due
from antiphon.core.config import RunConfig
from antiphon.core.errors import InfeasibleError
from antiphon.core.lengths.memory import LengthMemory, predicts
from antiphon.core.lengths.order import LeaseOrder, order_by_length, take
from antiphon.core.loop.admission import Waiting
from antiphon.core.loop.events import JournalEvent
from antiphon.core.loop.run_state import RunState
from antiphon.core.status import CapacityRecord

WorkerSpeed = tuple[str, float, int]
"""Id of an active worker, its tokens per second (0: not known) and the groups that it has room for."""


class RunAheadPlanner:
    """Measures the loop and chooses what elastic mode keeps in flight."""

    def __init__(
        self,
        config: RunConfig,
        fleet: Callable[[], list[WorkerSpeed]],
        memory: Callable[[], LengthMemory],
        supply: Callable[[], float],
        places: Callable[[], int],
    ) -> None:
        """Plan for a run.

        `fleet` returns its active workers, `memory` the lengths that it remembers, `supply` the tokens per
        second that the workers can sample, `places` how many groups at once.
        """
        self._config, self._places = config, places
        self.order = OrderPlanner(config, memory, fleet)
        self._supply = supply
        self._planned, self._assessed, self._with_losses = 0, 0, False
        self.active = config.loop.mode == "elastic" and config.loop.run_ahead == "measured"
        """Otherwise only the gate decides."""
        self.measures = LoopMeasures()
        self.capacity: CapacityRecord | None = None
        """What the capacity model expected last; None before a batch was trained."""
        self._plan: RunAhead | None = None

    def observe(self, event: JournalEvent, state: RunState, now: float) -> None:
        """Take in an event that is about to be applied to `state`."""
        self.measures.observe(event, state, now)

    @property
    def plan(self) -> RunAhead | None:
        """Return what may be in flight; None where only the gate decides."""
        if self._plan is None and self.active:
            return first_plan(self._config.loop, self._places())
        return self._plan

    def assess(self) -> CapacityRecord | None:
        """Return what the capacity model expects by the batches that were trained; None before it can say."""
        if self.measures.batches > self._assessed:
            self._assessed = self.measures.batches
            measured = self.measures.measured(self._supply())
            # A step that took no time that a clock shows is no measurement.
            with contextlib.suppress(InfeasibleError):
                self.capacity = measured.expected(self._config.loop) if measured else self.capacity
        return self.capacity

    def due(self, now: float) -> Callable[[], RunAhead] | None:
        """Return what makes a new plan, which takes a while; None while none is due.

        One is due after the first steps, then now and then.
        """
        batches, losses = self.measures.batches, self.measures.losses
        self.assess()
        if not self.active or not (is_due(batches, self._planned) or (losses and not self._with_losses)):
            return None
        pace = self.measures.pace(now)
        if pace is None:
            return None
        self._planned, self._with_losses = batches, losses
        return partial(choose, pace, self._config.loop, self._places(), batches)

    def take(self, plan: RunAhead) -> None:
        """Go by a plan from now on."""
        self._plan = plan


class OrderPlanner:
    """Says what a run leases its groups by."""

    def __init__(
        self, config: RunConfig, memory: Callable[[], LengthMemory], fleet: Callable[[], list[WorkerSpeed]]
    ) -> None:
        """Plan for a run with what `memory` returns, and with the active workers that `fleet` returns."""
        self._memory, self._fleet = memory, fleet
        self._by_length = order_by_length(config.loop.max_staleness)
        self._judged = -1
        self._correlation: float | None = None
        self.active = config.loop.order == "by_length"

    @property
    def correlation(self) -> float | None:
        """Return how well remembered lengths rank groups, -1..1; None while that is not known."""
        memory = self._memory()
        if self._judged != memory.added:
            self._judged, self._correlation = memory.added, memory.correlation()
        return self._correlation

    @property
    def order(self) -> LeaseOrder:
        """Return what groups are leased by now."""
        return self._by_length if self.active and predicts(self.correlation) else LeaseOrder.ARRIVAL

    def predict(self, prompt_index: int) -> float | None:
        """Return the tokens that a prompt's longest completion should have; None where nothing predicts."""
        return self._memory().predict(prompt_index) if predicts(self.correlation) else None

    def describe(self) -> str:
        """Say what groups are leased by; "" where that is always arrival."""
        if not self.active:
            return ""
        known = "not known yet" if self.correlation is None else f"{self.correlation:.2f}"
        return f"{self.order} (rank correlation of lengths {known})"

    def metrics(self) -> dict[str, float]:
        """Return what is known of `core.metrics.ORDER_METRICS`; nothing where groups are always taken as they
        come."""
        if not self.active:
            return {}
        by_length = {"order_by_length": float(self.order is not LeaseOrder.ARRIVAL)}
        return by_length if self.correlation is None else by_length | {"order_correlation": self.correlation}

    def take(self, order: LeaseOrder, worker_id: str, waiting: Sequence[Waiting], most: int) -> list[int]:
        """Return the places in `waiting` of up to `most` groups for a worker."""
        if most < 1 or not waiting:
            return []
        memory = self._memory()
        predicted = [memory.predict(group.prompt_index) for group in waiting]
        known = [tokens for tokens in predicted if tokens is not None]
        usual = math.fsum(known) / len(known) if known else 0.0  # of a prompt that was never sampled
        groups = [
            (place, group.step, usual if tokens is None else tokens)
            for place, (group, tokens) in enumerate(zip(waiting, predicted, strict=True))
        ]
        speeds = {name: speed for name, speed, _ in self._fleet()}
        fastest, own = max(speeds.values(), default=0.0), speeds.get(worker_id, 0.0)
        share = own / fastest if own and fastest else 1.0
        return take(order, groups, most, max(1, len(speeds)), share)
