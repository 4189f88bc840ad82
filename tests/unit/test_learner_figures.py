"""The figures of a step: estimates that hold their signs, and splits that add up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.metrics import LEARNER_METRICS, STALENESS_METRICS, find_metric, staleness_metric
from antiphon.services.learner.figures import TokenTable, describe_tokens

TOKENS = st.lists(
    st.tuples(st.floats(-5, 5), st.floats(-8, 0), st.booleans(), st.integers(0, 3)), min_size=1, max_size=40
)


def table(tokens: list[tuple[float, float, bool, int]]) -> TokenTable:
    ratio, logprob, altered, staleness = zip(*tokens, strict=True)
    return TokenTable(np.array(ratio), np.array(logprob), np.array(altered), np.array(staleness))


@given(tokens=TOKENS)
def test_figures_are_catalogued_bounded_and_add_up_over_staleness(tokens) -> None:
    found = describe_tokens(table(tokens))
    assert all(find_metric(name) is not None for name in found)
    assert found["kl_k3"] >= 0 and 0 < found["effective_sample_share"] <= 1 + 1e-9
    ages = sorted({token[3] for token in tokens})
    counts = [found[staleness_metric("tokens", age)] for age in ages]
    assert sum(counts) == len(tokens)
    for name in ("kl_k1", "kl_k3"):
        parts = [found[staleness_metric(name, age)] for age in ages]
        assert np.average(parts, weights=counts) == pytest.approx(found[name], abs=1e-9)


def test_on_policy_tokens_have_no_divergence() -> None:
    found = describe_tokens(table([(0.0, -1.5, False, 0)] * 4))
    assert (found["ratio_mean"], found["ratio_max"], found["kl_k1"], found["kl_k3"]) == (1.0, 1.0, 0.0, 0.0)
    assert (found["effective_sample_share"], found["entropy_estimate"]) == (1.0, 1.5)


def test_a_hopeless_ratio_stays_finite() -> None:
    found = describe_tokens(table([(900.0, -1.0, True, 0), (-900.0, -900.0, True, 1)]))
    assert all(np.isfinite(value) for value in found.values())


def test_names_are_unique() -> None:
    names = [metric.name for metric in LEARNER_METRICS]
    assert len(set(names)) == len(names) and all("." not in name for name in names)
    assert {metric.name for metric in STALENESS_METRICS} == {"kl_k1", "kl_k3", "tokens"}
    assert find_metric("loss.staleness_1") is None and find_metric("nothing") is None
