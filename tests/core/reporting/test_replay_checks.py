"""Replay, the comparing part: equal means every bit, and a difference is said in words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.reporting.replay_checks import (
    CPU,
    LOGPROB_SHARE,
    LOGPROB_TOLERANCE,
    LogprobCheck,
    ReplaySummary,
    StepCheck,
    choose_steps,
    compare_logprobs,
    compare_metrics,
    logprob_tolerance,
)
from antiphon.lineage.documents.replay_copy import environment_differences
from antiphon.lineage.retention import due
from antiphon.sampling.keyed_sampler import RowSampling, draw, score

FIGURES = st.dictionaries(st.sampled_from(["loss", "a", "b", "c"]), st.floats(), max_size=4)


def check(step: int, same: bool = True) -> StepCheck:
    return StepCheck(step, step + 1, "a" * 64, ("a" if same else "b") * 64, {})


@given(FIGURES)
def test_figures_equal_themselves(figures: dict[str, float]) -> None:
    assert compare_metrics(figures, dict(figures)) == {}


def test_only_the_recorded_world_is_exact_and_weights_that_are_not_kept_are_in_no_tolerance() -> None:
    def said(ranks: int, device: str = CPU, same: bool = True, **of_last: bool) -> str:
        steps = [replace(check(0, same), near=True), replace(check(1, same), **{"near": True, **of_last})]
        return ReplaySummary("r", 0, steps=steps, recorded_ranks=2, ranks=ranks, device=device).exactness

    assert said(2) == "exact on CPU x 2" and said(2, "NVIDIA H100") == "exact on NVIDIA H100 x 2"
    assert said(1) == said(1, same=False) == "within tolerance: trained by 2 ranks, repeated by 1"
    assert said(1, compared=False).startswith("loss and gradient norm within tolerance: trained by 2 ranks")
    assert said(1, compared=False).endswith("weights of version 2 not kept to compare")
    assert said(1, near=False) == "different" == said(2, same=False)
    assert "version 2 again, loss and gradient" in replace(check(1, False), near=True, compared=False).words()


def test_a_rate_that_counted_updates_is_named_as_the_cause() -> None:
    recorded = {"loss": 0.5, "gradient_norm": 1.0, "learning_rate": 1e-4}
    metrics = compare_metrics(recorded, {"loss": 0.25, "gradient_norm": 2.0, "learning_rate": 8e-5})
    assert list(metrics) == ["learning_rate", "loss", "gradient_norm"]
    said = StepCheck(3, 4, "a" * 64, "b" * 64, metrics).words()
    assert said.endswith("learning_rate was 0.0001 and is 8e-05, 2e-05 apart")


@given(FIGURES, FIGURES)
def test_every_figure_that_differs_is_named_and_loss_comes_first(
    old: dict[str, float], new: dict[str, float]
) -> None:
    found = compare_metrics(old, new)
    for name in set(old) | set(new):
        same = name in old and name in new and np.array_equal(old[name], new[name], equal_nan=True)
        assert (name in found) != same
    assert "loss" not in found or next(iter(found)) == "loss"
    assert all(found.values())


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(None, None, range(10)), (4, None, range(4, 10)), (None, 0, range(1)), (9, 9, range(9, 10))],
)
def test_steps_are_those_asked_for(first: int | None, last: int | None, expected: range) -> None:
    assert choose_steps(10, 10, first, last) == expected


@pytest.mark.parametrize(
    ("recorded", "first", "last", "sentence"),
    [
        (10, 3, 2, "first step to replay is 3 and the last 2"),
        (10, 10, None, "first step to replay is 10, but steps 0 to 9"),
        (10, 0, 10, "last step to replay is 10, but steps 0 to 9"),
        (10, -1, 2, "first step to replay is -1"),
        (7, None, None, "unfinished: 7 of 10 steps are on record; .* --to 6"),
        (0, None, None, "no step of the run is on record, of 10 planned"),
    ],
)
def test_steps_that_cannot_be_had_are_refused(
    recorded: int, first: int | None, last: int | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        choose_steps(recorded, 10, first, last)


def test_logprobs_are_counted_token_by_token() -> None:
    recorded = [np.array([-1.0, -2.0, -3.0], np.float32), np.array([-1.0, np.nan], np.float32)]
    scored = [
        np.array([-1.0, -2.0 + LOGPROB_TOLERANCE / 2, -3.5], np.float32),
        np.array([np.nan, -1.0], np.float32),
    ]
    versions = [np.array([1, 1, 2]), np.array([3, 3])]
    found = compare_logprobs(
        5, recorded, scored, ["sample 0", "sample 1"], versions, [np.zeros(n, bool) for n in (3, 2)]
    )
    assert (found.tokens, found.within, found.unscored) == (5, 2, 1)
    assert found.largest == np.inf and "token 1 of sample 1, sampled by version 3" in found.where
    assert "1 tokens were sampled by versions whose weights" in found.words()


def test_tokens_over_a_kept_cache_are_counted_apart() -> None:
    recorded = [np.array([-1.0, -2.0, -3.0], np.float32)]
    scored = [np.array([-1.0, np.nan, -9.0], np.float32)]
    found = compare_logprobs(
        0, recorded, scored, ["sample 0"], [np.array([1, 2, 2])], [np.array([False, True, True])]
    )
    assert (found.tokens, found.within, found.unscored, found.kept_cache) == (1, 1, 0, 2)
    assert found.largest == 0.0 and "2 further tokens were sampled over a kept cache" in found.words()


@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_logprobs_agree_exactly_within_the_tolerance(tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    recorded = rng.uniform(-5, 0, tokens).astype(np.float32)
    scored = (recorded + rng.uniform(-3e-5, 3e-5, tokens)).astype(np.float32)
    gap = np.abs(scored.astype(np.float64) - recorded)
    found = compare_logprobs(
        0, [recorded], [scored], ["sample 0"], [np.zeros(tokens, np.int64)], [np.zeros(tokens, bool)]
    )
    assert found.within == (gap <= LOGPROB_TOLERANCE).sum()
    assert found.largest == gap.max()


def test_a_summary_names_the_first_difference_and_what_may_have_caused_it() -> None:
    summary = ReplaySummary("demo-1", 0, ("torch was 2.13.0 and is 2.14.0",))
    summary.steps += [check(0), check(1, same=False), check(2, same=False)]
    assert not summary.equal and summary.steps_equal_share == pytest.approx(1 / 3)
    sentence = summary.first_difference()
    assert sentence is not None
    assert "step 1: version 2 has weights" in sentence and "torch was 2.13.0 and is 2.14.0" in sentence
    assert "1 of 3 steps" in " ".join(summary.lines())


def test_too_few_logprobs_within_the_tolerance_are_a_difference() -> None:
    summary = ReplaySummary("demo-1", 20)
    summary.steps.append(check(20))
    summary.logprobs.append(LogprobCheck(20, 1000, 999, 2e-5, "token 1"))
    assert summary.equal and summary.first_difference() is None
    assert "checkpoint of version 20" in " ".join(summary.lines())
    summary.logprobs.append(LogprobCheck(21, 1000, 951, 0.5, "token 2"))
    assert not summary.equal
    assert "only 97.5000%" in str(summary.first_difference())
    summary.compares_logprobs = False  # sampled in bfloat16
    assert summary.equal and summary.first_difference() is None


def test_the_machine_of_the_record_is_compared_with_this_one() -> None:
    old = {
        "libraries": {"torch": "2.13.0", "mlflow": "3.1", "numpy": "2.3"},
        "hardware": {"cpu": "A", "gpus": []},
        "threads": {},
        "code": {"revision": "a" * 40, "modified": False, "changes_md5": "1"},
    }
    assert environment_differences(old, old) == ()
    new = {
        "libraries": {"torch": "2.14.0", "mlflow": "3.2"},
        "hardware": {"cpu": "B", "gpus": []},
        "threads": {"OMP_NUM_THREADS": "4"},
        "code": {"revision": "b" * 40, "modified": True, "changes_md5": "2"},
    }
    assert environment_differences(old, new) == (
        "torch was 2.13.0 and is 2.14.0",
        "numpy was 2.3 and is absent",
        "mlflow was 3.1 and is 3.2",
        "cpu was A and is B",
        "OMP_NUM_THREADS was unset and is 4",
        "the code was at aaaaaaaaaaaa and is at bbbbbbbbbbbb with changes",
    )
    assert environment_differences({"code": {}}, new)[-1] == "OMP_NUM_THREADS was unset and is 4"


def test_a_stride_of_zero_pins_no_checkpoint() -> None:
    assert not any(due(version, 5, 0) for version in range(100))
    assert [version for version in range(12) if due(version, 2, 1)] == [2, 4, 6, 8, 10]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.7, 1.0, 1.7]),
    st.sampled_from([0, 3, 10]),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_scoring_a_drawn_token_repeats_what_was_reported(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 40, generator=generator) * 4
    u = torch.rand(6, generator=generator, dtype=torch.float64)
    rows = RowSampling(
        temperature=torch.full((6,), temperature or 1.0, dtype=torch.float64),
        top_k=torch.full((6,), top_k or 40),
        top_p=torch.full((6,), top_p, dtype=torch.float64),
        greedy=torch.full((6,), temperature == 0.0),
        all_greedy=temperature == 0.0,
    )
    tokens, reported = draw(logits, u, rows)
    assert torch.allclose(score(logits, tokens, rows), reported, atol=1e-6)


def test_a_token_that_was_cut_off_scores_minus_infinity() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    rows = RowSampling(top_k=torch.tensor([2]))
    found = [float(score(logits, torch.tensor([token]), rows)) for token in range(3)]
    assert found[2] == -np.inf and np.exp(found[0]) + np.exp(found[1]) == pytest.approx(1.0)


@pytest.mark.parametrize(("temperature", "equal"), [(1.0, True), (1.0002, False)])
def test_of_many_tokens_a_sum_in_float32_is_within_and_another_temperature_is_not(
    temperature: float, equal: bool
) -> None:
    """As much as a mixed-up setting that is hard to see; weights of another step are further off."""
    vocabulary, rows = 151_936, 40
    rng = np.random.default_rng(1)
    logits = (4.0 * rng.standard_normal((rows, vocabulary))).astype(np.float32)
    tokens = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    scaled = (logits - logits.max(1, keepdims=True)) / np.float32(temperature)
    # In sixteen sums side by side, as vector units add.
    sums = np.exp(scaled).reshape(rows, -1, 16).cumsum(1, dtype=np.float32)[:, -1]
    engine = scaled - np.log(sums.sum(1, keepdims=True))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    recorded, scored = (one[np.arange(rows), tokens].astype(np.float32) for one in (engine, exact))
    tolerance = logprob_tolerance(vocabulary)
    found = compare_logprobs(
        0, [recorded], [scored], ["it"], [np.zeros(rows, np.int64)], [np.zeros(rows, bool)], tolerance
    )
    assert (found.within >= LOGPROB_SHARE * found.tokens) == equal
    assert "within 3.3e-05" in found.words()
