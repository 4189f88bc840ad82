"""Events survive the journal's JSON; submissions that do not fit their lease are refused in words."""

import dataclasses

import numpy as np
import pytest

from antiphon.core.checks import check_rewards, check_submission, submission_digest
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import fixed_openings, group_seeds, prompt_place
from antiphon.core.loop.group_state import GroupOutcome, GroupState, Tally
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import FinishReason, GroupSubmission, SampleReward, Trajectory, VersionSpan
from tests.support.loop_model import MAX_TOKENS, LoopModel, light_trajectory, make_config

SEEDS = (11, 2**64 - 1)


def submission(**changes: object) -> GroupSubmission:
    trajectories = tuple(light_trajectory(seed, 3, index, "k") for index, seed in enumerate(SEEDS))
    whole = GroupSubmission("l", "g1", "w", trajectories, 0.5)
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def first(**changes: object) -> GroupSubmission:
    whole = submission()
    changed = dataclasses.replace(whole.trajectories[0], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(whole, trajectories=(changed, *whole.trajectories[1:]))


def check(handed_in: GroupSubmission, version: int | None = None, newest: int = 5) -> None:
    check_submission(handed_in, SEEDS, max_tokens=MAX_TOKENS, version=version, newest_version=newest)


def spans(*edges: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*edge) for edge in edges)


TOKENS = submission().trajectories[0].token_ids.size


