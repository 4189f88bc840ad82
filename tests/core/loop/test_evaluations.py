"""A score of a version is earned by that version alone, from the first token of each answer to the last."""

import dataclasses

import pytest

from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.loop import admission
from antiphon.core.loop import events as e
from antiphon.core.records import GroupSubmission, VersionSpan
from tests.support.loop_model import LoopModel, ModelWorker, make_config


def evaluated(version: int = 0) -> tuple[LoopModel, ModelWorker]:
    """Return a run at version 1 that evaluates a version, and a worker that holds it."""
    model = LoopModel(make_config(filter_="none"))
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
