"""Own objective: a loss that the user wrote, tried out before anything is trained with it.

    python -m antiphon.services.learner.own_objective package.module:function

tries one in a process of its own. The contract, with examples: docs/guides/own-objective.md.

Legend: R sequences of a micro-batch, T completion tokens.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.environments.outside import import_named, tried
from antiphon.system.packages import package_facts

OwnLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`function(logprobs, behaviour_logprobs, advantages, mask)` returns the loss of each token, [R, T].

The learner's logprobs, with a gradient, and the behaviour policy's are [R, T] nats, advantages [R], and the
mask [R, T] is 1 for tokens that count; where it is 0 both logprobs are equal and the loss is ignored. The
loss of an update is the sum over its tokens divided by their number. A sequence's may depend on it alone."""

_STEP = 1e-6
"""Nats by which a logprob is moved to see what the loss does."""
_TOLERANCE = 1e-4
"""Of a gradient, relative where that is above 1; differences of float64 are good for a hundredth of it."""


@cache
def own_objective(reference: str) -> tuple[OwnLoss, str]:
    """Return the user's function that `algorithm.objective` names, tried out, and the digest of its source.

    The digest is of what was imported: an edit later trains nothing in this process.

    Raises:
        ConfigError: when there is none, or it breaks the contract.
    """
    called = f"algorithm.objective={reference}"
    digest = package_facts(reference).get("digest", "")
    function: OwnLoss = import_named(called, reference, "function")
    tried(called, "it", lambda: _check(function))
    return function, digest


def token_losses(
    function: OwnLoss,
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token, 0 where the mask is 0, and the gradient of their sum, [R, T] each.

    Arguments as for `OwnLoss`; the function gets copies. Neither result has a gradient.
    """
    leaf = logprobs.detach().clone().requires_grad_()
    behaviour = torch.where(mask > 0, behaviour_logprobs, leaf.detach())
    with torch.enable_grad():
        losses = function(leaf, behaviour, advantages.clone(), mask.clone())
        losses = torch.where(mask > 0, losses, 0.0)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    # Where nothing counts a mean over the mask divides by 0, and 0 times infinity is no number.
    return losses.detach(), torch.where(mask > 0, gradient, 0.0)


class _Detached(TorchFunctionMode):  # type: ignore[misc]
    """Records what is detached, or gives the same tensors again: they are no part of the derivative."""

    def __init__(self, kept: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self._again = None if kept is None else iter(kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.Tensor.detach, torch.detach):
            return found
        self.kept.append(found.clone())
        return found if self._again is None else next(self._again).clone()  # it may be written into


def _check(function: OwnLoss) -> None:
    draws = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    lengths = [7, 4, 1, 5, 3, 2]
    mask = torch.zeros(6, 7, dtype=torch.float64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1.0
    mask[0, 2] = 0.0  # not the policy's
    mask[5] = 0.0  # too far from where they were sampled
    behaviour, advantages = -2.0 + 0.5 * drawn(6, 7), drawn(6)
    advantages[3] = 0.0
    given = behaviour + 0.3 * drawn(6, 7), behaviour, advantages, mask
    raw = function(given[0].clone().requires_grad_(), *(one.clone() for one in given[1:]))
    if not isinstance(raw, torch.Tensor) or raw.shape != mask.shape:
        shape = list(raw.shape) if isinstance(raw, torch.Tensor) else type(raw).__name__
        raise ConfigError(f"it returned {shape} for logprobs of shape [6, 7]; return the loss of each token")
    if not raw.requires_grad:
        raise ConfigError("it returned a loss without a gradient; compute it from logprobs by torch")
    for apart in (0.0, 20.0, -20.0):
        found = token_losses(function, *(one.float() for one in (behaviour + apart, *given[1:])))
        if not all(bool(torch.isfinite(one).all()) for one in found):
            raise ConfigError(
                "it gives a loss or gradient that is not finite where the learner's logprob is "
                f"{apart:+g} nats from the behaviour policy's; bound the ratio"
            )
    losses, gradient = token_losses(function, *given)
    order = torch.tensor([3, 0, 4, 5, 2, 1])
    mixed = token_losses(function, *(one[order] for one in given))
    alone = []
    for row, length in enumerate(lengths):
        tokens, trajectory = (slice(row, row + 1), slice(length)), slice(row, row + 1)
        alone.append(token_losses(function, *(one[tokens if one.ndim == 2 else trajectory] for one in given)))
    for whole, other, parts in zip((losses, gradient), mixed, zip(*alone, strict=True), strict=True):
        own = torch.cat([torch.nn.functional.pad(part, (0, 7 - part.shape[1])) for part in parts])
        if not (torch.allclose(other, whole[order], atol=1e-9) and torch.allclose(own, whole, atol=1e-9)):
            raise ConfigError(
                "it gives a sequence another loss in another order, beside others or with padding; go "
                "by a sequence's own tokens, and by the mask"
            )
    _check_gradient(function, given, gradient)


def _check_gradient(function: OwnLoss, given: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
    """Compare a gradient with differences of the loss, what is detached held as it is."""
    logprobs, *rest = given
    with _Detached() as first:
        function(logprobs.clone().requires_grad_(), *(one.clone() for one in rest))

    def total(moved: torch.Tensor) -> float:
        with _Detached(first.kept):
            losses = function(moved.requires_grad_(), *(one.clone() for one in rest))
        return float(losses.detach()[rest[-1] > 0].sum())

    for place in (rest[-1] > 0).nonzero().tolist():
        there = torch.zeros_like(logprobs)
        there[tuple(place)] = _STEP
        slope = (total(logprobs + there) - total(logprobs - there)) / (2.0 * _STEP)
        own = float(gradient[tuple(place)])
        if not abs(slope - own) <= _TOLERANCE * max(1.0, abs(own)):
            raise ConfigError(
                f"it has the gradient {own:.6g} where its value changes by {slope:.6g} per nat; take "
                "what is to be held fixed with detach(), not under no_grad or from .data"
            )


if __name__ == "__main__":
    try:
        own_objective(sys.argv[1])
    except AntiphonError as complaint:
        sys.exit(str(complaint))
