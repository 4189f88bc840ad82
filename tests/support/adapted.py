"""Versions that an adapter makes of some weights, as a learner publishes them."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from antiphon.models.adapters import DOWN, PREFIX, UP
from antiphon.weights.adapter import merge_into
from antiphon.weights.snapshot import Adapter, Weights, weights_of

MODULE, SCALE = "layers.0.q_proj", 0.5
_RANK, _HEIGHT, _WIDTH = 2, 48, 64


def base_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return version 0."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(_HEIGHT, _WIDTH, generator=generator)
    matrix[3] = -0.0
    return {"bias": torch.full((3,), 0.5, dtype=dtype), f"{MODULE}.weight": matrix.to(dtype)}


def pair(version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of a version, float32; B of version 0 is zero."""
    generator = torch.Generator().manual_seed(version)
    down = torch.randn(_RANK, _WIDTH, generator=generator)
    return down, torch.randn(_HEIGHT, _RANK, generator=generator) * bool(version)


def adapted(version: int, dtype: torch.dtype) -> Weights:
    """Return a version."""
    tensors = base_tensors(dtype)
    down, up = (part.to(dtype) for part in pair(version))
    merged = tensors[f"{MODULE}.weight"].float()
    merge_into(merged, down.float(), up.float(), SCALE)
    entries = weights_of(tensors).entries
    tensors[f"{MODULE}.weight"] = merged
    adapter = Adapter(SCALE, {f"{PREFIX}{MODULE}{DOWN}": down, f"{PREFIX}{MODULE}{UP}": up})
    made = Weights(entries, lambda name: nullcontext(tensors[name]))
    return replace(made, adapter=lambda: adapter)
