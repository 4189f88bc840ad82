"""What is kept in flight follows from what the run measured, and the loop keeps every group's place."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.benchmarks.tails import Lengths, Setting, TailsRun, Walked
from antiphon.core.capacity.loop_measures import LoopMeasures, LoopPace, SampledGroup
from antiphon.core.capacity.run_ahead import RunAhead, choose, describe, first_plan, walk
from antiphon.core.config import build_config
from antiphon.core.config_sections import LoopSection
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import new_state

ALIKE = Lengths(0.0, 0.0, 4.0)
LONG_TAILED = Lengths(0.8, 0.6, 16.0)
SETTING = Setting(
    max_staleness=4,
    prompts_per_step=8,
    group_size=4,
    steps=24,
    places=4,
    learner_s=4.0,
    reward_s=0.1,
    broadcast_s=0.1,
    alpha=0.01,
    beta=0.0005,
)


def walked(setting: Setting, lengths: Lengths, plan: RunAhead | None = None, measured: bool = True) -> Walked:
    return TailsRun(setting, lengths, plan, measured).walk()


@settings(max_examples=25)
@given(
    sigma=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 0.8)),
    bound=st.integers(0, 5),
    places=st.integers(1, 10),
    learner_s=st.floats(0.1, 10.0),
    delays=st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)),
    filter_=st.sampled_from(["none", "drop", "refill"]),
    varied=st.floats(0.3, 1.0),
    losses=st.sampled_from([0.0, 100.0]),
    measured=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_places_are_kept_whatever_the_lengths(
    sigma: tuple[float, float],
    bound: int,
    places: int,
    learner_s: float,
    delays: tuple[float, float],
    filter_: str,
    varied: float,
    losses: float,
    measured: bool,
    seed: int,
) -> None:
    setting = replace(
        SETTING,
        max_staleness=bound,
        prompts_per_step=4,
        steps=8,
        places=places,
        learner_s=learner_s,
        reward_s=delays[0],
        broadcast_s=delays[1],
        filter=filter_,
        varied_share=varied,
        losses_per_hour=losses,
    )
    found = walked(setting, Lengths(*sigma, 16.0, seed), measured=measured)  # ends: no group starves
    assert found.staleness_worst <= bound
    if not losses:
        assert found.wasted_share == 0.0 and found.restarts_worst == 0
    if filter_ != "refill":
        assert found.trained == list(range(4 * setting.steps))
        assert found.trained_mean == pytest.approx(found.opened_mean)
    elif not losses:
        assert found.trained == sorted(found.trained)


def test_short_groups_do_not_train_first() -> None:
    found = walked(replace(SETTING, places=10), LONG_TAILED)
    assert found.first_batches_mean == pytest.approx(found.opened_mean, rel=0.15)
    assert found.wasted_share == 0.0


def test_staleness_is_a_bound_and_no_target() -> None:
    # Rollouts take a fraction of a learner step: one step ahead covers them.
    quick = replace(SETTING, learner_s=20.0, places=10)
    ours, gate = walked(quick, ALIKE), walked(quick, ALIKE, measured=False)
    assert gate.staleness_mean > 3.5 and ours.staleness_mean < 1.6
    assert ours.plan is not None and ours.plan.window == 16
    assert ours.seconds_per_step < 1.01 * gate.seconds_per_step
    # Where the longest completions take several steps, the window covers them.
    tails = replace(SETTING, learner_s=3.0)
    ours, gate = walked(tails, LONG_TAILED), walked(tails, LONG_TAILED, measured=False)
    assert ours.plan is not None and ours.plan.window >= 32
    assert ours.seconds_per_step < 1.10 * gate.seconds_per_step  # with the steps before it is known


def test_pace_and_delays_are_measured_from_the_events() -> None:
    run = TailsRun(replace(SETTING, learner_s=3.0, reward_s=0.7, broadcast_s=0.4), LONG_TAILED, None, True)
    run.walk()
    pace = run.pace()
    assert pace is not None
    assert pace.learner_s == pytest.approx(3.0)
    assert pace.broadcast_s == pytest.approx(0.4)
    assert {round(group.reward_s, 6) for group in pace.groups} == {0.7}
    assert pace.alpha == pytest.approx(0.01, rel=0.25)
    assert pace.beta == pytest.approx(0.0005 / 4, rel=0.25)  # four workers share the load
    longest = sorted(int(LONG_TAILED.draw(n, 8, 4).max()) for n in range(8 * 24))
    assert sorted(group.longest for group in pace.groups) == longest


def test_a_walk_without_overlap_is_the_sum_of_its_parts() -> None:
    groups = tuple(SampledGroup(100, 100.0, 3, 0.5) for _ in range(8))
    pace = LoopPace(groups, alpha=0.01, beta=0.001, learner_s=2.0, broadcast_s=0.25)
    loop = LoopSection(max_staleness=4, prompts_per_step=8)
    step_s, staleness = walk(pace, loop, window=8, places=8, at_once=8)
    assert step_s == pytest.approx(100 * (0.01 + 0.001 * 32) + 0.5 + 2.0 + 0.25)
    assert staleness == 0.0
    step_s, staleness = walk(pace, loop, window=24, places=8, at_once=8)
    assert step_s == pytest.approx(100 * (0.01 + 0.001 * 32), rel=0.01)


def test_evaluations_and_waits_of_broadcasts_are_measured_apart() -> None:
    state, found = new_state(build_config({"loop": {"prompts_per_step": 1, "group_size": 2}})), LoopMeasures()

    def take(at_s: float, *happened: e.JournalEvent) -> None:
        for event in happened:
            found.observe(event, state, at_s)
            state.apply(event)

    take(0.0, e.RunOpened("r", {}, 0.0), e.WorkerRegistered("w-1", "w", 4, 0.0), e.StepOpened(0))
    take(0.0, e.GroupOpened("g0", 0, 0, 0, step=None, version=None, refill=False))
    take(0.0, e.LeaseGranted("g0", "l0", "w-1", 1, 0, 0.0))
    take(3.0, e.GroupSubmitted("g0", "l0", "w-1", 1, "", 0, (30, 50), 3.0, 3.0))
    take(4.0, e.GroupRewarded("g0", (0.0, 1.0), "reward", 4.0))
    take(4.0, e.BatchSealed(0, ("g0",), (), "", "", 2, 0, 0, 80, 0.5, 40.0, ()))
    # Version 2 is made while version 1 is on its way: it waits, and its own broadcast takes 2 s as well.
    take(5.0, e.StepCommitted(0, 1, "", "", {}, True))
    take(6.0, e.StepOpened(1), e.BatchSealed(1, (), (), "", "", 0, 0, 0, 0, 0.0, 0.0, ()))
    take(6.0, e.StepCommitted(1, 2, "", "", {}, True))
    take(7.0, e.WorkerLoaded("w-1", 1))
    take(9.0, e.WorkerLoaded("w-1", 2))
    assert found.seconds() == (0.5, 2.0, 4.0, 4.0)
    assert found.completion_tokens() == 40.0
    take(9.0, e.EvaluationOpened(2, 1))
    held_out = next(group for group in state.groups.values() if group.evaluation is not None)
    take(9.0, e.LeaseGranted(held_out.group_id, "l1", "w-1", 1, 2, 9.0))
    take(9.5, e.GroupSubmitted(held_out.group_id, "l1", "w-1", 1, "", 2, (20,), 0.5, 9.5))
    assert found.completion_tokens() == 40.0 * (1.0 + 20.0 / 80.0)


def test_a_walk_replaces_groups_up_to_the_limit() -> None:
    kept, left_out = SampledGroup(100, 100.0, 3, 0.0), SampledGroup(100, 100.0, 3, 0.0, replaced=True)
    pace = LoopPace((kept, left_out) * 8, alpha=0.01, beta=0.0, learner_s=2.0, broadcast_s=0.0)
    loops = [
        LoopSection(max_staleness=4, prompts_per_step=8, filter="refill", refill_limit=limit)
        for limit in (1.0, 1.5, 4.0)
    ]
    seconds = [walk(pace, loop, 8, 64, 64)[0] for loop in loops]
    # One second a group; with nothing behind a batch the place of one that is left out is filled again.
    assert seconds[0] == pytest.approx(3.0) and seconds[0] < seconds[1] <= seconds[2]
    ahead = walk(pace, loops[-1], 40, 64, 64)[0]
    assert ahead == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("ahead", [2, 4, 6])
def test_a_walk_takes_as_long_as_the_run_that_it_foresees(ahead: int) -> None:
    setting = replace(SETTING, max_staleness=6, prompts_per_step=16, places=8, steps=96, learner_s=0.5)
    plan = RunAhead((ahead + 1) * 16, 1.0)
    modelled = TailsRun(setting, LONG_TAILED, plan, measured=False)
    run, pace = modelled.walk(), modelled.pace()
    assert pace is not None
    step_s, staleness = walk(pace, LoopSection(max_staleness=6, prompts_per_step=16), plan.window, places=32)
    # While it runs empty a walk is fast: one that counted its end was off by a quarter here.
    assert step_s == pytest.approx(run.seconds_per_step, rel=0.1)
    assert staleness == pytest.approx(run.staleness_mean, abs=0.5)


@given(st.integers(0, 6), st.integers(1, 4), st.integers(1, 300), st.integers(0, 200), st.floats(0.0, 20.0))
@settings(max_examples=40)
def test_a_plan_never_leaves_the_bound_and_always_lets_a_step_fill(
    bound: int, interval: int, places_per_step: int, places: int, learner_s: float
) -> None:
    if interval > bound + 1:
        return
    groups = tuple(SampledGroup(50 + 37 * (n % 5), 40.0, 3, 0.1) for n in range(64))
    loop = LoopSection(
        max_staleness=bound, prompts_per_step=places_per_step, publish_interval=interval, filter="none"
    )
    plan = choose(LoopPace(groups, 0.01, 0.0001, learner_s, 0.2), loop, places)
    assert interval * places_per_step <= plan.window <= (bound + 1) * places_per_step
    assert 0.0 < plan.share <= 1.0 and plan.unused(1, 0) >= 1


def test_a_run_that_knows_nothing_samples_two_steps_at_once() -> None:
    loop = LoopSection(max_staleness=4, prompts_per_step=4)
    plan = first_plan(loop, places=32)
    assert (plan.window, plan.share) == (20, 0.25) and first_plan(loop, places=6).share == 1.0
    assert "not measured yet" in describe(plan, 4, 4)
