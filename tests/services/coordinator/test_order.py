"""The order planner says what was predicted of an order and what it came to."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.core.config import build_config
from antiphon.core.lengths.choice import OrderChoice
from antiphon.core.lengths.memory import LengthMemory
from antiphon.core.lengths.order import ARRIVAL, LeaseOrder, Policy
from antiphon.core.metrics import ORDER_METRICS, find_metric
from antiphon.services.coordinator import order
from antiphon.services.coordinator.order import STEPS_NEEDED, OrderPlanner


def planner(order: str, memory: LengthMemory) -> OrderPlanner:
    return OrderPlanner(build_config({"loop": {"order": order}}), lambda: memory, lambda: [("w", 1.0, 4)])


def remembered(epochs: int) -> LengthMemory:
    memory = LengthMemory()
    for _ in range(epochs):
        for prompt in range(40):
            memory.add(prompt, [prompt + 1, prompt + 2])
    return memory


def test_predicted_and_measured_seconds_stand_beside_the_correlation() -> None:
    found = planner("longest_first", remembered(epochs=2))
    for step in range(STEPS_NEEDED):
        assert "measured" not in found.describe() and "order_step_s" not in found.metrics()
        found.committed(10.0 + 2.0 * step)
    assert found.metrics() == {
        "order_correlation": pytest.approx(1.0),
        "order_by_length": 1.0,
        "order_step_s": pytest.approx(2.0),
    }
    assert found.describe().endswith("measured: 2.00 s a step")
    assert {metric.name for metric in ORDER_METRICS} >= set(found.metrics())
    assert all(find_metric(metric.name) == metric for metric in ORDER_METRICS)


def test_steps_of_another_order_are_not_measured_with_those_of_this_one() -> None:
    memory = remembered(epochs=1)
    found = planner("longest_first", memory)
    assert found.order == ARRIVAL  # every prompt was seen once
    for step in range(STEPS_NEEDED):
        found.committed(float(step))
    assert found.metrics() == {"order_by_length": 0.0, "order_step_s": pytest.approx(1.0)}
    for prompt in range(40):
        memory.add(prompt, [prompt + 1, prompt + 2])
    found.committed(100.0)
    assert "order_step_s" not in found.metrics()


def test_an_order_that_turns_out_slower_than_arrival_was_is_left() -> None:
    memory = remembered(epochs=1)
    found = planner("auto", memory)
    measures: Any = SimpleNamespace(batches=0, pace=lambda now: object())

    def commit(step_s: float) -> OrderPlanner:
        for _ in range(STEPS_NEEDED + 1):
            measures.batches += 8
            found.committed(8 * step_s * measures.batches)
        asyncio.run(found.plan_if_due(measures, 0.0))
        return found

    def decide(choice: OrderChoice) -> Callable[..., OrderChoice]:
        def choose(asked: str, groups: object, loop: object, measured_s: float) -> OrderChoice:
            heard.append(measured_s)
            return choice

        return choose

    heard: list[float] = []
    alternating = OrderChoice(LeaseOrder(Policy.ALTERNATING))
    for prompt in range(40):
        memory.add(prompt, [prompt + 1, prompt + 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "choose_order", decide(alternating))
        patch.setattr(OrderPlanner, "_loop", lambda self, pace: None)
        assert commit(2.0).order == alternating.order
        assert commit(1.9).order == alternating.order
        assert commit(2.1).order == ARRIVAL
    assert heard == [pytest.approx(2.0 * 64)] * 2


def test_nothing_is_said_where_groups_are_always_taken_as_they_come() -> None:
    found = planner("arrival", remembered(epochs=2))
    for step in range(STEPS_NEEDED):
        found.committed(float(step))
    assert found.metrics() == {} and found.describe() == ""


def test_a_prompt_is_predicted_only_while_lengths_rank_groups() -> None:
    assert planner("arrival", remembered(epochs=2)).predict(7) == 9.0
    assert planner("arrival", remembered(epochs=1)).predict(7) is None
    assert planner("auto", LengthMemory()).predict(7) is None
