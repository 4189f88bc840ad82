"""TOPR, tapered off-policy REINFORCE: Le Roux and others, arXiv 2503.14286.

What is good is learned from anyone who wrote it. What is bad is pushed down only as far as the learner would
still write it: its importance ratio, of the whole sequence, is cut off at 1.
"""

import torch


def topr(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of each token; [R, T] nats, [R, T] nats, [R], [R, T] -> [R, T]."""
    gap = ((logprobs - behaviour_logprobs) * mask).sum(1, keepdim=True)
    ratio = gap.clamp(max=0.0).exp()
    advantages = advantages[:, None]
    weight = torch.where(advantages > 0, 1.0, ratio).detach()
    return -weight * advantages * logprobs
