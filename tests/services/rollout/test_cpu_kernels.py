"""The kernels that CPUs get: what they answer is what vLLM's own would, whatever stands beside a row."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.rollout.engine.cpu_kernels import (
    _rms_norm,
    _silu_and_mul,
    fill_steps,
    filled_rows,
    use_cpu_kernels,
)
from antiphon.services.rollout.engine.environment import EngineSettings, prepare_environment

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
