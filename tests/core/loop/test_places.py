"""A group keeps the place that its lease was checked for, whatever its length and the one that is faster."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.loop import admission, assembly
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.places import batch_size, last_step, place_to_move_to, training_step, window_of
from antiphon.core.loop.run_state import RunState
from tests.support.loop_model import LoopModel, act, make_config

SEEDS = st.integers(0, 2**32 - 1)


def opened(count: int, *, mode: str = "elastic", filter_: str = "none", steps: int = 8) -> LoopModel:
    model = LoopModel(make_config(mode=mode, filter_=filter_, steps=steps), workers=1)
    while model.open_step():
        pass
    model.lease(model.workers[0], count)
    return model


def test_an_order_of_leasing_is_told_the_step_at_which_each_group_trains() -> None:
    model = opened(7)  # three a step
    told: list[admission.Waiting] = []

    def take(waiting: Sequence[admission.Waiting], most: int) -> Sequence[int]:
        told.extend(waiting)
        return range(min(most, len(waiting)))

    for grant in model.workers[0].leases[2:6]:  # given back: they wait beside groups that are opened now
        model.lose(grant)
    admission.plan_leases(model.state, model.config, 0, groups=9, ordering=admission.Ordering(take, math.inf))
    steps = {one.group_id: one.step for one in told}
    assert {name: steps[name] for name in ("g0000002", "g0000003", "g0000005")} == {
        "g0000002": 0,
        "g0000003": 1,
        "g0000005": 1,
    }
    assert all(step == int(name[1:]) // 3 for name, step in steps.items())


def reward(model: LoopModel, number: int) -> None:
    grant = model.workers[0].leases[number]
    submission = model.sample(grant, model.workers[0].held or 0)
    assert submission is not None
    model.submit(submission)
    model.judge(model.state.groups[grant.group_id])


def test_a_batch_waits_for_its_own_groups_and_takes_no_others() -> None:
    model = opened(9)
    for number in (1, 2, 3, 4, 5, 6):
        reward(model, number)
        assert assembly.plan_seal(model.state, model.config) is None  # the first one is still sampled
    reward(model, 0)
    for first in (0, 3):
        plan = assembly.plan_seal(model.state, model.config)
        assert plan is not None
        assert [group.number for group in plan.used] == [first, first + 1, first + 2]
        model.seal()
    assert assembly.plan_seal(model.state, model.config) is None


@pytest.mark.parametrize(
    ("filter_", "used", "filtered"),
    [("none", (0, 1, 2), ()), ("drop", (0, 2), (1,)), ("refill", (0, 2, 3), ())],
)
def test_groups_without_variance(filter_: str, used: tuple[int, ...], filtered: tuple[int, ...]) -> None:
    model = opened(4, filter_=filter_)
    for group in list(model.state.training()):
        rewards = (1.0, 1.0) if group.number == 1 else (0.0, 1.0)
        model.record(
            e.GroupSubmitted(group.group_id, group.lease_id, "w0", 1, "d", 0, (1, 1), 0.1, 0.0),
            e.GroupRewarded(group.group_id, rewards, "r", 0.0),
        )
    model.settle()
    plan = assembly.plan_seal(model.state, model.config)
    assert plan is not None
    assert tuple(group.number for group in plan.used) == used
    assert tuple(group.number for group in plan.filtered) == filtered


@settings(max_examples=60)
@given(
    SEEDS,
    st.sampled_from(["none", "drop", "refill"]),
    st.integers(0, 3),
    st.floats(0.0, 0.3),
    st.integers(0, 4),
    st.floats(1.0, 3.0),
)
def test_no_group_ever_trains_later_than_its_place_said(
    seed: int, filter_: str, bound: int, faults: float, dullness: int, refill_limit: float
) -> None:
    config = make_config(max_staleness=bound, filter_=filter_, refill_limit=refill_limit)
    model, rng = LoopModel(config, workers=3, dullness=dullness), np.random.default_rng(seed)
    size, promised = config.loop.prompts_per_step, dict[str, int]()
    for _ in range(1500):
        act(model, rng, faults)
        living = list(model.state.training())
        for rank, group in enumerate(living):
            step = model.state.next_seal + rank // size
            # A refilling step at its limit moves back only who has the time.
            last = last_step(group, bound)
            if last is None:
                promised.pop(group.group_id, None)
            else:
                assert step <= last, (group, step)
                if filter_ != "refill":
                    assert step <= promised.setdefault(group.group_id, step)
        if model.done:
            break
    if filter_ != "refill" or not faults:  # a lost group may be moved back, and its first holder hand it in
        assert model.state.groups_dropped_stale == 0
    if filter_ != "refill" and not faults:
        trained = [int(group_id[1:]) for group_id in model.sealed_ids]
        assert trained == sorted(trained)


def line_of(versions: list[int | None]) -> list[GroupState]:
    return [
        GroupState(
            f"g{index}",
            index,
            "train",
            index,
            0,
            2,
            phase=GroupPhase.OPEN if version is None else GroupPhase.LEASED,
            held_version=version or 0,
        )
        for index, version in enumerate(versions)
    ]


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12),
)
def test_a_short_batch_leaves_everyone_within_the_bound(
    bound: int, places: int, wanted: int, slack: list[int | None]
) -> None:
    step, wanted = 5, min(wanted, places)
    # Each version was allowed at its place: the step of rank r is step + r // places.
    versions = [
        None if more is None else step + rank // places - bound + min(more, bound)
        for rank, more in enumerate(slack)
    ]
    line = line_of(versions)
    size = batch_size(line, step, places, wanted, bound)
    assert wanted <= size <= places

    def fits(taken: int) -> bool:
        return all(
            version is None or version + bound >= step + 1 + (rank - taken) // places
            for rank, version in enumerate(versions)
            if rank >= taken
        )

    assert fits(size)
    assert size == wanted or not fits(size - 1)


def test_a_group_that_held_up_its_step_moves_back_as_far_as_it_may() -> None:
    model = opened(9)
    state, size = model.state, model.config.loop.prompts_per_step
    stuck = next(iter(state.training()))
    model.lose(model.workers[0].leases[0])
    assert place_to_move_to(state, stuck, size, last=None) == "g0000008"
    assert place_to_move_to(state, stuck, size, last=1) == "g0000005"
    assert place_to_move_to(state, stuck, size, last=0) == "g0000002"
    assert place_to_move_to(state, state.groups["g0000008"], size, last=None) is None
    before = {group.group_id: training_step(state, group, size) for group in state.training()}
    model.record(e.GroupMovedBack(stuck.group_id, "g0000005"))
    order = [group.number for group in state.training()]
    assert order == [1, 2, 3, 4, 5, 0, 6, 7, 8]
    for group in state.training():
        if group is not stuck:
            assert training_step(state, group, size) <= before[group.group_id]
    assert window_of(state, model.config.loop, stuck).admits(0)
    assert model.refolded() == state


@pytest.mark.parametrize(("bound", "verdict"), [(1, "accepted"), (0, "stale")])
def test_a_late_group_that_gave_its_place_back_is_taken_within_the_bound(bound: int, verdict: str) -> None:
    model = LoopModel(make_config(max_staleness=1, filter_="none", prompts_per_step=2), workers=1)
    while model.open_step():
        pass
    worker = model.workers[0]
    assert model.lease(worker, 8) == 4
    late = model.sample(worker.leases[0], 0)
    assert late is not None
    model.lose(worker.leases[0])
    model.record(e.GroupMovedBack("g0000000", "g0000003"))
    # By its new place it trains at step 1, which version 0 reaches with a bound of 1 alone.
    model.config = make_config(max_staleness=bound, filter_="none", prompts_per_step=2)
    assert str(model.submit(late)) == verdict


def test_moving_needs_living_groups() -> None:
    state = RunState(group_size=2, payload_retention_steps=2)
    for number in range(2):
        state.apply(e.GroupOpened(f"g{number}", number, number, 0, None, None, False))
    for gone, behind in itertools.permutations(("g0", "g9"), 2):
        with pytest.raises(Exception, match="g9 is not known"):
            state.apply(e.GroupMovedBack(gone, behind))


def test_the_progress_of_a_step_is_that_of_its_own_places() -> None:
    model = opened(9)
    for number in (0, 1, 3):
        reward(model, number)
    shares = [
        assembly.step_progress(model.state, model.config, step, GroupPhase.REWARDED) for step in range(3)
    ]
    assert shares == pytest.approx([2 / 3, 1 / 3, 0.0])
    reward(model, 2)
    model.seal()
    shares = [
        assembly.step_progress(model.state, model.config, step, GroupPhase.REWARDED) for step in range(3)
    ]
    assert shares == pytest.approx([1.0, 1 / 3, 0.0])


@pytest.mark.parametrize(
    ("filter_", "limit", "train_size", "most"),
    [("refill", 2.5, 100, 7), ("refill", 2.0, 5, 5), ("drop", 2.0, 100, 3), ("none", 2.0, 100, 3)],
)
def test_the_most_groups_of_a_batch_of_fixed_mode(
    filter_: str, limit: float, train_size: int, most: int
) -> None:
    config = make_config(mode="fixed", filter_=filter_, refill_limit=limit, train_size=train_size)
    assert admission.fixed_limit(config) == most
