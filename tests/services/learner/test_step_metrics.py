"""The figures of a step: estimates that hold their signs, and splits that add up."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.metrics import LEARNER_METRICS, STALENESS_METRICS, find_metric, staleness_metric
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.services.learner.figures import Figures
from antiphon.services.learner.objective import TokenMetrics
from antiphon.services.learner.packing import make_micro_batches
from antiphon.services.learner.step import describe_tokens, drifts

TOKENS = st.lists(
    st.tuples(
        st.floats(-5, 5), st.floats(-8, 0), st.booleans(), st.booleans(), st.floats(0, 2), st.integers(0, 3)
    ),
    min_size=1,
    max_size=40,
)


def describe(tokens: list[tuple[float, float, bool, bool, float, int]]) -> dict[str, float]:
    return describe_tokens(*(np.array(column) for column in zip(*tokens, strict=True)))


@given(tokens=TOKENS)
def test_figures_are_catalogued_bounded_and_add_up_over_staleness(tokens) -> None:
    found = describe(tokens)
    assert all(find_metric(name) is not None for name in found)
    assert found["kl_k3"] >= 0 and 0 <= found["effective_sample_share"] <= 1 + 1e-9
    ages = sorted({token[-1] for token in tokens})
    counts = [found[staleness_metric("tokens", age)] for age in ages]
    assert sum(counts) == len(tokens)
    for name in ("kl_k1", "kl_k3"):
        parts = [found[staleness_metric(name, age)] for age in ages]
        assert np.average(parts, weights=counts) == pytest.approx(found[name], abs=1e-9)


def test_on_policy_tokens_have_no_divergence() -> None:
    found = describe([(0.0, -1.5, False, False, 1.0, 0)] * 4)
    assert (found["ratio_mean"], found["ratio_max"], found["kl_k1"], found["kl_k3"]) == (1.0, 1.0, 0.0, 0.0)
    assert (found["effective_sample_share"], found["entropy_estimate"]) == (1.0, 1.5)


def test_a_hopeless_ratio_stays_finite() -> None:
    found = describe([(900.0, -1.0, True, False, 0.0, 0), (-900.0, -900.0, True, False, 0.0, 1)])
    assert all(np.isfinite(value) for value in found.values())


def test_the_effective_share_is_of_the_weights_that_were_applied() -> None:
    # Raw ratios of 1 everywhere; what the mask left decides.
    kept, masked = (0.0, -1.0, False, False, 1.0, 0), (0.0, -1.0, True, False, 0.0, 0)
    found = describe([kept] + [masked] * 3)
    assert (found["effective_sample_share"], found["truncated_share"], found["clip_share"]) == (
        0.25,
        0.75,
        0.0,
    )
    assert describe([masked] * 4)["effective_sample_share"] == 0.0


def test_names_are_unique() -> None:
    names = [metric.name for metric in LEARNER_METRICS]
    assert len(set(names)) == len(names) and all("." not in name for name in names)
    assert {metric.name for metric in STALENESS_METRICS} == {"kl_k1", "kl_k3", "tokens"}
    assert find_metric("loss.staleness_1") is None and find_metric("nothing") is None


def test_drifts_are_of_trajectories_that_the_present_weights_sampled() -> None:
    rows = [row("g1", 0, versions=(3,)), row("g1", 1, versions=(3,)), row("g2", 0, versions=(2, 3))]
    batches = make_micro_batches(rows, 3, 64)
    figures = [
        Figures.of(batch, 0.0, TokenMetrics(batch.behaviour_logprobs - 0.25, nothing, nothing, batch.mask))
        for batch in batches
        for nothing in [torch.zeros_like(batch.mask, dtype=torch.bool)]
    ]
    found = drifts(figures)
    assert set(found) == {"g1"}  # the other one began under an older version
    assert sorted((s.sample_index, s.tokens, s.missed) for s in found["g1"]) == [(0, 4, 0), (1, 4, 0)]
    assert all(sample.drift == pytest.approx(0.25) for sample in found["g1"])


def row(group_id: str, sample: int, versions: tuple[int, ...]) -> BatchRow:
    spans = tuple(VersionSpan(v, 2 * i, 2 * i + 2) for i, v in enumerate(versions))
    stop = 4 if len(versions) == 1 else spans[-1].stop
    spans = (*spans[:-1], VersionSpan(spans[-1].version, spans[-1].start, stop))
    return BatchRow(
        np.arange(4, dtype=np.int32),
        np.full(4, -1.0, dtype=np.float32),
        spans,
        FinishReason.STOP,
        group_id=group_id,
        prompt_key="p",
        sample_index=sample,
        prompt_token_ids=np.arange(3, dtype=np.int32),
        reward=1.0,
        advantage=0.5,
    )
