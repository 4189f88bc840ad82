"""Draft kernels: the compiled inner loops of the forest; they touch nothing but the arrays they get.

Every text lies in one arena of int32 tokens, between negative separators. Position p of the arena belongs to
the context that ends just before it: ``previous[p]`` is the position before p whose preceding tokens
had the same hash, and a head table holds the newest position of each hash. There are two such
chains, for contexts of `gram` and of `LONG_GRAM` tokens. Walking a chain visits the earlier occurrences
of a context, newest first; each is verified token by token, so hash collisions cost time and never
put a wrong text into a draft.

The occurrences that agree with a text so far are a node of the (unbuilt) suffix tree of all documents:
the tokens after them are its branches, their summed votes the counts. Following a branch keeps the
occurrences that agree. Where a text has left another one and no long context recurs, anchors say where it
would continue if the two still ran in parallel: a position there needs less context to be believed.

Legend: B rows, W tokens of a draft, C candidates, A anchors, N positions of the arena, H head entries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit

CANDIDATES = 16
"""Most occurrences that vote on a branch; the newest of a chain come first."""
OWN_CANDIDATES = 6
"""Of these, room kept for the request's own text."""
LONG_GRAM = 6
"""Context of the long chains, asked first: they lead to long matches past all the short ones."""
CHAIN_STEPS = 96
"""Most links of one chain followed in one look-up, so that a frequent context stays cheap."""
MATCH_CAP = 24
"""Tokens of context compared; a longer match counts as this long."""
GROWTH = 2.0
"""Factor on a candidate's vote for each token of context it shares with the text."""
ANCHORS = 4
"""Positions in other texts that a request follows in parallel."""
REACH = 8
"""Tokens to either side of an anchor within which a text may have been cut or lengthened."""
SURE_SPAN = 4
"""Candidates with at least this match become anchors even when their first token failed."""
NEAR = 2.0
"""Further factor on a vote near an anchor for each token of its match."""
AWAY = 0.8
"""Factor on such a vote for each token it lies away from the anchor."""
SHARES, LENGTHS, CROWDS = 6, 5, 3
BUCKETS = SHARES * LENGTHS * CROWDS
"""Kinds of drafted tokens whose acceptance is counted apart: vote share x match length x voters."""
KEPT_OUTCOMES = 256.0
"""Outcomes a bucket remembers: beyond them both counts are halved, so old ones fade."""

GROUP, START, LENGTH, CAPACITY, SEEN, OWN_HEAD, OWN_MASK, LIVE = range(8)
"""Columns of the request table; OWN_MASK is negative where the own text is no source."""
HEAD, MASK, VOCABULARY = range(3)
"""Columns of the group table."""

Array = npt.NDArray[Any]
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile a function of numbers and arrays; the result is kept on disk for the next process."""
    kernel: _F = njit(cache=True, nogil=True)(function)
    return kernel


class Texts(NamedTuple):
    """The arena and its index."""

    tokens: Array
    """[N] int32, negative where a text begins or ends."""
    previous: Array
    """[N, 2] int32, by length of context: short, long; negative where a chain ends."""
    weights: Array
    """[N] float32, vote of the text a position belongs to."""
    heads: Array
    """[H] int32; a table is a block of 2 x (mask + 1) entries, short contexts first."""


class Node(NamedTuple):
    """Room for the candidates of one node and its branches, [C] each."""

    positions: Array
    """int64, position of each candidate's next token."""
    votes: Array
    """float64."""
    spans: Array
    """int64, tokens of context shared with the text."""
    names: Array
    """int64, token of each branch."""
    sums: Array
    """float64, votes of each branch."""
    crowd: Array
    """int64, candidates of each branch."""


class Memory(NamedTuple):
    """What the drafts of the past taught, and what awaits its outcome, by slot."""

    hits: Array
    """[BUCKETS] float64, accepted tokens of each kind."""
    misses: Array
    """[BUCKETS] float64, rejected ones."""
    kinds: Array
    """[slots, W] int16, kinds of the last draft's tokens."""
    pending: Array
    """[slots] int64, how many of them await their outcome."""
    anchors: Array
    """[slots, A] int64, positions; negative where there is none."""
    trails: Array
    """[slots, 2 + C] int64: how many candidates the last draft began with, their match, their positions."""
    factors: Array
    """[3, MATCH_CAP + 1] float64, on a vote: by match, by match near an anchor, by distance."""


