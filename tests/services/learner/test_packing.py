"""Packing: every token once, within the budget, in an order that arrival cannot change."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ContractError
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.services.learner.packing import (
    MicroBatch,
    Packing,
    deal_groups,
    make_micro_batches,
    sequences_of,
)
from tests.support.branched_rows import row_of, sampled_of, stories


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


def alike_row(place: int, group: int, tokens: list[int]) -> BatchRow:
    row = make_row(group, place, 1 + group % 2, len(tokens))
    prompt = np.full(1 + group % 2, 1, dtype=np.int32)
    return dataclasses.replace(row, prompt_token_ids=prompt, token_ids=np.array(tokens, dtype=np.int32))


ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=24
).map(lambda sizes: [make_row(group, place, p, t) for place, (group, p, t) in enumerate(sizes)])
FEW = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(1, 2), min_size=1, max_size=12)),
    min_size=1,
    max_size=24,
).map(lambda found: [alike_row(place, group, tokens) for place, (group, tokens) in enumerate(found)])
"""Rows of few different tokens, so that many begin alike, also across groups."""


def same(mine: Any, other: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, other)
    if dataclasses.is_dataclass(mine):
        return all(same(getattr(mine, f.name), getattr(other, f.name)) for f in dataclasses.fields(mine))
    if isinstance(mine, tuple):
        return len(mine) == len(other) and all(map(same, mine, other))
    return bool(mine == other)


def trajectories(batch: MicroBatch) -> list[tuple]:
    """Read the rows back from a micro-batch through token_index alone."""
    found = []
    for place in range(len(batch.advantages)):
        count = int(batch.mask[place].sum())
        tokens = batch.pair_ids[batch.token_index[place, :count]]
        found.append(
            (
                tuple(tokens.tolist()),
                tuple(batch.behaviour_logprobs[place, :count].tolist()),
                float(batch.advantages[place]),
                tuple(batch.staleness[place, :count].tolist()),
            )
        )
    return found


@given(rows=ROWS | FEW, budget=st.integers(1, 300))
def test_every_row_comes_back_once_and_budgets_hold(rows, budget) -> None:
    batches = make_micro_batches(rows, 5, budget)
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
        assert batch.positions <= batch.shared.real_slots


@given(rows=ROWS | FEW, budget=st.integers(1, 300))
def test_distinct_beginnings_are_computed_once_and_attention_sees_whole_rows(rows, budget) -> None:
    by_name = {(row.group_id, row.sample_index): row for row in rows}
    for batch in make_micro_batches(rows, 5, budget):
        whole = [
            (*by_name[name].prompt_token_ids.tolist(), *by_name[name].token_ids.tolist())
            for name in batch.rows
        ]
        shared = batch.shared
        inputs = sorted(tokens[:-1] for tokens in whole)
        assert batch.positions == len({row[:stop] for row in inputs for stop in range(1, len(row) + 1)})
        assert batch.positions == len(batch.input_ids) == len(shared.position_ids)
        seen, start = [], 0
        real = torch.zeros(len(shared.slots.index), dtype=torch.bool)
        real[shared.slots.places] = True
        for count, length in shared.blocks:
            for _ in range(count):
                index = shared.slots.index[start : start + length][real[start : start + length]]
                assert shared.position_ids[index].tolist() == list(range(len(index)))
                seen.append(tuple(batch.input_ids[index].tolist()))
                start += length
        assert sorted(seen) == inputs
        pairs = set()
        for tokens, (group_id, sample) in zip(whole, batch.rows, strict=True):
            prompt = len(by_name[group_id, sample].prompt_token_ids)
            pairs |= {tokens[: stop + 1] for stop in range(prompt, len(tokens))}
        assert len(batch.pair_ids) == len(pairs)


@given(rows=ROWS | FEW, budget=st.integers(1, 300))
def test_copies_are_taken_and_their_gradients_summed(rows, budget) -> None:
    for batch in make_micro_batches(rows, 5, budget):
        for copies, count in ((batch.shared.slots, batch.positions), (batch.pairs, batch.positions)):
            values = torch.randn(count, 3, dtype=torch.float64, requires_grad=True)
            weights = torch.zeros(len(copies.index), 3, dtype=torch.float64)
            weights[copies.places] = torch.randn(len(copies.places), 3, dtype=torch.float64)
            (ours,) = torch.autograd.grad((copies.take(values) * weights).sum(), values)
            (plain,) = torch.autograd.grad((values[copies.index] * weights).sum(), values)
            torch.testing.assert_close(ours, plain)
            assert torch.equal(copies.take(values), values[copies.index])
        slots = torch.randn(len(batch.shared.slots.index), 3, dtype=torch.float64, requires_grad=True)
        collected = batch.shared.collect(slots)
        assert torch.equal(collected, slots[batch.shared.first])
        assert torch.equal(batch.shared.slots.index[batch.shared.first], torch.arange(batch.positions))
        (ours,) = torch.autograd.grad(collected.sum(), slots)
        assert int(ours.sum()) == 3 * batch.positions and int(ours.max()) == 1


@given(rows=ROWS | FEW, budget=st.integers(1, 300), chance=st.randoms(use_true_random=False))
def test_arrival_changes_nothing(rows, budget, chance) -> None:
    shuffled = list(rows)
    chance.shuffle(shuffled)
    first = make_micro_batches(rows, 5, budget)
    second = make_micro_batches(shuffled, 5, budget)
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        for field in dataclasses.fields(MicroBatch):
            assert same(getattr(ours, field.name), getattr(theirs, field.name))
    ids, mixed = [row.group_id for row in rows], [row.group_id for row in shuffled]
    assert deal_groups(ids, 3) == deal_groups(mixed, 3)


def trained(batch: MicroBatch) -> list[tuple]:
    """Read from a micro-batch what it trains: context, token, logprob, version, advantage."""
    shared, contexts, start = batch.shared, dict[int, tuple[int, ...]](), 0
    real = torch.zeros(len(shared.slots.index), dtype=torch.bool)
    real[shared.slots.places] = True
    for count, length in shared.blocks:
        for _ in range(count):
            index = shared.slots.index[start : start + length][real[start : start + length]]
            row = batch.input_ids[index].tolist()
            contexts |= {int(at): tuple(row[: place + 1]) for place, at in enumerate(index)}
            start += length
    return [
        (
            contexts[int(batch.pairs.index[pair])],
            int(batch.pair_ids[pair]),
            float(batch.behaviour_logprobs[row, place]),
            5 - int(batch.staleness[row, place]),
            float(batch.advantages[row]),
        )
        for row, place in (batch.mask > 0).nonzero().tolist()
        for pair in [int(batch.token_index[row, place])]
    ]


@given(told=st.lists(stories(), min_size=1, max_size=6), budget=st.integers(1, 60))
def test_each_sampled_token_trains_once_in_the_context_it_was_sampled_in(told, budget) -> None:
    rows = [row_of(story, place // 2, place % 2) for place, story in enumerate(told)]
    expected = [
        (*sampled, row.advantage)
        for row, story in zip(rows, told, strict=True)
        for sampled in sampled_of(story)
    ]
    batches = make_micro_batches(rows, 5, budget)
    assert sorted(found for batch in batches for found in trained(batch)) == sorted(expected)
    packing = Packing(rows, 5, budget)
    assert packing.trajectories == len(rows)
    assert packing.completion_tokens == sum(batch.completion_tokens for batch in batches)
    shares: dict[tuple[str, int], float] = {}
    for batch in batches:
        for name, share in zip(batch.rows, batch.shares.tolist(), strict=True):
            shares[name] = shares.get(name, 0.0) + share
    assert list(shares.values()) == pytest.approx([1.0] * len(rows))
    for row in rows:
        for part in sequences_of(row):
            assert not part.breaks and part.prompt_token_ids.size and part.stop == part.token_ids.size


@given(rows=ROWS | FEW, budget=st.integers(1, 300), ranks=st.integers(2, 5))
def test_ranks_train_all_rows_together_and_dummies_train_nothing(rows, budget, ranks) -> None:
    packing = Packing(rows, 5, budget, ranks)
    parts = [list(packing.of_rank(rank)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    seen = [name for part in parts for batch in part for name in batch.rows]
    assert sorted(seen) == sorted((row.group_id, row.sample_index) for row in rows)
    for rank, part in enumerate(parts):
        for number, batch in zip(packing.plan.ranks[rank], part, strict=True):
            if number is None:
                assert batch.positions == batch.completion_tokens == 1 and not batch.advantages.any()
            else:
                names, counts = packing.listed(number)
                assert (tuple(names), counts) == (batch.rows, batch.mask.sum(1).int().tolist())


@given(rows=ROWS, updates=st.integers(1, 6))
def test_updates_share_whole_groups(rows, updates) -> None:
    ids = [row.group_id for row in rows]
    parts = deal_groups(ids, updates)
    assert len(parts) == updates and set().union(*parts) == set(ids)
    assert sum(map(len, parts)) == len(set(ids))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


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


def test_micro_batches_are_made_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []
    make = Packing.make

    def noting(self: Packing, number: int | None) -> MicroBatch:
        made.append(number)
        return make(self, number)

    monkeypatch.setattr(Packing, "make", noting)
    packing = Packing([make_row(group, 0, 8, 8) for group in range(6)], 5, 16)
    for used, _ in enumerate(packing.of_rank(0), 1):
        assert used <= len(made) <= used + 1
    assert made == list(range(len(packing.plan.micro_batches)))
    assert len(made) == 6
