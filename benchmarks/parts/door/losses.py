"""Losses of clients once more: each formula in float64, position by position, with its gradient by hand.

Nothing here is shared with `services/learner/client_losses.py`: no tensor, no autograd. `loss_error_worst`
compares the two on data at random.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.client_records import LOSSES, Datum
from antiphon.services.learner.client_losses import losses_of, make_client_batch
from antiphon.services.learner.objective import Objective

VOCABULARY = 50
DRAWS = 40
"""Micro-batches of each loss that are compared."""
_CAP = AlgorithmSection().correction_cap
Pair = tuple[list[float], list[float]]
"""Cost of each position, and the gradient of the sum by each logprob."""


def reference(loss: str, config: Mapping[str, float], datum: Datum, logprobs: list[float]) -> Pair:
    """Return costs and gradients of a datum's positions, [T] each, from the logprobs of its targets, nats."""
    length = len(logprobs)
    given = {name: [float(x) for x in values] for name, values in datum.inputs.items()}
    mask = given.get("mask", [1.0] * length)
    costs, slopes = [0.0] * length, [0.0] * length
    if loss == "cross_entropy":
        for t, (p, w, m) in enumerate(zip(logprobs, given["weights"], mask, strict=True)):
            costs[t], slopes[t] = -w * m * p, -w * m
        return costs, slopes
    advantages, behaviour = given["advantages"], given["logprobs"]
    low = given.get("clip_low_threshold", [config.get("clip_low_threshold", 0.8)] * length)
    high = given.get("clip_high_threshold", [config.get("clip_high_threshold", 1.2)] * length)
    if loss == "gspo":
        over = given.get("sequence_ratio_mask", given.get("mask", advantages))
        places = [t for t in range(length) if over[t]]
        count = max(1, len(places))
        ratio = math.exp(sum(logprobs[t] - behaviour[t] for t in places) / count)
        for t in range(length):
            a, bounded = advantages[t] * mask[t], min(max(ratio, low[t]), high[t])
            costs[t] = -min(ratio * a, bounded * a)
            if ratio * a <= bounded * a:  # else the bound is in force, which has no slope
                for other in places:
                    slopes[other] -= ratio * a / count
        return costs, slopes
    for t, (p, q, a, m) in enumerate(zip(logprobs, behaviour, advantages, mask, strict=True)):
        if loss == "dro":
            beta = config.get("beta", 0.05)
            counted = m if "mask" in given else float(a != 0 or q != 0)
            costs[t] = -(p * a * m - 0.5 * beta * (p - q) ** 2 * counted)
            slopes[t] = -(a * m - beta * (p - q) * counted)
            continue
        a *= m
        if not a:
            continue
        ratio = math.exp(p - q)
        bounded = min(max(ratio, low[t]), high[t])
        if loss == "importance_sampling":
            costs[t] = slopes[t] = -ratio * a
        elif loss == "ppo":
            costs[t] = -min(ratio * a, bounded * a)
            slopes[t] = -ratio * a if ratio * a <= bounded * a else 0.0
        elif loss == "cispo":
            costs[t], slopes[t] = -bounded * a * p, -bounded * a
        elif loss == "stable_reinforce":
            costs[t] = slopes[t] = -min(ratio, _CAP) * a
        else:
            raise ValueError(loss)
    return costs, slopes


def draw(loss: str, rng: np.random.Generator) -> tuple[dict[str, float], list[Datum]]:
    """Return a configuration and some data at random; a third of the positions count nowhere."""
    config: dict[str, float] = {}
    if loss in ("ppo", "cispo", "gspo") and rng.random() < 0.5:
        config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    if loss == "dro" and rng.random() < 0.5:
        config = {"beta": float(rng.random())}
    masked, bounds, ratio = rng.random(3) < 0.5
    data = []
    for _ in range(int(rng.integers(1, 5))):
        length = int(rng.integers(1, 12))
        counted = (rng.random(length) < 0.67).astype(np.float32)
        own = rng.normal(size=length) * counted
        inputs: dict[str, npt.NDArray[Any]] = (
            {"weights": own} if loss == "cross_entropy" else {"advantages": own}
        )
        if loss != "cross_entropy":
            inputs["logprobs"] = -rng.exponential(2.0, length) * counted
        if masked:
            inputs["mask"] = (rng.random(length) < 0.8).astype(np.float32)
        if bounds and loss in ("ppo", "cispo", "gspo"):
            inputs["clip_high_threshold"] = 1.0 + rng.random(length)
        if ratio and loss == "gspo":
            inputs["sequence_ratio_mask"] = counted
        if loss == "stable_reinforce":
            inputs["staleness"] = np.ones(length)
        targets = np.where(counted, rng.integers(0, VOCABULARY, length), rng.integers(-9, 999, length))
        read = rng.integers(0, VOCABULARY, length).astype(np.int32)
        data.append(Datum(read, targets, {name: x.astype(np.float32) for name, x in inputs.items()}))
    return config, data


def loss_error_worst(seed: int = 0, draws: int = DRAWS) -> float:
    """Return by how much a cost or a gradient of any loss differs, relative to the larger of 1 and itself."""
    objective = Objective(AlgorithmSection(), 16, 1.0)
    worst = 0.0
    for loss in LOSSES:
        rng = np.random.default_rng([seed, *loss.encode()])
        for _ in range(draws):
            config, data = draw(loss, rng)
            batch = make_client_batch(data, loss, config, VOCABULARY)
            found = torch.tensor(-rng.exponential(2.0, batch.counted.shape), dtype=torch.float32)
            found.requires_grad_(True)
            losses = losses_of(found, batch, objective.importance_weights)
            losses.costs.sum().backward()
            assert found.grad is not None, "every loss has a slope"
            for row, place in enumerate(batch.order):
                datum = data[place]
                length = len(datum.targets)
                own = found.detach()[row, :length].tolist()
                for ours, theirs in zip(
                    (losses.costs.detach()[row, :length], found.grad[row, :length]),
                    reference(loss, config, datum, own),
                    strict=True,
                ):
                    for one, other in zip(ours.tolist(), theirs, strict=True):
                        worst = max(worst, abs(one - other) / max(1.0, abs(other)))
    return worst
