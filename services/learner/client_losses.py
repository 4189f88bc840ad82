"""Client losses: what a client's data cost, each a sum over the positions that count.

With p the logprob of a target, q that of the policy that sampled it, a its advantage, w its weight and
r = exp(p - q), the definitions are those of https://tinker-docs.thinkingmachines.ai/losses: cross_entropy
-w p; importance_sampling -r a; ppo -min(r a, clip(r, low, high) a); cispo -clip(r, low, high) a p, the clip
without a gradient; dro -(p a - beta/2 (p - q)^2). gspo is ppo with one ratio for each sequence, the
exponential of the mean of p - q over `sequence_ratio_mask` (Zheng et al. 2025, arXiv:2507.18071, equation 7).
`mask` multiplies all of them. stable_reinforce has no public definition: it is -v r' a, where v is the weight
of our decoupled objective for exp(p - q) without a gradient, and r' has the value 1 and the gradient of p.

Legend: R data of a micro-batch, T positions of the longest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.client_checks import CLIPS, DEFAULTS, counts, ratio_mask, weight_of
from antiphon.core.client_records import Datum
from antiphon.core.errors import IntegrityError
from antiphon.cpu.copies import copies_of
from antiphon.cpu.shared_rows import common_lengths, share_rows
from antiphon.services.learner.packing import MicroBatch

ImportanceWeights = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""As `Objective.importance_weights`."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientBatch:
    """Data of one loss and configuration that one forward pass works on."""

    loss: str
    config: Mapping[str, float]
    positions: MicroBatch
    """Its mask [R, T] has 1 where the target is a token; what else a loss of rows needs is unused."""
    inputs: Mapping[str, torch.Tensor]
    """By name, [R, T] float32; 0 beyond a datum's end."""
    counted: torch.Tensor
    """[R, T] bool: which positions take part in the loss."""
    order: tuple[int, ...]
    """Which of the given data each row is; sequences that begin alike are neighbours."""

    def to(self, device: torch.device) -> "ClientBatch":
        moved = {name: value.to(device) for name, value in self.inputs.items()}
        positions, counted = self.positions.to(device), self.counted.to(device)
        return ClientBatch(self.loss, self.config, positions, moved, counted, self.order)


class NoNumber(IntegrityError):
    """A loss that is no number; `place` is the datum's among those of its micro-batch."""

    def __init__(self, found: str, place: int) -> None:
        super().__init__(f"{found} at datum {place} of a micro-batch")
        self.found, self.place = found, place


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """What the positions of a micro-batch cost."""

    costs: torch.Tensor
    """[R, T] float32, with a gradient where the logprobs have one; 0 where nothing counts."""
    ratios: torch.Tensor | None = None
    """[R, T] exp(p - q), detached; None where the loss has none."""
    clipped: torch.Tensor | None = None
    """[R, T] bool: where the bounds, or a cap of our own, changed the ratio."""