def vote_factors() -> Array:
    """Return `Memory.factors`."""
    steps = np.arange(MATCH_CAP + 1, dtype=np.float64)
    return np.stack([GROWTH**steps, (GROWTH * NEAR) ** steps, AWAY**steps])


@compiled
def _entry(tokens: Any, end: int, gram: int, mask: int) -> int:
    """Return the head entry of the `gram` tokens before `end`, or -1 where a separator is among them."""
    mixed = np.uint64(0x9E3779B97F4A7C15)
    for k in range(1, gram + 1):
        token = tokens[end - k]
        if token < 0:
            return -1
        mixed = (mixed ^ np.uint64(token)) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed & np.uint64(mask))  # type: ignore[return-value]


@compiled
def link(texts: Any, first: int, stop: int, gram: int, head: int, mask: int) -> None:
    """Put positions [first, stop) into the chains of one head table, oldest first."""
    for position in range(first, stop):
        for level in range(2):
            base = head + level * (mask + 1)
            entry = _entry(texts.tokens, position, gram if level == 0 else max(gram, LONG_GRAM), mask)
            if entry >= 0:
                texts.previous[position, level] = texts.heads[base + entry]
                texts.heads[base + entry] = position
            else:
                texts.previous[position, level] = -1


@compiled
def _span(tokens: Any, end: int, position: int) -> int:
    """Return how many tokens before `end` and before `position` agree, up to the cap and the separators."""
    span = 0
    while (
        span < MATCH_CAP
        and tokens[end - 1 - span] == tokens[position - 1 - span]
        and tokens[end - 1 - span] >= 0
    ):
        span += 1
    return span


@compiled
def _look_up(
    texts: Any,
    node: Any,
    head: int,
    mask: int,
    end: int,
    gram: int,
    level: int,
    bound: int,
    found: int,
    most: int,
) -> int:
    """Add the verified occurrences of the context before `end` from one table; return how many there are."""
    entry = _entry(texts.tokens, end, gram, mask)
    if entry < 0:
        return found
    position = texts.heads[head + level * (mask + 1) + entry]
    steps = 0
    while position >= 0 and found < most and steps < CHAIN_STEPS:
        steps += 1
        if position != end and 0 <= texts.tokens[position] < bound:
            span = _span(texts.tokens, end, position)
            if span >= gram:
                node.positions[found] = position
                node.spans[found] = span
                node.votes[found] = texts.weights[position]
                found += 1
        position = texts.previous[position, level]
    return found


@compiled
def _realign(texts: Any, node: Any, anchors: Any, factors: Any, end: int, bound: int, found: int) -> int:
    """Add, for each anchor, the position near it whose context fits best, or itself; return their number."""
    tokens = texts.tokens
    for anchor in anchors:
        if anchor < 0 or found >= CANDIDATES:
            continue
        best, best_span, best_vote = -1, 0, 0.0
        for side in (-1, 1):
            for step in range(REACH + 1):
                position = anchor + side * step
                if tokens[position - 1] < 0:
                    break
                span = _span(tokens, end, position)
                if 0 <= tokens[position] < bound and position != end and (span > 0 or step == 0):
                    vote = texts.weights[position] * factors[1, span] * factors[2, step]
                    if vote > best_vote:
                        best, best_span, best_vote = position, span, vote
        if best >= 0:
            node.positions[found] = best
            node.spans[found] = best_span
            node.votes[found] = best_vote
            found += 1
    return found


