"""Packing: every token once, within the budget, in an order that arrival cannot change."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ContractError
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.services.learner.packing import MicroBatch, make_micro_batches, split_updates


def make_row(group: int, sample: int, prompt: int, length: int) -> BatchRow:
    rng = np.random.default_rng([group, sample])
    cut = length // 2
    spans = tuple(
        span for span in (VersionSpan(3, 0, cut), VersionSpan(4, cut, length)) if span.stop > span.start
    )
    return BatchRow(
        group_id=f"g{group:03d}",
        prompt_key=f"p{group}",
        sample_index=sample,
        prompt_token_ids=rng.integers(1, 60, prompt).astype(np.int32),
        token_ids=rng.integers(1, 60, length).astype(np.int32),
        logprobs=-rng.random(length).astype(np.float32),
        spans=spans,
        finish_reason=FinishReason.STOP,
        reward=1.0,
        advantage=float(group) - sample,
    )


ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=24
).map(lambda sizes: [make_row(group, place, p, t) for place, (group, p, t) in enumerate(sizes)])
LAYOUT = st.sampled_from(["bucket", "pack"])


def trajectories(batch: MicroBatch) -> list[tuple]:
    """Read the rows back from a micro-batch through token_index alone."""
    flat = batch.input_ids.reshape(-1)
    found = []
    for place in range(len(batch.advantages)):
        count = int(batch.mask[place].sum())
        index = batch.token_index[place, :count]
        assert torch.equal(flat[index + 1], batch.token_ids[place, :count])
        found.append(
            (
                tuple(batch.token_ids[place, :count].tolist()),
                tuple(batch.behaviour_logprobs[place, :count].tolist()),
                float(batch.advantages[place]),
                tuple(batch.staleness[place, :count].tolist()),
            )
        )
    return found


@given(rows=ROWS, budget=st.integers(1, 300), layout=LAYOUT)
def test_every_row_comes_back_once_and_budgets_hold(rows, budget, layout) -> None:
    batches = make_micro_batches(rows, 5, budget, layout)
    expected = [
        (
            tuple(row.token_ids.tolist()),
            tuple(row.logprobs.tolist()),
            row.advantage,
            tuple(5 - span.version for span in row.spans for _ in range(span.start, span.stop)),
        )
        for row in rows
    ]
    assert sorted(found for batch in batches for found in trajectories(batch)) == sorted(expected)
    for batch in batches:
        assert batch.positions <= budget or len(batch.advantages) == 1
        assert batch.positions >= batch.real_tokens
        if layout == "pack":
            assert batch.positions == batch.real_tokens


@given(rows=ROWS, budget=st.integers(1, 300), layout=LAYOUT, chance=st.randoms(use_true_random=False))
def test_arrival_changes_nothing(rows, budget, layout, chance) -> None:
    shuffled = list(rows)
    chance.shuffle(shuffled)
    first = make_micro_batches(rows, 5, budget, layout)
    second = make_micro_batches(shuffled, 5, budget, layout)
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        for field in dataclasses.fields(MicroBatch):
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
    order = [[row.group_id for row in part] for part in split_updates(rows, 3)]
    assert order == [[row.group_id for row in part] for part in split_updates(shuffled, 3)]


@given(rows=ROWS, updates=st.integers(1, 6))
def test_updates_share_whole_groups(rows, updates) -> None:
    parts = split_updates(rows, updates)
    groups = [{row.group_id for row in part} for part in parts]
    assert sum(len(part) for part in parts) == len(rows)
    assert len(set().union(*groups)) == sum(map(len, groups))
    assert 1 <= len(parts) <= updates


def test_packed_positions_start_again_at_zero() -> None:
    (batch,) = make_micro_batches([make_row(0, 0, 2, 3), make_row(0, 1, 1, 1)], 5, 100, "pack")
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_token_ids": np.zeros(0, np.int32)}, "0 prompt"),
        ({"token_ids": np.zeros(0, np.int32)}, "0 completion"),
        ({"logprobs": np.zeros(2, np.float32)}, "2 behaviour logprobs"),
        (
            {"spans": (VersionSpan(0, 0, 2), VersionSpan(0, 3, 6))},
            r"without gaps, but one is \[3, 6\) where 2 was due",
        ),
        ({"spans": (VersionSpan(0, 0, 5),)}, r"cover \[0, 6\) .* but end at 5"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(change, words) -> None:
    row = dataclasses.replace(make_row(1, 7, 3, 6), **change)
    with pytest.raises(ContractError, match=f"sample 7 of group g001.*{words}"):
        make_micro_batches([row], 5, 100)
