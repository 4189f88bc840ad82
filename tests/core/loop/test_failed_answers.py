"""Answers that could not be scored: they teach nothing, and too many of them pause the run."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.loop import acceptance
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import (
    RECENT_SCORES,
    GroupPhase,
    GroupState,
    Receipt,
    Scored,
    newest_scored,
)
from antiphon.core.loop.run_state import RunState
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
    assert f"sample {samples - 1} of group {group_id}: it hung; fix the scorer" in paused.reason
    assert not model.state.groups[group_id].varied
    assert model.state.trajectories_failed == samples
    assert model.refolded() == model.state
    # Who starts it again has looked at it: the count begins again.
    model.record(e.RunResumed())
    assert not model.state.paused_reason
    assert len(reward(model, submitted(model), 1, most)) == 1


@pytest.mark.parametrize("most", [1.0, 0.1])
def test_few_failures_do_not(most: float) -> None:
    model = LoopModel(make_config(mode="elastic"))
    assert len(reward(model, submitted(model), 1, most)) == 1


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=80), st.integers(1, 12))
def test_only_the_newest_count(groups: list[list[bool]], group_size: int) -> None:
    found: list[Scored] = []
    for number, group in enumerate(groups):
        failed = {i for i, failed in enumerate(group) if failed}
        found = newest_scored(found, [f"w{number}"] * len(group), failed, group_size)
    whole = [(f"w{number}", failed) for number, group in enumerate(groups) for failed in group]
    assert found == whole[-max(RECENT_SCORES, 32 * group_size) :]


def play(
    worker_scores: Sequence[tuple[str, int]],
    most: float = 0.1,
    group_size: int = 8,
    before: Sequence[Scored] = (),
) -> tuple[list[str], str]:
    """Reward groups with this many failures in turn; return who was blamed, and why it paused."""
    state = RunState(group_size, 2)
    state.recent_scored = list(before)
    group = GroupState("g", 0, "train", 0, 0, group_size, phase=GroupPhase.SUBMITTED)
    group.token_counts = (1,) * group_size
    state.groups["g"], state.receipts["g"] = group, Receipt("l", "d", 0)
    blamed, paused = [], ""
    for worker, failed in worker_scores:
        group.worker_id = f"{worker}-1"
        given_ = [SampleReward(i, 0.0, "it hung" if i < failed else "") for i in range(group_size)]
        if author := acceptance.author_of_failures(state, "g", given_, most):
            blamed.append(author)
        _, *pauses = acceptance.accept_rewards(state, "g", given_, "j", 0.0, most)
        paused = paused or (pauses[0].reason if pauses else "")  # type: ignore[attr-defined]
        state.recent_scored = newest_scored(
            state.recent_scored, state.authors(group), range(failed), group_size
        )
    return blamed, paused


@settings(max_examples=15)
@given(st.integers(1, 1024), st.integers(2, 10), st.randoms(use_true_random=False))
def test_groups_of_every_size_are_counted_alike(group_size: int, workers: int, order: random.Random) -> None:
    names = [f"w{number}" for number in range(workers)]

    def rounds(count: int, failing: Collection[str]) -> list[tuple[str, int]]:
        return [
            (name, group_size if name in failing else 0)
            for _ in range(count)
            for name in order.sample(names, workers)
        ]

    blamed, paused = play(rounds(2, ()) + rounds(4, ["w0"]), group_size=group_size)
    assert set(blamed) == {"w0"} and len(blamed) >= 2 and not paused
    enough = 3 + RECENT_SCORES // (10 * group_size)
    blamed, paused = play(rounds(2, ()) + rounds(enough, names), group_size=group_size)
    assert not blamed and "answers could not be scored" in paused
    blamed, paused = play([("w0", group_size)] * (1 + enough), group_size=group_size)
    assert not blamed and "answers could not be scored" in paused


def test_a_single_answer_of_others_does_not_say_that_the_scorer_works() -> None:
    blamed, paused = play([("evil", 8)] * 4, before=[("good", False)])
    assert not blamed and paused.startswith("32 of the newest 33 answers could not be scored")


def test_one_author_whose_answers_fail_is_blamed_and_the_run_goes_on() -> None:
    blamed, paused = play([("good", 0), ("evil", 8), ("good", 0), ("other", 1)] * 8)
    assert blamed == ["evil"] * 6 and not paused  # from its third group on, which is soon its last


def test_answers_of_several_authors_that_fail_pause_the_run() -> None:
    blamed, paused = play([("good", 0), *[("good", 8), ("evil", 8), ("other", 8)] * 3])
    assert not blamed and paused.startswith("32 of the newest 40 answers could not be scored")


def test_where_nobody_else_samples_the_run_pauses() -> None:
    blamed, paused = play([("only", 0), *[("only", 8)] * 4])
    assert not blamed and paused.startswith("32 of the newest 40 answers")


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
    assert model.state.evaluations[0].counted()[0] == (0.0,)
    assert model.state.evaluations[0].means(-1.0)[0] == -1.0
    assert model.state.trajectories_failed == 1
