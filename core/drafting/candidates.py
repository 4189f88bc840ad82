"""Draft candidates: a tree of tokens that may come next, and the best single chain through it."""

from dataclasses import dataclass

from antiphon.core.records import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Candidates below the end of a request's text, N nodes; parents come before their children."""

    tokens: IntArray
    """[N] int32."""
    parents: IntArray
    """[N] int32, index of the token before; -1 where that is the request's text."""
    probabilities: FloatArray
    """[N] float32, estimated chance that this token and all above it are accepted."""


def best_chain(tree: DraftTree, limit: int, floor: float) -> tuple[IntArray, FloatArray]:
    """Cut a tree to its most probable chain, for engines that verify chains only.

    Args:
        tree: what `DraftForest.grow_tree` returned.
        limit: most tokens.
        floor: the chain ends before the first token whose path probability is below this.

    Returns:
        (tokens [K] int32, path probabilities [K] float32), K <= limit.

    >>> import numpy as np
    >>> tree = DraftTree(np.array([5, 6, 7], np.int32), np.array([-1, -1, 0], np.int32),
    ...                  np.array([0.5, 0.4, 0.3], np.float32))
    >>> best_chain(tree, 8, 0.0)[0].tolist(), best_chain(tree, 8, 0.4)[0].tolist()
    ([5, 7], [5])
    """
    best: dict[int, int] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        known = best.get(parent)
        if known is None or tree.probabilities[node] > tree.probabilities[known]:
            best[parent] = node
    chain: list[int] = []
    node = best.get(-1, -1)
    while node >= 0 and len(chain) < limit and tree.probabilities[node] >= floor:
        chain.append(node)
        node = best.get(node, -1)
    return tree.tokens[chain], tree.probabilities[chain]
