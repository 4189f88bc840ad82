"""A score of a version is earned by that version alone, from the first token of each answer to the last."""

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.loop import admission
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import EvaluationState, heldout_group
from antiphon.core.records import GroupSubmission, VersionSpan
from antiphon.core.seeds import derive_seed
from tests.support.loop_model import LoopModel, ModelWorker, make_config


def evaluated(version: int = 0, samples: int = 1) -> tuple[LoopModel, ModelWorker]:
    """Return a run at version 1 that evaluates a version, and a worker that holds it."""
    model = LoopModel(make_config(filter_="none", evaluation_samples=samples))
    worker = model.workers[0]
    model.open_step()
    while not model.state.commits:
        model.lease(worker, 3)
        while worker.leases and (submission := model.sample(worker.leases.pop(), 0)):
            model.submit(submission)
        for group in model.unrewarded():
            model.judge(group)
        model.seal()
        model.commit()
    model.publish()
    model.open_evaluation(version)
    worker.held = version
    return model, worker


def test_only_a_worker_that_holds_the_version_is_given_its_prompts() -> None:
    model, worker = evaluated()
    newer = ModelWorker("newer", held=1)
    assert not any(group_id.startswith("v") for group_id in model.plan(newer, 3).group_ids)
    assert len([i for i in model.plan(worker, 3).group_ids if i.startswith("v000000-")]) == 3


def leased_prompt(model: LoopModel, worker: ModelWorker) -> GroupSubmission:
    grant = e.LeaseGranted("v000000-e0000", "0" * 32, worker.name, 1, 0, 0.0)
    model.record(grant)
    submission = model.sample(grant, 0)
    assert submission is not None
    return submission


def test_an_answer_that_a_later_version_went_on_with_is_refused() -> None:
    model, worker = evaluated()
    submission = leased_prompt(model, worker)
    (answer,) = submission.trajectories
    length = answer.token_ids.size
    for spans in ((VersionSpan(1, 0, length),), (VersionSpan(0, 0, 1), VersionSpan(1, 1, length))):
        mixed = dataclasses.replace(answer, spans=tuple(s for s in spans if s.start < s.stop))
        if mixed.spans != answer.spans:
            with pytest.raises(ContractError, match="version"):
                model.submit(dataclasses.replace(submission, trajectories=(mixed,)))
    model.submit(submission)
    event = model.journal[-1]
    assert isinstance(event, e.GroupSubmitted) and (event.oldest_version, event.newest_version) == (0, 0)


def test_the_fold_refuses_a_mixed_score_and_opens_journals_from_before() -> None:
    for newest in (1, None):
        model, worker = evaluated()
        submission = leased_prompt(model, worker)
        model.submit(submission)
        told = dataclasses.replace(model.journal.pop(), oldest_version=newest or 1, newest_version=newest)  # type: ignore[type-var]
        model.journal.append(told)
        if newest is None:
            assert model.refolded().groups["v000000-e0000"].oldest_version == 1
        else:
            with pytest.raises(IntegrityError, match="contradicts itself: v000000-e0000"):
                model.refolded()


def test_training_waits_before_the_evaluated_snapshot_is_dropped() -> None:
    model, worker = evaluated()
    limit = admission.kept_until(model.config, 0)
    assert limit == 15 and admission.version_to_evaluate(model.state, model.config) == 0
    for version in range(2, limit + 2):
        model.state.snapshots[version] = "digest"
    model.state.newest_version = limit
    assert admission.version_to_evaluate(model.state, model.config) == 0
    model.state.opened_steps = 99
    model.state.sealed = model.state.sealed * limit
    worker.held = limit
    plan = model.plan(worker, 3)
    assert not plan.openings and "waits for an evaluation" in plan.reason
    model.state.newest_version = limit + 1  # a run from before this rule: nothing can be done, so none waits
    assert admission.version_to_evaluate(model.state, model.config) is None
    assert model.plan(worker, 3).openings


