"""CPU kernels: places in which vLLM 0.32 spends a fifth of an uncompiled step on a CPU, and needs not.

*Matrix products.* oneDNN builds a kernel for each number of rows and vLLM keeps 32 of them for a layer.
Continuous batches, and drafts above all, have another number at each step, so kernels are built all the
time: twice the time of the product itself for the demo's model. Here the rows are filled up to one of few
numbers: whole steps, as vLLM does for a graph that was captured, else the rows of a product, with zeros.

*RMS norm.* vLLM's own kernel for CPUs is used nowhere: its list of kernels gives CPUs five torch operations.

*SiLU.* Its product with the gate takes a second buffer, which large steps give back to the system each time.

What a row is worth depends on no other row. vLLM alone does not keep that in two places. Where a processor
has AMX it multiplies up to four rows of 16-bit numbers with AVX-512 and more with AMX, which add in another
order: rows are filled up to whole blocks there. And its attention adds up a long context in parts whose size
follows from a request's tokens in the pass, so drafts, a cut prompt and a continuation changed bits: it is
handed each token as a request of its own, in compiled models as well.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

EXACT_ROWS = 16
"""So few rows are not filled up: each number of them has its kernel."""
LEAST_STEP = 16
"""Numbers of rows are multiples of this, and of an eighth of the power of two below them."""
BLOCK_ROWS = 32
"""Rows that vLLM's kernel for AMX multiplies at once."""

_MARK = "antiphon_kernels"


def filled_rows(rows: int, blocks: bool = False) -> int:
    """Return the number of rows that `rows` are filled up to: at most an eighth more, from 128 on.

    With `blocks` it is a multiple of `BLOCK_ROWS`.

    >>> [filled_rows(n) for n in (1, 16, 17, 150, 192, 193, 257, 1025)]
    [1, 16, 32, 160, 192, 208, 288, 1152]
    >>> [filled_rows(n, blocks=True) for n in (1, 16, 33, 150, 1025)]
    [32, 32, 64, 160, 1152]
    """
    if blocks:
        return -(-filled_rows(max(rows, BLOCK_ROWS)) // BLOCK_ROWS) * BLOCK_ROWS
    if rows <= EXACT_ROWS:
        return rows
    step = max(LEAST_STEP, 1 << (rows.bit_length() - 4))
    return -(-rows // step) * step


def use_cpu_kernels() -> None:
    """Put them in place for models that are loaded from now on; calling again does nothing."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    if hasattr(ops, _MARK) or not hasattr(torch.ops._C, "onednn_mm"):
        return
    setattr(ops, _MARK, True)
    fill_products(ops, torch.cpu._is_amx_tile_supported())
    RMSNorm.forward_cpu = _rms_norm
    SiluAndMul.forward_cpu = _silu_and_mul


def fill_products(ops: Any, amx: bool) -> None:
    """Fill up the rows of vLLM's two matrix products; `amx` says what the processor has."""
    product, small = ops.onednn_mm, ops.weight_packed_linear_cpu

    def fill(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        rows = filled_rows(len(x), amx and x.dtype != torch.float32) if x.dim() == 2 else len(x)
        return multiply(x) if rows == len(x) else multiply(_filled(x, rows))[: len(x)]

    ops.onednn_mm = lambda handler, x, bias: fill(lambda rows: product(handler, rows, bias), x)
    ops.weight_packed_linear_cpu = lambda x, packed, n, bias: fill(
        lambda rows: small(rows, packed, n, bias), x
    )


def attend_by_token() -> None:
    """Let vLLM's attention on CPUs take each token for a request of its own; calling again does nothing.

    Its keys lie in the cache before attention begins, so each token has a context and nothing else.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    if hasattr(Builder, _MARK):
        return
    setattr(Builder, _MARK, True)
    build = Builder.build

    def built(builder: Any, prefix: int, batch: Any, fast_build: bool = False) -> Any:
        whole = builder.is_cross_attention or builder.is_encoder_only_attention or batch.causal is not True
        return build(builder, prefix, batch if whole else by_token(batch), fast_build)

    Builder.build = built


def by_token(batch: Any) -> Any:
    """Return vLLM's description of a causal batch with one request for each of its tokens."""
    if batch.max_query_len == 1:
        return batch
    starts = batch.query_start_loc[: batch.num_reqs + 1]
    counts = starts.diff()
    tokens = torch.arange(int(starts[-1]), dtype=starts.dtype)
    of = torch.arange(batch.num_reqs).repeat_interleave(counts)
    return replace(
        batch,
        num_reqs=len(tokens),
        max_query_len=1,
        query_start_loc=torch.arange(len(tokens) + 1, dtype=starts.dtype),
        seq_lens=(batch.seq_lens[: batch.num_reqs] - counts - starts[:-1] + 1)[of] + tokens,
        block_table_tensor=batch.block_table_tensor[of],
    )


def fill_steps(runner: Any) -> None:
    """Let one vLLM runner fill up its steps, so that no product of a layer has to copy its rows."""
    dispatcher, most = runner.cudagraph_dispatcher, runner.max_num_tokens
    dispatch = dispatcher.dispatch

    def filled(num_tokens: int, **options: Any) -> tuple[Any, Any]:
        mode, batch = dispatch(num_tokens, **options)
        return mode, replace(batch, num_tokens=min(filled_rows(batch.num_tokens), most))

    dispatcher.dispatch = filled


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    wide = x.new_empty((rows, x.shape[1]))
    wide[: len(x)] = x
    wide[len(x) :] = 0.0
    return wide


def _rms_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Do what `RMSNorm.forward_native` does, in place where a residual comes along."""
    weight = norm.weight.data if norm.has_weight else None
    plain = weight is not None and weight.dtype == x.dtype and norm.variance_size_override is None
    if not plain:
        return norm.forward_native(x, residual)
    if residual is None:
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, norm.variance_epsilon)
        return out
    if not (x.is_contiguous() and residual.is_contiguous()):
        return norm.forward_native(x, residual)
    torch.ops._C.fused_add_rms_norm(x, residual, weight, norm.variance_epsilon)
    return x, residual


def _silu_and_mul(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Do what `SiluAndMul.forward_native` does, in one buffer."""
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]).mul_(x[..., half:])
