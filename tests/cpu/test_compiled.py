"""Compiled blocks: gradients are those of whole, padded rows; a machine or model that cannot is told."""

import pytest
import torch

from antiphon.benchmarks.parts.learner_speed.reference import ReferencePolicy, padded_batches
from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.errors import ConfigError
from antiphon.cpu.compiler import why_not_compiling
from antiphon.cpu.layers import compile_blocks
from antiphon.services.learner.objective import Objective
from antiphon.services.learner.packing import make_micro_batches
from antiphon.services.learner.policy import Policy
from tests.support.small_policy import MAX_TOKENS, make_model, make_rows, summed


@pytest.mark.skipif(why_not_compiling() is not None, reason=f"torch compiles nothing: {why_not_compiling()}")
def test_the_gradient_is_that_of_whole_padded_rows() -> None:
    objective, rows = Objective(AlgorithmSection(), MAX_TOKENS, 1.0), make_rows(3)
    model = make_model()
    policy = Policy(model, objective)
    assert compile_blocks(model) == 2
    loss, found = summed(policy, make_micro_batches(rows, 0, 60), False)
    expected_loss, expected = summed(
        ReferencePolicy(make_model(), objective), padded_batches(rows, 0, 60), False
    )
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert all("forward" not in vars(layer.mlp.up_proj) for layer in model.model.layers)


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"learner\.compiled=true needs a C\+\+ compiler.*no-such-compiler"):
        compile_blocks(make_model())


def test_a_model_without_such_blocks_is_told() -> None:
    class Bare(torch.nn.Module):
        def get_decoder(self) -> torch.nn.Module:
            return torch.nn.Linear(2, 2)

    with pytest.raises(ConfigError, match="no layers with an mlp"):
        compile_blocks(Bare())
