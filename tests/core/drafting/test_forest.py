"""Draft tree: what is drafted from which text, what siblings see, and that bad sources do nothing."""

import numpy as np
import pytest

from antiphon.core.drafting.forest import BlockMap, DraftForest
from antiphon.core.errors import ContractError
from tests.support.forests import stored_tokens

VOCABULARY = 1_000
PROMPT = [900, 901, 902, 903]
STORY = list(range(10, 40))


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class Rows:
    """A forest with one group, and requests whose texts are typed in."""

    def __init__(self, *completions, window=8, min_match=2, prompt=PROMPT) -> None:
        self.forest = DraftForest(2, window, min_match)
        self.prompt = list(prompt)
        self.window = window
        self.group = self.forest.open_group(
            self.prompt, [(np.asarray(c), w) for c, w in completions], 64, VOCABULARY
        )
        self.texts: dict[int, list[int]] = {}

    def open(self, slot: int = 0, max_tokens: int = 64, own_text: bool = True) -> "Rows":
        self.forest.open_request(slot, self.group, len(self.prompt), max_tokens, own_text)
        self.texts[slot] = []
        return self

    def draft(self, *more: int, slot: int = 0, limit: int | None = None, floor: float = 0.0) -> list[int]:
        self.texts[slot] += more
        row = tokens(*self.prompt, *self.texts[slot])[None, :]
        limits = ints(self.window if limit is None else limit)
        drafts, counts, chances = self.forest.draft(ints(slot), row, ints(row.shape[1]), limits, floor)
        assert np.all(np.diff(chances[0, : counts[0]]) <= 0)
        return drafts[0, : counts[0]].tolist()


def test_a_past_completion_is_drafted_from_its_first_token_on() -> None:
    rows = Rows((STORY, 1.0)).open()
    assert rows.draft() == STORY[:8]
    assert rows.draft(*STORY[:5]) == STORY[5:13]
    assert rows.draft(limit=3) == STORY[5:8]
    assert rows.draft(limit=0) == []


def test_drafts_end_where_the_document_does_and_where_the_request_must() -> None:
    assert Rows((STORY[:3], 1.0)).open().draft() == STORY[:3]
    assert Rows((STORY, 1.0)).open(max_tokens=4).draft(*STORY[:2]) == STORY[2:4]
    assert Rows((STORY, 1.0)).open(max_tokens=0).draft() == []


def test_the_heavier_branch_wins_and_many_light_ones_outvote_it() -> None:
    one, other = [10, 11, 50, 51], [10, 11, 60, 61]
    assert Rows((one, 1.0), (other, 0.4)).open().draft(10, 11) == [50, 51]
    assert Rows((one, 0.4), (other, 1.0)).open().draft(10, 11) == [60, 61]
    assert Rows((one, 1.0), *[(other, 0.4)] * 3).open().draft(10, 11) == [60, 61]


def test_a_longer_match_outvotes_a_shorter_one() -> None:
    near = [1, 2, 3, 4, 5, 70, 71]
    far = [9, 8, 7, 4, 5, 80, 81]
    rows = Rows((near, 1.0), *[(far, 1.0)] * 3, prompt=[]).open()
    assert rows.draft(1, 2, 3, 4, 5) == [70, 71]


def test_the_requests_own_text_is_a_source_unless_it_is_told_not_to_be() -> None:
    loop = [1, 2, 3, 4, 5, 6] * 3
    assert Rows().open().draft(*loop)[:6] == [1, 2, 3, 4, 5, 6]
    assert Rows().open(own_text=False).draft(*loop) == []


def test_the_prompt_is_a_source() -> None:
    assert Rows(prompt=[5, 6, 7, 8, 9, 4]).open().draft(5, 6)[:3] == [7, 8, 9]


def test_a_text_goes_on_beside_the_one_it_followed_after_a_token_that_no_text_foresaw() -> None:
    rows = Rows((STORY, 1.0), min_match=3).open()
    rows.draft(*STORY[:6])
    assert rows.draft(500)[:4] == STORY[7:11]


def test_siblings_see_a_finished_text_when_it_is_whole() -> None:
    rows = Rows().open(0).open(1)
    rows.draft(*STORY[:12], slot=0)
    assert rows.draft(slot=1) == []
    rows.forest.close_request(0, finished=True)
    assert rows.draft(slot=1) == STORY[:8]


def test_an_unfinished_text_is_forgotten() -> None:
    rows = Rows().open(0).open(1)
    rows.draft(*STORY[:12], slot=0)
    rows.forest.close_request(0, finished=False)
    assert rows.draft(slot=1) == []


def test_one_group_never_sees_another() -> None:
    rows = Rows().open()
    rows.forest.open_group(PROMPT, [(np.array(STORY), 1.0)], 8, VOCABULARY)
    assert rows.draft(*STORY[:4]) == []