@compiled
def gather(
    texts: Any, node: Any, request: Any, group: Any, end: int, gram: int, anchors: Any, factors: Any
) -> tuple[int, int]:
    """Fill a node with the candidates for the text before `end`; return how many, and the longest match."""
    found = 0
    for level in (1, 0):
        context = gram if level == 0 else max(gram, LONG_GRAM)
        most = CANDIDATES - OWN_CANDIDATES
        bound = group[VOCABULARY]
        found = _look_up(texts, node, group[HEAD], group[MASK], end, context, level, bound, 0, most)
        if request[OWN_MASK] >= 0:
            head, mask, most = request[OWN_HEAD], request[OWN_MASK], found + OWN_CANDIDATES
            found = _look_up(texts, node, head, mask, end, context, level, bound, found, most)
        if found > 0:
            break
    longest = 0
    for k in range(found):
        node.votes[k] *= factors[0, node.spans[k]]
        longest = max(longest, node.spans[k])
    if longest < LONG_GRAM:
        before = found
        found = _realign(texts, node, anchors, factors, end, group[VOCABULARY], found)
        for k in range(before, found):
            longest = max(longest, node.spans[k])
    return found, longest


@compiled
def branch(tokens: Any, node: Any, found: int) -> tuple[int, float]:
    """Tally the next tokens of `found` >= 1 candidates.

    Returns the branch with most votes (the first of equals) and the sum of all votes.
    """
    branches = 0
    total = 0.0
    for k in range(found):
        token = tokens[node.positions[k]]
        total += node.votes[k]
        known = 0
        while known < branches and node.names[known] != token:
            known += 1
        if known == branches:
            node.names[known] = token
            node.sums[known] = 0.0
            node.crowd[known] = 0
            branches += 1
        node.sums[known] += node.votes[k]
        node.crowd[known] += 1
    best = 0
    for j in range(1, branches):
        if node.sums[j] > node.sums[best]:
            best = j
    return best, total


@compiled
def kind_of(share: float, span: int, crowd: int) -> int:
    """Return the kind of a drafted token: its share of the votes, the length of the match, who backs it."""
    s = (share > 0.35) + (share > 0.55) + (share > 0.7) + (share > 0.85) + (share > 0.97)
    g = (span >= 4) + (span >= 6) + (span >= 10) + (span >= 16)
    c = (crowd > 1) + (crowd > 3)
    return (s * LENGTHS + g) * CROWDS + c


@compiled
def _advance(tokens: Any, node: Any, found: int, token: int, bound: int) -> int:
    """Keep the candidates that follow `token`, moved on by it, where another token follows."""
    kept = 0
    for k in range(found):
        position = node.positions[k]
        if tokens[position] == token and 0 <= tokens[position + 1] < bound:
            node.positions[kept] = position + 1
            node.votes[kept] = node.votes[k]
            kept += 1
    return kept


@compiled
def _take_in(texts: Any, request: Any, row: Any, length: int, gram: int) -> int:
    """Append what a row holds beyond what was seen to the request's own text, index it; return how much."""
    fresh = length - request[SEEN]
    if fresh <= 0:
        return 0
    taken: int = min(fresh, request[CAPACITY] - request[LENGTH])
    end = request[START] + request[LENGTH]
    for k in range(taken):
        token = row[request[SEEN] + k]
        texts.tokens[end + k] = token if token >= 0 else -1
    # The position after each token gets its context; the last of them still waits for its own token.
    if request[OWN_MASK] >= 0:
        link(texts, end + 1, end + taken + 1, gram, request[OWN_HEAD], request[OWN_MASK])
    request[LENGTH] += taken
    request[SEEN] = length
    return taken


@compiled
def _follow(tokens: Any, anchors: Any, trail: Any, end: int, fresh: int) -> None:
    """Move the anchors to where the text continued with its `fresh` newest tokens before `end`.

    The candidates of the last draft that agreed with the text longest become the new anchors, except
    where a short match led astray from the first token on: then the old ones hold.
    """
    if fresh > 2 * MATCH_CAP:
        anchors[:] = -1
        trail[0] = 0
        return
    longest, kept = -1, 0
    for k in range(trail[0]):
        position = trail[2 + k]
        agreed = 0
        while agreed < fresh and 0 <= tokens[position + agreed] == tokens[end - fresh + agreed]:
            agreed += 1
        if agreed > longest and (agreed > 0 or trail[1] >= SURE_SPAN):
            longest, kept = agreed, 0
            anchors[:] = -1
        if agreed == longest and kept < ANCHORS:
            anchors[kept] = position
            kept += 1
    trail[0] = 0
    for k in range(ANCHORS):
        for step in range(fresh if anchors[k] >= 0 else 0):
            if tokens[anchors[k] + step] < 0:
                anchors[k] = -1
                break
        if anchors[k] >= 0:
            anchors[k] += fresh


