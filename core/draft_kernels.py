"""Draft kernels: the inner loops of `core.draft_tree`, compiled; they touch nothing but the arrays they get.

Every text lies in one arena of int32 tokens and is closed by a negative separator. Position p of the arena
belongs to the context that ends just before it: ``previous[p]`` is the position before p whose preceding
`gram` tokens had the same hash, and a head table holds the newest position of each hash. Walking such a
chain visits the earlier occurrences of a context, newest first; each is verified token by token, so hash
collisions cost time and never a wrong draft.

The set of occurrences that agree with a text so far is a node of the (unbuilt) suffix tree of all
documents: the tokens that follow its members are its branches, the summed weights of the members their
counts. Following a branch keeps the members that agree.

Legend: B rows, W tokens of a draft, C candidates, N positions of the arena, H head entries.
"""

import math
from typing import Any

import numpy as np
from numba import njit

CANDIDATES = 24
"""Most occurrences that vote on a branch; the newest of a chain come first."""
OWN_CANDIDATES = 8
"""Of these, room kept for the request's own text."""
LONG_GRAM = 6
"""Context of the long chains, asked first: they lead to long matches without passing all the short ones."""
CHAIN_STEPS = 96
"""Most links of one chain followed in one look-up, so that a frequent context stays cheap."""
MATCH_CAP = 24
"""Tokens of context compared; a longer match counts as this long."""
GROWTH = 2.0
"""Factor on a candidate's vote for each further token of context it shares with the text."""
ANCHORS = 4
"""Places in other texts that a request follows in parallel."""
REACH = 8
"""Tokens to either side of an anchor within which a text may have been cut or lengthened."""
SURE_SPAN = 4
"""Candidates with at least this match become anchors even when their first token failed."""
NEAR = 2.0
"""Further factor on a vote near an anchor for each token of its match."""
AWAY = 0.8
"""Factor on such a vote for each token it lies away from the anchor."""
SHARES = 6
LENGTHS = 5
CROWDS = 3
BUCKETS = SHARES * LENGTHS * CROWDS
"""Kinds of drafted tokens whose acceptance is counted apart: vote share x match length x voters."""
KEPT_OUTCOMES = 256.0
"""Outcomes a bucket remembers: beyond them both counts are halved, so old ones fade."""

# Columns of the request table.
GROUP, START, LENGTH, CAPACITY, SEEN, OWN_HEAD, OWN_MASK, LIVE = range(8)
REQUEST_COLUMNS = 8
# Columns of the group table.
HEAD, MASK, VOCABULARY, SHARED = range(4)
GROUP_COLUMNS = 4


@njit(cache=True, nogil=True, inline="always")
def _entry(tokens: Any, end: int, gram: int, mask: int) -> Any:
    """Return the head entry of the `gram` tokens before `end`, or -1 where a separator is among them."""
    mixed = np.uint64(0x9E3779B97F4A7C15)
    for k in range(1, gram + 1):
        token = tokens[end - k]
        if token < 0:
            return -1
        mixed = (mixed ^ np.uint64(token)) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed & np.uint64(mask))


@njit(cache=True, nogil=True)
def link(
    tokens: Any, previous: Any, heads: Any, first: int, stop: int, gram: int, head: int, mask: int
) -> None:
    """Put positions [first, stop) into the short and the long chains of one pair of tables, oldest first."""
    for position in range(first, stop):
        for level in range(2):
            base = head + level * (mask + 1)
            entry = _entry(tokens, position, gram if level == 0 else max(gram, LONG_GRAM), mask)
            if entry >= 0:
                previous[position, level] = heads[base + entry]
                heads[base + entry] = position
            else:
                previous[position, level] = -1


