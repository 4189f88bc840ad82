"""Gumbel: the other rule of keyed sampling, one random number for each token of the vocabulary.

    token(i) = argmax over t of  logits[t] / T + g(seed, i, t),   g = -log(-log(1 - v(seed, i, t)))

With v uniform and independent this is an exact draw (Gumbel 1954; the "Gumbel-max trick" of Maddison,
Tarlow and Minka 2014). A token's number does not depend on the other tokens, so a small change of the
logits changes the drawn token with probability of at most 2 TV / (1 + TV), TV the total variation
between the two distributions; the inverse of the cumulative distribution shifts all later boundaries
instead. On engines whose rounding depends on the batch that decides how often two samples part.

The hash of every token is dear on a CPU; `core.sampling_config.decide_rule` says which rule a run takes.

Legend: R rows, V vocabulary.
"""

import numpy as np
import numpy.typing as npt
import torch

from antiphon.sampling.keyed_sampler import (
    GAMMA,
    MIX1,
    MIX2,
    Int64Array,
    RowSampling,
    UInt64Array,
    draw_by,
    most_probable,
    place_keys,
    processed,
)


def row_keys(keys: UInt64Array, positions: Int64Array) -> npt.NDArray[np.int64]:
    """Return the keys that draw the tokens at `positions`.

    Args:
        keys: [R] uint64, from `keyed_sampler.request_key`.
        positions: [R] int64, index of the token to draw in its whole sequence, prompt included.

    Returns:
        [R] int64: 64 random bits, in the signed type that torch computes with.
    """
    return place_keys(keys, positions).view(np.int64)


def draw(logits: torch.Tensor, keys: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, by the largest sum of scaled logit and Gumbel noise.

    Args:
        logits: [R, V], any float dtype; left unchanged.
        keys: [R] int64, from `row_keys`.
        rows: how each row is sampled.

    Returns:
        Tokens [R] int64 and log-probabilities [R] float32, nats, as `keyed_sampler.draw` does.
    """
    if logits.is_cuda and rows.top_k is None and rows.top_p is None and rows.greedy is None:
        from antiphon.sampling import gumbel_kernel  # needs Triton, which only GPUs have

        return gumbel_kernel.draw(logits, keys, rows.temperature)
    return draw_by(_pick, logits, keys, rows)


def shortfalls(
    logits: torch.Tensor, tokens: torch.Tensor, keys: torch.Tensor, rows: RowSampling
) -> torch.Tensor:
    """Return by how much each token's sum of scaled logit and noise falls short of the largest.

    Args:
        logits: [R, V], any float dtype; left unchanged.
        tokens: [R] int64.
        keys: [R] int64, from `row_keys`.
        rows: how each row was sampled.

    Returns:
        [R] float64, nats: 0 for the token that is drawn from these logits, infinity for one that was cut
        off, and for one that a greedy row does not take.
    """
    _, weights = processed(logits, rows)
    races = _races(weights, keys)
    best = races.amin(-1)
    own = races.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    short = (own / best).log()
    if rows.greedy is not None:
        certain = torch.where(most_probable(logits) == tokens, 0.0, float("inf")).to(torch.float64)
        short = torch.where(rows.greedy, certain, short)
    return short


def _pick(weights: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _races(weights, keys).argmin(-1), weights.sum(-1, dtype=torch.float64)


def _races(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return [R, V] float64 whose smallest entry is drawn.

    Exponential numbers divided by the weights: exp(-(log weight + g)), so the order is that of the sums
    with Gumbel noise, without a second logarithm. Tokens of weight 0 are infinitely late.
    """
    return _exponentials(keys, weights.shape[-1]).div_(weights)


def _exponentials(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return independent exponential numbers -log(1 - v), [R, V] float64, for keys [R] int64.

    v comes from the output of splitmix64, seeded with the row's key: its t-th number for token t.
    """
    places = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=keys.device)
    z = keys.unsqueeze(-1) + places * _signed(GAMMA)
    z = z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(MIX1))
    z = z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(MIX2))
    z = z.bitwise_xor_(_shifted(z, 31))
    # 52 bits and a half: never 0, never 1, and exact where v is small, which decides the race.
    v = _shifted(z, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return v.neg_().log1p_().neg_()


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int64 values shifted right as if they had no sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
