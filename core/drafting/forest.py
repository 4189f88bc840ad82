"""Draft tree: what may come next, from past completions, siblings and the request's own text.

A group is a prompt with its documents: past completions, texts of its finished requests and the
prompt itself. A drafted token is the branch with the most votes in the suffix tree of these
documents and of the request's own text, at the longest context that recurs; a vote is the
document's weight (recency and reward, set by the caller) times a factor for the length of the match.
The tree is kept as chains of equal contexts (see `core.drafting.kernels`), from which any of its nodes is
gathered in bounded time; a draft is read along one path of it. After a token that no document foresaw,
a request continues beside the text it had followed (an anchor): there a shorter match than
`min_match`, or none, is enough.

Costs: a sampled token is taken in with one hash (constant); a draft of W tokens looks at a bounded number
of occurrences per token; a document of T tokens is indexed in O(T). A stored token takes 16 bytes (token,
two chain links, weight) and 8 to 16 of head tables, and arrays grow by half. Drafts depend on the
calls alone, never on time or randomness. Nothing that a document holds can raise an error, and none
of it can change what an engine samples: drafts are only proposals.

Legend: B rows of one call, L width of the engine's rows, W the largest window.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.drafting import kernels
from antiphon.core.errors import ContractError
from antiphon.core.records import FloatArray, IntArray

Int64Array = npt.NDArray[np.int64]

LONGEST_DOCUMENT = 1 << 18
"""Completions beyond this are dropped and longer requests are not followed beyond it, tokens."""
PROMPT_TOKENS = 8_192
"""Of a longer prompt only the last tokens serve as a document."""
PRIOR_CHANCES = (
    (0.10, 0.12, 0.14, 0.16, 0.18),
    (0.15, 0.28, 0.28, 0.42, 0.42),
    (0.30, 0.36, 0.44, 0.55, 0.55),
    (0.37, 0.50, 0.60, 0.75, 0.75),
    (0.62, 0.66, 0.66, 0.75, 0.78),
    (0.26, 0.80, 0.86, 0.92, 0.98),
)
"""Acceptance by vote share (down) and length of match (across) in replays of recorded responses."""
PRIOR_POWERS = (1.2, 1.0, 0.7)
"""Exponent of it for one, a few and many candidates that agree."""
PRIOR_OUTCOMES = 8.0
"""How many outcomes the guess for a kind of token weighs before any was observed."""


def prior() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the hits and misses every kind of token starts with, [BUCKETS] float64 each."""
    chances = np.array(PRIOR_CHANCES)[:, :, None] ** np.array(PRIOR_POWERS)
    return chances.ravel() * PRIOR_OUTCOMES, (1.0 - chances.ravel()) * PRIOR_OUTCOMES


def known_tokens(prompt: Sequence[int], vocabulary: int) -> IntArray:
    """Return the end of a prompt as int32, with separators where an id is outside the vocabulary.

    >>> known_tokens([3, 9, -4, 2], vocabulary=5).tolist()
    [3, -1, -1, 2]
    """
    least = min(vocabulary, 2**31 - 1)
    return np.array([t if 0 <= t < least else -1 for t in prompt[-PROMPT_TOKENS:]], dtype=np.int32)


def usable(token_ids: Any, weight: float, vocabulary: int) -> IntArray | None:
    """Return a completion's tokens, or None where nothing could be drafted from them."""
    tokens = np.asarray(token_ids)
    sound = (
        tokens.ndim == 1
        and 0 < tokens.size <= LONGEST_DOCUMENT
        and tokens.dtype.kind in "iu"
        and math.isfinite(weight)
        and weight > 0.0
    )
    if sound and tokens.dtype == np.int32:  # a negative id is a large one without its sign
        return tokens if int(tokens.view(np.uint32).max()) < min(vocabulary, 2**31 - 1) else None
    if not sound or int(tokens.min()) < 0 or int(tokens.max()) >= min(vocabulary, 2**31 - 1):
        return None
    return tokens.astype(np.int32, copy=False)


