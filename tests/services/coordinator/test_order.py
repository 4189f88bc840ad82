"""The order planner leases by remembered lengths while these rank the groups, and says so."""

import pytest

from antiphon.core.config import build_config, load_config
from antiphon.core.coordinator.planner import OrderPlanner
from antiphon.core.errors import ConfigError
from antiphon.core.lengths.memory import LengthMemory
from antiphon.core.lengths.order import LeaseOrder
from antiphon.core.metrics import ORDER_METRICS, find_metric
from tests.support.main_job import QUICKSTART


def planner(memory: LengthMemory, order: str = "by_length", staleness: int = 1) -> OrderPlanner:
    config = build_config({"loop": {"order": order, "max_staleness": staleness}})
    return OrderPlanner(config, lambda: memory, lambda: [("w", 1.0, 4)])


def remembered(epochs: int) -> LengthMemory:
    memory = LengthMemory()
    for _ in range(epochs):
        for prompt in range(40):
            memory.add(prompt, [prompt + 1, prompt + 2])
    return memory


@pytest.mark.parametrize(
    ("staleness", "order"),
    [(0, LeaseOrder.LONGEST_FIRST), (1, LeaseOrder.ALTERNATING), (4, LeaseOrder.ALTERNATING)],
)
def test_the_bound_decides_the_order_where_lengths_predict(staleness: int, order: LeaseOrder) -> None:
    found = planner(remembered(epochs=2), staleness=staleness)
    assert found.order is order
    assert found.describe() == f"{order.value} (rank correlation of lengths 1.00)"
    assert found.metrics() == {"order_correlation": pytest.approx(1.0), "order_by_length": 1.0}
    assert {metric.name for metric in ORDER_METRICS} == set(found.metrics())
    assert all(find_metric(metric.name) == metric for metric in ORDER_METRICS)


def test_groups_are_taken_as_they_come_until_lengths_predict() -> None:
    memory = remembered(epochs=1)
    found = planner(memory)
    assert found.order is LeaseOrder.ARRIVAL  # every prompt was seen once
    assert found.metrics() == {"order_by_length": 0.0}
    for prompt in range(40):
        memory.add(prompt, [prompt + 1, prompt + 2])
    assert found.order is LeaseOrder.ALTERNATING


def test_nothing_is_said_where_groups_are_always_taken_as_they_come() -> None:
    found = planner(remembered(epochs=2), "arrival")
    assert found.order is LeaseOrder.ARRIVAL
    assert found.metrics() == {} and found.describe() == ""


def test_a_prompt_is_predicted_only_while_lengths_rank_groups() -> None:
    assert planner(remembered(epochs=2), "arrival").predict(7) == 9.0
    assert planner(remembered(epochs=1), "arrival").predict(7) is None
    assert planner(LengthMemory()).predict(7) is None


@pytest.mark.parametrize("order", ["auto", "longest_first", "alternating", "two_tier"])
def test_an_order_of_before_is_refused_by_name_and_read_where_it_was_recorded(order: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"loop\.order={order} is no order any more; write loop\.order=by_length"
    ):
        load_config(QUICKSTART, [f"loop.order={order}"])
    assert build_config({"loop": {"order": order}}).loop.order == "by_length"
