"""The benchmark of gradient sums, with few micro-batches: the engine holds, a plain sum is worse."""

import json

import pytest

from antiphon.benchmarks.gradient_sums import main

pytestmark = pytest.mark.engine


def test_the_engines_sum_is_nearer_to_float64_than_a_sum_in_bfloat16(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--micro-batches", "48", "--stages", "0"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["holds"] and found["stage_0_cosine"] >= 0.999999 and found["stage_0_norm_error"] <= 1e-5
    assert found["plain_cosine"] < found["stage_0_cosine"]