@pytest.mark.parametrize(
    ("handed_in", "words"),
    [
        (submission(trajectories=submission().trajectories[:1]), "1 trajectories, but its lease asks for 2"),
        (submission(generation_s=float("nan")), "generation_s is nan"),
        (first(sample_index=1), "sample_index=1"),
        (first(seed=12), "seed=12, but the lease says 11"),
        (first(token_ids=np.zeros(0, np.int32)), "non-empty row of integers"),
        (first(token_ids=np.zeros(TOKENS, np.float32)), "non-empty row of integers, not float32"),
        (first(token_ids=np.full(TOKENS, -1, np.int32)), "token id -1 is negative"),
        (first(logprobs=np.zeros(TOKENS + 1, np.float32)), f"for {TOKENS} tokens"),
        (
            first(logprobs=np.full(TOKENS, np.nan, np.float32)),
            r"must lie in \[-50, 0\] nats, but lie in \[nan",
        ),
        (first(logprobs=np.full(TOKENS, -np.inf, np.float32)), r"must lie in \[-50, 0\] nats"),
        (first(logprobs=np.full(TOKENS, -50.01, np.float32)), r"but lie in \[-50\.01, -50\.01\]"),
        (first(logprobs=np.full(TOKENS, -1e5, np.float32)), "look at the worker's engine"),
        (first(logprobs=np.full(TOKENS, 1e-3, np.float32)), r"must lie in \[-50, 0\] nats"),
        (first(spans=()), "but end at 0"),
        (first(spans=spans((3, 1, TOKENS))), "without gaps"),
        (first(spans=spans((3, 0, TOKENS + 1))), f"but end at {TOKENS + 1}"),
        (first(spans=spans((6, 0, TOKENS))), r"allows versions 0\.\.5"),
    ],
)
def test_submission_that_does_not_fit_is_refused(handed_in: GroupSubmission, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        check(handed_in)


def test_submission_that_fits_is_taken() -> None:
    check(submission())
    check(first(logprobs=np.linspace(-50.0, 0.0, TOKENS, dtype=np.float32)))
    check(submission(), version=3)
    with pytest.raises(ContractError, match=r"version 3, but its lease allows versions 2\.\.2"):
        check(submission(), version=2)


def kept(*edges: tuple[int, int, int, bool]) -> GroupSubmission:
    return first(spans=tuple(VersionSpan(*edge) for edge in edges))


def test_kept_caches_are_taken_only_after_a_swap_and_where_the_run_keeps_them() -> None:
    def check_kept(handed_in: GroupSubmission, keeps: bool = True) -> None:
        check_submission(
            handed_in, SEEDS, max_tokens=MAX_TOKENS, version=None, newest_version=5, keeps_cache=keeps
        )

    good = kept((3, 0, 1, False), (4, 1, 2, True), (5, 2, TOKENS, True))
    check_kept(good)
    with pytest.raises(ContractError, match=r"the run has rollout\.swap_cache=recompute"):
        check_kept(good, keeps=False)
    # Behind a version of its own no token escapes an audit.
    for hidden in (
        kept((3, 0, TOKENS, True)),
        kept((3, 0, 1, False), (3, 1, TOKENS, True)),
    ):
        with pytest.raises(ContractError, match="kept cache, but no swap came before"):
            check_kept(hidden)
    check_kept(kept((3, 0, 1, False), (4, 1, 2, True), (4, 2, TOKENS, False)))  # another worker went on


def test_finish_reason_must_match_the_length() -> None:
    def trajectory(tokens: int, reason: FinishReason) -> Trajectory:
        return Trajectory(
            np.ones(tokens, np.int32),
            np.zeros(tokens, np.float32),
            spans((0, 0, tokens)),
            reason,
            sample_index=0,
            seed=11,
        )

    def one(tokens: int, reason: FinishReason) -> None:
        handed_in = GroupSubmission("l", "g", "w", (trajectory(tokens, reason),), 0.0)
        check_submission(handed_in, (11,), max_tokens=4, version=None, newest_version=0)

    one(4, FinishReason.LENGTH)
    one(4, FinishReason.STOP)
    with pytest.raises(ContractError, match="finish_reason=length after 3 tokens"):
        one(3, FinishReason.LENGTH)
    with pytest.raises(ContractError, match=r"exceed sampling\.max_tokens=4"):
        one(5, FinishReason.STOP)


def test_digest_of_a_submission_ignores_who_sampled_it_and_how_long_it_took() -> None:
    digest = submission_digest(submission())
    assert digest == submission_digest(submission(worker_id="x", generation_s=9.0, lease_id="m"))
    assert digest != submission_digest(submission(group_id="g2"))
    assert digest != submission_digest(first(seed=12))
    assert digest != submission_digest(first(spans=spans((2, 0, TOKENS))))
    over = ((3, 0, 1, False), (4, 1, TOKENS, False)), ((3, 0, 1, False), (4, 1, TOKENS, True))
    assert len({submission_digest(kept(*edges)) for edges in over}) == 2


@pytest.mark.parametrize(
    ("sample_rewards", "words"),
    [
        ([SampleReward(0, 1.0)], r"0\.\.1, but got \[0\]"),
        ([SampleReward(0, 1.0), SampleReward(0, 1.0)], r"got \[0, 0\]"),
        ([SampleReward(0, 1.0), SampleReward(1, float("inf"))], "reward of sample 1 is inf"),
        ([SampleReward(0, float("nan")), SampleReward(1, 1.0)], "reward of sample 0 is nan"),
        ([SampleReward(0, -0.1), SampleReward(1, 1.0)], r"is -0\.1; environments must score in \[0, 1\]"),
        ([SampleReward(0, 0.0), SampleReward(1, 1.5)], r"is 1\.5; environments must score in \[0, 1\]"),
        ([SampleReward(0, 0.0), SampleReward(1, 0.5, "too slow")], "is 0.5; .* not be scored has 0"),
    ],
)
def test_rewards_must_be_whole_and_within_their_range(sample_rewards: list[SampleReward], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        check_rewards("g", sample_rewards, 2)


def test_rewards_are_ordered_by_sample() -> None:
    ordered = (SampleReward(0, 1.0), SampleReward(1, 0.25))
    assert check_rewards("g", ordered[::-1], 2) == ordered


def test_why_an_answer_failed_is_kept_as_one_short_line() -> None:
    given = [SampleReward(0, 0.0, "it\nended  " + 300 * "x"), SampleReward(1, 0.0, " ")]
    first, second = check_rewards("g", given, 2)
    assert first.failure.startswith("it ended x") and len(first.failure) < 200
    assert second.failure == "no reason was given"


EXAMPLES: list[e.JournalEvent] = [
    e.RunOpened("r", {"run.seed": "1"}),
    e.GroupOpened("g", 1, 2, 0, None, None, False),
    e.GroupSubmitted("g", "l", "w", 1, "d", 3, (1, 2), 0.1 + 0.2, 1e-17),
    e.GroupRewarded("g", (0.1, 1.0), "j", 3.3),
    e.GroupRewarded("g", (0.1, 0.0), "j", 3.3, ((1, "the scorer returned None"),)),
    e.BatchSealed(0, ("g",), (), "d", "t", 2, 0, 0, 7, 1 / 3, 3.5, ((0, 2), (1, 3))),
    e.StepCommitted(0, 1, "w", "d", {"loss": -0.125}, True),
    e.RunFinished(),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_event_is_read_back_as_it_was_written(event: e.JournalEvent) -> None:
    assert e.load_event(event.kind, e.dump_event(event)) == event


def test_every_event_has_a_kind_of_noun_and_verb() -> None:
    assert all(kind.count(".") == 1 for kind in e.event_kinds())
    assert {"lease.granted", "batch.sealed", "worker.loaded"} <= set(e.event_kinds())


@pytest.mark.parametrize(("kind", "body"), [("x.y", "{}"), ("step.opened", "{}"), ("step.opened", "[")])
def test_unreadable_event_is_named(kind: str, body: str) -> None:
    with pytest.raises(IntegrityError, match=kind):
        e.load_event(kind, body)


def test_state_refuses_events_that_contradict_it() -> None:
    state = RunState(group_size=2, payload_retention_steps=2)
    opened = e.GroupOpened("g", 0, 0, 0, None, None, False)
    state.apply(opened)
    for event in (opened, e.GroupRewarded("g", (1.0, 0.0), "", 0.0), e.GroupDropped("h", "stale")):
        with pytest.raises(IntegrityError, match="contradicts itself"):
            state.apply(event)


def test_epochs_visit_every_prompt_once() -> None:
    config = make_config(train_size=10)
    for epoch in range(3):
        places = [prompt_place(config, epoch * 10 + position) for position in range(10)]
        assert sorted(prompt for prompt, _ in places) == list(range(10))
        assert {found for _, found in places} == {epoch}


def test_spare_prompts_never_repeat_a_prompt_of_their_step_nor_its_seeds() -> None:
    config = make_config(mode="fixed", filter_="refill", train_size=10, refill_limit=3.0)
    opened = fixed_openings(config, 5, 9)
    assert len({opening.prompt_index for opening in opened}) == 9
    assert opened[:4] == fixed_openings(config, 5, 4)

    def seeds(refill: bool) -> tuple[int, ...]:
        group = GroupState("g", 0, "train", 4, 1, samples=2, step=5, refill=refill)
        return group_seeds(config, group, "train-0-4")

    assert not set(seeds(True)) & set(seeds(False))


def test_what_a_batch_has_booked_leaves_the_tally() -> None:
    outcomes = [GroupOutcome((reward,), (4,), None, 0) for reward in (0.0, 0.5, 1.0)]
    assert Tally(outcomes, 3, 40).without(1, 2, 15) == Tally(outcomes[1:], 1, 25)


def test_the_first_worker_decides_the_rule_for_all() -> None:
    state = RunState(group_size=2, payload_retention_steps=2)
    for name, rule in (("a", ""), ("b", "gumbel"), ("c", "inverse_cdf")):
        state.apply(e.WorkerRegistered(f"{name}-1", name, 4, 0.0, rule))
    assert state.sampling_rule == "gumbel"


def test_receipts_stay_for_as_long_as_the_payloads_of_their_steps() -> None:
    model = LoopModel(make_config(filter_="none", steps=5), workers=1)
    sealed: dict[int, list[str]] = {}
    while len(model.state.commits) < 5:
        model.open_step()
        model.lease(model.workers[0], 3)
        while model.workers[0].leases:
            submission = model.sample(model.workers[0].leases.pop(0), model.workers[0].held or 0)
            assert submission is not None
            model.submit(submission)
        for group in model.unrewarded():
            model.judge(group)
        step = len(model.state.sealed)
        model.seal()
        sealed[step] = [*model.state.sealed_groups[step]]
        model.commit()
        model.publish()
        model.load(model.workers[0], model.state.newest_version or 0)
        oldest = step - model.state.payload_retention_steps
        kept = {group_id for number, ids in sealed.items() if number >= oldest for group_id in ids}
        assert {group_id for group_id in model.state.receipts if group_id not in model.state.groups} == kept
