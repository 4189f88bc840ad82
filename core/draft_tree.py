"""Draft tree: what may come next, from past completions, siblings and the request's own text.

A group is a prompt with its documents: past completions, texts of its finished requests and the
prompt itself. A drafted token is the branch with the most votes in the suffix tree of these
documents and of the request's own text, at the longest context that recurs; a vote is the
document's weight (recency and reward, set by the caller) times a factor for the length of the match.
The tree is kept as chains of equal contexts (see `core.draft_kernels`), from which any of its nodes is
gathered in bounded time; drafts are read along one path of it, or as a tree of candidates.

Costs: a sampled token is taken in with one hash (constant); a draft of W tokens looks at a bounded number
of occurrences per token; a document of T tokens is indexed in O(T); 12 bytes a token for tokens, chain
and weight, and 4 to 8 for its head entry (before the arrays' room for growth). Drafts depend on the
calls alone, never on time or chance. Nothing that a document holds can raise an error, and none
of it can change what an engine samples: drafts are only proposals.

Legend: B rows of one call, L width of the engine's rows, W the largest window, N nodes of a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from antiphon.core import draft_kernels as kernels
from antiphon.core.draft_arena import BlockMap
from antiphon.core.errors import ContractError
from antiphon.core.records import FloatArray, IntArray

Int64Array = npt.NDArray[np.int64]
Share = Literal["finished", "lockstep", "none"]

LONGEST_DOCUMENT = 1 << 18
"""Completions beyond this are dropped and longer requests are not followed beyond it, tokens."""
PROMPT_TOKENS = 8_192
"""Of a longer prompt only the last tokens serve as a document."""
PREFIX_TOKENS = 8
"""Tokens of the prompt's end that stand before each text, so that its very beginning has a context."""
PROMPT_WEIGHT = 0.5
"""Vote of the prompt's own text; a completion quotes it less often than it repeats its siblings."""
LIVE_WEIGHT = 1.0
"""Vote of a text sampled now, by the request itself or by a sibling."""
HEADS_AHEAD = 1 << 16
"""Most head entries prepared for tokens that are still to be sampled."""
TREE_NODES = 4_096
"""Most nodes considered while a tree is grown."""
PRIOR_OUTCOMES = 8.0
"""How many outcomes the guess for a kind of token weighs before any was observed."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Candidates below the end of a request's text; parents come before their children."""

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


@dataclass(slots=True)
class _Group:
    """What the tables do not hold of a group: its blocks and documents."""

    share: Share
    prefix: IntArray
    head: int
    head_cells: int
    blocks: list[tuple[int, int]]
    documents: list[tuple[int, int]]
    positions: int
    tokens: int
    requests: set[int]


@dataclass(slots=True)
class _Request:
    """What the tables do not hold of a request: its blocks."""

    group: int
    block: int
    cells: int
    head: int
    head_cells: int