@njit(cache=True, nogil=True)
def _look_up(
    tokens: Any,
    previous: Any,
    weights: Any,
    heads: Any,
    head: int,
    mask: int,
    end: int,
    gram: int,
    level: int,
    vocabulary: int,
    places: Any,
    votes: Any,
    spans: Any,
    found: int,
    most: int,
) -> int:
    """Add the verified occurrences of the context before `end` from one table; return how many there are."""
    entry = _entry(tokens, end, gram, mask)
    if entry < 0:
        return found
    position = heads[head + level * (mask + 1) + entry]
    steps = 0
    while position >= 0 and found < most and steps < CHAIN_STEPS:
        steps += 1
        token = tokens[position]
        if position != end and 0 <= token < vocabulary:
            span = 0
            while (
                span < MATCH_CAP
                and tokens[end - 1 - span] == tokens[position - 1 - span]
                and tokens[end - 1 - span] >= 0
            ):
                span += 1
            if span >= gram:
                places[found] = position
                spans[found] = span
                votes[found] = weights[position]
                found += 1
        position = previous[position, level]
    return found


@njit(cache=True, nogil=True)
def _gather(
    tokens: Any,
    previous: Any,
    weights: Any,
    heads: Any,
    request: Any,
    group: Any,
    end: int,
    gram: int,
    anchors: Any,
    powers: Any,
    places: Any,
    votes: Any,
    spans: Any,
) -> tuple[int, int]:
    """Return the candidates for the context before `end` and the longest match among them."""
    found = 0
    for level in (1, 0):
        context = gram if level == 0 else max(gram, LONG_GRAM)
        found = _look_up(
            tokens,
            previous,
            weights,
            heads,
            group[HEAD],
            group[MASK],
            end,
            context,
            level,
            group[VOCABULARY],
            places,
            votes,
            spans,
            0,
            CANDIDATES - OWN_CANDIDATES,
        )
        if request[OWN_MASK] >= 0:
            found = _look_up(
                tokens,
                previous,
                weights,
                heads,
                request[OWN_HEAD],
                request[OWN_MASK],
                end,
                context,
                level,
                group[VOCABULARY],
                places,
                votes,
                spans,
                found,
                found + OWN_CANDIDATES,
            )
        if found > 0:
            break
    longest = 0
    for k in range(found):
        votes[k] *= powers[spans[k]]
        longest = max(longest, spans[k])
    if longest < LONG_GRAM:
        before = found
        found = _realign(
            tokens, weights, anchors, end, group[VOCABULARY], powers, places, votes, spans, found
        )
        for k in range(before, found):
            longest = max(longest, spans[k])
    return found, longest


@njit(cache=True, nogil=True)
def follow(
    tokens: Any, end: int, fresh: int, anchors: Any, trail: Any, trail_count: int, trail_span: int
) -> None:
    """Move the anchors to where the text went on, given its `fresh` newest tokens before `end`.

    An anchor is the place in another text where this one would go on if the two ran in parallel. The
    members of the last draft's candidates (`trail`) that agreed with the text longest become the
    new anchors, except where a short match led astray from the first token on: then the old ones hold.
    """
    if fresh > MATCH_CAP * 2:
        anchors[:] = -1
        return
    longest = -1
    for k in range(trail_count):
        agreed = 0
        while agreed < fresh and tokens[trail[k] + agreed] == tokens[end - fresh + agreed]:
            agreed += 1
        longest = max(longest, agreed)
    if longest > 0 or (longest == 0 and trail_span >= SURE_SPAN):
        kept = 0
        for k in range(trail_count):
            agreed = 0
            while agreed < fresh and tokens[trail[k] + agreed] == tokens[end - fresh + agreed]:
                agreed += 1
            if agreed == longest and kept < ANCHORS:
                anchors[kept] = trail[k]
                kept += 1
        anchors[kept:] = -1
    for k in range(ANCHORS):
        if anchors[k] >= 0:
            for step in range(fresh):
                if tokens[anchors[k] + step] < 0:
                    anchors[k] = -1
                    break
            if anchors[k] >= 0:
                anchors[k] += fresh


