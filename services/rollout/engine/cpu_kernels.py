"""CPU kernels: places in which vLLM 0.32 spends a fifth of an uncompiled step on a CPU, and needs not.

*Matrix products.* oneDNN builds a kernel for each number of rows and vLLM keeps 32 of them for a layer.
Continuous batches, and drafts above all, have another number at each step, so kernels are built all the
time: twice the time of the product itself for the demo's model. Here the rows are filled up to one of few
numbers: whole steps, as vLLM does for a graph that was captured, else the rows of a product, with zeros.

*RMS norm.* vLLM's own kernel for CPUs is used nowhere: its list of kernels gives CPUs five torch operations.

*SiLU.* Its product with the gate takes a second buffer, which large steps give back to the system each time.

None of them changes what a row is worth depending on the rows beside it.
"""

from dataclasses import replace
from typing import Any

import torch

EXACT_ROWS = 16
"""So few rows are not filled up: each number of them has its kernel."""
LEAST_STEP = 16
"""Numbers of rows are multiples of this, and of an eighth of the power of two below them."""

_MARK = "antiphon_kernels"


def filled_rows(rows: int) -> int:
    """Return the number of rows that `rows` are filled up to: at most an eighth more, from 128 on.

    >>> [filled_rows(n) for n in (1, 16, 17, 150, 192, 193, 257, 1025)]
    [1, 16, 32, 160, 192, 208, 288, 1152]
    """
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
    product = ops.onednn_mm

    def filled(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dim() != 2 or (wanted := filled_rows(len(x))) == len(x):
            return product(handler, x, bias)
        return product(handler, _filled(x, wanted), bias)[: len(x)]

    ops.onednn_mm = filled
    RMSNorm.forward_cpu = _rms_norm
    SiluAndMul.forward_cpu = _silu_and_mul


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
