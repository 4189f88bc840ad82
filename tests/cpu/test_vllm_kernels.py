"""The kernels that CPUs get: what they answer is what vLLM's own would, whatever stands beside a row."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cpu.vllm_kernels import (
    BLOCK_ROWS,
    _rms_norm,
    _silu_and_mul,
    by_token,
    fill_products,
    fill_steps,
    filled_rows,
    use_cpu_kernels,
)
from antiphon.services.rollout.engine.environment import EngineSettings, prepare_environment
from antiphon.services.rollout.selfcheck.startup_check import uneven_share

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    prepare_environment(EngineSettings(model_dir=tmp_path_factory.mktemp("model")))
    use_cpu_kernels()


@given(st.integers(1, 1 << 20))
def test_few_numbers_of_rows_are_left_and_none_is_much_larger(rows: int) -> None:
    filled = filled_rows(rows)
    assert rows <= filled < rows + max(16, rows / 8 + 1)
    assert filled_rows(filled) == filled
    octave = range(1 << (rows.bit_length() - 1), 1 << rows.bit_length()) if rows < 5000 else [rows]
    assert len({filled_rows(n) for n in octave}) <= 16


@given(st.integers(1, 1 << 20))
def test_blocks_are_whole_and_few_rows_more(rows: int) -> None:
    filled = filled_rows(rows, blocks=True)
    assert filled % BLOCK_ROWS == 0 and rows <= filled < rows + max(64, rows / 8 + 1)
    assert filled_rows(filled, blocks=True) == filled


WIDTH, OUT = 16, 256


def two_units() -> SimpleNamespace:
    """Return products that add up to four rows in another order than more, as vLLM's do where AMX is."""
    weight = torch.randn(WIDTH, OUT, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).float()

    def small(x: torch.Tensor, packed: None, n: int, bias: None) -> torch.Tensor:
        terms = x.float()[:, :, None] * weight
        if len(x) <= 4:
            return terms.sum(1).to(x.dtype)
        return (terms[:, ::2].sum(1) + terms[:, 1::2].sum(1)).to(x.dtype)

    return SimpleNamespace(
        onednn_mm=lambda handler, x, bias: small(x, None, OUT, None), weight_packed_linear_cpu=small
    )


@pytest.mark.parametrize("name", ["onednn_mm", "weight_packed_linear_cpu"])
def test_where_amx_is_no_number_of_rows_changes_a_16_bit_product(name: str) -> None:
    def share(amx: bool, dtype: torch.dtype) -> float:
        fill_products(ops := two_units(), amx)

        def product(x: torch.Tensor) -> torch.Tensor:
            if name == "onednn_mm":
                return ops.onednn_mm(None, x, None)
            return ops.weight_packed_linear_cpu(x, None, OUT, None)

        return uneven_share(WIDTH, product, dtype, seed=1)

    seen = share(False, torch.bfloat16)
    print(name, seen)
    assert 0 < seen < 1e-3  # so rare that sampled answers alone do not show it
    assert share(True, torch.bfloat16) == 0.0
    assert share(True, torch.float32) > 0.1  # nothing is filled up for it, and it is always seen


@dataclass(frozen=True)
class _Described:
    num_reqs: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor


def test_attention_sees_each_token_with_what_stands_before_it() -> None:
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    blocks = torch.arange(12, dtype=torch.int32).view(3, 4)
    # A prompt of 3 tokens, a draft of 1 behind 7 tokens, one token behind 30; the rest is padding.
    batch = _Described(3, 3, ints(0, 3, 5, 6, 6, 6), ints(3, 9, 31, 0, 0), blocks)
    tokens = by_token(batch)
    assert (tokens.num_reqs, tokens.max_query_len) == (6, 1)
    assert tokens.query_start_loc.tolist() == list(range(7))
    assert tokens.seq_lens.tolist() == [1, 2, 3, 8, 9, 31]
    assert tokens.block_table_tensor[:, 0].tolist() == [0, 0, 0, 4, 4, 8]
    assert tokens.seq_lens.dtype == tokens.query_start_loc.dtype == torch.int32


def test_a_product_of_filled_rows_is_that_of_the_rows() -> None:
    import vllm._custom_ops as ops

    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64), torch.randn(96)
    handler = ops.create_onednn_mm(weight.t(), 32)
    x = torch.randn(700, 64)
    whole = ops.onednn_mm(handler, x, bias)
    torch.testing.assert_close(whole, x @ weight.T + bias)
    for rows in (1, 5, 16, 17, 33, 150, 192, 193, 500):
        part = ops.onednn_mm(handler, x[:rows], bias)
        assert part.shape == (rows, 96)
        torch.testing.assert_close(part, whole[:rows])
    assert torch.equal(ops.onednn_mm(handler, x[:17], None), ops.onednn_mm(handler, x[:18], None)[:17])


def norm(weight: torch.Tensor | None, override: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        weight=SimpleNamespace(data=weight),
        has_weight=weight is not None,
        variance_epsilon=1e-6,
        variance_size_override=override,
        forward_native=lambda x, residual=None: "native",
    )


def test_a_norm_is_that_of_plain_operations_and_each_row_its_own() -> None:
    torch.manual_seed(1)
    weight, x, residual = torch.randn(32), torch.randn(40, 4, 32), torch.randn(40, 32)
    wanted = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    found = _rms_norm(norm(weight), x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(_rms_norm(norm(weight), x.transpose(0, 1)), wanted.transpose(0, 1))
    assert torch.equal(_rms_norm(norm(weight), x[3:4]), found[3:4])
    beside = torch.randn(40, 3, 4, 32)  # heads that are a part of longer rows, as vLLM's queries are
    beside[:, 1] = x
    assert torch.equal(_rms_norm(norm(weight), beside[:, 1]), found)
    both = x[:, 0] + residual
    scaled = both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    out, carried = _rms_norm(norm(weight), x[:, 0].clone(), residual.clone())
    torch.testing.assert_close(out, scaled)
    torch.testing.assert_close(carried, both)


def test_a_norm_that_the_kernel_does_not_know_is_vllms_own() -> None:
    x = torch.randn(4, 32)
    assert _rms_norm(norm(None), x) == "native"
    assert _rms_norm(norm(torch.ones(32), override=16), x) == "native"
    assert _rms_norm(norm(torch.ones(32, dtype=torch.bfloat16)), x) == "native"
    assert _rms_norm(norm(torch.ones(32)), x.t().contiguous().t(), x) == "native"


def test_silu_and_its_product_have_the_bits_of_vllms_own() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    x = torch.randn(300, 512)
    before = x.clone()
    assert torch.equal(_silu_and_mul(None, x), SiluAndMul.forward_native(x))
    assert torch.equal(x, before)


@dataclass(frozen=True)
class _Batch:
    num_tokens: int
    num_reqs: int | None = None


def test_a_step_is_filled_up_as_far_as_its_buffers_reach() -> None:
    dispatcher = SimpleNamespace(dispatch=lambda num_tokens, **_: ("none", _Batch(num_tokens)))
    fill_steps(SimpleNamespace(cudagraph_dispatcher=dispatcher, max_num_tokens=300))
    filled = [dispatcher.dispatch(n, uniform_decode=False) for n in (1, 17, 150, 297, 300)]
    assert filled == [("none", _Batch(n)) for n in (1, 32, 160, 300, 300)]
