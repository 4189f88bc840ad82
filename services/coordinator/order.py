"""Order planner: keeps the order of leasing up to date with what the run remembers and measures of itself."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import linear_regression

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.lengths.choice import OrderChoice, choose_order, describe_order
from antiphon.core.lengths.makespan import Loop, WorkerPace
from antiphon.core.lengths.memory import LengthMemory, predicts
from antiphon.core.lengths.order import ARRIVAL, AskingWorker, LeaseOrder, WaitingGroup, WaitingGroups
from antiphon.core.loop.admission import Waiting
from antiphon.core.loop.loop_measures import LoopMeasures, LoopPace
from antiphon.core.loop.run_ahead import is_due

STEPS_MEASURED = 32
"""Newest commits that the measured seconds per step are the slope of, and"""
STEPS_NEEDED = 5
"""how many are needed."""
SLOWEST, FASTEST = 0.1, 10.0
"""Paces of single workers, in those of the mean, that are believed."""
_log = structlog.get_logger("coordinator")

WorkerSpeed = tuple[str, float, int]
"""Id of an active worker, its tokens per second (0: not known) and the groups that it has room for."""


class OrderPlanner:
    """Chooses what a run leases its groups by."""

    def __init__(
        self, config: RunConfig, memory: Callable[[], LengthMemory], fleet: Callable[[], list[WorkerSpeed]]
    ) -> None:
        """Plan for a run with what `memory` returns, and with the active workers that `fleet` returns."""
        self._config, self._memory, self._fleet = config, memory, fleet
        self._asked = config.loop.order
        self._choice = choose_order(self._asked, (), None)
        self._planned = 0
        self._judged = -1
        self._correlation: float | None = None
        self._leased_by = ARRIVAL
        self._by_arrival_s = math.inf
        """Seconds per step in the order of arrival, as last measured."""
        self._commits: deque[float] = deque(maxlen=STEPS_MEASURED)
        """When steps were committed under this order."""
        self.active = self._asked != "arrival"

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
        if not self.active or self._choice.order == ARRIVAL:
            return ARRIVAL
        return self._choice.order if predicts(self.correlation) else ARRIVAL

    def predict(self, prompt_index: int) -> float | None:
        """Return the tokens that a prompt's longest completion should have; None where nothing predicts."""
        return self._memory().predict(prompt_index) if predicts(self.correlation) else None

    def describe(self) -> str:
        """Say what groups are leased by; "" where that is always arrival."""
        if not self.active:
            return ""
        words = describe_order(self._choice, self.correlation, predicts(self.correlation))
        step_s = self._step_s()
        return words if step_s is None else f"{words}; measured: {step_s:.2f} s a step"

    def committed(self, now: float) -> None:
        """Note that a step was committed."""
        if self.order != self._leased_by:
            self._leased_by = self.order
            self._commits.clear()
        self._commits.append(now)

    def metrics(self) -> dict[str, float]:
        """Return what is known of `core.metrics.ORDER_METRICS`; nothing where groups are always taken as they
        come."""
        if not self.active:
            return {}
        known: dict[str, float | None] = {
            "order_correlation": self.correlation,
            "order_by_length": float(self.order != ARRIVAL),
            "order_step_s": self._step_s(),
            "order_predicted_s": self._choice.step_s,
            "order_arrival_s": self._choice.arrival_s,
        }
        return {name: value for name, value in known.items() if value is not None and math.isfinite(value)}

    def _step_s(self) -> float | None:
        count = len(self._commits)
        return linear_regression(range(count), self._commits).slope if count >= STEPS_NEEDED else None

    async def plan_if_due(self, measures: LoopMeasures, now: float) -> None:
        """Choose anew after the first steps in which lengths predict, then now and then."""
        batches = measures.batches
        due = not self._planned or is_due(batches, self._planned)
        by_pace = self._asked in ("auto", "two_tier")
        if not (by_pace and due and predicts(self.correlation)):
            return
        pace, step_s = measures.pace(now), self._step_s()
        if pace is None or step_s is None:
            return
        self._planned = batches
        if self._leased_by == ARRIVAL:
            self._by_arrival_s = step_s
        elif step_s > self._by_arrival_s and self._asked == "auto":
            _log.info("order.left", order=self.describe(), by_arrival_s=round(self._by_arrival_s, 2))
            self._choice = OrderChoice()
            return
        groups, loop = tuple(self._memory().compared), self._loop(pace)
        self._choice = await asyncio.to_thread(choose_order, self._asked, groups, loop, self._by_arrival_s)
        _log.info("order.planned", order=self.describe())

    def take(
        self, order: LeaseOrder, worker_id: str, held: int, waiting: Sequence[Waiting], most: int
    ) -> list[int]:
        """Return the places in `waiting` of up to `most` groups for a worker that samples `held` groups."""
        if most < 1 or not waiting:
            return []
        memory = self._memory()
        predicted = [memory.predict(group.prompt_index) for group in waiting]
        known = [tokens for tokens in predicted if tokens is not None]
        usual = math.fsum(known) / len(known) if known else 0.0  # of a prompt that was never sampled
        groups = WaitingGroups(
            order,
            (
                WaitingGroup(place, group.step, usual if tokens is None else tokens)
                for place, (group, tokens) in enumerate(zip(waiting, predicted, strict=True))
            ),
        )
        return groups.take(self._asking(worker_id, held), most)

    def _asking(self, worker_id: str, held: int) -> AskingWorker:
        speeds = {name: speed for name, speed, _ in self._fleet()}
        fastest = max(speeds.values(), default=0.0)
        own = speeds.get(worker_id, 0.0)
        share = own / fastest if own and fastest else 1.0
        rank = sum((-speed, name) < (-own, worker_id) for name, speed in speeds.items())
        return AskingWorker(rank, max(1, len(speeds)), share, held)

    def _loop(self, pace: LoopPace) -> Loop | None:
        """Return the loop that is walked: the fleet's pace, divided among the workers by their speeds."""
        fleet, loop = self._fleet(), self._config.loop
        if not fleet:
            return None
        known = [speed for _, speed, _ in fleet if speed > 0.0]
        mean = math.fsum(known) / len(known) if known else 1.0

        def one(speed: float, groups: int) -> WorkerPace:
            share = min(FASTEST, max(SLOWEST, speed / mean)) if speed > 0.0 else 1.0
            # The pace was fitted to the completions of the whole fleet; of those a worker has its part.
            return WorkerPace(
                pace.alpha / share, pace.beta * len(fleet) / share, max(1, groups) * loop.group_size
            )

        return Loop(
            workers=tuple(one(speed, groups) for _, speed, groups in fleet),
            max_staleness=loop.max_staleness,
            prompts_per_step=loop.prompts_per_step,
            learner_s=pace.learner_s,
            broadcast_s=pace.broadcast_s,
            reward_s=math.fsum(group.reward_s for group in pace.groups) / max(1, len(pace.groups)),
        )
