"""Losses of clients: each is what its formula says, in value and gradient."""

import pytest

from antiphon.core.client_records import LOSSES
from benchmarks.parts.door.losses import loss_error_worst

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_are_those_of_the_formulas(seed: int) -> None:
    assert len(LOSSES) == 7
    worst = loss_error_worst(seed)
    print(f"seed {seed}: worst error {worst:.1e}")
    assert worst <= 1e-6
