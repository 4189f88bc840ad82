"""Attention in chunks: every position looks at its own row's beginning, and at nothing else."""

import numpy as np
import pytest
import torch

from antiphon.cpu import chunks
from antiphon.cpu.shared_rows import SharedRows, common_lengths, share_rows

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def make_sequences(seed: int, count: int, longest: int, tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, tokens, rng.integers(1, longest + 1)) for _ in range(count)]
    return sorted(found, key=lambda ids: ids.tolist())


def laid_out(sequences: list[np.ndarray]) -> tuple[SharedRows, list[np.ndarray]]:
    return share_rows([len(ids) for ids in sequences], common_lengths(sequences))


@pytest.mark.parametrize(
    ("count", "longest", "tokens"),
    [(1, 1, 2), (5, 300, 2), (40, 12, 2), (60, 20, 1), (20, 64, 9), (1, 200, 5), (3, 64, 1)],
)
@pytest.mark.parametrize("seed", range(3))
def test_each_row_is_attended_to_as_if_it_were_alone(
    seed: int, count: int, longest: int, tokens: int
) -> None:
    shared, positions = laid_out(make_sequences(seed, count, longest, tokens))
    size = len(shared.position_ids) + shared.padding
    torch.manual_seed(seed)
    inputs = [torch.randn(size, heads, WIDTH, requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    above = torch.randn(size, HEADS, WIDTH)
    above[len(shared.position_ids) :] = 0.0
    assert shared.chunks is not None
    found = shared.chunks.attend(*inputs, scaling=0.5)
    expected, computed = torch.zeros(()), 0
    for row in positions:
        query, key, value = (part[torch.from_numpy(row)].transpose(0, 1)[None] for part in inputs)
        alone = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=0.5, enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(found[row], alone, atol=1e-5, rtol=1e-5)
        own = row[row >= computed]  # a position's gradient comes through the first row that has it
        computed += len(own)
        expected = expected + (alone[len(row) - len(own) :] * above[own]).sum()
    ours = torch.autograd.grad((found * above).sum(), inputs)
    theirs = torch.autograd.grad(expected, inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_too_many_scores_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make_sequences(0, 4, 40, 3)
    assert laid_out(sequences)[0].chunks is not None
    monkeypatch.setattr(chunks, "SCORES_AT_ONCE", chunks.CHUNK**2 - 1)
    assert laid_out(sequences)[0].chunks is None
