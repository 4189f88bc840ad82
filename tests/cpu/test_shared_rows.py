"""Shared rows on a transformer: loss, gradients and logprobs are those of whole, padded rows."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from antiphon.benchmarks.parts.learner_speed.reference import ReferencePolicy, padded_batches
from antiphon.core.algorithm import AlgorithmSection
from antiphon.cpu import chunks, shared_rows
from antiphon.cpu.layers import quicken_norms
from antiphon.cpu.shared_rows import ATTENTION, common_lengths, share_rows
from antiphon.services.learner import policy as policy_module
from antiphon.services.learner.objective import Objective
from antiphon.services.learner.packing import make_micro_batches
from antiphon.services.learner.policy import Policy
from tests.support.small_policy import MAX_TOKENS, make_model, make_rows, summed


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("budget", [40, 4096])
@pytest.mark.parametrize("most_scores", [0, 2**19])
def test_the_gradient_is_that_of_whole_padded_rows(
    name: str, proximal: bool, budget: int, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "SCORES_AT_ONCE", most_scores)
    rows = make_rows(budget)
    objective = Objective(AlgorithmSection(objective=name), MAX_TOKENS, 0.9)
    loss, found = summed(Policy(make_model(), objective), make_micro_batches(rows, 0, budget), proximal)
    expected_loss, expected = summed(
        ReferencePolicy(make_model(), objective), padded_batches(rows, 0, budget), proximal
    )
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_packed_sequences_are_those_of_whole_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def varlen(query, key, value, starts, ends, longest, longest_key, *, scale, window_size):
        # What torch.nn.attention.varlen says its kernel does, which no CPU has.
        called.append(len(starts))
        assert torch.equal(starts, ends) and starts.dtype == torch.int32 and window_size == (-1, 0)
        assert longest == longest_key == int(starts.diff().max())
        out = torch.zeros_like(query)
        for start, stop in zip(starts.tolist(), starts[1:].tolist(), strict=False):
            row = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
            found = functional.scaled_dot_product_attention(*row, is_causal=True, scale=scale)
            out[start:stop] = found[0].transpose(0, 1)
        assert stop == len(query)
        return out

    monkeypatch.setattr(chunks, "SCORES_AT_ONCE", 0)
    rows, objective = make_rows(7), Objective(AlgorithmSection(), MAX_TOKENS, 1.0)
    _, expected = summed(Policy(make_model(), objective), make_micro_batches(rows, 0, 100), False)
    monkeypatch.setattr(shared_rows, "_packs", lambda query: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    _, found = summed(Policy(make_model(), objective), make_micro_batches(rows, 0, 100), False)
    assert called and float((found - expected).norm() / expected.norm()) < 1e-5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=90), min_size=1, max_size=12))
def test_the_layout_of_a_micro_batch_has_each_sequence_once(sequences: list[list[int]]) -> None:
    rows = [np.array(row, dtype=np.int64) for row in sorted(sequences)]
    lengths = [len(row) for row in rows]
    shared, positions = share_rows(lengths, common_lengths(rows))
    starts = {tuple(row[: at + 1]) for row in rows for at in range(len(row))}
    assert len(shared.position_ids) == len(starts)  # each beginning is computed once
    for row, where in zip(rows, positions, strict=True):
        assert shared.position_ids[where].tolist() == list(range(len(row)))
    # What the kernel of packed rows takes: where each begins and ends, and the longest.
    bounds, index = shared.ends.tolist(), shared.slots.index.numpy()
    widths = [width for count, width in shared.blocks for _ in range(count)]
    assert shared.ends.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(index)
    assert np.diff(bounds).tolist() == widths and max(widths) == max(lengths)
    left = [where.tolist() for where in positions]
    for start, stop in itertools.pairwise(bounds):
        (found,) = [row for row in left if index[start : start + len(row)].tolist() == row][-1:]
        left.remove(found)
        assert not index[start + len(found) : stop].any()
    assert not left and shared.real_slots == sum(lengths)
    assert index[shared.first.numpy()].tolist() == list(range(len(shared.position_ids)))
    at = 0
    for count, width in shared.blocks:
        assert count * width <= sum(sorted(lengths)[::-1][at : at + count]) + shared_rows.BLOCK_PADDING
        at += count


def test_keys_that_are_repeated_for_a_gpu_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SCORES_AT_ONCE", 0)
    rows, objective = make_rows(7), Objective(AlgorithmSection(), MAX_TOKENS, 1.0)
    asked = []
    gradients = []
    for many in (False, True):
        monkeypatch.setattr(shared_rows, "_too_many_scores", lambda query, many=many: asked.append(1) or many)
        batches = make_micro_batches(rows, 0, 100)
        gradients.append(summed(Policy(make_model(), objective), batches, False)[1])
    assert asked and float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_each_logprob_is_that_of_its_own_row() -> None:
    rows, objective = make_rows(5), Objective(AlgorithmSection(), MAX_TOKENS, 1.0)
    policy, reference = Policy(make_model(), objective), ReferencePolicy(make_model(), objective)
    found, expected = (
        {
            name: logprobs[mask > 0]
            for batch in batches
            for name, logprobs, mask in zip(batch.rows, made(batch).detach(), batch.mask, strict=True)
        }
        for made, batches in (
            (policy, make_micro_batches(rows, 0, 100)),
            (reference, padded_batches(rows, 0, 100)),
        )
    )
    assert found.keys() == expected.keys()
    for name, logprobs in found.items():
        torch.testing.assert_close(logprobs, expected[name], atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_no_bit() -> None:
    objective = Objective(AlgorithmSection(), MAX_TOKENS, 1.0)
    found = []
    for checkpointing in (False, True):
        model = make_model()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(summed(Policy(model, objective), make_micro_batches(make_rows(7), 0, 60), False)[1])
    assert torch.equal(*found)


def test_attention_over_a_window_is_left_as_it_is() -> None:
    """Such a model sees whole padded rows, and its gradient is the same too."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    rows, objective = make_rows(9), Objective(AlgorithmSection(), MAX_TOKENS, 1.0)
    model = make_model(**window)
    policy = Policy(model, objective)
    assert model.config._attn_implementation == "sdpa"
    _, found = summed(policy, make_micro_batches(rows, 0, 100), False)
    _, expected = summed(
        ReferencePolicy(make_model(**window), objective), padded_batches(rows, 0, 100), False
    )
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_model_whose_states_would_differ_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective(AlgorithmSection(), MAX_TOKENS, 1.0)
    shared = make_model()
    Policy(shared, objective)
    assert shared.config._attn_implementation == ATTENTION
    states = policy_module._states
    monkeypatch.setattr(policy_module, "_states", lambda *of: states(*of) + 0.5)
    other = make_model()
    Policy(other, objective)
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("seed", range(4))
def test_neither_length_nor_order_of_rows_changes_the_gradient(seed: int) -> None:
    rows, objective = make_rows(seed, groups=5, tail=1.5), Objective(AlgorithmSection(), MAX_TOKENS, 1.0)
    model = Policy(make_model(), objective)
    _, found = summed(model, make_micro_batches(rows, 0, 64), False)
    _, again = summed(model, make_micro_batches(rows[::-1], 0, 64), False)
    assert torch.equal(found, again)
    renamed = [dataclasses.replace(row, group_id=f"z{row.group_id}") for row in rows]
    _, split = summed(model, make_micro_batches(renamed, 0, 500), False)
    assert float((found - split).norm() / split.norm()) < 1e-5


def test_quick_norms_are_the_models_own_and_others_are_left() -> None:
    plain, quick = make_model(), make_model()
    norms = [m for m in quick.modules() if type(m).__name__ == "Qwen3RMSNorm"]
    for model in (plain, quick):
        torch.manual_seed(2)
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                torch.nn.init.uniform_(module.weight, 0.5, 2.0)
    # Its weight is an offset from 1, as in some models: another norm under the same kind of name.
    norms[0].forward = lambda values, own=norms[0]: torch.nn.functional.rms_norm(
        values, values.shape[-1:], 1.0 + own.weight, own.variance_epsilon
    )
    assert quicken_norms(quick) == len(norms) - 1
    assert quicken_norms(make_model().bfloat16()) == 0
    pairs = zip((m for m in plain.modules() if type(m).__name__ == "Qwen3RMSNorm"), norms, strict=True)
    for one, other in list(pairs)[1:]:
        values = torch.randn(5, 3, len(one.weight), requires_grad=True)
        weights = torch.randn_like(values)
        expected = torch.autograd.grad((one(values) * weights).sum(), [values, one.weight])
        found = torch.autograd.grad((other(values) * weights).sum(), [values, other.weight])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