@given(samples=st.integers(1, 64), version=st.integers(0, 10**6), index=st.integers(0, 10**4))
def test_more_samples_keep_the_seeds_of_fewer(samples: int, version: int, index: int) -> None:
    group, key = heldout_group(version, index, samples), f"heldout-0-{index}"
    seeds = admission.group_seeds(make_config(), group, key)
    assert len(set(seeds)) == len(seeds) == samples
    assert seeds[0] == derive_seed("evaluation", 7, key, version)
    fewer = heldout_group(version, index, max(1, samples // 2))
    assert admission.group_seeds(make_config(), fewer, key) == seeds[: fewer.samples]
    assert group.group_id == fewer.group_id


@pytest.mark.parametrize(
    ("samples", "groups", "leased"),  # of groups of 2 samples; three prompts wait
    [(1, 1, 2), (1, 2, 3), (2, 2, 2), (3, 2, 1), (3, 4, 2), (64, 1, 1), (64, 3, 1), (3, 0, 0)],
)
def test_a_prompt_with_more_samples_than_there_are_places_is_leased_alone(
    samples: int, groups: int, leased: int
) -> None:
    model, worker = evaluated(samples=samples)
    ids = model.plan(worker, groups).group_ids
    assert len([group_id for group_id in ids if group_id.startswith("v")]) == leased
    if samples > 2 * groups:
        assert len(ids) == leased, "there is no place left for training"


def test_each_prompt_is_sampled_as_often_as_asked() -> None:
    model, worker = evaluated(1, samples=3)
    for _ in range(4):  # a prompt takes the places of two groups
        model.lease(worker, 2)
        while worker.leases and (submission := model.sample(worker.leases.pop(), 1)):
            model.submit(submission)
        for group in model.unrewarded():
            model.judge(group)
    found = model.state.evaluations[1]
    assert found.rewarded == found.prompts == 3 and not model.state.evaluating
    assert all(len(rewards) == len(found.tokens[index]) == 3 for index, rewards in found.rewards.items())
    assert model.refolded() == model.state


RANGES = st.tuples(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9)).map(lambda pair: (pair[0], sum(pair)))


@given(st.data(), st.integers(1, 6), st.integers(1, 6), RANGES)
def test_a_score_is_the_mean_over_prompts_of_the_mean_over_samples(
    data: st.DataObject, prompts: int, samples: int, within: tuple[float, float]
) -> None:
    low, high = within
    rows = data.draw(
        st.lists(
            st.lists(st.none() | st.floats(low, high), min_size=samples, max_size=samples).map(tuple),
            min_size=prompts,
            max_size=prompts,
        )
    )
    failures = {i: {k: "it hung" for k, r in enumerate(row) if r is None} for i, row in enumerate(rows)}
    rewards = {i: tuple(0.0 if r is None else r for r in row) for i, row in enumerate(rows)}
    tokens = {i: (i + 1,) * samples for i in range(prompts)}
    order = data.draw(st.permutations(range(prompts)))
    found = EvaluationState(
        prompts, samples, {i: rewards[i] for i in order}, {i: tokens[i] for i in order}, failures
    )
    counted = [[low if r is None else r for r in row] for row in rows]
    mean, length = found.means(low)
    expected = statistics.fmean(map(statistics.fmean, counted))
    assert mean == pytest.approx(expected, rel=1e-12, abs=1e-6 * 1e-3 + 1e-12 * max(abs(low), abs(high)))
    assert length == pytest.approx((prompts + 1) / 2)
    assert low - 1e-6 * (high - low) <= mean <= found.best_of_k(low) + 1e-6 * (high - low)
    in_order = EvaluationState(prompts, samples, rewards, tokens, failures)
    assert in_order.means(low) == (mean, length) and in_order.best_of_k(low) == found.best_of_k(low)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40), st.integers(0, 999))
def test_one_sample_a_prompt_scores_as_it_did_bit_for_bit(rewards: list[float], length: int) -> None:
    count = len(rewards)
    state = EvaluationState(
        count, 1, {i: (r,) for i, r in enumerate(rewards)}, {i: (length + i,) for i in range(count)}
    )
    lengths = [length + i for i in range(count)]
    assert state.means() == (math.fsum(rewards) / count, math.fsum(lengths) / count)