@njit(cache=True, nogil=True)
def _realign(
    tokens: Any,
    weights: Any,
    anchors: Any,
    end: int,
    vocabulary: int,
    powers: Any,
    places: Any,
    votes: Any,
    spans: Any,
    found: int,
) -> int:
    """Add, for each anchor, the place near it whose context fits best, or itself; return their number."""
    for k in range(ANCHORS):
        anchor = anchors[k]
        if anchor < 0 or found >= CANDIDATES:
            continue
        best = -1
        best_vote = 0.0
        best_span = 0
        for side in (-1, 1):
            for step in range(REACH + 1):
                place = anchor + side * step
                if tokens[place - 1] < 0:
                    break
                span = 0
                while (
                    span < MATCH_CAP
                    and tokens[end - 1 - span] == tokens[place - 1 - span]
                    and tokens[end - 1 - span] >= 0
                ):
                    span += 1
                if 0 <= tokens[place] < vocabulary and place != end and (span > 0 or step == 0):
                    vote = weights[place] * powers[span] * NEAR**span * AWAY**step
                    if vote > best_vote:
                        best, best_vote, best_span = place, vote, span
        if best >= 0:
            places[found] = best
            spans[found] = best_span
            votes[found] = best_vote
            found += 1
    return found


@njit(cache=True, nogil=True)
def take_in(
    tokens: Any,
    previous: Any,
    weights: Any,
    heads: Any,
    request: Any,
    group: Any,
    row: Any,
    length: int,
    gram: int,
) -> None:
    """Append what a row holds beyond what was seen to the request's own text, and index it."""
    fresh = length - request[SEEN]
    if fresh <= 0:
        return
    if group[SHARED] != 0:
        head, mask = group[HEAD], group[MASK]
    else:
        head, mask = request[OWN_HEAD], request[OWN_MASK]
    taken = min(fresh, request[CAPACITY] - request[LENGTH])
    end = request[START] + request[LENGTH]
    for k in range(taken):
        token = row[request[SEEN] + k]
        tokens[end + k] = token if token >= 0 else -1
    # The position after each token gets its context; the last of them still waits for its token.
    if mask >= 0:
        link(tokens, previous, heads, end + 1, end + taken + 1, gram, head, mask)
    request[LENGTH] += taken
    request[SEEN] = length


@njit(cache=True, nogil=True)
def _branch(
    tokens: Any, places: Any, votes: Any, found: int, names: Any, sums: Any, crowd: Any
) -> tuple[int, float]:
    """Tally the candidates' next tokens; return how many branches there are and the sum of all votes."""
    branches = 0
    total = 0.0
    for k in range(found):
        token = tokens[places[k]]
        total += votes[k]
        known = -1
        for j in range(branches):
            if names[j] == token:
                known = j
                break
        if known < 0:
            known = branches
            names[known] = token
            sums[known] = 0.0
            crowd[known] = 0
            branches += 1
        sums[known] += votes[k]
        crowd[known] += 1
    return branches, total


@njit(cache=True, nogil=True, inline="always")
def _bucket(share: float, span: int, crowd: int) -> int:
    """Return the kind of a drafted token: vote share, length of the match, how many back it."""
    if share > 0.97:
        s = 5
    elif share > 0.85:
        s = 4
    elif share > 0.7:
        s = 3
    elif share > 0.55:
        s = 2
    elif share > 0.35:
        s = 1
    else:
        s = 0
    if span >= 16:
        g = 4
    elif span >= 10:
        g = 3
    elif span >= 6:
        g = 2
    elif span >= 4:
        g = 1
    else:
        g = 0
    c = 0 if crowd <= 1 else (1 if crowd <= 3 else 2)
    return (s * LENGTHS + g) * CROWDS + c


@njit(cache=True, nogil=True)
def _advance(tokens: Any, places: Any, votes: Any, found: int, token: int, vocabulary: int) -> int:
    """Keep the candidates that follow `token`, moved on by it, where another token follows."""
    kept = 0
    for k in range(found):
        place = places[k]
        if tokens[place] == token:
            following = tokens[place + 1]
            if 0 <= following < vocabulary:
                places[kept] = place + 1
                votes[kept] = votes[k]
                kept += 1
    return kept


