"""Keyed sampling: a token depends on its logits, its request's seed and its position, on nothing else.

One uniform number per request and position comes from an integer hash instead of a stream, and
inverts the cumulative distribution. So tokens do not depend on the batch, on the order of arrival
or on what was drafted, and a chain of drafts is verified by comparing tokens for equality. `gumbel`
is the other rule: a number for each token of the vocabulary. What both share stands here.

Legend: R rows (one per request, or drafts + 1 per request), B requests, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

FLAT_VOCABULARY = 1024
"""Up to this many tokens the distribution is summed in one float64 pass; above, in two levels."""
BLOCK = 512
"""Tokens of one block of the two-level sum."""
CHUNK = 1 << 18
"""Most logits worked on at a time on CPU: what fits its cache costs a tenth of what does not."""
CHUNK_GPU = 1 << 25
"""The same on a GPU, where each takes up to 32 bytes of scratch memory, 1 GiB in all: without a bound drafted
rows of a large vocabulary take five times the memory of their logits."""

GAMMA = 0x9E3779B97F4A7C15
"""Step and multipliers of splitmix64 (Steele, Lea and Flood, 2014)."""
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
_STEP = 0xD1342543DE82EF95
_MASK = (1 << 64) - 1
_UNIT = 2.0**-53


def mix64(value: int) -> int:
    """Scramble an unsigned 64-bit number (the finaliser of splitmix64)."""
    z = (value + GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * MIX1) & _MASK
    z = ((z ^ (z >> 27)) * MIX2) & _MASK
    return z ^ (z >> 31)


def request_key(seed: int) -> int:
    """Return the key of a request: its unsigned 64-bit seed, scrambled once and for all."""
    return mix64(seed)


def uniforms(keys: UInt64Array, positions: Int64Array) -> Float64Array:
    """Return the numbers in [0, 1) that draw the tokens at `positions`.

    Args:
        keys: [R] uint64, from `request_key`.
        positions: [R] int64, index of the token to draw in its whole sequence, prompt included.

    Returns:
        [R] float64, multiples of 2^-53.
    """
    unit: Float64Array = (place_keys(keys, positions) >> np.uint64(11)).astype(np.float64) * _UNIT
    return unit


def place_keys(keys: UInt64Array, positions: Int64Array) -> UInt64Array:
    """Return one number for each request and position, [R] uint64; arguments as those of `uniforms`."""
    z: UInt64Array = keys ^ (positions.astype(np.uint64) * np.uint64(_STEP))
    z += np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
    z ^= z >> np.uint64(31)
    return z


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each row is sampled; None where no row of the batch needs the feature."""

    temperature: torch.Tensor | None = None
    """[R] float64, positive; 1 for greedy rows."""
    top_k: torch.Tensor | None = None
    """[R] int64; V for rows that keep all."""
    top_p: torch.Tensor | None = None
    """[R] float64 in (0, 1]; 1 for rows that keep all."""
    greedy: torch.Tensor | None = None
    """[R] bool; these rows take the most probable token."""

    all_greedy: bool = False
    """Whether `greedy` holds for every row, which spares them the rest."""

    def repeat(self, times: torch.Tensor) -> "RowSampling":
        """Return the sampling of rows in which row i stands times[i] times, [R] int64."""
        return self._map(lambda column: column.repeat_interleave(times))

    def part(self, start: int, stop: int) -> "RowSampling":
        """Return the sampling of rows [start, stop), which on CPU are spared what none of them needs."""
        part = self._map(lambda column: column[start:stop])
        if part.greedy is None or part.greedy.device.type != "cpu":  # to ask a GPU would wait for it
            return part
        greedy = part.greedy if bool(part.greedy.any()) else None
        return replace(part, greedy=greedy, all_greedy=bool(part.greedy.all()))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RowSampling":
        def changed(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else change(column)

        return RowSampling(
            temperature=changed(self.temperature),
            top_k=changed(self.top_k),
            top_p=changed(self.top_p),
            greedy=changed(self.greedy),
            all_greedy=self.all_greedy,
        )


PLAIN = RowSampling()
"""Temperature 1, nothing cut off."""


def draw(logits: torch.Tensor, u: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: the smallest t with CDF(t) > u * CDF(V - 1).

    Where rounding leaves no such t, the last token of nonzero probability is taken. Ties at the
    edge of a top-k or top-p set keep the smaller token ids. Weights are float32, sums float64.

    Args:
        logits: [R, V], any float dtype; left unchanged.
        u: [R] float64 in [0, 1).
        rows: how each row is sampled.

    Returns:
        Tokens [R] int64 and their log-probabilities [R] float32, nats, under the processed
        distribution (temperature, top-k, top-p); greedy rows report the unprocessed one.
        A row with NaN among its logits reports NaN.
    """
    return draw_by(_invert, logits, u, rows)


Pick = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Picks tokens [R] int64 from weights [R, V] float32 and a number for each row [R]; returns the sums of
the weights, [R] float64, too."""


def draw_by(
    pick: Pick, logits: torch.Tensor, numbers: torch.Tensor, rows: RowSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as `draw` does, by any rule.

    Args:
        pick: the rule.
        logits: [R, V], any float dtype; left unchanged.
        numbers: [R] what the rule makes of seed and position.
        rows: how each row is sampled.
    """
    count, vocabulary = logits.shape
    most = max(1, (CHUNK if logits.device.type == "cpu" else CHUNK_GPU) // vocabulary)
    if count <= most:
        return _draw_rows(pick, logits, numbers, rows)
    parts = [
        _draw_rows(pick, logits[at : at + most], numbers[at : at + most], rows.part(at, at + most))
        for at in range(0, count, most)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _draw_rows(
    pick: Pick, logits: torch.Tensor, numbers: torch.Tensor, rows: RowSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    if rows.all_greedy:
        return _take_most_probable(logits)
    scaled, weights = processed(logits, rows)
    tokens, total = pick(weights, numbers)
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    logprobs = (chosen - total.log()).to(torch.float32)
    if rows.greedy is not None:
        # By the same sum as in a batch that is greedy throughout: neighbours must not change a bit.
        taken, certain = _take_most_probable(logits)
        tokens, logprobs = (
            torch.where(rows.greedy, taken, tokens),
            torch.where(rows.greedy, certain, logprobs),
        )
    return tokens, logprobs


def _take_most_probable(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = most_probable(logits)
    # One fused pass; exponentials, sum and logarithm one after the other take twice as long.
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def processed(logits: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scaled logits and the weights that are sampled from, [R, V] float32 each."""
    scaled = _scaled(logits, rows)
    return scaled, _cut(scaled.exp(), rows)


def _scaled(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    logits = logits.to(torch.float32)  # before the difference, which bfloat16 would round once more
    scaled = logits - logits.amax(-1, keepdim=True)
    if rows.temperature is not None:
        scaled /= rows.temperature.to(torch.float32).unsqueeze(-1)
    return scaled


def intervals(
    logits: torch.Tensor, tokens: torch.Tensor, rows: RowSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of [0, 1] in which a uniform draws each token.

    Args:
        logits: [R, V], any float dtype; left unchanged.
        tokens: [R] int64.
        rows: how each row is sampled; a greedy row draws its token with every uniform or with none.

    Returns:
        [R] float64 lower and upper ends; equal for a token that was cut off.
    """
    _, weights = processed(logits, rows)
    column = tokens.unsqueeze(-1)
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total, high = cdf[:, -1], cdf.gather(-1, column).squeeze(-1)
    low = high - weights.gather(-1, column).squeeze(-1).to(torch.float64)
    low, high = low / total, high / total
    if rows.greedy is not None:
        first = most_probable(logits) == tokens
        low = torch.where(rows.greedy, 0.0, low)
        high = torch.where(rows.greedy, first.to(torch.float64), high)
    return low, high


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest logits of each row, [R] int64."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # torch's search of a row is scalar code; numpy's is several times as fast.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def score(logits: torch.Tensor, tokens: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Return what `draw` reports for tokens that were drawn before.

    Args:
        logits: [R, V], any float dtype; left unchanged.
        tokens: [R] int64.
        rows: how each row was sampled.

    Returns:
        [R] float32 log-probabilities, nats; minus infinity for a token that was cut off.
    """
    scaled = _scaled(logits, rows)
    weights = scaled.exp()
    whole = weights.sum(-1, dtype=torch.float64)
    if not rows.all_greedy:
        weights = _cut(weights, rows)
    total = weights.sum(-1, dtype=torch.float64)
    column = tokens.unsqueeze(-1)
    cut = weights.gather(-1, column).squeeze(-1) == 0.0
    if rows.greedy is not None:
        total = torch.where(rows.greedy, whole, total)
        cut &= ~rows.greedy
    found = (scaled.gather(-1, column).squeeze(-1) - total.log()).to(torch.float32)
    return found.masked_fill(cut, float("-inf"))


def _invert(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = weights.shape[-1] <= FLAT_VOCABULARY
    return _invert_flat(weights, u) if flat else _invert_blocks(weights, u)


def _invert_flat(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    tokens = torch.searchsorted(cdf, (u * total).unsqueeze(-1), right=True).squeeze(-1)
    return torch.minimum(tokens, _last_step(cdf)), total


def _last_step(cdf: torch.Tensor) -> torch.Tensor:
    """Return the last index at which each row of `cdf` rises."""
    return torch.searchsorted(cdf, cdf[:, -1:].contiguous()).squeeze(-1).clamp_(max=cdf.shape[-1] - 1)


def _invert_blocks(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # A float64 running sum over a large vocabulary costs more than the softmax. Sum blocks in
    # float64, find the block, and run through that one alone.
    rows, vocabulary = weights.shape
    missing = -vocabulary % BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    blocks = padded.view(rows, -1, BLOCK)
    cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = cdf[:, -1]
    target = (u * total).unsqueeze(-1)
    block = torch.minimum(torch.searchsorted(cdf, target, right=True).squeeze(-1), _last_step(cdf))
    before = torch.where(block > 0, cdf.gather(-1, (block - 1).clamp_(min=0).unsqueeze(-1)).squeeze(-1), 0.0)
    inner = blocks[torch.arange(rows, device=weights.device), block].to(torch.float64).cumsum(-1)
    offset = torch.searchsorted(inner, target - before.unsqueeze(-1), right=True).squeeze(-1)
    return block * BLOCK + torch.minimum(offset, _last_step(inner)), total


def _cut(weights: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Return the weights with 0 for all but the `top_k` largest of each row, then all but the smallest set of
    these that holds `top_p` of their mass. Of equal weights the smaller token ids are kept.
    """
    if rows.top_k is None and rows.top_p is None:
        return weights
    count, vocabulary = weights.shape
    top_k = torch.full((count,), vocabulary, device=weights.device)
    top_k = top_k if rows.top_k is None else rows.top_k.clamp(1, vocabulary)
    top_p = torch.ones_like(top_k, dtype=torch.float64) if rows.top_p is None else rows.top_p
    some = ((top_k < vocabulary) | (top_p < 1.0)).nonzero().squeeze(-1)
    if not len(some):
        return weights
    # Of a large vocabulary a chunk is one row, and to copy it takes as long as to draw from it.
    chosen = weights if len(some) == count else weights.index_select(0, some)
    k, share = top_k[some].unsqueeze(-1), top_p[some].unsqueeze(-1)
    deepest = int(k.max())
    if deepest > vocabulary // 16:
        ordered, order = chosen.sort(dim=-1, descending=True, stable=True)
    else:  # to sort a large vocabulary takes longer than all else together
        largest, order = chosen.topk(deepest + 1)
        edge = largest.gather(-1, k - 1)
        if bool(((edge == largest.gather(-1, k)) & (edge > 0.0)).any()):
            # Of tokens that are tied at the edge some are too many.
            tied, above = chosen == edge, chosen > edge
            room = k - above.sum(-1, keepdim=True)
            order = chosen.masked_fill(~(above | (tied & (tied.cumsum(-1) <= room))), 0.0).topk(deepest)[1]
        order = order.sort(dim=-1).values
        ordered, places = chosen.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, places)
    ordered.masked_fill_(torch.arange(ordered.shape[-1], device=k.device) >= k, 0.0)
    running = ordered.cumsum(-1, dtype=torch.float64)
    cut = (share < 1.0) & ((running - ordered) >= share * running[:, -1:])
    kept = torch.zeros_like(chosen).scatter_(-1, order, ordered.masked_fill_(cut, 0.0))
    return kept if len(some) == count else weights.index_copy(0, some, kept)


def verify_chain(
    tokens: Int64Array, drafts: Int64Array, drafts_per_request: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.int32]]:
    """Accept drafted tokens while they equal the drawn ones.

    Each request owns drafts + 1 consecutive rows: row j was computed after its first j drafts,
    so `tokens` there is the token that belongs at that position if these drafts were right. What is
    emitted is therefore what would have been drawn without drafts.

    Args:
        tokens: [R] drawn token of each row, R = sum(drafts_per_request) + B.
        drafts: [sum(drafts_per_request)] drafted tokens, request after request.
        drafts_per_request: [B].

    Returns:
        Accepted drafts [B] int64, and the emitted tokens [B, max drafts + 1] int32: the accepted
        ones and the one after them, -1 beyond (the engine's own padding).
    """
    longest = int(drafts_per_request.max(initial=0))
    columns = np.arange(longest + 1)
    rows = drafts_per_request[:, None] + 1 > columns
    drawn = np.full(rows.shape, -1, dtype=np.int32)
    drawn[rows] = tokens
    drafted = np.full(rows.shape, -1, dtype=np.int64)
    drafted[drafts_per_request[:, None] > columns] = drafts
    # A request's column after its last draft compares with -1, so the run of equals ends there.
    accepted = np.argmin(drawn == drafted, axis=1).astype(np.int64)
    drawn[columns > accepted[:, None]] = -1
    return accepted, drawn
