"""Remembered lengths: what they predict, and whether they do."""

import numpy as np
import pytest

from antiphon.core.lengths import memory as lengths
from antiphon.core.lengths.memory import LengthMemory, predicts, rank_correlation


def remembered(epochs: int, prompts: int, shuffled: bool = False, equal: bool = False) -> LengthMemory:
    """Return a memory of this many epochs over prompts whose lengths span two orders of magnitude."""
    memory, random = LengthMemory(), np.random.default_rng(3)
    for _ in range(epochs):
        order = random.permutation(prompts)
        for prompt in range(prompts):
            base = 40 if equal else 10 + 30 * int(order[prompt] if shuffled else prompt)
            memory.add(prompt, [base, base + (0 if equal else int(random.integers(8)))])
    return memory


def test_stable_lengths_are_ranked_and_shuffled_ones_are_not() -> None:
    stable, shuffled = remembered(3, 40).correlation(), remembered(4, 40, shuffled=True).correlation()
    assert stable is not None and stable > 0.95 and predicts(stable)
    assert not predicts(shuffled)


def test_nothing_is_known_of_equal_lengths_of_few_groups_and_of_the_first_epoch() -> None:
    assert remembered(3, 40, equal=True).correlation() is None
    assert remembered(2, lengths.GROUPS_NEEDED - 1).correlation() is None
    assert remembered(1, 40).correlation() is None
    assert LengthMemory().predict(0) is None


def test_newer_groups_count_more_and_a_group_without_completions_counts_nothing() -> None:
    memory = LengthMemory()
    memory.add(7, [10, 20])
    memory.add(7, [20, 40])
    memory.add(7, [])
    assert memory.predict(7) == pytest.approx(0.6 * 40 + 0.4 * 20)
    assert memory.added == 2


def test_what_was_sampled_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "PROMPTS_REMEMBERED", 2)
    memory = LengthMemory()
    for prompt in (0, 1, 0, 2):
        memory.add(prompt, [5])
    assert list(memory.prompts) == [0, 2]


def test_ranks_of_equal_values_are_shared() -> None:
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert rank_correlation([1, 1], [1, 2]) is None
    assert rank_correlation([3, 2, 1], [1, 2, 3]) == pytest.approx(-1.0)
