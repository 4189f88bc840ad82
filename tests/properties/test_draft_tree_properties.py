"""Draft tree: whatever it is fed, drafts are well formed, come from the group's own texts, and repeat."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.drafting.forest import DraftForest
from tests.support.forests import stored_tokens

WINDOW = 6
SLOTS = 4
VOCABULARY = 12
WIDTH = 64

texts = st.lists(st.integers(0, VOCABULARY - 1), max_size=24)
wild = st.lists(st.integers(-3, VOCABULARY + 3), max_size=24)
documents = st.lists(st.tuples(wild, st.sampled_from([0.0, 0.2, 1.0, 3.0])), max_size=4)


@dataclass
class Fed:
    """A forest together with the rows an engine would hold."""

    forest: DraftForest
    rows: dict[int, list[int]] = field(default_factory=dict)

    def draft(
        self, slots: list[int], limits: list[int], floor: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table = np.zeros((len(slots), WIDTH), dtype=np.int32)
        for b, slot in enumerate(slots):
            table[b, : len(self.rows[slot])] = self.rows[slot]
        lengths = np.array([len(self.rows[slot]) for slot in slots], dtype=np.int64)
        drafts, counts, chances = self.forest.draft(
            np.array(slots, dtype=np.int64), table, lengths, np.array(limits, dtype=np.int64), floor
        )
        return drafts.copy(), counts.copy(), chances.copy()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("group"), wild, documents),
        st.tuples(st.just("shut"), st.integers(0, 5)),
        st.tuples(st.just("open"), st.integers(0, SLOTS - 1), st.integers(0, 5), st.integers(0, 30)),
        st.tuples(st.just("close"), st.integers(0, SLOTS - 1), st.booleans()),
        st.tuples(st.just("draft"), texts, st.integers(0, WINDOW), st.floats(0.0, 1.0)),
        st.tuples(st.just("learn"), st.integers(-1, WINDOW + 1)),
    ),
    max_size=30,
)


def play(script: list[tuple]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Do to a new forest what a script says; yield all drafts."""
    fed = Fed(DraftForest(1, WINDOW, 2))
    groups: list[tuple[int, list[int]]] = []
    for name, *values in script:
        if name == "group":
            prompt, completions = values
            asked = [(np.array(text, dtype=np.int64), weight) for text, weight in completions]
            groups.append((fed.forest.open_group(prompt, asked, 8, VOCABULARY), prompt))
        elif name == "shut" and groups:
            group, _ = groups.pop(values[0] % len(groups))
            fed.forest.close_group(group)
        elif name == "open" and groups:
            slot, which, most = values
            group, prompt = groups[which % len(groups)]
            fed.forest.open_request(slot, group, len(prompt), most)
            fed.rows[slot] = [max(0, token) for token in prompt]
        elif name == "close":
            fed.forest.close_request(*values)
        elif name == "draft" and fed.rows:
            more, limit, floor = values
            slots = sorted(fed.rows)
            for slot in slots:
                fed.rows[slot] = [*fed.rows[slot], *more][:WIDTH]
            yield fed.draft(slots, [limit] * len(slots), floor)
        elif name == "learn" and fed.rows:
            slots = np.array(sorted(fed.rows), dtype=np.int64)
            fed.forest.learn(slots, np.full(len(slots), values[0], dtype=np.int64))
    for group, _ in groups:
        fed.forest.close_group(group)
    assert stored_tokens(fed.forest) == 0


@given(actions)
def test_any_sequence_of_calls_gives_well_formed_drafts_and_loses_no_memory(script) -> None:
    limits_floors = [
        (limit, floor) for name, *values in script if name == "draft" for _, limit, floor in [values]
    ]
    asked = iter(limits_floors)
    made = list(play(script))
    if len(made) == len(limits_floors):  # no draft was asked for before the first request
        for (drafts, counts, chances), (limit, floor) in zip(made, asked, strict=True):
            for b, count in enumerate(counts):
                assert 0 <= count <= min(limit, WINDOW)
                kept = drafts[b, :count]
                assert np.all((kept >= 0) & (kept < VOCABULARY))
                odds = chances[b, :count]
                assert np.all((odds > 0) & (odds <= 1) & (odds >= np.float32(floor) - 1e-6))
                assert np.all(np.diff(odds) <= 0)