@njit(cache=True, nogil=True)
def draft_rows(
    tokens: Any,
    previous: Any,
    weights: Any,
    heads: Any,
    requests: Any,
    groups: Any,
    slots: Any,
    rows: Any,
    anchors: Any,
    trails: Any,
    lengths: Any,
    limits: Any,
    floor: float,
    gram: int,
    powers: Any,
    hits: Any,
    misses: Any,
    kinds: Any,
    kind_counts: Any,
    drafts: Any,
    counts: Any,
    chances: Any,
    places: Any,
    votes: Any,
    spans: Any,
    names: Any,
    sums: Any,
    crowd: Any,
) -> None:
    """Take in each row's new tokens; draft its chain into `drafts`, `chances` [B, W] and `counts` [B]."""
    window = drafts.shape[1]
    nowhere = np.full(ANCHORS, -1, dtype=np.int64)
    for b in range(slots.shape[0]):
        counts[b] = 0
        slot = slots[b]
        if slot < 0 or slot >= requests.shape[0] or requests[slot, LIVE] == 0:
            continue
        request = requests[slot]
        group = groups[request[GROUP]]
        kind_counts[slot] = 0
        length = min(lengths[b], rows.shape[1])
        old = request[LENGTH]
        take_in(tokens, previous, weights, heads, request, group, rows[b], length, gram)
        if request[LENGTH] > old:
            end = request[START] + request[LENGTH]
            follow(
                tokens,
                end,
                request[LENGTH] - old,
                anchors[slot],
                trails[slot, 2:],
                trails[slot, 0],
                trails[slot, 1],
            )
            trails[slot, 0] = 0
        room = request[CAPACITY] - request[LENGTH]
        limit = min(min(limits[b], window), room)
        if limit <= 0 or length != request[SEEN]:
            continue
        end = request[START] + request[LENGTH]
        count = 0
        found = 0
        span = 0
        path = 1.0
        while count < limit:
            if found == 0:
                found, span = _gather(
                    tokens,
                    previous,
                    weights,
                    heads,
                    request,
                    group,
                    end + count,
                    gram,
                    anchors[slot] if count == 0 else nowhere,
                    powers,
                    places,
                    votes,
                    spans,
                )
                if count == 0:
                    trails[slot, 1] = span
                    trails[slot, 0] = found
                    trails[slot, 2 : 2 + found] = places[:found]
                if found == 0:
                    break
            branches, total = _branch(tokens, places, votes, found, names, sums, crowd)
            best = 0
            for j in range(1, branches):
                if sums[j] > sums[best]:
                    best = j
            kind = _bucket(sums[best] / total, span, crowd[best])
            path *= hits[kind] / (hits[kind] + misses[kind])
            if path < floor:
                break
            token = names[best]
            drafts[b, count] = token
            chances[b, count] = path
            kinds[slot, count] = kind
            tokens[end + count] = token  # so that look-ups further on see the drafted context
            count += 1
            span = min(span + 1, MATCH_CAP)
            found = _advance(tokens, places, votes, found, token, group[VOCABULARY])
        for k in range(count):
            tokens[end + k] = -1
        counts[b] = count
        kind_counts[slot] = count


@njit(cache=True, nogil=True)
def settle_rows(slots: Any, accepted: Any, kinds: Any, kind_counts: Any, hits: Any, misses: Any) -> None:
    """Count each slot's accepted tokens as hits, its first rejected one as a miss, later ones not at all."""
    for b in range(slots.shape[0]):
        slot = slots[b]
        if slot < 0 or slot >= kinds.shape[0]:
            continue
        drafted = kind_counts[slot]
        kept = min(max(accepted[b], 0), drafted)
        for k in range(min(kept + 1, drafted)):
            kind = kinds[slot, k]
            if k < kept:
                hits[kind] += 1.0
            else:
                misses[kind] += 1.0
            if hits[kind] + misses[kind] > KEPT_OUTCOMES:
                hits[kind] *= 0.5
                misses[kind] *= 0.5
        kind_counts[slot] = 0


