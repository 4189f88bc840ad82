"""Bands, reputation, tokens and rates: tables of decisions, and promises over all inputs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.checks import TokenRules, check_token_rules
from antiphon.core.errors import ContractError
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import FinishReason, GroupSubmission, Trajectory, VersionSpan
from antiphon.core.trust.access_tokens import Scope, TokenClaims, check_claims
from antiphon.core.trust.audit import (
    Band,
    SampleStatistics,
    Sums,
    audit_group,
    by_author,
    calibrate,
    upper_tail,
)
from antiphon.core.trust.reputation import FIRST_SHARE, LAST_SHARE, STRIKES, Standing, quarantine_reason
from antiphon.net.security.guard import Rate, TokenBucket

HONEST = SampleStatistics(0, 300, 0, 0, 1e-6)


@pytest.mark.parametrize(
    ("samples", "checks"),
    [
        ([HONEST], set()),
        ([SampleStatistics(0, 300, 2, 0, 1e-3)], set()),  # rounding
        ([SampleStatistics(0, 300, 60, 0, 1e-6)], {"sampling"}),  # other seeds, honest logprobs
        ([SampleStatistics(0, 300, 0, 0, 0.3)], {"logprobs"}),  # faked logprobs
        ([SampleStatistics(0, 300, 0, 0, math.inf)], {"logprobs"}),
        ([SampleStatistics(0, 300, 0, 9, 1e-6)], {"support"}),
        ([HONEST, SampleStatistics(1, 300, 60, 9, 2.0)], {"sampling", "support", "logprobs"}),
        ([SampleStatistics(0, 0, 0, 0, 0.0)], set()),  # nothing could be scored
    ],
)
def test_what_an_audit_says(samples: list[SampleStatistics], checks: set[str]) -> None:
    assert {finding.check for finding in audit_group(samples, Band())} == checks


def test_a_little_in_every_group_adds_up() -> None:
    sample = SampleStatistics(0, 300, 2, 0, 1e-3)  # 0.7 %, where rounding explains 0.2 %
    assert not audit_group([sample], Band(), earlier=Sums(300, 2))
    assert audit_group([sample], Band(), earlier=Sums(30_000, 200))[0].certain
    assert not audit_group([HONEST], Band(), earlier=Sums(30_000, 60))


def test_one_gross_token_is_a_strike_and_two_are_proof() -> None:
    """One edited token of a group of 4,096 decides a reward, and is 0.02% of what rounding may explain."""
    one = SampleStatistics(0, 4096, 1, 0, 1e-6, near=1, gross=1)
    (found,) = audit_group([one], Band())
    assert found.check == "tokens" and not found.certain
    assert audit_group([one, one], Band())[0].certain
    assert not audit_group([SampleStatistics(0, 4096, 1, 0, 1e-6, near=1)], Band())  # rounding
    state, audits = RunState(group_size=2, payload_retention_steps=4), 0
    while not (standing := state.standings.get("w", Standing())).quarantined:
        audits += 1
        (found,) = audit_group([one], Band(), standing.sums)
        state.apply(e.WorkerStruck("w", f"g{audits}", found.check, found.words, 1))
        reason = quarantine_reason(state.standings["w"], found.certain, found.words)
        if reason is not None:
            state.apply(e.WorkerQuarantined("w", reason))
    assert audits <= STRIKES


def test_a_seldom_editor_is_found_although_its_strikes_are_forgiven() -> None:
    """It edits one token in a hundred groups: each is a strike, and 99 groups that pass forgive it."""
    standing, edits = Standing(), 0
    while edits < 20:
        for _ in range(99):
            standing = standing.pass_group(Sums(4096))
        edits += 1
        one = SampleStatistics(0, 4096, 1, 0, 1e-6, near=1, gross=1)
        (found,) = audit_group([one], Band(), standing.sums)
        standing = standing.strike(audited=True, gross=1)
        if quarantine_reason(standing, found.certain, found.words):
            break
    assert edits <= 6


def test_many_tokens_just_outside_their_intervals_add_up() -> None:
    """Who takes the other token at every boundary within a bfloat16 band has 2% of them; rounding 0.16%."""
    picked, honest = (
        SampleStatistics(0, 512, 0, 0, 1e-3, near=10),
        SampleStatistics(0, 512, 1, 0, 1e-3, near=1),
    )
    assert not audit_group([honest], Band(), Sums(400 * 512, 400, 400))
    groups = 0
    sums = Sums()
    while not audit_group([picked], Band(), sums):
        sums, groups = sums.plus(Sums.of([picked])), groups + 1
    assert groups <= 10


def test_what_was_found_belongs_to_whoever_sampled_it() -> None:
    own, given = HONEST, SampleStatistics(0, 40, 30, 0, 1e-6, 30, 25, author="bad-1")
    found = by_author([own, given], "good-1")
    assert found == {"good-1": [own], "bad-1": [given]}
    assert not audit_group(found["good-1"], Band()) and audit_group(found["bad-1"], Band())


def test_a_small_part_of_a_group_makes_no_one_more_trusted() -> None:
    state = RunState(group_size=2, payload_retention_steps=4)
    state.apply(e.GroupAudited("g0", "w", 3, 1, 0.0, 2, most=False))
    assert state.standings["w"] == Standing(tokens=3, missed=1, near=2)
    state.apply(e.GroupAudited("g0", "kept", 3, 0, 0.0, kept_cache=40))
    assert state.standings["kept"] == Standing(passed=1, audited=1, tokens=3, kept_cache=40)
    assert state.standings["kept"].pardon().kept_cache == 40
    state.apply(e.GroupAudited("g1", "w", 0, 0, 0.0, most=False, unaudited="version 3 is not kept any more"))
    assert state.standings["w"].share == FIRST_SHARE and state.standings["w"].unaudited == 1


def test_a_band_is_narrowed_by_many_trusted_trajectories_alone() -> None:
    assert calibrate([HONEST] * 10) == Band()
    narrow = calibrate([HONEST] * 500)
    assert narrow.drift == 1e-3 and narrow.miss_rate == 2e-4
    assert calibrate([SampleStatistics(0, 300, 5, 0, 0.05)] * 500).drift == pytest.approx(0.2)


@given(st.integers(0, 400), st.integers(1, 400), st.floats(1e-4, 0.5))
def test_the_tail_of_the_binomial(count: int, trials: int, rate: float) -> None:
    from scipy.stats import binom

    assert upper_tail(count, trials, rate) == pytest.approx(
        float(binom.sf(count - 1, trials, rate)), rel=1e-6, abs=1e-15
    )


@given(st.lists(st.sampled_from(["pass", "strike", "pardon"]), max_size=200))
def test_the_share_stays_within_its_bounds_and_a_doubt_resets_it(history: list[str]) -> None:
    standing = Standing()
    for what in history:
        before = standing
        match what:
            case "pass":
                standing = standing.pass_group(Sums(100))
                assert standing.share <= before.share
            case "strike":
                standing = standing.strike(audited=True)
                assert standing.share == FIRST_SHARE
            case _:
                standing = standing.pardon()
        assert LAST_SHARE <= standing.share <= FIRST_SHARE


def test_strikes_quarantine_and_pardon_are_a_fold_of_events() -> None:
    state = RunState(group_size=2, payload_retention_steps=4)
    for number in range(STRIKES):
        assert not quarantine_reason(state.standings.get("w", Standing()), False, "x")
        state.apply(e.WorkerStruck("w", f"g{number}", "sampling", "x"))
    reason = quarantine_reason(state.standings["w"], False, "x")
    assert reason == "3 strikes, the last one: x"
    state.apply(e.WorkerQuarantined("w", reason))
    assert state.barred("w") == reason and not state.barred("v")
    assert quarantine_reason(state.standings["w"], True, "more") is None  # once is enough
    state.apply(e.WorkerPardoned("w", "mended"))
    assert not state.barred("w") and state.standings["w"].share == FIRST_SHARE
    assert quarantine_reason(Standing(), True, "proof") == "proof"


def test_invalid_claims() -> None:
    good = TokenClaims("0" * 32, "run", "w", (Scope.LEASE,), 10, 1)
    check_claims(good)
    for name, value in {
        "token_id": "x",
        "run_id": "../r",
        "worker_name": "a/b",
        "scopes": (),
        "max_leases": 0,
    }.items():
        fields = {field: getattr(good, field) for field in good.__slots__} | {name: value}
        with pytest.raises(ContractError):
            check_claims(TokenClaims(**fields))


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 3)), min_size=1, max_size=60))
def test_a_bucket_never_gives_more_than_its_rate(calls: list[tuple[float, float]]) -> None:
    bucket, now, given_out = TokenBucket(Rate(per_s=1.0, burst=4.0)), 0.0, 0.0
    for pause, units in calls:
        now += pause
        wait_s = bucket.take(units, now)
        given_out += units if wait_s == 0.0 else 0.0
        assert given_out <= 4.0 + now + 1e-6
        assert wait_s == 0.0 or bucket.take(units, now + wait_s + 1e-6) == 0.0 or units > 4.0
        if wait_s > 0.0:
            given_out += units
            now += wait_s + 1e-6


RULES = TokenRules(vocabulary=64, end_tokens=frozenset({1}))


@pytest.mark.parametrize(
    ("tokens", "reason", "words"),
    [
        ([5, 6, 1], "stop", None),
        ([5, 6, 7], "length", None),
        ([5, 6, 1], "length", None),  # the end token came with the last place
        ([5, 64, 1], "stop", "token id 64 is not in the vocabulary of 64"),
        ([5, 1, 6, 1], "stop", "continues after its end token at 1 of 4"),
        ([5, 6, 7], "stop", "finish_reason=stop, but token 7 is no end token"),
    ],
)
def test_tokens_obey_the_models_rules(tokens: list[int], reason: str, words: str | None) -> None:
    trajectory = Trajectory(
        np.array(tokens, dtype=np.int32),
        np.zeros(len(tokens), dtype=np.float32),
        (VersionSpan(0, 0, len(tokens)),),
        FinishReason(reason),
        sample_index=0,
        seed=1,
    )
    submission = GroupSubmission("l", "g", "w-1", (trajectory,), 1.0)
    if words is None:
        check_token_rules(submission, RULES)
    else:
        with pytest.raises(ContractError, match=words):
            check_token_rules(submission, RULES)
