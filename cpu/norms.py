"""Norms: root-mean-square norms of a float32 model, with fewer passes over memory than one operation each.

A norm is little arithmetic, but on a CPU it takes time by its passes over memory. The backward pass here uses
what the forward pass has made. Other types than float32 round between the operations, and are left alone.
"""

from functools import partial
from typing import Any

import torch

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