@njit(cache=True, nogil=True)
def grow(
    tokens: Any,
    previous: Any,
    weights: Any,
    heads: Any,
    request: Any,
    group: Any,
    gram: int,
    anchors: Any,
    powers: Any,
    hits: Any,
    misses: Any,
    depth: int,
    pool_places: Any,
    pool_votes: Any,
    node_tokens: Any,
    node_parents: Any,
    node_chances: Any,
    node_depths: Any,
    node_spans: Any,
    node_firsts: Any,
    node_founds: Any,
    node_picked: Any,
    names: Any,
    sums: Any,
    crowd: Any,
    spans: Any,
    order: Any,
) -> int:
    """Expand the most probable node first until `order` is full; return how many nodes were picked.

    Nodes are made in the order of expansion, picked ones are listed in `order`; a node's parent is the
    node it branched from, -1 for the request's text.
    """
    budget = order.shape[0]
    nowhere = np.full(ANCHORS, -1, dtype=np.int64)
    end = request[START] + request[LENGTH]
    room = min(depth, request[CAPACITY] - request[LENGTH])
    made = 0
    picked = 0
    pool = 0
    current = -1
    current_depth = 0
    while True:
        # Expand `current`: its candidates, moved on by its token, or a look-up where none is left.
        found = 0
        span = 0
        if current_depth < room and pool + CANDIDATES <= pool_places.shape[0]:
            places = pool_places[pool : pool + CANDIDATES]
            votes = pool_votes[pool : pool + CANDIDATES]
            if current >= 0:
                first = node_firsts[current]
                for k in range(node_founds[current]):
                    place = pool_places[first + k]
                    if tokens[place] == node_tokens[current]:
                        following = tokens[place + 1]
                        if 0 <= following < group[VOCABULARY]:
                            places[found] = place + 1
                            votes[found] = pool_votes[first + k]
                            found += 1
                span = min(node_spans[current] + 1, MATCH_CAP)
            if found == 0:
                walk = current
                for k in range(current_depth - 1, -1, -1):
                    tokens[end + k] = node_tokens[walk]
                    walk = node_parents[walk]
                found, span = _gather(
                    tokens,
                    previous,
                    weights,
                    heads,
                    request,
                    group,
                    end + current_depth,
                    gram,
                    anchors if current_depth == 0 else nowhere,
                    powers,
                    places,
                    votes,
                    spans,
                )
                for k in range(current_depth):
                    tokens[end + k] = -1
        if found > 0:
            branches, total = _branch(tokens, places, votes, found, names, sums, crowd)
            best = 0
            for j in range(1, branches):
                if sums[j] > sums[best]:
                    best = j
            kind = _bucket(sums[best] / total, span, crowd[best])
            likely = hits[kind] / (hits[kind] + misses[kind])
            above = node_chances[current] if current >= 0 else 1.0
            for j in range(branches):
                if made >= node_tokens.shape[0]:
                    break
                # The branch a chain would take comes first; the others share what it leaves.
                branch = best if j == 0 else (j - 1 if j <= best else j)
                chance = likely
                if j > 0:
                    chance = min(likely, (1.0 - likely) * sums[branch] / (total - sums[best]))
                node_tokens[made] = names[branch]
                node_parents[made] = current
                node_chances[made] = above * chance
                node_depths[made] = current_depth + 1
                node_spans[made] = span
                node_firsts[made] = pool
                node_founds[made] = found
                node_picked[made] = 0
                made += 1
            pool += found
        if picked >= budget:
            break
        current = -1
        for k in range(made):
            if node_picked[k] == 0 and (current < 0 or node_chances[k] > node_chances[current]):
                current = k
        if current < 0:
            break
        node_picked[current] = 1
        order[picked] = current
        picked += 1
        current_depth = node_depths[current]
        if picked >= budget:
            break
    return picked


def growth_powers() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the factor on a vote by length of match, [MATCH_CAP + 1] float64."""
    return np.array([math.pow(GROWTH, k) for k in range(MATCH_CAP + 1)], dtype=np.float64)
