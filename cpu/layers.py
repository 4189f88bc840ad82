"""Layers of a float32 model on a CPU: norms in fewer passes over memory, products by oneDNN, compiled blocks.

A root-mean-square norm is little arithmetic, but on a CPU it takes time by its passes over memory. The
backward pass here uses what the forward pass has made. Other types than float32 round between the
operations, and are left alone. torch multiplies float32 matrices by MKL, which leaves half of a CPU of
another maker unused; oneDNN does not. It makes code for every shape that it meets, so callers round the
number of rows.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from antiphon.core.errors import ConfigError
from antiphon.cpu.compiler import check_compiler

_TOLERANCE = 1e-5
_PROBE_ROWS = 3


def quicken_norms(model: torch.nn.Module) -> int:
    """Let the root-mean-square norms of a model compute as here, and return how many do.

    A module counts as one if it is called so, has a weight and a small term, holds float32, and gives the
    same result as here for a trial input. Others are left as they are.
    """
    count = 0
    for module in model.modules():
        small = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or weight is None or not isinstance(small, float):
            continue
        if weight.dtype != torch.float32 or weight.dim() != 1 or weight.device.type != "cpu":
            continue
        trial = torch.linspace(-2.0, 3.0, _PROBE_ROWS * len(weight)).view(_PROBE_ROWS, -1)
        with torch.no_grad():
            expected, found = module(trial), _RootMeanSquare.apply(trial, weight, small)
        if torch.allclose(found, expected, atol=_TOLERANCE, rtol=_TOLERANCE):
            module.forward = partial(_normed, module, small)
            count += 1
    return count


def _normed(module: Any, small: float, values: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = _RootMeanSquare.apply(values, module.weight, small)
    return normed


class _RootMeanSquare(torch.autograd.Function):  # type: ignore[misc]
    """values [..., D] / sqrt(mean of their squares + small) * weight [D]."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, small: float) -> torch.Tensor:
        scale = torch.linalg.vecdot(values, values)[..., None]
        scale.div_(values.shape[-1]).add_(small).rsqrt_()
        normed = values * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        width = len(weight)
        both = (gradient * normed).reshape(-1, width)
        along = (both @ weight).div_(-width).reshape(scale.shape)
        values = (gradient * weight).addcmul_(normed, along).mul_(scale)
        return values, both.sum(0), None


def quicken_linears(model: torch.nn.Module) -> int:
    """Let the linear maps without bias of a model on a CPU multiply as here, and return how many do.

    Others, and those of other types than float32, are left as they are.
    """
    count = 0
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.bias is None and _is_ours(module.weight):
            module.forward = partial(_mapped, module)
            count += 1
    return count


def linear(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return values [..., D] times the transpose of weight [E, D]."""
    if not _is_ours(weight):
        return functional.linear(values, weight)
    mapped: torch.Tensor = _Linear.apply(values, weight)
    return mapped


def _mapped(module: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
    return linear(values, module.weight)


def _is_ours(weight: torch.Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and bool(torch.backends.mkldnn.is_available())


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left [..., D] times the transpose of right [E, D]."""
    # The product that torch.compile calls on a CPU; torch.nn.functional.linear would call MKL.
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return made


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """values [..., D] times the transpose of weight [E, D]."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        return _product(values, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        values, weight = ctx.saved_tensors
        rows, of_weight = gradient.flatten(0, -2), None
        if ctx.needs_input_grad[1]:  # not beside an adapter
            of_weight = _product(rows.T, values.flatten(0, -2).T)
        return _product(gradient, weight.T), of_weight


def compile_blocks(model: Any) -> int:
    """Let the block `mlp` of each of a causal model's layers be compiled when it first runs; return how many.

    One piece of code serves all layers and numbers of rows. What torch compiles calls products of its own, so
    those of `linears` are taken out of the blocks.

    Raises:
        ConfigError: when the model has no such blocks, or this machine cannot compile.
    """
    layers = getattr(model.get_decoder(), "layers", None) or ()
    blocks = [block for layer in layers if (block := getattr(layer, "mlp", None)) is not None]
    if not blocks:
        raise ConfigError("learner.compiled=true finds no layers with an mlp in this model; leave it out")
    if next(model.parameters()).device.type == "cpu":
        check_compiler("learner.compiled=true")
    for block in blocks:
        for module in block.modules():
            if type(module) is torch.nn.Linear:
                vars(module).pop("forward", None)
        block.compile(dynamic=True)
    return len(blocks)
