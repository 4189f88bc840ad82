"""Order planner: leases by remembered lengths as long as these rank the groups."""

import math
from collections.abc import Callable, Sequence

from antiphon.core.config import RunConfig
from antiphon.core.lengths.memory import LengthMemory, predicts
from antiphon.core.lengths.order import (
    AskingWorker,
    LeaseOrder,
    WaitingGroup,
    WaitingGroups,
    order_by_length,
)
from antiphon.core.loop.admission import Waiting

WorkerSpeed = tuple[str, float, int]
"""Id of an active worker, its tokens per second (0: not known) and the groups that it has room for."""


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
        groups = WaitingGroups(
            order,
            (
                WaitingGroup(place, group.step, usual if tokens is None else tokens)
                for place, (group, tokens) in enumerate(zip(waiting, predicted, strict=True))
            ),
        )
        speeds = {name: speed for name, speed, _ in self._fleet()}
        fastest, own = max(speeds.values(), default=0.0), speeds.get(worker_id, 0.0)
        return groups.take(AskingWorker(max(1, len(speeds)), own / fastest if own and fastest else 1.0), most)
