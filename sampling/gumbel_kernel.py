"""The Gumbel rule in one pass over the logits, for GPUs: what `gumbel` computes step by step, as one kernel.

Step by step the hash and the logarithm of each token take a dozen passes over numbers of eight bytes: on an
H100 151,936 tokens cost 6 ms for 256 rows and 189 ms for 8,448, ten times what they cost here. Each row is
worked on in parts of fixed size, so that its bits do not depend on how many rows there are.

Legend: R rows, V vocabulary, P parts.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from antiphon.sampling.keyed_sampler import GAMMA, MIX1, MIX2

PARTS = 8
BLOCK = 1024
_GAMMA, _MIX1, _MIX2 = (tl.constexpr(number - (1 << 64)) for number in (GAMMA, MIX1, MIX2))


def draw(
    logits: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row as `gumbel.draw` does of rows that cut nothing off, with its arguments."""
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    top = logits.amax(-1, keepdim=True).to(torch.float32)
    heat = torch.ones_like(top) if temperature is None else temperature.to(torch.float32)[:, None]
    best, total = torch.empty(2, rows, PARTS, dtype=torch.float64, device=logits.device)
    place = torch.empty(rows, PARTS, dtype=torch.int64, device=logits.device)
    _race[(rows, PARTS)](logits, keys, top, heat, best, place, total, vocabulary, PARTS, BLOCK)
    tokens = place.gather(-1, best.argmin(-1, keepdim=True))
    chosen = (logits.gather(-1, tokens).to(torch.float32) - top) / heat
    return tokens.squeeze(-1), (chosen - total.sum(-1, keepdim=True).log()).to(torch.float32).squeeze(-1)


@triton.jit
def _shifted(values, bits: tl.constexpr):
    return (values >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _race(logits, keys, top, heat, best, place, total, vocabulary, parts: tl.constexpr, block: tl.constexpr):
    """Find the smallest exponential number over its weight, and the sum of the weights, in a part of a row.

    logits [R, V]; keys, top and heat [R]; best, place and total [R, P].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, highest, divisor = tl.load(keys + row), tl.load(top + row), tl.load(heat + row)
    first = tl.full([block], float("inf"), tl.float64)
    where = tl.zeros([block], tl.int64)
    weights = tl.zeros([block], tl.float64)
    length = tl.cdiv(tl.cdiv(vocabulary, block), parts)
    for step in range(length):
        token = (part * length + step) * block + tl.arange(0, block)
        inside = token < vocabulary
        value = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
        weight = libdevice.exp((value - highest) / divisor).to(tl.float64)
        z = key + (token + 1).to(tl.int64) * _GAMMA
        z = (z ^ _shifted(z, 30)) * _MIX1
        z = (z ^ _shifted(z, 27)) * _MIX2
        z = z ^ _shifted(z, 31)
        uniform = (_shifted(z, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 to the power of -52
        late = -libdevice.log1p(-uniform) / weight
        earlier = late < first
        first, where = tl.where(earlier, late, first), tl.where(earlier, token.to(tl.int64), where)
        weights += weight
    earliest = tl.min(first, 0)
    out = row * parts + part
    tl.store(best + out, earliest)
    tl.store(place + out, tl.min(tl.where(first == earliest, where, vocabulary - 1), 0))
    tl.store(total + out, tl.sum(weights, 0))