@pytest.mark.parametrize(
    ("completion", "weight"),
    [
        ([], 1.0),
        ([1, -2, 3], 1.0),
        ([1, VOCABULARY, 3], 1.0),
        ([1, 2**40, 3], 1.0),
        ([1.5, 2.0], 1.0),
        ([[1, 2], [3, 4]], 1.0),
        (np.zeros(1 << 19, dtype=np.int32), 1.0),
        (STORY, 0.0),
        (STORY, -1.0),
        (STORY, float("nan")),
        (STORY, float("inf")),
    ],
)
def test_completions_that_cannot_be_used_are_left_out(completion, weight) -> None:
    rows = Rows((completion, weight)).open()
    assert rows.draft() == []
    assert Rows((completion, weight), (STORY, 1.0)).open().draft() == STORY[:8]


def test_the_floor_ends_a_draft_and_outcomes_move_it() -> None:
    rows = Rows((STORY, 1.0)).open()
    everything = rows.draft()
    assert rows.draft(floor=1.0) == []
    _, _, chances = rows.forest.draft(ints(0), tokens(*PROMPT)[None, :], ints(4), ints(8), 0.0)
    middle = float(chances[0, 4])
    assert rows.draft(floor=middle) == everything[:5]
    for _ in range(50):
        rows.draft()
        rows.forest.learn(ints(0), ints(0))
    assert len(rows.draft(floor=middle)) < 5
    for _ in range(400):
        rows.draft()
        rows.forest.learn(ints(0), ints(8))
    assert rows.draft(floor=0.9) == everything


def test_an_outcome_counts_once_and_strange_ones_are_bounded() -> None:
    rows = Rows((STORY, 1.0)).open()
    rows.draft()
    rows.forest.learn(ints(0), ints(8))
    once = (rows.forest._memory.hits.copy(), rows.forest._memory.misses.copy())
    rows.forest.learn(ints(0), ints(8))
    rows.forest.learn(ints(55, -3), ints(4, 4))
    assert np.array_equal(once[0], rows.forest._memory.hits)
    rows.draft()
    rows.forest.learn(ints(0), ints(1_000))
    rows.draft()
    rows.forest.learn(ints(0), ints(-5))
    assert np.all(rows.forest._memory.hits >= 0)


def test_a_row_shorter_than_before_and_a_slot_that_is_not_open_get_no_draft() -> None:
    rows = Rows((STORY, 1.0)).open()
    rows.draft(*STORY[:4])
    row = tokens(*PROMPT, *STORY[:2])[None, :]
    assert rows.forest.draft(ints(0), row, ints(6), ints(8), 0.0)[1][0] == 0
    assert rows.forest.draft(ints(7), row, ints(6), ints(8), 0.0)[1][0] == 0
    assert rows.draft() == STORY[4:12]


def test_a_slot_opened_again_starts_anew() -> None:
    rows = Rows((STORY, 1.0)).open()
    rows.draft(*STORY[:20])
    rows.open()
    assert rows.draft() == STORY[:8]


def test_closed_groups_give_their_memory_back() -> None:
    forest = DraftForest(4, 8, 2)
    sizes = []
    for _ in range(6):
        groups = [
            forest.open_group(PROMPT, [(np.arange(5_000) % 900, 1.0)] * 4, 256, VOCABULARY) for _ in range(3)
        ]
        for slot, group in enumerate(groups):
            forest.open_request(slot, group, len(PROMPT), 64)
        assert stored_tokens(forest) > 3 * 4 * 5_000
        for group in groups:
            forest.close_group(group)
        forest.close_group(groups[0])
        assert stored_tokens(forest) == 0
        sizes.append(forest.bytes_used)
    assert len(set(sizes)) == 1


def test_a_stored_token_takes_at_most_64_bytes() -> None:
    """The bound holds with the arrays' room for growth; the docs quote it."""
    source = np.random.default_rng(5)
    forest = DraftForest(64, 16, 3)
    for _ in range(8):
        texts = [(source.integers(0, 8_192, 1_000).astype(np.int32), 1.0) for _ in range(64)]
        forest.open_group(PROMPT, texts, 8 * 256, 8_192)
    assert forest.bytes_used / stored_tokens(forest) <= 64


@pytest.mark.parametrize("sizes", [(0, 8, 2), (1, 0, 2), (1, 8, 0), (1, 8, 9)])
def test_impossible_sizes_are_refused(sizes) -> None:
    with pytest.raises(ContractError, match="needs slots"):
        DraftForest(*sizes)


@pytest.mark.parametrize("slot", [-1, 1_000_001])
def test_a_request_needs_a_group_and_a_slot_in_range(slot) -> None:
    rows = Rows()
    with pytest.raises(ContractError, match="use slots"):
        rows.forest.open_request(slot, rows.group, 4, 8)
    with pytest.raises(ContractError, match="open the group first"):
        rows.forest.open_request(0, 99, 4, 8)


def test_more_slots_than_promised_are_no_harm() -> None:
    rows = Rows((STORY, 1.0)).open(300)
    assert rows.draft(slot=300) == STORY[:8]


def test_blocks_merge_when_they_touch() -> None:
    blocks = BlockMap()
    starts = [blocks.lend(4) for _ in range(4)]
    for k in (0, 2, 1):
        blocks.free(starts[k], 4)
    assert blocks.lend(12) == 0
    blocks.free(0, 12)
    blocks.free(starts[3], 4)
    assert blocks.top == 0