def contiguous(array: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """Return the array itself where it has the kernels' layout: another would compile them again."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, dtype=dtype)


MEMORY = 0.9
"""What a learned draft keeps of the older evidence of its request: about ten drafts count."""
PRIOR_TRIALS = 4.0
"""Evidence a fresh request starts with, in drafted tokens; one early rejection must not end it."""
PRIOR_ACCEPTANCE = 0.9
"""Acceptance that evidence claims: high, so that the draft's own probabilities decide at first."""
LEAST_REACH = 0.05
"""A draft ends where, by the request's own record, fewer than one in twenty gets so far."""
SHARES = 1024
"""Steps of the table from acceptance to limit; a table, because logarithms cost more than a step has."""


class DraftWindows:
    """Room up to max_window, less where a request's own record says that drafts do not reach so far.

    The length that pays is decided token by token, by the floor of `core/drafting/gate.py` on the path
    probability. This rule guards against probabilities that are wrong for one request. Of a draft of
    n tokens with a accepted, min(a + 1, n) were tried, since nothing is tried after a rejection.
    With p the request's accepted share of tried tokens (older evidence fading by `MEMORY` a draft),
    the limit is the largest k with p^k >= LEAST_REACH: 16 or more at p = 0.83, 6 at 0.65, 4 at 0.5;
    it never falls below 1, so that a request can recover.
    """

    def __init__(self, slots: int, max_window: int) -> None:
        """Make room for `slots` requests, which grows on demand; ContractError for max_window below 1."""
        if max_window < 1:
            raise ContractError(f"max_window={max_window} leaves no room for a draft; give at least 1")
        self._most = max_window
        shares = (np.arange(SHARES) + 0.5) / SHARES
        reach = np.clip(math.log(LEAST_REACH) / np.log(shares), 1, max_window).astype(np.int64)
        self._reach = np.append(reach, max_window)
        self._limits = np.full(max(slots, 1), max_window, np.int64)
        self._tried = np.full(len(self._limits), PRIOR_TRIALS)
        self._accepted = np.full(len(self._limits), PRIOR_TRIALS * PRIOR_ACCEPTANCE)

    def open(self, slot: int) -> None:
        """Begin a new request in `slot`, with room for a whole draft; forget what an earlier one left."""
        if slot >= len(self._limits):
            size = max(slot + 1, 2 * len(self._limits))
            self._limits = grown(self._limits, size, self._most)
            self._tried = grown(self._tried, size, 0)
            self._accepted = grown(self._accepted, size, 0)
        self._limits[slot] = self._most
        self._tried[slot] = PRIOR_TRIALS
        self._accepted[slot] = PRIOR_TRIALS * PRIOR_ACCEPTANCE

    def limits(self, slots: Int64Array) -> Int64Array:
        """Return [B] the most tokens to draft next, each in 1..max_window, for `slots` [B]."""
        return self._limits.take(slots)

    def learn(self, slots: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Take in [B] drafted tokens and [B] of them accepted from the front; 0 drafted changes nothing."""
        some = drafted > 0
        # A row without a draft adds nothing and forgets nothing, so its limit stays too.
        fade = np.where(some, MEMORY, 1.0)
        tried = self._tried.take(slots) * fade + np.minimum(accepted + some, drafted)
        kept = self._accepted.take(slots) * fade + accepted
        self._tried[slots] = tried
        self._accepted[slots] = kept
        self._limits[slots] = self._reach.take((kept / tried * SHARES).astype(np.int64))


FIRST_CELLS = 1 << 12
"""Cells of an empty forest's arrays."""


class BlockMap:
    """Which cells of an array are lent: first fit among the holes, else the end.

    The caller owns the array and makes it at least `top` long. Holes that touch are merged, so the
    number of holes is at most the number of blocks; lending and freeing cost time linear in it.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.top = 0
        """Cells below this were lent at some time; the array must be as long."""

    def lend(self, cells: int) -> int:
        """Return the first cell of a block of `cells` >= 1 cells.

        >>> blocks = BlockMap()
        >>> [blocks.lend(4), blocks.lend(2)]
        [0, 4]
        >>> blocks.free(0, 4)
        >>> [blocks.lend(3), blocks.lend(3), blocks.top]
        [0, 6, 9]
        """
        for k, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            if stop - start >= cells:
                self._starts[k] = start + cells
                if self._starts[k] == stop:
                    del self._starts[k], self._stops[k]
                return start
        start = self.top
        self.top += cells
        return start

    def free(self, start: int, cells: int) -> None:
        """Take back `cells` cells from `start` on, a whole block or the end of one."""
        if cells <= 0:
            return
        stop = start + cells
        k = bisect_left(self._starts, start)
        if k < len(self._starts) and self._starts[k] == stop:
            stop = self._stops[k]
            del self._starts[k], self._stops[k]
        if k > 0 and self._stops[k - 1] == start:
            k -= 1
            start = self._starts[k]
            del self._starts[k], self._stops[k]
        if stop == self.top:
            self.top = start
        else:
            self._starts.insert(k, start)
            self._stops.insert(k, stop)


class DraftArena:
    """Texts and head tables of a forest: arrays that are lent out in blocks, which never move.

    Positions are offsets in the arrays and stay valid when these grow.
    """

    def __init__(self, gram: int) -> None:
        """Start small; `gram` is the length of the short contexts, in tokens."""
        self._gram = gram
        self._cells = BlockMap()
        self._entries = BlockMap()
        self.texts = kernels.Texts(
            tokens=np.full(FIRST_CELLS, -1, dtype=np.int32),
            previous=np.full((FIRST_CELLS, 2), -1, dtype=np.int32),
            weights=np.zeros(FIRST_CELLS, dtype=np.float32),
            heads=np.full(FIRST_CELLS, -1, dtype=np.int32),
        )
        """The arrays now; growing replaces them."""

    @property
    def bytes_used(self) -> int:
        """Bytes of the arrays, room for growth included."""
        return sum(array.nbytes for array in self.texts)

    def lend_text(self, cells: int, weight: float) -> int:
        """Return the first of `cells` positions, all separators, whose text votes with `weight`."""
        block = self._cells.lend(cells)
        if self._cells.top > len(self.texts.tokens):
            self.texts = kernels.Texts(
                tokens=grown(self.texts.tokens, self._cells.top, -1),
                previous=grown(self.texts.previous, self._cells.top, -1),
                weights=grown(self.texts.weights, self._cells.top, 0),
                heads=self.texts.heads,
            )
        self.texts.tokens[block : block + cells] = -1
        self.texts.previous[block : block + cells] = -1
        self.texts.weights[block : block + cells] = weight
        return block

    def free_text(self, block: int, cells: int) -> None:
        """Take back positions that no chain in use leads to."""
        self._cells.free(block, cells)

    def lend_table(self, positions: int) -> tuple[int, int]:
        """Return (first entry, mask) of empty head tables for about that many positions."""
        size = power_of_two(positions)
        head = self._entries.lend(2 * size)
        if self._entries.top > len(self.texts.heads):
            self.texts = self.texts._replace(heads=grown(self.texts.heads, self._entries.top, -1))
        self.texts.heads[head : head + 2 * size] = -1
        return head, size - 1

    def free_table(self, head: int, mask: int) -> None:
        """Take back what `lend_table` returned."""
        self._entries.free(head, 2 * (mask + 1))

    def write(self, start: int, tokens: npt.NDArray[np.int32], weight: float) -> None:
        """Put a text into lent positions."""
        self.texts.tokens[start : start + len(tokens)] = tokens
        self.texts.weights[start : start + len(tokens)] = weight

    def index(self, start: int, length: int, head: int, mask: int) -> None:
        """Put a text of `length` tokens into the chains of a table, the position after its end too."""
        kernels.link(self.texts, start, start + length + 1, self._gram, head, mask)


def power_of_two(cells: int) -> int:
    """Return the smallest power of two that holds `cells`, at least 16.

    >>> [power_of_two(n) for n in (1, 16, 17)]
    [16, 16, 32]
    """
    return 1 << max(4, (cells - 1).bit_length())


def grown(array: npt.NDArray[Any], rows: int, fill: int) -> npt.NDArray[Any]:
    """Return a copy of at least `rows` rows and half as many again as before, the new ones filled.

    >>> grown(np.array([1, 2]), 3, 7).tolist()
    [1, 2, 7]
    """
    larger = np.full((max(rows, len(array) * 3 // 2), *array.shape[1:]), fill, dtype=array.dtype)
    larger[: len(array)] = array
    return larger


PREFIX_TOKENS = 8
"""Tokens of the prompt's end that stand before each text, so that its very beginning has a context."""
PROMPT_WEIGHT = 0.5
"""Vote of the prompt's own text; a completion quotes it less often than it repeats its siblings."""
LIVE_WEIGHT = 1.0
"""Vote of a text sampled now, by the request itself or by a sibling."""
HEADS_AHEAD = 1 << 16
"""Most head entries prepared for tokens that are still to be sampled."""


@dataclass(slots=True)
class _Group:
    """What the tables do not hold of a group."""

    prefix: IntArray
    blocks: list[tuple[int, int]]
    """(first position, positions) lent to it."""
    documents: list[tuple[int, int]]
    """(start, length) of its indexed texts."""
    positions: int
    """Positions in its chains."""
    requests: set[int]


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
        self._arena = DraftArena(min_match)
        self._groups: dict[int, _Group] = {}
        self._free_groups: list[int] = []
        self._blocks: dict[int, tuple[int, int]] = {}
        """Slot of each live request -> (first position, positions) lent to it."""
        self._group_table = np.zeros((8, 3), dtype=np.int64)
        self._requests = np.zeros((slots, 8), dtype=np.int64)
        self._node = kernels.Node(
            *(np.zeros(kernels.CANDIDATES, dtype=kind) for kind in ("i8", "f8", "i8", "i8", "f8", "i8"))
        )
        hits, misses = prior()
        self._memory = kernels.Memory(
            hits=hits,
            misses=misses,
            kinds=np.zeros((slots, max_window), dtype=np.int16),
            pending=np.zeros(slots, dtype=np.int64),
            anchors=np.full((slots, kernels.ANCHORS), -1, dtype=np.int64),
            trails=np.zeros((slots, 2 + kernels.CANDIDATES), dtype=np.int64),
            factors=kernels.vote_factors(),
        )
        self._reserve_rows(slots)
        self._rehearse()

    @property
    def bytes_used(self) -> int:
        """Bytes of all arrays, room for growth included."""
        arrays = (self._group_table, self._requests, self._drafts, self._counts, self._chances)
        return self._arena.bytes_used + sum(array.nbytes for array in (*arrays, *self._node, *self._memory))

    def open_group(
        self,
        prompt: Sequence[int],
        completions: Sequence[tuple[IntArray, float]],
        capacity: int,
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
            vocabulary: token ids at or above this are never drafted.
        """
        asked = known_tokens(prompt, vocabulary)
        prefix = asked[max(0, len(asked) - PREFIX_TOKENS) :]
        texts = [(asked, PROMPT_WEIGHT)] if len(asked) else []
        for token_ids, weight in completions:
            tokens = usable(token_ids, weight, vocabulary)
            if tokens is not None:
                texts.append((np.concatenate([prefix, tokens]), float(weight)))
        cells = 1 + sum(len(text) + 1 for text, _ in texts)
        block = self._arena.lend_text(cells, 0.0)
        head, mask = self._arena.lend_table(cells + min(max(capacity, 0), HEADS_AHEAD))
        handle = self._free_groups.pop() if self._free_groups else len(self._groups)
        if handle >= len(self._group_table):
            self._group_table = grown(self._group_table, handle + 1, 0)
        self._group_table[handle] = (head, mask, max(0, min(vocabulary, 2**31 - 1)))
        self._groups[handle] = _Group(prefix, [(block, cells)], [], 0, set())
        held, position = self._groups[handle], block + 1
        for text, vote in texts:
            self._arena.write(position, text, vote)
            held.documents.append((position, len(text)))
            position += len(text) + 1
        # One behind the other, as they lie: in one go.
        held.positions = cells - 1
        if texts:
            self._arena.index(block + 1, cells - 2, head, mask)
        return handle

    def close_group(self, group: int) -> None:
        """Forget a group and free its memory; requests still open in it are closed first."""
        held = self._groups.get(group)
        if held is None:
            return
        for slot in list(held.requests):
            self.close_request(slot, finished=False)
        for block, cells in held.blocks:
            self._arena.free_text(block, cells)
        self._arena.free_table(*self._table(group))
        del self._groups[group]
        self._free_groups.append(group)

    def open_request(
        self, slot: int, group: int, prompt_length: int, max_tokens: int, own_text: bool = True
    ) -> None:
        """Follow a request from the end of its group's prompt on.

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
        self.close_request(slot, finished=False)
        self._reserve_slots(slot + 1)
        prefix = len(held.prefix)
        capacity = prefix + max(0, min(max_tokens, LONGEST_DOCUMENT))
        cells = 1 + capacity + self._window + 1  # separators, and room for the draft behind the text
        block = self._arena.lend_text(cells, LIVE_WEIGHT)
        self._arena.write(block + 1, held.prefix, LIVE_WEIGHT)
        head, mask = 0, -1
        if own_text:
            head, mask = self._arena.lend_table(capacity + 1)
            self._arena.index(block + 1, prefix, head, mask)
        self._blocks[slot] = block, cells
        held.requests.add(slot)
        self._requests[slot] = (group, block + 1, prefix, capacity, max(0, prompt_length), head, mask, 1)
        self._memory.pending[slot] = 0
        self._memory.anchors[slot] = -1
        self._memory.trails[slot] = 0

    def close_request(self, slot: int, finished: bool) -> None:
        """Stop following a slot; with `finished` its whole text stays, for its siblings to draft from.

        A slot that is not followed changes nothing.
        """
        if slot not in self._blocks:
            return
        group, start, length, *_, own_head, own_mask, _ = self._requests[slot].tolist()
        held, (block, cells) = self._groups[group], self._blocks.pop(slot)
        kept = 1 + length + 1 if finished else 0
        self._arena.free_text(block + kept, cells - kept)
        if own_mask >= 0:
            self._arena.free_table(own_head, own_mask)
        held.requests.discard(slot)
        self._requests[slot, kernels.LIVE] = 0
        self._memory.pending[slot] = 0
        if finished:
            held.blocks.append((block, kept))
            self._reserve_table(group, length + 1)
            self._arena.index(start, length, *self._table(group))
            held.documents.append((start, length))
            held.positions += length + 1

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
            drafts [B, W] int32, counts [B] int32 and path probabilities [B, W] float32, the first and the
            last meaningful up to counts. They are views, valid until the next call.
        """
        rows = len(slots)
        if rows > len(self._counts):
            self._reserve_rows(rows)
        drafts, counts, chances = self._drafts[:rows], self._counts[:rows], self._chances[:rows]
        kernels.draft_rows(
            self._arena.texts, self._node, self._memory, self._requests, self._group_table, self._gram,
            contiguous(slots, np.int64), contiguous(token_ids, np.int32), contiguous(lengths, np.int64),
            contiguous(limits, np.int64), float(floor), drafts, counts, chances,
        )  # fmt: skip
        return drafts, counts, chances

    def learn(self, slots: Int64Array, accepted: Int64Array) -> None:
        """Learn from the outcome of each slot's last draft, once; it calibrates later probabilities.

        Args:
            slots: [B] int64.
            accepted: [B] int64, tokens of the last draft that were accepted. All of it must have been
                verified: the first token that was not accepted counts as rejected.
        """
        kernels.learn_rows(self._memory, contiguous(slots, np.int64), contiguous(accepted, np.int64))

    def _table(self, group: int) -> tuple[int, int]:
        head, mask, _ = self._group_table[group].tolist()
        return head, mask

    def _reserve_table(self, group: int, more: int) -> None:
        """Make a group's head tables as large as its positions; doubling keeps that constant per token."""
        held = self._groups[group]
        head, mask = self._table(group)
        if held.positions + more <= mask + 1:
            return
        self._arena.free_table(head, mask)
        head, mask = self._arena.lend_table(held.positions + more)
        self._group_table[group, [kernels.HEAD, kernels.MASK]] = head, mask
        for start, length in held.documents:
            self._arena.index(start, length, head, mask)

    def _reserve_slots(self, slots: int) -> None:
        if slots <= len(self._requests):
            return
        self._requests = grown(self._requests, slots, 0)
        rows = len(self._requests)
        self._memory = self._memory._replace(
            kinds=grown(self._memory.kinds, rows, 0)[:rows],
            pending=grown(self._memory.pending, rows, 0)[:rows],
            anchors=grown(self._memory.anchors, rows, -1)[:rows],
            trails=grown(self._memory.trails, rows, 0)[:rows],
        )
        self._reserve_rows(rows)

    def _reserve_rows(self, rows: int) -> None:
        self._drafts = np.zeros((rows, self._window), dtype=np.int32)
        self._counts = np.zeros(rows, dtype=np.int32)
        self._chances = np.zeros((rows, self._window), dtype=np.float32)

    def _rehearse(self) -> None:
        """Run every kernel once, so that none compiles while an engine waits."""
        group = self.open_group((1, 2), [(np.array([3, 4], dtype=np.int32), 1.0)], 4, 8)
        self.open_request(0, group, 2, 4)
        row = np.array([[1, 2, 3, 4]], dtype=np.int32)
        one = np.zeros(1, dtype=np.int64)
        self.draft(one, row, one + 3, one + self._window, 0.0)
        self.learn(one, one)
        self.close_request(0, finished=True)
        self.close_group(group)
        self._memory.hits[:], self._memory.misses[:] = prior()
