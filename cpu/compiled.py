"""Compiled blocks: the dense part of each layer through torch.compile, which joins its small operations."""

from typing import Any

import torch

from antiphon.core.errors import ConfigError
from antiphon.cpu.compiler import check_compiler


def compile_blocks(model: Any) -> int:
    """Let the block `mlp` of each of a causal model's layers be compiled when it first runs; return how many.

    One piece of code serves all layers and numbers of rows. What torch compiles calls products of its own, so
    those of `linears` are taken out of the blocks.

    Raises:
        ConfigError: when the model has no such blocks, or this machine cannot compile.
    """
    blocks = [block for layer in _layers(model) if (block := getattr(layer, "mlp", None)) is not None]
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


def _layers(model: Any) -> list[Any]:
    return list(getattr(model.get_decoder(), "layers", None) or ())
