"""Rows that a check asks after again: multiplied with the head once, kept within bounds."""

from types import SimpleNamespace

import pytest
import torch

from antiphon.services.rollout.engine import vllm_engine
from antiphon.services.rollout.engine.vllm_engine import VllmEngine


class Head:
    """Counts the rows that it multiplies."""

    def __init__(self) -> None:
        self.weight, self.rows = torch.randn(64, 8), list[int]()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return hidden @ self.weight.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hidden_state_that_comes_again_is_multiplied_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, engine = Head(), object.__new__(VllmEngine)
    head.weight = head.weight.to(dtype)
    engine._runner = SimpleNamespace(get_model=lambda: head, device=torch.device("cpu"))
    monkeypatch.setattr(vllm_engine, "KEPT_LOGITS", 3 * 64)
    hidden = torch.randn(5, 8).to(dtype)
    with engine.equal_rows_once():
        for places in ([0, 0, 1], [1, 2], [0, 3, 4], [0], [1]):
            torch.testing.assert_close(head.compute_logits(hidden[places]), hidden[places] @ head.weight.T)
    assert head.rows == [2, 1, 2, 1]  # the last was asked for longer ago than three others
    head.compute_logits(hidden)
    assert head.rows[-1] == 5
