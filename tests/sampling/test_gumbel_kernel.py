"""The kernel of the Gumbel rule against what `gumbel` computes step by step, in Triton's interpreter.

The CPU lock has no Triton (200 MB), so it is skipped. With one in a folder of its own it runs:

    .venv/bin/pip install --no-deps --target build/triton triton==3.7.1
    PYTHONPATH=build/triton TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/sampling/test_gumbel_kernel.py
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.sampling import gumbel
from antiphon.sampling.keyed_sampler import RowSampling
from tests.sampling.test_keyed_sampler import keys_of

if os.environ.get("TRITON_INTERPRET") != "1":  # Triton asks for it when it is imported
    pytest.skip("TRITON_INTERPRET is not 1; the module says why", allow_module_level=True)
gumbel_kernel = pytest.importorskip("antiphon.sampling.gumbel_kernel", reason="there is no Triton")


@pytest.fixture(scope="module")
def kernel() -> Any:
    from triton.language import tensor
    from triton.runtime.interpreter import TensorHandle

    def by(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
        def computed(values: Any) -> Any:
            found = function(torch.from_numpy(values.handle.data)).numpy()
            return tensor(TensorHandle(found, values.handle.dtype), values.type)

        return computed

    # NVIDIA's library is code for GPUs; on a CPU its two functions are torch's.
    gumbel_kernel.libdevice = SimpleNamespace(exp=by(torch.exp), log1p=by(torch.log1p))
    return gumbel_kernel


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype", "heated"),
    [
        (1000, 1000, torch.float32, True),
        (60, 20_011, torch.float32, False),
        (60, 9_000, torch.bfloat16, True),
    ],
)
def test_the_kernel_draws_what_the_steps_draw(
    kernel: Any, rows: int, vocabulary: int, dtype: torch.dtype, heated: bool
) -> None:
    seed = rows + vocabulary
    chance = torch.Generator().manual_seed(seed)
    logits = (3.0 * torch.randn(rows, vocabulary, generator=chance)).to(dtype)
    logits[:, 7] = -float("inf")
    logits[0, : vocabulary - 1] = -float("inf")
    heat = torch.linspace(0.4, 1.6, rows, dtype=torch.float64) if heated else None
    positions = np.arange(rows) * 3
    numbers = torch.from_numpy(gumbel.row_keys(keys_of(list(range(seed, seed + rows))), positions))
    tokens, logprobs = kernel.draw(logits, numbers, heat)
    wanted, wanted_logprobs = gumbel.draw(logits, numbers, RowSampling(temperature=heat))
    apart = float((logprobs - wanted_logprobs).abs().max())
    same = int((logprobs == wanted_logprobs).sum())
    print(f"seed {seed}: {same} of {rows} log-probabilities have the same bits, {apart:.2g} nats apart")
    assert torch.equal(tokens, wanted) and int(tokens[0]) == vocabulary - 1
    assert apart <= 1e-6


def test_a_row_has_the_bits_that_it_has_alone(kernel: Any) -> None:
    logits = 3.0 * torch.randn(20, 5_000, generator=torch.Generator().manual_seed(1))
    numbers = torch.from_numpy(gumbel.row_keys(keys_of(list(range(20))), np.arange(20)))
    together = kernel.draw(logits, numbers, None)
    for row in (0, 7, 19):
        alone = kernel.draw(logits[row : row + 1], numbers[row : row + 1], None)
        assert all(torch.equal(one[0], both[row]) for one, both in zip(alone, together, strict=True))
