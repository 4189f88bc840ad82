"""Draft rows: the compiled pass over a batch that takes in new text, writes drafts and learns from outcomes.

What a node of the tree is, and how its candidates are found, stands in `core.drafting.kernels`.

Legend: B rows, W tokens of a draft.
"""

from typing import Any

import numpy as np

from antiphon.core.drafting.kernels import (
    ANCHORS,
    CAPACITY,
    GROUP,
    KEPT_OUTCOMES,
    LENGTH,
    LIVE,
    MATCH_CAP,
    OWN_HEAD,
    OWN_MASK,
    SEEN,
    START,
    SURE_SPAN,
    VOCABULARY,
    branch,
    compiled,
    gather,
    kind_of,
    link,
)


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
