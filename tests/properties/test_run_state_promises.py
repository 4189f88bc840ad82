"""The loop's promises hold whatever happens in whichever order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.loop.staleness import oldest_allowed_version
from antiphon.core.records import SubmitVerdict
from tests.support.loop_model import LoopModel, act, make_config, run_to_end

SEEDS = st.integers(0, 2**32 - 1)
FILTERS = st.sampled_from(["none", "drop", "refill"])
SCHEDULES = st.sampled_from([(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3)])


@settings(max_examples=60)
@given(SEEDS, FILTERS, SCHEDULES, st.sampled_from(["elastic", "fixed"]), st.floats(0.0, 0.3))
def test_loop_ends_and_nothing_stale_or_doubled_trains(
    seed: int, filter_: str, schedule: tuple[int, int], mode: str, faults: float
) -> None:
    staleness, interval = schedule
    config = make_config(mode=mode, filter_=filter_, max_staleness=staleness, publish_interval=interval)
    model = LoopModel(config, workers=3)
    run_to_end(model, np.random.default_rng(seed), faults)
    assert len(model.sealed_ids) == len(set(model.sealed_ids))
    assert max(model.state.staleness_histogram, default=0) <= staleness
    assert min(model.state.staleness_histogram, default=0) >= 0
    assert [ref.step for ref in model.state.sealed] == list(range(config.run.steps))
    assert model.refolded() == model.state
    if mode == "fixed":
        assert model.state.groups_dropped_stale == 0


@settings(max_examples=25)
@given(SEEDS, FILTERS, SCHEDULES, st.floats(0.0, 0.3), st.integers(1, 4), st.integers(0, 4))
def test_timing_never_changes_a_batch_of_fixed_mode(
    seed: int, filter_: str, schedule: tuple[int, int], faults: float, workers: int, dullness: int
) -> None:
    staleness, interval = schedule
    config = make_config(mode="fixed", filter_=filter_, max_staleness=staleness, publish_interval=interval)
    calm = LoopModel(config, workers=1, dullness=dullness)
    run_to_end(calm, np.random.default_rng(0), faults=0.0)
    stormy = LoopModel(config, workers=workers, dullness=dullness)
    run_to_end(stormy, np.random.default_rng(seed), faults)
    assert [ref.digest for ref in stormy.state.sealed] == [ref.digest for ref in calm.state.sealed]


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 2), (2, 1), (2, 2)])
def test_fixed_mode_samples_with_the_version_of_the_rule(staleness: int, interval: int) -> None:
    config = make_config(mode="fixed", max_staleness=staleness, publish_interval=interval, filter_="none")
    model = LoopModel(config)
    run_to_end(model, np.random.default_rng(1), faults=0.2)
    expected = {t - oldest_allowed_version(t, staleness, interval) for t in range(config.run.steps)}
    assert set(model.state.staleness_histogram) == expected


@settings(max_examples=40)
@given(SEEDS, FILTERS, SCHEDULES)
def test_every_opened_group_ends_once_the_run_is_trained(
    seed: int, filter_: str, schedule: tuple[int, int]
) -> None:
    staleness, interval = schedule
    config = make_config(filter_=filter_, max_staleness=staleness, publish_interval=interval)
    model = LoopModel(config, workers=2)
    rng = np.random.default_rng(seed)
    run_to_end(model, rng, faults=0.1)
    opened = model.state.next_number
    ended = opened - sum(1 for _ in model.state.training())
    batches = config.run.steps * config.loop.prompts_per_step
    left_over = opened - ended
    # Reservations: what is still alive never exceeds what the gate allows beyond the last batch.
    assert left_over <= (staleness + 1) * config.loop.prompts_per_step
    used = len(model.sealed_ids)
    assert used <= batches
    assert ended == used + model.state.groups_filtered + model.state.groups_dropped_stale


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 3))
def test_the_gate_counts_with_the_version_the_worker_holds(seed: int, staleness: int) -> None:
    config = make_config(max_staleness=staleness, filter_="none")
    model = LoopModel(config, workers=3)
    rng = np.random.default_rng(seed)
    places = config.loop.prompts_per_step
    for _ in range(400):
        before = model.state.next_number
        act(model, rng, faults=0.1)
        if model.state.next_number > before:
            held = max(g.held_version for g in model.state.groups.values() if g.number >= before)
            issued = model.state.next_seal * places + sum(1 for _ in model.state.training())
            assert (issued - 1) // places <= held + staleness


def test_lost_work_releases_its_reservation() -> None:
    config = make_config(max_staleness=0, filter_="none")
    model = LoopModel(config, workers=1)
    model.open_step()
    worker = model.workers[0]
    for _ in range(50):
        assert model.lease(worker, 8) == config.loop.prompts_per_step
        assert model.lease(worker, 8) == 0
        for grant in worker.leases:
            model.lose(grant)
        worker.leases.clear()
    assert model.state.groups_requeued == 50 * config.loop.prompts_per_step
    run_to_end(model, np.random.default_rng(3), faults=0.0)


def test_stale_groups_are_dropped_counted_and_replaced() -> None:
    config = make_config(max_staleness=0, filter_="none", steps=3)
    model = LoopModel(config, workers=2)
    slow, quick = model.workers
    model.open_step()
    model.lease(slow, 1)
    stuck = slow.leases[0]
    late = model.sample(stuck, 0)
    model.lease(quick, 8)
    for grant in quick.leases:
        model.submit(model.sample(grant, 0))
    quick.leases.clear()
    for group in model.unrewarded():
        model.judge(group)
    assert not model.seal()  # two of three places
    model.lose(stuck)
    model.lease(quick, 1)
    quick_submission = model.sample(quick.leases.pop(), 0)
    assert model.submit(quick_submission) is SubmitVerdict.ACCEPTED
    assert model.submit(late) is SubmitVerdict.ALREADY_ACCEPTED  # same weights, same seeds, same tokens
    model.judge(model.unrewarded()[0])
    assert model.seal() and model.commit() and model.publish()
    model.open_step()
    model.load(quick, 1)
    model.lease(quick, 3)
    slow.held = 0
    grant = quick.leases[0]
    stale = model.sample(grant, 0)
    assert model.submit(stale) is SubmitVerdict.STALE
    assert model.submit(stale) is SubmitVerdict.STALE
    assert model.state.groups_dropped_stale == 1
    run_to_end(model, np.random.default_rng(0), faults=0.0)
    assert model.state.sealed[1].groups_dropped_stale == 1


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
@pytest.mark.parametrize("filter_", ["drop", "refill"])
def test_steps_without_any_variance_still_happen(mode: str, filter_: str) -> None:
    config = make_config(mode=mode, filter_=filter_, steps=4)
    model = LoopModel(config, dullness=10**9)  # hardly any reward but 0
    run_to_end(model, np.random.default_rng(5), faults=0.0)
    assert all(ref.trajectories == 0 for ref in model.state.sealed)
    filtered = [ref.groups_filtered for ref in model.state.sealed]
    if filter_ == "drop":
        assert filtered == [3] * 4
    elif mode == "fixed":
        assert filtered == [6] * 4  # refill_limit * prompts_per_step
    else:
        assert min(filtered) >= 6


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_evaluations_come_first_are_never_gated_and_never_train(mode: str) -> None:
    config = make_config(mode=mode, max_staleness=0, filter_="none", steps=2)
    model = LoopModel(config, workers=1)
    worker = model.workers[0]
    model.open_step()
    assert model.open_evaluation(0) and not model.open_evaluation(0)
    # Two groups of two samples: the three evaluations of one sample leave no room for a whole group.
    assert model.lease(worker, 2) == 3
    first = [model.state.groups[g.group_id] for g in worker.leases[:3]]
    assert [group.evaluation for group in first] == [0, 0, 0]
    run_to_end(model, np.random.default_rng(2), faults=0.0)
    for _ in range(200):
        act(model, np.random.default_rng(3), faults=0.0)
    while any(g.evaluation is not None for g in model.state.groups.values()):
        model.lease(worker, 2)
        for grant in worker.leases:
            submission = model.sample(grant, worker.held or 0)
            if submission is not None:
                model.submit(submission)
        worker.leases.clear()
        for group in model.unrewarded():
            model.judge(group)
    assert model.state.evaluations[0].rewarded == config.evaluation.prompts
    assert not any("e" in group_id for group_id in model.sealed_ids)
    assert all(g.phase is not GroupPhase.SUBMITTED for g in model.state.groups.values())
