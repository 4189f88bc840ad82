"""Answers that could not be scored: they teach nothing, and too many of them pause the run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.loop import acceptance
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import RECENT_SCORES, Scored, newest_scored
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
    assert f"{samples} of the newest {samples} answers" in paused.reason
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
    found: list[Scored] = []
    for number, group in enumerate(groups):
        found = newest_scored(
            found, [f"w{number}"] * len(group), {i for i, failed in enumerate(group) if failed}
        )
    whole = [(f"w{number}", failed) for number, group in enumerate(groups) for failed in group]
    assert found == whole[-RECENT_SCORES:]


def play(worker_scores: list[tuple[str, int]], most: float = 0.1) -> tuple[list[str], str]:
    """Reward groups of 8 with so many failures in turn; return who was blamed, and why it paused."""
    model = LoopModel(make_config(mode="elastic", group_size=8))
    group_id = submitted(model)
    state, group = model.state, model.state.groups[group_id]
    blamed, paused = [], ""
    for worker, failed in worker_scores:
        group.worker_id = f"{worker}-1"
        given_ = [SampleReward(i, 0.0, "it hung" if i < failed else "") for i in range(8)]
        if author := acceptance.author_of_failures(state, group_id, given_, most):
            blamed.append(author)
        _, *pauses = acceptance.accept_rewards(state, group_id, given_, "j", 0.0, most)
        paused = paused or (pauses[0].reason if pauses else "")  # type: ignore[attr-defined]
        state.recent_scored = newest_scored(
            state.recent_scored, state.authors(group), {i for i in range(8) if i < failed}
        )
    return blamed, paused


def test_one_author_whose_answers_fail_is_blamed_and_the_run_goes_on() -> None:
    blamed, paused = play([("good", 0), ("evil", 8), ("good", 0), ("other", 1)] * 8)
    assert blamed == ["evil"] * 6 and not paused  # from its third group on, which is soon its last


def test_answers_of_several_authors_that_fail_pause_the_run() -> None:
    blamed, paused = play([("good", 0), *[("good", 8), ("evil", 8), ("other", 8)] * 3])
    assert not blamed and paused.startswith("32 of the newest 40 answers could not be scored")


def test_where_nobody_else_samples_the_run_pauses() -> None:
    blamed, paused = play([("only", 0), *[("only", 8)] * 4])
    assert not blamed and paused.startswith("32 of the newest 40 answers")


def test_a_group_of_more_answers_than_are_remembered_is_rewarded() -> None:
    model = LoopModel(make_config(mode="elastic"))
    group_id, count = submitted(model), RECENT_SCORES + 8
    group = model.state.groups[group_id]
    group.samples, group.token_counts = count, (1,) * count
    given_ = [SampleReward(i, 0.0, "" if i else "it hung") for i in range(count)]
    assert acceptance.author_of_failures(model.state, group_id, given_, 0.1) == ""
    assert len(acceptance.accept_rewards(model.state, group_id, given_, "j", 0.0, 0.1)) == 1


def test_one_prompt_that_ends_the_scorer_speaks_against_nobody() -> None:
    story = [("good", 0), ("new", 8), ("other", 0), ("new", 0), ("other", 8), ("good", 1), ("new", 0)] * 3
    assert play(story, most=0.5) == ([], "")


def test_a_scorer_that_broke_speaks_against_nobody() -> None:
    """The fastest worker meets it first; that others were scored before says nothing."""
    blamed, paused = play([*[("slow", 0), ("fast", 0)] * 4, *[("fast", 8)] * 8, ("slow", 8), ("fast", 8)])
    assert not blamed and "answers could not be scored" in paused


def test_who_sampled_most_of_an_answer_is_its_author() -> None:
    model = LoopModel(make_config(mode="elastic"))
    group_id = submitted(model)
    group = model.state.groups[group_id]
    group.worker_id, group.token_counts = "good-1", (10, 10)
    authors = ((0, "evil-3", 0, 6), (1, "evil-3", 0, 3))
    model.state.receipts[group_id] = replace(model.state.receipts[group_id], authors=authors)
    assert model.state.authors(group) == ["evil", "good"]


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