class DraftForest:
    """Draft sources of all groups and requests of one engine; pure apart from its own arrays.

    One thread at a time. The first forest of a process waits for the compiled kernels, from the cache
    on disk where there is one.
    """

    def __init__(self, slots: int, max_window: int, min_match: int) -> None:
        """Make an empty forest.

        Args:
            slots: rows the engine has; tables grow when a larger slot is opened.
            max_window: most tokens of a draft, W >= 1.
            min_match: shortest context, in tokens, that must recur, 1 to 8.

        Raises:
            ContractError: a size outside its range.
        """
        if slots < 1 or max_window < 1 or not 1 <= min_match <= 8:
            raise ContractError(
                f"a draft forest got slots={slots}, max_window={max_window}, min_match={min_match}, but "
                "needs slots >= 1, max_window >= 1 and min_match from 1 to 8"
            )
        self._window = max_window
        self._gram = min_match
        self._cells = BlockMap()
        self._head_cells = BlockMap()
        self._tokens = np.full(1 << 12, -1, dtype=np.int32)
        self._previous = np.full((1 << 12, 2), -1, dtype=np.int32)
        self._weights = np.zeros(1 << 12, dtype=np.float32)
        self._heads = np.full(1 << 12, -1, dtype=np.int32)
        self._groups: dict[int, _Group] = {}
        self._free_groups: list[int] = []
        self._requests: dict[int, _Request] = {}
        self._group_table = np.zeros((8, kernels.GROUP_COLUMNS), dtype=np.int64)
        self._stored = 0
        self._powers = kernels.growth_powers()
        self._hits, self._misses = _prior()
        self._candidates = (
            np.zeros(kernels.CANDIDATES, dtype=np.int64),
            np.zeros(kernels.CANDIDATES, dtype=np.float64),
            np.zeros(kernels.CANDIDATES, dtype=np.int64),
            np.zeros(kernels.CANDIDATES, dtype=np.int64),
            np.zeros(kernels.CANDIDATES, dtype=np.float64),
            np.zeros(kernels.CANDIDATES, dtype=np.int64),
        )
        self._slots = 0
        self._reserve_slots(slots)
        self._rehearse()

    @property
    def bytes_used(self) -> int:
        """Bytes of all arrays, room for growth included."""
        arrays = (
            self._tokens,
            self._previous,
            self._weights,
            self._heads,
            self._group_table,
            self._request_table,
            self._kinds,
            self._kind_counts,
            self._drafts,
            self._counts,
            self._chances,
            self._hits,
            self._misses,
            self._powers,
            *self._candidates,
        )
        return sum(array.nbytes for array in arrays)

    @property
    def stored_tokens(self) -> int:
        """Tokens of all documents and live texts, in their prefixes and prompts too."""
        live = sum(int(self._request_table[slot, kernels.LENGTH]) for slot in self._requests)
        return self._stored + live

    def open_group(
        self,
        prompt: Sequence[int],
        completions: Sequence[tuple[IntArray, float]],
        capacity: int,
        share: Share,
        vocabulary: int,
    ) -> int:
        """Index a prompt and its past completions; return the group's handle.

        Completions that cannot be used are left out: empty ones, ids outside [0, vocabulary), ones of
        more than `LONGEST_DOCUMENT` tokens, weights that are not positive and finite.

        Args:
            prompt: the token ids that all requests of the group begin with.
            completions: (token_ids [T] int32, weight > 0), oldest first: among equal contexts later ones
                are asked first.
            capacity: tokens the group's requests may sample in all; a hint.
            share: what requests see of their siblings: "finished" texts, all text already ("lockstep"),
                or "none".
            vocabulary: token ids at or above this are never drafted.
        """
        asked = np.asarray(prompt[-PROMPT_TOKENS:], dtype=np.int64).ravel()
        asked = np.where((asked >= 0) & (asked < vocabulary), asked, -1).astype(np.int32)
        prefix = asked[max(0, len(asked) - PREFIX_TOKENS) :]
        texts = [(asked, PROMPT_WEIGHT)] if len(asked) else []
        for token_ids, weight in completions:
            usable = _usable(token_ids, weight, vocabulary)
            if usable is not None:
                texts.append((np.concatenate([prefix, usable]), float(weight)))
        cells = 1 + sum(len(text) + 1 for text, _ in texts)
        ahead = min(max(capacity, 0), HEADS_AHEAD)
        head_cells = _power_of_two(cells + ahead)
        block = self._lend(cells)
        head = self._lend_heads(2 * head_cells)
        handle = self._free_groups.pop() if self._free_groups else len(self._groups)
        if handle >= len(self._group_table):
            self._group_table = _grown(self._group_table, handle + 1, 0)
        self._group_table[handle] = (head, head_cells - 1, vocabulary, share == "lockstep")
        group = _Group(share, prefix.astype(np.int32), head, head_cells, [(block, cells)], [], 0, 0, set())
        self._groups[handle] = group
        place = block + 1
        for text, text_weight in texts:
            self._tokens[place : place + len(text)] = text
            self._weights[place : place + len(text)] = text_weight
            self._add_document(group, place, len(text))
            place += len(text) + 1
        return handle

    def close_group(self, group: int) -> None:
        """Forget a group and free its memory; requests still open in it are closed first."""
        held = self._groups.pop(group, None)
        if held is None:
            return
        for slot in list(held.requests):
            self._forget(slot)
        for block, cells in held.blocks:
            self._cells.free(block, cells)
        self._head_cells.free(held.head, 2 * held.head_cells)
        self._stored -= held.tokens
        self._free_groups.append(group)

    def open_request(
        self, slot: int, group: int, prompt_length: int, max_tokens: int, own_text: bool = True
    ) -> None:
        """Follow a request from the end of its prompt on.

        Args:
            slot: the row's number, from 0 to a million; a request that still holds it is closed, unfinished.
            group: handle of its group.
            prompt_length: tokens of the prompt in the engine's row.
            max_tokens: most tokens it may sample.
            own_text: draft from the request's own text, too.

        Raises:
            ContractError: the group is not open or the slot is out of range.
        """
        held = self._groups.get(group)
        if held is None or not 0 <= slot <= 1_000_000:
            raise ContractError(
                f"slot={slot} cannot follow group={group}; open the group first and use slots from 0 "
                "to 1,000,000"
            )
        if slot in self._requests:
            self.close_request(slot, finished=False)
        self._reserve_slots(slot + 1)
        prefix = held.prefix
        capacity = len(prefix) + max(0, min(max_tokens, LONGEST_DOCUMENT))
        cells = 1 + capacity + self._window + 1  # separators, and room for the draft behind the text
        block = self._lend(cells)
        self._weights[block : block + cells] = LIVE_WEIGHT
        head, head_cells = 0, 0
        shared = held.share == "lockstep"
        if not shared and own_text:
            head_cells = _power_of_two(capacity + 1)
            head = self._lend_heads(2 * head_cells)
        elif shared:
            self._reserve_heads(held, min(capacity, HEADS_AHEAD))
        self._anchors[slot] = -1
        self._trails[slot] = 0
        self._requests[slot] = _Request(group, block, cells, head, head_cells)
        held.requests.add(slot)
        self._request_table[slot] = (
            group,
            block + 1,
            len(prefix),
            capacity,
            max(0, prompt_length),
            head,
            head_cells - 1,
            1,
        )
        self._tokens[block + 1 : block + 1 + len(prefix)] = prefix
        own_head, own_mask = (held.head, held.head_cells - 1) if shared else (head, head_cells - 1)
        if own_mask >= 0:
            kernels.link(
                self._tokens,
                self._previous,
                self._heads,
                block + 1,
                block + 2 + len(prefix),
                self._gram,
                own_head,
                own_mask,
            )
        self._kind_counts[slot] = 0

    def close_request(self, slot: int, finished: bool) -> None:
        """Stop following a slot; a slot that is not followed changes nothing.

        Args:
            slot: the row's number.
            finished: the text is whole and stays as a sibling's, if the group shares.
        """
        request = self._requests.get(slot)
        if request is None:
            return
        held = self._groups[request.group]
        start, length = (int(x) for x in self._request_table[slot, [kernels.START, kernels.LENGTH]])
        # In lock-step the chains already run through the text, so it has to stay.
        keep = held.share == "lockstep" or (finished and held.share == "finished")
        if not keep or length == 0:
            self._forget(slot)
            return
        kept = 1 + length + 1
        self._cells.free(request.block + kept, request.cells - kept)
        held.blocks.append((request.block, kept))
        self._drop_request(slot)
        if held.share == "lockstep":
            held.documents.append((start, length))
            held.positions += length + 1
            held.tokens += length
            self._stored += length
        else:
            self._reserve_heads(held, length + 1)
            self._add_document(held, start, length)

    def draft(
        self, slots: Int64Array, token_ids: IntArray, lengths: Int64Array, limits: Int64Array, floor: float
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Take in what each row sampled since the last call and draft its next tokens.

        Rows of slots that are not followed, and rows shorter than before, get no draft.

        Args:
            slots: [B] int64, each at most once.
            token_ids: [>= B, L] int32 in C order, the engine's rows, prompt first; row b is slots[b]'s.
            lengths: [B] int64, tokens in each row so far.
            limits: [B] int64, most tokens to draft; with 0 the text is still taken in.
            floor: a draft ends before the first token whose path probability is below this.

        Returns:
            drafts [B, W] int32 and path probabilities [B, W] float32, meaningful up to counts [B] int32.
            They are views, valid until the next call.
        """
        rows = len(slots)
        if rows > len(self._counts):
            self._reserve_rows(rows)
        drafts, counts, chances = self._drafts[:rows], self._counts[:rows], self._chances[:rows]
        kernels.draft_rows(
            self._tokens,
            self._previous,
            self._weights,
            self._heads,
            self._request_table,
            self._group_table,
            _contiguous(slots, np.int64),
            _contiguous(token_ids, np.int32),
            self._anchors,
            self._trails,
            _contiguous(lengths, np.int64),
            _contiguous(limits, np.int64),
            float(floor),
            self._gram,
            self._powers,
            self._hits,
            self._misses,
            self._kinds,
            self._kind_counts,
            drafts,
            counts,
            chances,
            *self._candidates,
        )
        return drafts, counts, chances

    def settle(self, slots: Int64Array, accepted: Int64Array) -> None:
        """Learn from the outcome of each slot's last draft, once; it calibrates later probabilities.

        Args:
            slots: [B] int64.
            accepted: [B] int64, tokens of the whole last draft that were accepted.
        """
        kernels.settle_rows(
            _contiguous(slots, np.int64),
            _contiguous(accepted, np.int64),
            self._kinds,
            self._kind_counts,
            self._hits,
            self._misses,
        )

    def grow_tree(self, slot: int, budget: int) -> DraftTree:
        """Return the `budget` most probable candidates below the text taken in by the last `draft`.

        Expansion is best first; a node's candidates are gathered as in `draft`, so that
        `best_chain` of the tree is a prefix of the slot's draft. A slot that is not followed has none.
        """
        made = max(0, min(budget, TREE_NODES))
        if made == 0 or slot not in self._requests:
            return DraftTree(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
        request = self._request_table[slot]
        _, _, spans, names, sums, crowd = self._candidates
        nodes = min(TREE_NODES, (made + 1) * kernels.CANDIDATES)
        pool = (made + 2) * kernels.CANDIDATES
        order = np.zeros(made, dtype=np.int64)
        tokens = np.zeros(nodes, dtype=np.int64)
        parents = np.zeros(nodes, dtype=np.int64)
        chances = np.zeros(nodes, dtype=np.float64)
        picked = kernels.grow(
            self._tokens,
            self._previous,
            self._weights,
            self._heads,
            request,
            self._group_table[request[kernels.GROUP]],
            self._gram,
            self._anchors[slot],
            self._powers,
            self._hits,
            self._misses,
            self._window,
            np.zeros(pool, dtype=np.int64),
            np.zeros(pool, dtype=np.float64),
            tokens,
            parents,
            chances,
            *(np.zeros(nodes, dtype=np.int64) for _ in range(5)),
            names,
            sums,
            crowd,
            spans,
            order,
        )
        order = order[:picked]
        index = np.full(nodes + 1, -1, dtype=np.int32)  # the last entry serves parent -1
        index[order] = np.arange(picked, dtype=np.int32)
        return DraftTree(
            tokens=tokens[order].astype(np.int32),
            parents=index[parents[order]],
            probabilities=chances[order].astype(np.float32),
        )

    def _add_document(self, group: _Group, start: int, length: int) -> None:
        """Put a text that lies in the arena into its group's chains."""
        kernels.link(
            self._tokens,
            self._previous,
            self._heads,
            start,
            start + length + 1,
            self._gram,
            group.head,
            group.head_cells - 1,
        )
        group.documents.append((start, length))
        group.positions += length + 1
        group.tokens += length
        self._stored += length

    def _reserve_heads(self, group: _Group, more: int) -> None:
        """Make a group's head table as large as its positions; doubling keeps it constant a token."""
        live = (
            [slot for slot in group.requests if slot in self._requests] if group.share == "lockstep" else []
        )
        lengths = self._request_table[live, kernels.LENGTH] if live else np.zeros(0, dtype=np.int64)
        if group.positions + int(lengths.sum()) + more <= group.head_cells:
            return
        self._head_cells.free(group.head, 2 * group.head_cells)
        group.head_cells = _power_of_two(group.positions + int(lengths.sum()) + more)
        group.head = self._lend_heads(2 * group.head_cells)
        spans = [
            *group.documents,
            *(
                (int(self._request_table[s, kernels.START]), int(n))
                for s, n in zip(live, lengths, strict=True)
            ),
        ]
        for start, length in spans:
            kernels.link(
                self._tokens,
                self._previous,
                self._heads,
                start,
                start + length + 1,
                self._gram,
                group.head,
                group.head_cells - 1,
            )
        for handle, held in self._groups.items():
            if held is group:
                self._group_table[handle, kernels.HEAD] = group.head
                self._group_table[handle, kernels.MASK] = group.head_cells - 1

    def _forget(self, slot: int) -> None:
        request = self._requests[slot]
        self._cells.free(request.block, request.cells)
        self._drop_request(slot)

    def _drop_request(self, slot: int) -> None:
        request = self._requests.pop(slot)
        if request.head_cells:
            self._head_cells.free(request.head, 2 * request.head_cells)
        self._request_table[slot, kernels.LIVE] = 0
        self._kind_counts[slot] = 0
        group = self._groups.get(request.group)
        if group is not None:
            group.requests.discard(slot)

    def _lend(self, cells: int) -> int:
        """Return a block of the token arena, filled with separators."""
        block = self._cells.lend(cells)
        if self._cells.top > len(self._tokens):
            self._tokens = _grown(self._tokens, self._cells.top, -1)
            self._previous = _grown(self._previous, self._cells.top, -1)
            self._weights = _grown(self._weights, self._cells.top, 0)
        self._tokens[block : block + cells] = -1
        self._previous[block : block + cells] = -1
        return block

    def _lend_heads(self, cells: int) -> int:
        block = self._head_cells.lend(cells)
        if self._head_cells.top > len(self._heads):
            self._heads = _grown(self._heads, self._head_cells.top, -1)
        self._heads[block : block + cells] = -1
        return block

    def _reserve_slots(self, slots: int) -> None:
        if slots <= self._slots:
            return
        size = max(slots, 2 * self._slots)
        table = np.zeros((size, kernels.REQUEST_COLUMNS), dtype=np.int64)
        kinds = np.zeros((size, self._window), dtype=np.int16)
        kind_counts = np.zeros(size, dtype=np.int64)
        anchors = np.full((size, kernels.ANCHORS), -1, dtype=np.int64)
        trails = np.zeros((size, 2 + kernels.CANDIDATES), dtype=np.int64)
        if self._slots:
            table[: self._slots] = self._request_table
            kinds[: self._slots] = self._kinds
            kind_counts[: self._slots] = self._kind_counts
            anchors[: self._slots] = self._anchors
            trails[: self._slots] = self._trails
        self._anchors: Int64Array = anchors
        self._trails: Int64Array = trails
        self._request_table: Int64Array = table
        self._kinds: npt.NDArray[np.int16] = kinds
        self._kind_counts: Int64Array = kind_counts
        self._slots = size
        self._reserve_rows(size)

    def _reserve_rows(self, rows: int) -> None:
        self._drafts = np.zeros((rows, self._window), dtype=np.int32)
        self._counts = np.zeros(rows, dtype=np.int32)
        self._chances = np.zeros((rows, self._window), dtype=np.float32)

    def _rehearse(self) -> None:
        """Run every kernel once, so that none compiles while an engine waits."""
        group = self.open_group((1, 2), [(np.array([3, 4], dtype=np.int32), 1.0)], 4, "finished", 8)
        self.open_request(0, group, 2, 4)
        row = np.array([[1, 2, 3, 4]], dtype=np.int32)
        one = np.zeros(1, dtype=np.int64)
        self.draft(one, row, one + 3, one + self._window, 0.0)
        self.grow_tree(0, 2)
        self.settle(one, one)
        self.close_request(0, finished=True)
        self.close_group(group)
        self._hits, self._misses = _prior()


def _prior() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the hits and misses every kind of token starts with, [BUCKETS] float64 each."""
    shares = np.array([0.25, 0.4, 0.55, 0.65, 0.75, 0.85])
    likely = np.repeat(shares, kernels.LENGTHS * kernels.CROWDS)
    return likely * PRIOR_OUTCOMES, (1.0 - likely) * PRIOR_OUTCOMES


def _usable(token_ids: Any, weight: float, vocabulary: int) -> IntArray | None:
    """Return a completion's tokens, or None where nothing could be drafted from them."""
    tokens = np.asarray(token_ids)
    sound = (
        tokens.ndim == 1
        and 0 < tokens.size <= LONGEST_DOCUMENT
        and np.issubdtype(tokens.dtype, np.integer)
        and np.isfinite(weight)
        and weight > 0.0
    )
    if not sound or int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        return None
    return tokens.astype(np.int32, copy=False)


def _power_of_two(cells: int) -> int:
    """Return the smallest power of two that holds `cells`, at least 16.

    >>> [_power_of_two(n) for n in (1, 16, 17)]
    [16, 16, 32]
    """
    return 1 << max(4, (cells - 1).bit_length())


def _grown(array: npt.NDArray[Any], cells: int, fill: int) -> npt.NDArray[Any]:
    """Return a copy of at least `cells` rows and twice the old length, the new ones filled."""
    grown = np.full((max(cells, 2 * len(array)), *array.shape[1:]), fill, dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def _contiguous(array: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """Return the array itself where it has the kernels' layout: another would compile them anew."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, dtype=dtype)