@given(actions)
def test_the_same_calls_give_the_same_drafts(script) -> None:
    for one, other in zip(play(script), play(script), strict=True):
        assert np.array_equal(one[1], other[1])
        for b, count in enumerate(one[1]):
            assert np.array_equal(one[0][b, :count], other[0][b, :count])


@given(prompt=texts, completions=st.lists(texts, max_size=3), own=texts, cuts=st.sets(st.integers(0, 23)))
def test_text_taken_in_piece_by_piece_is_text_taken_in_at_once(prompt, completions, own, cuts) -> None:
    results = []
    for stops in ([], sorted(cut for cut in cuts if cut < len(own))):
        fed = Fed(DraftForest(1, WINDOW, 2))
        weighed = [(np.array(text, dtype=np.int32), 1.0) for text in completions]
        group = fed.forest.open_group(prompt, weighed, 8, VOCABULARY)
        fed.forest.open_request(0, group, len(prompt), 40)
        for stop in stops:
            fed.rows[0] = [*prompt, *own[:stop]]
            fed.draft([0], [0], 0.0)
        fed.rows[0] = [*prompt, *own]
        drafts, counts, _ = fed.draft([0], [WINDOW], 0.0)
        results.append(drafts[0, : counts[0]].tolist())
    assert results[0] == results[1]


@given(prompt=texts, completions=st.lists(texts, max_size=4), own=texts)
def test_a_first_draft_continues_a_passage_of_the_texts_where_its_context_recurs(
    prompt, completions, own
) -> None:
    """The oracle knows nothing of chains: it searches every text for the last two tokens."""
    fed = Fed(DraftForest(1, WINDOW, 2))
    weighed = [(np.array(text, dtype=np.int32), 1.0) for text in completions]
    group = fed.forest.open_group(prompt, weighed, 8, VOCABULARY)
    fed.forest.open_request(0, group, len(prompt), 40)
    fed.rows[0] = [*prompt, *own]
    drafts, counts, _ = fed.draft([0], [1], 0.0)
    head = prompt[-8:]
    context = [*head, *own][-2:]
    sources = [prompt, *([*head, *text] for text in completions if text), [*head, *own]]
    following = {
        text[k]
        for text in sources
        for k in range(2, len(text))
        if len(context) == 2 and text[k - 2 : k] == context
    }
    if counts[0]:
        assert int(drafts[0, 0]) in following
    else:
        assert not following


@given(prompt=texts, text=texts, others=st.lists(texts, max_size=3))
def test_what_other_groups_hold_changes_no_draft(prompt, text, others) -> None:
    drafted = []
    for crowd in ([], others):
        fed = Fed(DraftForest(1, WINDOW, 2))
        strangers = [
            fed.forest.open_group(other, [(np.array(other, dtype=np.int32), 5.0)], 8, VOCABULARY)
            for other in crowd
        ]
        group = fed.forest.open_group(prompt, [(np.array(text, dtype=np.int32), 1.0)], 8, VOCABULARY)
        fed.forest.open_request(0, group, len(prompt), 40)
        for k, stranger in enumerate(strangers):
            fed.forest.open_request(1 + k, stranger, len(crowd[k]), 40)
            fed.rows[1 + k] = [*crowd[k], *text]
        made = []
        for stop in range(len(text) + 1):
            fed.rows[0] = [*prompt, *text[:stop]]
            drafts, counts, _ = fed.draft(sorted(fed.rows), [WINDOW] * len(fed.rows), 0.0)
            made.append(drafts[0, : counts[0]].tolist())
        drafted.append(made)
    assert drafted[0] == drafted[1]


@settings(max_examples=30)
@given(st.permutations(range(60)), st.integers(1, WINDOW))
def test_a_text_seen_before_takes_the_fewest_passes_there_are(text, window) -> None:
    forest = DraftForest(1, WINDOW, 2)
    group = forest.open_group([70, 71], [(np.array(text, dtype=np.int32), 1.0)], 60, 80)
    forest.open_request(0, group, 2, 60)
    row = np.array([[70, 71, *text]], dtype=np.int32)
    position, passes = 2, 0
    while position < 62:
        limit = min(window, 62 - position - 1)
        _, counts, _ = forest.draft(
            np.zeros(1, dtype=np.int64), row, np.array([position]), np.array([limit]), 0.0
        )
        assert counts[0] == limit
        forest.learn(np.zeros(1, dtype=np.int64), counts.astype(np.int64))
        position += int(counts[0]) + 1
        passes += 1
    assert passes == -(-60 // (window + 1))
