"""The benchmark of the rules in small: its distribution, its interval, and what it calls a violation."""

import numpy as np
import pytest
import torch

from antiphon.benchmarks import sampling_rules as bench


def test_the_distribution_has_the_entropy_and_noise_flips_fewer_tokens_under_gumbel() -> None:
    logits = bench.peaked_logits(2000, 0.5)
    logprobs = torch.log_softmax(logits.double(), -1)
    assert float(-(logprobs.exp() * logprobs).sum()) == pytest.approx(0.5, abs=1e-4)
    assert float(logprobs.exp().max()) > 0.9
    cdf, _ = bench.flips("inverse_cdf", logits, 4800)
    few, distance = bench.flips("gumbel", logits, 4800)
    print(f"flips: inverse_cdf={cdf:.2%} gumbel={few:.2%} total_variation={distance:.2%}")
    assert few < cdf / 3 and bench.wilson_high(few, 4800) < cdf
    assert 0 < distance < 0.002


def test_the_interval_is_wilsons() -> None:
    assert bench.wilson_high(0.0, 100) == pytest.approx(0.0513, abs=1e-3)
    assert bench.wilson_high(0.5, 10_000) == pytest.approx(0.5116, abs=1e-3)


def test_faults_are_found_and_rules_pass_at_a_small_vocabulary() -> None:
    assert min(bench.faulty_zs(4000)) > bench.Z_LIMIT
    assert max(bench.honest_z(rule, 4000) for rule in bench.RULES) < 4.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"flips_gumbel_high": 1e-3}, ["above 3 total variations"]),
        ({"law_z": {"inverse_cdf": 1.0, "gumbel": 7.0}}, ["gumbel fails the law test"]),
        ({"law_power_found": 0.75}, ["was not found"]),
    ],
)
def test_each_violation_is_a_sentence(changes: dict[str, object], words: list[str]) -> None:
    good = {
        "flips_gumbel_high": 8e-4,
        "total_variation": 3e-4,
        "law_z": {"inverse_cdf": 1.0, "gumbel": 0.5},
        "law_power_found": 1.0,
    }
    result = {**good, **changes}
    found = [*bench.flipped(result), *bench.violations(result)]
    assert len(found) == len(words) and all(word in one for word, one in zip(words, found, strict=True))
    assert np.isfinite(bench.microseconds("gumbel", 64, rows=4, times=1))
