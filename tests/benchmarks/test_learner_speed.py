"""The benchmark of the learner's step, on one small real batch: the gradient is the reference's."""

import json

import pytest

from antiphon.benchmarks.learner_speed import main

pytestmark = pytest.mark.engine


def test_the_gradient_on_a_real_batch_is_the_references(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "0", "--groups", "4", "--pairs", "0"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.0 < found["gradient_error"] <= 1e-5
