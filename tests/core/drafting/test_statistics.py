"""Figures of drafting: what cannot be true is left out, what is added up stays finite."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.api.engine import EngineOutput
from antiphon.core.drafting.statistics import (
    COUNTS,
    MOST_COUNT,
    add_statistics,
    believed_statistics,
    drafting_rates,
    drafting_summary,
)
from antiphon.core.errors import IntegrityError
from antiphon.core.loop import acceptance
from antiphon.core.loop import events as e
from antiphon.core.loop.assembly import SealPlan
from antiphon.core.loop.group_state import GroupOutcome, Tally
from antiphon.core.loop.run_state import RunState
from antiphon.core.metrics import BATCH_METRICS, DRAFTING_METRICS, batch_metrics, find_metric
from antiphon.core.records import BatchRef, DraftingStatistics, FinishReason, GroupSubmission, SubmitVerdict
from antiphon.lineage.rollout_table import decode_timings
from antiphon.lineage.run_log import is_timing, step_line
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.runs.outcome import epochs_words
from antiphon.services.coordinator.sealing import seal_batch
from antiphon.services.rollout.work import GroupInFlight, WorkInFlight
from antiphon.system.wakeup import Wakeup
from tests.support.light_coordinator import light_lease
from tests.support.light_parties import LightPrompts
from tests.support.loop_model import LoopModel, light_trajectory, make_config

SEEDS = (11, 12)


def outcome(drafting: DraftingStatistics | None) -> GroupOutcome:
    return GroupOutcome((1.0, 1.0), (3, 4), drafting, 0)


TRAJECTORIES = tuple(light_trajectory(seed, 0, index, "k") for index, seed in enumerate(SEEDS))
TOKENS = sum(t.token_ids.size for t in TRAJECTORIES)
HONEST = DraftingStatistics(TOKENS, 5, 9, TOKENS - 1, TOKENS - 2, 2, 0.25, 0.125, 1.5, completions=2)


def submission(figures: DraftingStatistics | None) -> GroupSubmission:
    return GroupSubmission("l", "g", "w", TRAJECTORIES, 0.5, figures)


@st.composite
def possible(draw: st.DrawFn) -> DraftingStatistics:
    accepted, wrong, undrafted, wasted = (draw(st.integers(0, 2**38)) for _ in range(4))
    covered, completions = accepted + wrong, draw(st.integers(1, 2**20))
    promising = draw(st.integers(0, covered + undrafted))
    return DraftingStatistics(
        tokens=covered + undrafted,
        passes=draw(st.integers(0, MOST_COUNT)),
        drafted=covered + wasted,
        covered=covered,
        accepted=accepted,
        with_history=draw(st.integers(0, completions)),
        drafter_s=draw(st.floats(0, 1e9)),
        sampler_s=draw(st.floats(0, 1e9)),
        gain=draw(st.floats(0, 1e6)),
        completions=completions,
        promising=promising,
        rested=draw(st.integers(0, promising)),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": TOKENS + 1},
        {"tokens": -1, "covered": -1, "accepted": -1},
        {"accepted": TOKENS},
        {"covered": TOKENS + 1, "drafted": TOKENS + 1},
        {"covered": 9, "drafted": 8, "accepted": 0, "tokens": TOKENS},
        {"drafted": MOST_COUNT + 1},
        {"passes": 2**62},
        {"passes": -1},
        {"passes": 2.5},
        {"passes": math.nan},
        {"passes": True},
        {"with_history": 3},
        {"with_history": -1},
        {"promising": TOKENS + 1},
        {"promising": 3, "rested": 4},
        {"rested": -1},
        *(
            {name: value}
            for name in ("drafter_s", "sampler_s", "gain")
            for value in (math.nan, math.inf, -1.0)
        ),
        {"drafter_s": 1e300},
        {"gain": 1e7},
        {"gain": "fast"},
    ],
    ids=str,
)
def test_figures_that_cannot_be_true_are_left_out_whole(changes: dict[str, object]) -> None:
    assert believed_statistics(submission(dataclasses.replace(HONEST, **changes))) is None  # type: ignore[arg-type]


def test_figures_that_can_be_true_are_kept_and_completions_are_counted() -> None:
    assert believed_statistics(submission(HONEST)) == HONEST
    assert believed_statistics(submission(dataclasses.replace(HONEST, completions=10**9))) == HONEST
    assert believed_statistics(submission(None)) is None


@given(st.lists(st.none() | possible(), max_size=6))
def test_sums_are_exact_possible_and_their_rates_finite(parts: list[DraftingStatistics | None]) -> None:
    whole = add_statistics(parts)
    found = [part for part in parts if part is not None]
    assert (whole is None) == (not found)
    if whole is None:
        return
    for name in (*COUNTS, "completions"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in found)
    assert whole.accepted <= whole.covered <= min(whole.drafted, whole.tokens)
    gains = [part.gain for part in found if part.gain > 0]
    assert (whole.gain == 0) if not gains else (min(gains) * 0.999 <= whole.gain <= max(gains) * 1.001)
    rates = drafting_rates(whole)
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates.values())
    assert max(rates[name] for name in ("acceptance", "coverage", "history_share", "rested_share")) <= 1


def test_shares_of_nothing_are_zero() -> None:
    nothing = DraftingStatistics(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, completions=0)
    assert set(drafting_rates(nothing).values()) == {0.0}


@given(possible())
def test_events_carry_figures_through_the_journal(figures: DraftingStatistics) -> None:
    for event in (
        e.GroupSubmitted("g", "l", "w", 1, "d", 3, (1, 2), 0.5, 1.5, figures),
        e.BatchSealed(0, ("g",), (), "d", "t", 2, 0, 0, 7, 0.5, 3.5, ((0, 2),), figures),
    ):
        body = e.dump_event(event)
        assert e.load_event(event.kind, body) == event
        assert "NaN" not in body and "Infinity" not in body


def test_journals_from_before_there_was_drafting_still_fold() -> None:
    event = e.GroupSubmitted("g", "l", "w", 1, "d", 3, (1, 2), 0.5, 1.5)
    old = {name: value for name, value in json.loads(e.dump_event(event)).items() if name != "drafting"}
    assert e.load_event(event.kind, json.dumps(old)) == event
    with pytest.raises(IntegrityError, match=r"group\.submitted"):
        e.load_event(event.kind, json.dumps({**old, "drafting": {"tokens": 1}}))


def test_a_group_hands_in_the_sum_of_its_completions_and_the_newest_gain() -> None:
    lease = light_lease(0, samples=3)
    one = DraftingStatistics(4, 2, 3, 3, 2, 1, 0.5, 0.25, 1.0)

    def handed_in(drafting: Sequence[tuple[int, DraftingStatistics | None]]) -> DraftingStatistics | None:
        work, trajectory = WorkInFlight(Wakeup()), TRAJECTORIES[0]
        work.groups[lease.lease_id] = GroupInFlight(lease, 0.0, {})
        part = trajectory.token_ids, trajectory.logprobs, trajectory.spans, FinishReason.STOP
        for index, own in drafting:
            work.collect([EngineOutput(*part, request_id=f"{lease.lease_id}/{index}", drafting=own)])
        return work.finished[lease.lease_id].drafting

    async def story() -> None:
        expected = DraftingStatistics(8, 4, 6, 6, 4, 2, 1.0, 0.5, 1.0, completions=2)
        assert handed_in([(2, dataclasses.replace(one, gain=3.0)), (0, None), (1, one)]) == expected
        assert handed_in([(index, None) for index in range(3)]) is None

    asyncio.run(story())


class DraftingLoop(LoopModel):
    """The loop, with workers that draft; some of them lie."""

    def sample(self, grant: e.LeaseGranted, version: int) -> GroupSubmission | None:
        plain = super().sample(grant, version)
        if plain is None:
            return None
        tokens = sum(t.token_ids.size for t in plain.trajectories)
        figures = DraftingStatistics(tokens, tokens, 2, 1, 1, 0, 0.5, 0.25, 2.0, completions=99)
        lie = dataclasses.replace(figures, drafter_s=math.nan)
        return dataclasses.replace(plain, drafting=lie if grant.worker_id == "w1" else figures)


def rewarded(filter_: str, groups: int) -> DraftingLoop:
    model = DraftingLoop(make_config(filter_=filter_, steps=2, prompts_per_step=groups))
    assert model.open_step()
    for worker in model.workers:
        model.lease(worker, groups // 2)
        for grant in worker.leases:
            handed_in = model.sample(grant, worker.held or 0)
            assert handed_in is not None
            assert model.submit(handed_in) is SubmitVerdict.ACCEPTED
    return model


def test_a_lie_costs_its_figures_and_not_the_group() -> None:
    model = rewarded("none", 4)
    by_worker = {group.worker_id: group.drafting for group in model.state.groups.values()}
    assert by_worker["w1"] is None
    honest = by_worker["w0"]
    assert honest is not None and honest.completions == model.config.loop.group_size
    assert model.refolded() == model.state


def test_a_sealed_batch_sums_the_groups_it_judged(tmp_path: Path) -> None:
    model = rewarded("none", 4)
    groups = [
        dataclasses.replace(g, rewards=(0.0, 1.0) * (g.samples // 2)) for g in model.state.groups.values()
    ]
    prompts, tally = LightPrompts(), Tally([outcome(HONEST), outcome(None)])
    sampled = {
        g.group_id: (model.submissions[g.group_id], prompts.prompt(g.split, g.prompt_index))
        for g in groups[:3]
    }
    plan = SealPlan(0, tuple(groups[:3]), tuple(groups[3:]))
    store = ArtifactStore(tmp_path)
    event = seal_batch(plan, sampled, tally, model.config, store)
    assert event.drafting == add_statistics([*(g.drafting for g in groups), HONEST])
    for timing in decode_timings(store.get(event.timings_digest)):
        figures = next(g.drafting for g in groups if g.group_id == timing.group_id)
        assert timing.passes == (figures.passes if figures else None)
        assert timing.accepted == (figures.accepted if figures else None)
    undrafted = [dataclasses.replace(g, drafting=None) for g in groups]
    bare = SealPlan(0, tuple(undrafted[:3]), tuple(undrafted[3:]))
    plain = seal_batch(bare, sampled, Tally(), model.config, store)
    assert plain.drafting is None
    assert plain.digest == event.digest, "the batch knows nothing of drafting"


def test_figures_of_groups_that_left_early_are_booked_once() -> None:
    tally = Tally([outcome(HONEST), outcome(None)])
    assert tally.copy() == tally
    assert tally.without(1, 0, 0).filtered == [outcome(None)]
    state = RunState(group_size=2, payload_retention_steps=2)
    state.apply(e.GroupOpened("g", 0, 0, 0, None, None, False))
    state.apply(e.GroupSubmitted("g", "l", "w", 1, "d", 0, (3, 4), 0.5, 1.0, HONEST))
    state.apply(e.GroupRewarded("g", (1.0, 1.0), "j", 2.0))
    state.apply(e.GroupDropped("g", "filtered"))
    assert [group.drafting for group in state.since_seal.filtered] == [HONEST]
    state.apply(e.BatchSealed(0, (), (), "d", "t", 0, 1, 0, 0, 1.0, 3.5, (), HONEST))
    assert state.since_seal.filtered == [] and state.sealed[0].drafting == HONEST


BATCH = BatchRef(0, "b" * 64, "c" * 64, 16, 2, 0, 0, 400, 0.5, {0: 16}, 25.0)


def test_a_batch_of_which_nothing_was_scored_says_nothing_of_rewards() -> None:
    driven = dataclasses.replace(BATCH, groups=0, reward_mean=0.0)  # by a client of the door
    assert {"reward_mean", "completion_tokens_mean"} == {*batch_metrics(BATCH)} - {*batch_metrics(driven)}
    filtered = dataclasses.replace(driven, groups_filtered=2)
    assert batch_metrics(filtered)["reward_mean"] == 0.0


def test_a_commit_says_what_drafting_did_and_nothing_without_it() -> None:
    plain = batch_metrics(BATCH)
    assert set(plain) == {metric.name for metric in BATCH_METRICS}
    drafted = batch_metrics(dataclasses.replace(BATCH, drafting=HONEST))
    assert set(drafted) - set(plain) == {metric.name for metric in DRAFTING_METRICS}
    assert drafted["drafting_tokens_per_pass"] == TOKENS / 5
    assert drafted["drafting_history_share"] == 1.0
    assert drafted["drafting_drafter_ms"] == pytest.approx(50.0)
    assert drafted["drafting_gain"] == 1.5
    assert all(find_metric(name) is not None for name in drafted)


def test_what_drafting_did_is_no_part_of_what_a_fixed_run_repeats() -> None:
    from antiphon.core.loop.events import StepCommitted

    batch = dataclasses.replace(BATCH, drafting=HONEST)
    commit = StepCommitted(0, 1, "a" * 64, "b" * 64, {"loss": 0.5, **batch_metrics(batch)}, True)
    line = step_line(commit, batch, 0.0, None)
    timings = line.pop("timings")
    assert {metric.name for metric in DRAFTING_METRICS} <= set(timings)
    without = dataclasses.replace(commit, metrics={"loss": 0.5, **batch_metrics(BATCH)})
    bare = step_line(without, BATCH, 0.0, None)
    del bare["timings"]
    assert line == bare
    assert all(is_timing(metric.name) for metric in DRAFTING_METRICS)


@given(st.dictionaries(st.integers(0, 99), possible(), max_size=20))
def test_a_summary_is_plain_finite_and_in_order(by_epoch: dict[int, DraftingStatistics]) -> None:
    summary = drafting_summary(by_epoch)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    if not by_epoch:
        assert summary == {}
        return
    assert [entry["epoch"] for entry in summary["by_epoch"]] == sorted(by_epoch)
    assert summary["tokens"] == sum(entry["tokens"] for entry in summary["by_epoch"])
    words = epochs_words(summary["by_epoch"])
    assert words.startswith(f"{min(by_epoch)}: ") and len(words) < 300


def test_the_digest_of_a_submission_ignores_drafting() -> None:
    plain = acceptance.submission_digest(submission(None))
    assert plain == acceptance.submission_digest(submission(HONEST))
    assert np.isfinite(HONEST.gain)