@compiled
def _draft_row(
    texts: Any,
    node: Any,
    memory: Any,
    slot: int,
    request: Any,
    group: Any,
    gram: int,
    limit: int,
    floor: float,
    nowhere: Any,
    drafts: Any,
    chances: Any,
) -> int:
    """Write one chain into `drafts` [W] and `chances` [W]; return its length."""
    end = request[START] + request[LENGTH]
    count, found, span = 0, 0, 0
    path = 1.0
    while count < limit:
        if found == 0:
            anchors = memory.anchors[slot] if count == 0 else nowhere
            found, span = gather(texts, node, request, group, end + count, gram, anchors, memory.factors)
            if count == 0:
                trail = memory.trails[slot]
                trail[0], trail[1] = found, span
                trail[2 : 2 + found] = node.positions[:found]
            if found == 0:
                break
        best, total = branch(texts.tokens, node, found)
        kind = kind_of(node.sums[best] / total, span, node.crowd[best])
        path *= memory.hits[kind] / (memory.hits[kind] + memory.misses[kind])
        if path < floor:
            break
        token = node.names[best]
        drafts[count] = token
        chances[count] = path
        memory.kinds[slot, count] = kind
        texts.tokens[end + count] = token  # so that look-ups further on see the drafted context
        count += 1
        span = min(span + 1, MATCH_CAP)
        found = _advance(texts.tokens, node, found, token, group[VOCABULARY])
    texts.tokens[end : end + count] = -1
    return count


@compiled
def draft_rows(
    texts: Any,
    node: Any,
    memory: Any,
    requests: Any,
    groups: Any,
    gram: int,
    slots: Any,
    rows: Any,
    lengths: Any,
    limits: Any,
    floor: float,
    drafts: Any,
    counts: Any,
    chances: Any,
) -> None:
    """Take in each row's new tokens and draft its chain: `drafts` [B, W], `counts` [B], `chances` [B, W]."""
    nowhere = np.full(ANCHORS, -1, dtype=np.int64)
    for b in range(slots.shape[0]):
        counts[b] = 0
        slot = slots[b]
        if slot < 0 or slot >= requests.shape[0] or requests[slot, LIVE] == 0:
            continue
        request = requests[slot]
        group = groups[request[GROUP]]
        memory.pending[slot] = 0
        length = min(lengths[b], rows.shape[1])
        taken = _take_in(texts, request, rows[b], length, gram)
        if taken > 0:
            end = request[START] + request[LENGTH]
            _follow(texts.tokens, memory.anchors[slot], memory.trails[slot], end, taken)
        limit = min(min(limits[b], drafts.shape[1]), request[CAPACITY] - request[LENGTH])
        if limit > 0 and length == request[SEEN]:
            counts[b] = _draft_row(
                texts, node, memory, slot, request, group, gram, limit, floor, nowhere, drafts[b], chances[b]
            )
            memory.pending[slot] = counts[b]


@compiled
def learn_rows(memory: Any, slots: Any, accepted: Any) -> None:
    """Count accepted tokens as hits and the first rejected one as a miss; later ones say nothing."""
    for b in range(slots.shape[0]):
        slot = slots[b]
        if slot < 0 or slot >= memory.pending.shape[0]:
            continue
        drafted = memory.pending[slot]
        kept = min(max(accepted[b], 0), drafted)
        for k in range(min(kept + 1, drafted)):
            kind = memory.kinds[slot, k]
            if k < kept:
                memory.hits[kind] += 1.0
            else:
                memory.misses[kind] += 1.0
            if memory.hits[kind] + memory.misses[kind] > KEPT_OUTCOMES:
                memory.hits[kind] *= 0.5
                memory.misses[kind] *= 0.5
        memory.pending[slot] = 0
