"""Linear maps: products of a float32 model's layers on a CPU, by oneDNN.

torch multiplies float32 matrices by MKL, which leaves half of a CPU of another maker unused; oneDNN does not.
It makes code for every shape that it meets, so callers round the number of rows.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional


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
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return _product(gradient, weight.T), _product(rows.T, values.flatten(0, -2).T)
