"""Skipping: a sealed batch may be given up until its step is committed, and nothing else changes for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import fixed_openings, group_seeds
from antiphon.core.loop.assembly import skip_step
from antiphon.core.loop.group_state import GroupState
from antiphon.core.seeds import prompt_order
from tests.support.loop_model import LoopModel, act, empty_batch, make_config, run_to_end

SEEDS = st.integers(0, 2**32 - 1)


def sealed_model(**fields: object) -> LoopModel:
    """Return a run whose step 1 is sealed and not committed."""
    model, rng = LoopModel(make_config(filter_="none", **fields), workers=2), np.random.default_rng(4)
    while len(model.state.commits) < 1 or not model.state.is_sealed(1):
        act(model, rng, faults=0.0)
        if len(model.state.commits) > 1:
            raise AssertionError("step 1 was committed first")
    return model


def ask(model: LoopModel, step: int) -> list[e.JournalEvent]:
    return skip_step(model.state, model.config.run.steps, empty_batch(step), "no finite loss", "ada")[1]


def test_only_a_step_whose_batch_waits_for_the_learner_can_be_skipped() -> None:
    model = sealed_model()
    last = model.config.run.steps - 1
    for step, words in (
        (0, "step 0 of run run-1 is committed, version 1 was trained on its batch"),
        (last, f"step {last} of run run-1 has no sealed batch yet"),
        (last + 1, rf"run run-1 has no step {last + 1}: its steps are 0..{last}"),
        (-1, "has no step -1"),
    ):
        with pytest.raises(ContractError, match=words):
            ask(model, step)
    digest = model.state.sealed[1].digest
    assert ask(model, 1)[0] == e.BatchVoided(1, digest, "no finite loss", "ada")


def test_repeating_a_skip_changes_nothing_also_after_the_step_was_committed() -> None:
    model = sealed_model()
    model.skip(1)
    assert ask(model, 1) == []
    run_to_end(model, np.random.default_rng(0), faults=0.0)
    assert model.state.commits[1].batch_digest == empty_batch(1).digest
    assert ask(model, 1) == []


def test_what_is_skipped_is_counted_once_and_kept_with_the_batch_in_its_place() -> None:
    model = sealed_model()
    before, spent = model.state.sealed[1], set(model.state.sealed_groups[1])
    trained = dict(model.state.staleness_histogram)
    model.skip(1)
    for age, count in before.staleness_histogram.items():
        assert model.state.staleness_histogram.get(age, 0) == trained[age] - count
    after = model.state.sealed[1]
    assert model.state.is_sealed(1) and (after.groups, after.trajectories) == (0, 0)
    assert spent <= set(model.state.sealed_groups[1])  # their payloads are forgotten in time
    assert [(v.digest, v.groups, v.reason, v.operator) for v in after.replaced] == [
        (before.digest, before.groups, "test", "operator")
    ]
    run_to_end(model, np.random.default_rng(1), faults=0.0)
    assert model.state.voided == list(after.replaced)
    assert sum(model.state.staleness_histogram.values()) == sum(
        ref.trajectories for ref in model.state.sealed
    )
    assert not spent & {row[0] for rows in model.batches.values() for row in rows}
    assert model.state.sealed_groups.get(1) is None  # retention is two steps


def test_an_event_that_contradicts_the_state_is_refused() -> None:
    model = sealed_model()
    for step in (0, model.config.run.steps - 1):
        with pytest.raises(IntegrityError, match="had no batch to void"):
            model.state.apply(e.BatchVoided(step, "", "", ""))
    model.record(e.BatchVoided(1, model.state.sealed[1].digest, "", ""))
    with pytest.raises(IntegrityError, match="committed out of order"):
        model.state.apply(e.StepCommitted(1, 2, "", "", {}, False))


@settings(max_examples=20, deadline=None)
@given(
    SEEDS,
    st.sampled_from(["none", "drop", "refill"]),
    st.sampled_from([(0, 1), (1, 1), (2, 2), (3, 2)]),
    st.sampled_from(["elastic", "fixed"]),
    st.booleans(),
)
def test_the_bound_holds_and_nothing_trains_twice_whichever_steps_are_skipped(
    seed: int, filter_: str, schedule: tuple[int, int], mode: str, voided: bool
) -> None:
    """`voided`: as older versions wrote it, other groups make another batch."""
    staleness, interval = schedule
    config = make_config(
        mode=mode, filter_=filter_, max_staleness=staleness, publish_interval=interval, steps=5
    )
    model, rng = LoopModel(config, workers=3), np.random.default_rng(seed)
    spent: set[str] = set()
    for _ in range(20_000):
        if model.done:
            break
        act(model, rng, faults=0.1)
        state = model.state
        waiting = [step for step in range(len(state.commits), len(state.sealed)) if state.is_sealed(step)]
        waiting = [step for step in waiting if not state.sealed[step].replaced]
        if waiting and rng.random() < 0.05:
            step = waiting[int(rng.integers(len(waiting)))]
            spent |= {row[0] for row in model.batches[step]}
            if voided:
                model.record(e.BatchVoided(step, state.sealed[step].digest, "test", "operator"))
                if mode == "fixed":
                    known = len(state.sealed_groups[step])
                    opened = fixed_openings(config, step, known + config.loop.prompts_per_step)
                    model.record(*opened[known:])
                model.settle()
            else:
                model.skip(step)
            assert model.refolded() == state
        for rank, group in enumerate(state.training()):
            if mode == "elastic" and group.phase != "open":
                oldest = group.held_version if group.phase == "leased" else group.oldest_version
                assert state.batches + rank // config.loop.prompts_per_step <= oldest + staleness
    assert model.done, f"no end: {[(g.group_id, str(g.phase)) for g in model.state.groups.values()]}"
    assert [ref.step for ref in model.state.sealed] == list(range(config.run.steps))
    assert [ref.digest for ref in model.state.sealed] == [
        commit.batch_digest for commit in model.state.commits
    ]
    assert max(model.state.staleness_histogram, default=0) <= staleness
    assert min(model.state.staleness_histogram, default=0) >= 0
    trained = [row[0] for rows in model.batches.values() for row in rows if row[2] == 0]
    assert len(trained) == len(set(trained)) and not spent & set(trained)
    assert model.refolded() == model.state


def test_a_step_that_was_voided_again_and_again_has_other_prompts_or_other_seeds_each_time() -> None:
    config = make_config(mode="fixed", filter_="none", prompts_per_step=3, train_size=10)
    opened = fixed_openings(config, 2, 40)
    assert [opening.number for opening in opened] == list(range(40))
    assert opened[:9] == fixed_openings(config, 2, 9)
    order = [int(prompt) for prompt in prompt_order(config.run.seed, 0, 10)]
    assert [opening.prompt_index for opening in opened[:3]] == order[6:9]
    assert len({opening.prompt_index for opening in opened[:10]}) == 10  # the whole split comes first
    requests = set()
    for opening in opened:
        fields = {"split": "train", "samples": 2, "step": 2, "refill": opening.refill}
        group = GroupState(opening.group_id, opening.number, prompt_index=0, epoch=opening.epoch, **fields)
        requests |= {(opening.prompt_index, seed) for seed in group_seeds(config, group, "key")}
    assert len(requests) == 80
