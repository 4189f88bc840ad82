"""Estimates: what a GPU samples, trains and sends, from its data sheet, where no run has measured it.

Decoding is bound by memory: each step reads all weights and the caches of all completions,

    tokens per second = n / t,   t = max((W + n k c) / (u B),  2 P n / (v F))

with n completions at once, W bytes of weights, k cache bytes per token, c tokens of live context, B bytes/s,
P active parameters and F operations per second; u and v are shares of the data sheet that engines reach.
As many completions run as the memory holds, and no more than the configuration allows. One public vLLM figure
(Qwen3-8B on two RTX 3090) was 40% above the formula, which is why estimates carry `RATE_BAND`.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from antiphon.core.capacity.model_shape import SHAPES, ModelShape, count
from antiphon.core.errors import InfeasibleError

RATE_BAND = 0.4
"""Estimated tokens per second may be off by this share, either way."""
TRAIN_BAND = 0.5
"""So may estimated seconds of a learner step."""
BANDWIDTH_REACHED = 0.7
MEMORY_USED = 0.9
RESERVED_BYTES = 2e9
"""Memory of a GPU that neither weights nor caches get."""
SAMPLING_FLOPS_REACHED = 0.5
TRAINING_FLOPS_REACHED = 0.3
"""Model operations of training over the data sheet's dense ones (MFU)."""
TRAINING_OPERATIONS = 8
"""Per active parameter and token: forward 2, backward 4, and the forward again for its activations."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its data sheet has it."""

    memory_bytes: float
    bytes_per_s: float
    flops: float
    """Dense bfloat16 operations per second."""


GPUS = {
    "B200": Gpu(180e9, 8.0e12, 2250e12),
    "H200": Gpu(141e9, 4.8e12, 989e12),
    "H100": Gpu(80e9, 3.35e12, 989e12),
    "A100": Gpu(80e9, 2.04e12, 312e12),
    "L40S": Gpu(48e9, 0.864e12, 362e12),
    "RTX5090": Gpu(32e9, 1.79e12, 209e12),
    "RTX4090": Gpu(24e9, 1.01e12, 165e12),
    "L4": Gpu(24e9, 0.3e12, 121e12),
}
"""Class -> data sheet of its vendor (A100: 80 GB; H100: SXM)."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides its speed."""

    parameters: float
    active_parameters: float
    """Those that one token uses; fewer than all in a mixture of experts."""
    cache_bytes_per_token: float
    """Keys and values of all layers in the engine's dtype."""

    @classmethod
    def of(cls, shape: ModelShape) -> "ModelSize":
        """Return the size of a shape; caches in bfloat16."""
        used = replace(shape, experts=shape.experts and shape.experts_used)
        cache = 2 * shape.layers * shape.cached_heads * shape.head_size * 2
        return cls(count(shape.tensors()), count(used.tensors()), cache)


MODELS = {name: ModelSize.of(shape) for name, shape in SHAPES.items()}
"""Models by their name on the Hugging Face hub."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU class by name, however it is spelled.

    Raises:
        InfeasibleError: when nothing is known of it.

    >>> find_gpu("rtx 5090") is GPUS["RTX5090"]
    True
    """
    known = {key.upper(): gpu for key, gpu in GPUS.items()}
    found = known.get("".join(c for c in name.upper() if c.isalnum()))
    if found is None:
        raise InfeasibleError(
            f"nothing is known of the GPU {name}; give tokens_per_s of its worker, or one of "
            f"{', '.join(GPUS)}"
        )
    return found


@dataclass(frozen=True, slots=True)
class SamplingRate:
    """What one worker samples."""

    tokens_per_s: float
    at_once: int
    """Completions that share it."""


def sampling_rate(
    model: ModelSize, gpu: Gpu, gpus: int, context_tokens: float, most_at_once: int, weight_bytes: float = 2.0
) -> SamplingRate:
    """Estimate what a worker samples.

    Args:
        model: the policy.
        gpu: class of its GPUs.
        gpus: GPUs of one worker, which share weights and caches evenly.
        context_tokens: mean tokens of a live completion, with its prompt.
        most_at_once: completions that the configuration lets it sample at once.
        weight_bytes: bytes per parameter in the engine; 2 for bfloat16.

    Raises:
        InfeasibleError: when the memory does not hold the weights and one completion.

    >>> h200 = sampling_rate(MODELS["Qwen/Qwen3-8B"], GPUS["H200"], 1, 4096, 4096)
    >>> round(h200.tokens_per_s, -2), h200.at_once
    (4800.0, 179)
    """
    weights = model.parameters * weight_bytes
    cache = model.cache_bytes_per_token * context_tokens
    free = gpus * (MEMORY_USED * gpu.memory_bytes - RESERVED_BYTES) - weights
    if free < cache:
        raise InfeasibleError(
            f"{gpus} GPU(s) of {gpu.memory_bytes / 1e9:.0f} GB hold {weights / 1e9:.1f} GB of weights and no "
            f"completion of {context_tokens:,.0f} tokens; give the worker more GPUs, or larger ones"
        )
    at_once = max(1, min(int(free / cache), most_at_once))
    read_s = (weights + at_once * cache) / (BANDWIDTH_REACHED * gpus * gpu.bytes_per_s)
    computed_s = 2.0 * model.active_parameters * at_once / (SAMPLING_FLOPS_REACHED * gpus * gpu.flops)
    return SamplingRate(at_once / max(read_s, computed_s), at_once)


def train_seconds(model: ModelSize, gpu: Gpu, gpus: int, tokens: float) -> float:
    """Estimate the seconds of a learner step over this many tokens, prompts included.

    >>> round(train_seconds(MODELS["Qwen/Qwen3-8B"], GPUS["H200"], 8, 8.4e6))
    232
    """
    operations = TRAINING_OPERATIONS * model.active_parameters * tokens
    return operations / (TRAINING_FLOPS_REACHED * gpus * gpu.flops)


def longest_of_group(spread: float, group_size: int) -> float:
    """Return the mean of the longest of G completions over the mean of one; lengths are lognormal.

    Args:
        spread: standard deviation of the logarithm of the length, within a group.
        group_size: G.

    >>> [round(longest_of_group(0.35, size), 2) for size in (1, 4, 8, 16)]
    [1.0, 1.39, 1.58, 1.78]
    """
    if spread <= 0.0 or group_size <= 1:
        return 1.0
    z = np.linspace(-8.0, 8.0, 4001)
    below = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    # The density of the largest of G normal draws is the derivative of below ** G.
    mass = np.diff(below**group_size)
    middle = (z[1:] + z[:-1]) / 2.0
    return float((mass * np.exp(spread * middle - spread * spread / 2.0)).sum())


def rounds_of_places(places: int, acceptance: float, limit: float) -> float:
    """Return the mean of how often the place is filled that is filled most often, of this many.

    Args:
        places: of a batch, P.
        acceptance: share of the groups that keep their place; others are sampled in place of the rest.
        limit: most groups of a batch over P (`loop.refill_limit`).

    >>> [round(rounds_of_places(32, acceptance, 16.0), 2) for acceptance in (1.0, 0.8, 0.5)]
    [1.0, 3.02, 6.36]
    >>> round(rounds_of_places(32, 0.1, limit=2.0), 2)
    3.0
    """
    found, left, replaced = 1.0, 1.0 - acceptance, 0.0
    while left > 1e-9 and replaced < limit - 1.0:
        found += 1.0 - (1.0 - left) ** places
        replaced += left
        left *= 1.0 - acceptance
    return found