def make_client_batch(
    data: Sequence[Datum], loss: str, config: Mapping[str, float], vocabulary: int
) -> ClientBatch:
    """Lay out data that `core.client_checks` has let pass, at least one."""
    keys = [datum.token_ids.astype(">u8").tobytes() for datum in data]
    order = sorted(range(len(data)), key=lambda place: (keys[place], place))
    rows = [data[place] for place in order]
    inputs = [datum.token_ids.astype(np.int64) for datum in rows]
    lengths = [len(ids) for ids in inputs]
    shared, positions = share_rows(lengths, common_lengths(inputs))
    ids = np.zeros(len(shared.position_ids), dtype=np.int64)
    shape = (len(rows), max(lengths))
    # A target that is no token is computed as token 0 and left out by the mask.
    pairs, real = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    counted = np.zeros(shape, dtype=np.bool_)
    for at, (datum, own) in enumerate(zip(rows, positions, strict=True)):
        length = len(datum.targets)
        known = (datum.targets >= 0) & (datum.targets < vocabulary)
        ids[own] = inputs[at]
        pairs[at, :length] = own * vocabulary + np.where(known, datum.targets, 0)
        real[at, :length], counted[at, :length] = known, counts(loss, datum)
    distinct, numbers = np.unique(pairs[pairs >= 0], return_inverse=True)
    index = np.zeros(shape, dtype=np.int64)
    index[pairs >= 0] = numbers

    def spread(values: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        found = np.zeros(shape, dtype=np.float32)
        for at, one in enumerate(values):
            found[at, : len(one)] = one
        return torch.from_numpy(found)

    given = {
        name: spread([datum.inputs.get(name, _missing(name, config, len(datum.targets))) for datum in rows])
        for name in sorted({name for datum in rows for name in datum.inputs} - {"weights", "advantages"})
    }
    given["weight"] = spread([weight_of(loss, datum) for datum in rows])
    if loss == "gspo":
        given["sequence_ratio_mask"] = spread([ratio_mask(datum) for datum in rows])
    behaviour = given.get("logprobs", torch.zeros(shape))
    micro_batch = MicroBatch(
        shared=shared,
        input_ids=torch.from_numpy(ids),
        pairs=copies_of(distinct // vocabulary, len(ids)),
        pair_ids=torch.from_numpy(distinct % vocabulary),
        token_index=torch.from_numpy(index),
        mask=torch.from_numpy(real.astype(np.float32)),
        behaviour_logprobs=behaviour,
        advantages=torch.zeros(len(rows)),
        staleness=torch.zeros(shape, dtype=torch.int64),
        shares=torch.ones(len(rows)),
        rows=tuple(("", place) for place in order),
    )
    return ClientBatch(loss, config, micro_batch, given, torch.from_numpy(counted), tuple(order))


def _missing(name: str, config: Mapping[str, float], length: int) -> npt.NDArray[np.float64]:
    """Return an input that a datum lacks and another one of its micro-batch has."""
    value = config.get(name, DEFAULTS[name]) if name in CLIPS else float(name == "mask")
    return np.full(length, value)


def losses_of(logprobs: torch.Tensor, batch: ClientBatch, weights: ImportanceWeights) -> Losses:
    """Return what a micro-batch costs.

    Args:
        logprobs: [R, T] of the targets, nats.
        batch: the micro-batch, on the same device.
        weights: of our decoupled objective.
    """
    inputs, counted, loss = batch.inputs, batch.counted, batch.loss
    weight = inputs["weight"]
    if loss == "cross_entropy":
        return Losses(_where_counted(-weight * logprobs, counted))
    # Elsewhere the target may be anything, and a ratio may overflow that nothing is multiplied by.
    apart = torch.where(counted, logprobs - inputs["logprobs"], 0.0)
    mask = inputs.get("mask", torch.ones_like(weight))
    if loss == "dro":
        beta = batch.config.get("beta", DEFAULTS["beta"])
        # The mask is a part of the weight already.
        costs = -(logprobs * weight - 0.5 * beta * mask * apart**2)
        return Losses(_where_counted(costs, counted), apart.detach().exp())
    if loss == "stable_reinforce":
        learner = logprobs.detach()
        positions = replace(batch.positions, mask=counted.to(learner.dtype))
        applied, altered = weights(torch.where(counted, learner, inputs["logprobs"]), positions)
        costs = -applied * weight * torch.where(counted, logprobs - learner, 0.0).exp()
        return Losses(_where_counted(costs, counted), apart.detach().exp(), altered & counted)
    if loss == "gspo":
        over = inputs["sequence_ratio_mask"]
        mean = (apart * over).sum(1, keepdim=True) / over.sum(1, keepdim=True).clamp(min=1.0)
        apart = mean.expand_as(apart)
    ratio = apart.exp()
    if loss == "importance_sampling":
        return Losses(_where_counted(-ratio * weight, counted), ratio.detach())
    low, high = (
        inputs.get(name, torch.full_like(weight, batch.config.get(name, DEFAULTS[name]))) for name in CLIPS
    )
    bounded = ratio.clamp(low, high)
    clipped = (bounded != ratio).detach()
    if loss == "cispo":
        return Losses(_where_counted(-bounded.detach() * weight * logprobs, counted), ratio.detach(), clipped)
    costs = -torch.minimum(ratio * weight, bounded * weight)
    return Losses(_where_counted(costs, counted), ratio.detach(), clipped)


def _where_counted(costs: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return torch.where(counted, costs, 0.0)


FIGURES = ("loss", "tokens", "ratio", "clipped", "kl_sample_train_v1")


def figures_of(logprobs: torch.Tensor, batch: ClientBatch, losses: Losses) -> npt.NDArray[np.float64]:
    """Return the sums over each datum's counted positions, [R, 5] in the order of `FIGURES`.

    The last is q - p, the estimate k1 of KL(behaviour || learner), nats.
    """
    counted, nothing = batch.counted, torch.zeros_like(batch.counted)
    columns = (
        losses.costs.detach(),
        counted,
        nothing if losses.ratios is None else torch.where(counted, losses.ratios, 0.0),
        nothing if losses.clipped is None else losses.clipped & counted,
        nothing if losses.ratios is None else torch.where(counted, batch.inputs["logprobs"] - logprobs, 0.0),
    )
    return np.stack([column.double().sum(1).cpu().numpy() for column in columns], axis=1)
