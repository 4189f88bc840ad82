"""Leasing by remembered lengths: the loop's promises hold, and batches are those of the order of arrival."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.coordinator.planner import OrderPlanner
from antiphon.core.lengths.order import LeaseOrder
from antiphon.core.loop import admission
from antiphon.core.loop.events import BatchSealed, GroupOpened, LeaseGranted
from antiphon.core.loop.group_state import GroupPhase
from tests.support.loop_model import LoopModel, make_config, run_to_end

ORDERS = (LeaseOrder.LONGEST_FIRST, LeaseOrder.ALTERNATING)


def ordered(model: LoopModel, order: LeaseOrder) -> LoopModel:
    """Have a model's groups leased by an order."""
    speeds = [(worker.name, 1.0 + index, 2) for index, worker in enumerate(model.workers)]
    planner = OrderPlanner(model.config, lambda: model.state.lengths, lambda: speeds)

    def ordering(name: str) -> admission.Ordering:
        return admission.Ordering(lambda waiting, most: planner.take(order, name, waiting, most), 100)

    model.ordering = ordering
    return model


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(ORDERS),
    st.integers(0, 2),
    st.sampled_from(["elastic", "fixed"]),
    st.sampled_from(["none", "drop", "refill"]),
    st.floats(0.0, 0.2),
)
def test_the_bound_holds_and_every_opened_group_is_trained_or_in_flight(
    seed: int, order: LeaseOrder, staleness: int, mode: str, filter_: str, faults: float
) -> None:
    config = make_config(mode=mode, max_staleness=staleness, filter_=filter_, steps=6)
    model = ordered(LoopModel(config, workers=3), order)
    run_to_end(model, np.random.default_rng(seed), faults)
    assert max(model.state.staleness_histogram, default=0) <= staleness
    assert model.state.groups_dropped_stale == 0 or faults > 0.0
    assert model.refolded() == model.state  # remembered lengths too
    opened = [event for event in model.journal if isinstance(event, GroupOpened)]
    if mode == "elastic":
        assert [event.number for event in opened] == list(range(len(opened)))
    if not faults:
        leased = [event.group_id for event in model.journal if isinstance(event, LeaseGranted)]
        assert len(leased) == len(set(leased))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.value)
@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_each_batch_has_the_groups_that_it_has_in_the_order_of_arrival(order: LeaseOrder, mode: str) -> None:
    """So the lengths of what is trained are those of what is opened, group by group."""

    def trained(model: LoopModel) -> list[tuple[str, ...]]:
        run_to_end(model, np.random.default_rng(11), faults=0.0)
        return [event.group_ids for event in model.journal if isinstance(event, BatchSealed)]

    config = make_config(mode=mode, filter_="none", max_staleness=1, steps=7)
    by_length = ordered(LoopModel(config, workers=3), order)
    assert trained(by_length) == trained(LoopModel(config, workers=3))
    if mode == "fixed":
        plain = LoopModel(config, workers=1)
        run_to_end(plain, np.random.default_rng(0), faults=0.0)
        assert [b.digest for b in by_length.state.sealed] == [b.digest for b in plain.state.sealed]


def test_a_worker_is_given_the_longest_of_what_was_opened_for_all() -> None:
    config = make_config(max_staleness=1, prompts_per_step=4, train_size=4, filter_="none")
    model = ordered(LoopModel(config, workers=1), LeaseOrder.LONGEST_FIRST)
    model.open_step()
    worker = model.workers[0]
    worker.held = 0
    prompts = [admission.prompt_place(config, number)[0] for number in range(4)]
    for tokens, prompt in zip((3, 9, 1, 5), prompts, strict=True):
        model.state.lengths.add(prompt, (tokens, tokens))
    model.lease(worker, 1)
    groups = list(model.state.groups.values())
    assert [group.number for group in groups] == [0, 1, 2, 3]
    assert [group.phase for group in groups].count(GroupPhase.OPEN) == 3
    assert groups[1].phase is GroupPhase.LEASED


def test_without_lengths_that_predict_a_run_leases_by_arrival() -> None:
    model = LoopModel(make_config())
    planner = OrderPlanner(model.config, lambda: model.state.lengths, list)
    assert planner.order is LeaseOrder.ARRIVAL
    assert planner.describe() == "arrival (rank correlation of lengths not known yet)"
