"""Draft growth: the compiled best-first expansion of a tree of candidates, for engines that verify trees.

Nodes are gathered and rewarded as a chain's are (`core.drafting.kernels`): the branch a chain would take
comes first among its siblings and is never less probable than they are, so the chain with the most
probable steps is the one that `draft_rows` writes.
"""

from typing import Any, NamedTuple

import numpy as np

from antiphon.core.drafting.kernels import (
    ANCHORS,
    CANDIDATES,
    CAPACITY,
    LENGTH,
    MATCH_CAP,
    START,
    VOCABULARY,
    Array,
    branch,
    compiled,
    gather,
    kind_of,
)

TOKEN, PARENT, DEPTH, SPAN, FIRST, FOUND, PICKED = range(7)
"""Columns of `Sprouts.nodes`."""


class Sprouts(NamedTuple):
    """Room for the nodes of one tree: S nodes made, K of them picked, P pooled candidates."""

    nodes: Array
    """[S, 7] int64; a node names the candidates of its parent, whom it chose a branch of."""
    chances: Array
    """[S] float64, path probabilities."""
    places: Array
    """[P] int64, next tokens of all nodes' candidates."""
    votes: Array
    """[P] float64."""
    picked: Array
    """[K] int64, nodes in the order they were picked."""


@compiled
def _candidates(
    texts: Any,
    node: Any,
    memory: Any,
    slot: int,
    request: Any,
    group: Any,
    gram: int,
    sprouts: Any,
    current: int,
) -> tuple[int, int]:
    """Fill `node` with the candidates below a made node (-1: the text); return how many, and the match.

    The node's path stands behind the text, as in a chain: a candidate may reach into it.
    """
    tokens = texts.tokens
    end = request[START] + request[LENGTH]
    found, span, depth = 0, 0, 0
    if current >= 0:
        made = sprouts.nodes[current]
        depth = made[DEPTH]
        span = min(made[SPAN] + 1, MATCH_CAP)
        for k in range(made[FIRST], made[FIRST] + made[FOUND]):
            place = sprouts.places[k]
            if tokens[place] == made[TOKEN] and 0 <= tokens[place + 1] < group[VOCABULARY]:
                node.places[found] = place + 1
                node.votes[found] = sprouts.votes[k]
                found += 1
    if found == 0:
        anchors = memory.anchors[slot] if depth == 0 else np.full(ANCHORS, -1, dtype=np.int64)
        found, span = gather(texts, node, request, group, end + depth, gram, anchors, memory.factors)
        if depth == 0:
            trail = memory.trails[slot]
            trail[0], trail[1] = found, span
            trail[2 : 2 + found] = node.places[:found]
    return found, span


@compiled
def _sprout(
    tokens: Any,
    node: Any,
    memory: Any,
    sprouts: Any,
    current: int,
    found: int,
    span: int,
    pool: int,
    made: int,
) -> int:
    """Make the branches of a node's candidates, which begin at `pool`; return how many nodes there are."""
    branches, best, total = branch(tokens, node, found)
    kind = kind_of(node.sums[best] / total, span, node.crowd[best])
    likely = memory.hits[kind] / (memory.hits[kind] + memory.misses[kind])
    above = sprouts.chances[current] if current >= 0 else 1.0
    depth = sprouts.nodes[current, DEPTH] if current >= 0 else 0
    for j in range(min(branches, sprouts.nodes.shape[0] - made)):
        chosen = best if j == 0 else (j - 1 if j <= best else j)
        chance = likely
        if j > 0:  # the others share what the best leaves
            chance = min(likely, (1.0 - likely) * node.sums[chosen] / (total - node.sums[best]))
        sprouts.chances[made] = above * chance
        sprout = sprouts.nodes[made]
        sprout[TOKEN], sprout[PARENT], sprout[DEPTH] = node.names[chosen], current, depth + 1
        sprout[SPAN], sprout[FIRST], sprout[FOUND], sprout[PICKED] = span, pool, found, 0
        made += 1
    return made


@compiled
def grow(
    texts: Any,
    node: Any,
    memory: Any,
    slot: int,
    request: Any,
    group: Any,
    gram: int,
    most_depth: int,
    sprouts: Any,
) -> int:
    """Pick the most probable node, expand it, and so on until `picked` is full; return how many there are."""
    end = request[START] + request[LENGTH]
    deepest = min(most_depth, request[CAPACITY] - request[LENGTH])
    made, pool, current, depth = 0, 0, -1, 0
    picks: int = sprouts.picked.shape[0]
    for pick in range(picks):
        if depth < deepest and pool + CANDIDATES <= sprouts.places.shape[0]:
            walk = current
            for k in range(depth - 1, -1, -1):
                texts.tokens[end + k] = sprouts.nodes[walk, TOKEN]
                walk = sprouts.nodes[walk, PARENT]
            found, span = _candidates(texts, node, memory, slot, request, group, gram, sprouts, current)
            if found > 0:
                sprouts.places[pool : pool + found] = node.places[:found]
                sprouts.votes[pool : pool + found] = node.votes[:found]
                made = _sprout(texts.tokens, node, memory, sprouts, current, found, span, pool, made)
                pool += found
            texts.tokens[end : end + depth] = -1
        current = -1
        for k in range(made):
            if sprouts.nodes[k, PICKED] == 0 and (
                current < 0 or sprouts.chances[k] > sprouts.chances[current]
            ):
                current = k
        if current < 0:
            return pick
        sprouts.nodes[current, PICKED] = 1
        sprouts.picked[pick] = current
        depth = sprouts.nodes[current, DEPTH]
    return picks
