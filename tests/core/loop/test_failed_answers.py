"""Answers that could not be scored: they teach nothing, and too many of them pause the run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.loop import acceptance
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import RECENT_SCORES, newest_failures
from antiphon.core.records import SampleReward
from tests.support.loop_model import LoopModel, act, make_config


def submitted(model: LoopModel) -> str:
    """Play on until a training group waits for its rewards; return its id."""
    rng = np.random.default_rng(0)
    while not (waiting := [g for g in model.unrewarded() if g.evaluation is None]):
        act(model, rng, faults=0.0)
    return waiting[0].group_id


def reward(model: LoopModel, group_id: str, failed: int, most: float) -> list[e.JournalEvent]:
    samples = model.state.groups[group_id].samples
    given_ = [SampleReward(i, 0.0, "it hung" if i < failed else "") for i in range(samples)]
    found = acceptance.accept_rewards(model.state, group_id, given_, "j", 0.0, most)
    model.record(*found)
    return found


def test_too_many_failures_pause_the_run_with_the_last_reason() -> None:
    model = LoopModel(make_config(mode="elastic"))
    samples = model.config.loop.group_size
    group_id = submitted(model)
    most = (samples - 1) / RECENT_SCORES
    (rewarded, paused) = reward(model, group_id, samples, most)
    assert isinstance(rewarded, e.GroupRewarded) and isinstance(paused, e.RunPaused)
    assert f"{samples} of the newest {RECENT_SCORES} answers" in paused.reason
    assert f"sample {samples - 1} of group {group_id}: it hung; mend the scorer" in paused.reason
    assert not model.state.groups[group_id].varied
    assert model.state.trajectories_failed == samples
    assert model.refolded() == model.state
    # Who starts it again has looked at it: the count begins anew.
    model.record(e.RunResumed())
    assert not model.state.paused_reason
    assert len(reward(model, submitted(model), 1, most)) == 1


@pytest.mark.parametrize("most", [1.0, 0.1])
def test_few_failures_do_not(most: float) -> None:
    model = LoopModel(make_config(mode="elastic"))
    assert len(reward(model, submitted(model), 1, most)) == 1


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=80))
def test_only_the_newest_count(groups: list[list[bool]]) -> None:
    found: list[bool] = []
    for group in groups:
        found = newest_failures(found, len(group), {i for i, failed in enumerate(group) if failed})
    assert found == [failed for group in groups for failed in group][-RECENT_SCORES:]


def test_a_held_out_answer_that_failed_solved_nothing() -> None:
    model = LoopModel(make_config(mode="elastic"))
    rng = np.random.default_rng(0)
    while not (waiting := [g for g in model.unrewarded() if g.evaluation is not None]):
        act(model, rng, faults=0.0)
        model.open_evaluation(0)
    group = waiting[0]
    reward(model, group.group_id, 1, 1.0)
    assert model.state.evaluations[0].rewards[group.prompt_index] == 0.0
    assert model.state.trajectories_failed == 1
