"""The history store stays within its bounds, keeps what is newest, and hands out what never changes."""

import math
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.drafting.history import HistoryChange, HistoryStore, completion_weight, weighted
from antiphon.core.drafting.history_codec import EncodedHistory, decode_history, encode_history, fit_histories
from antiphon.core.errors import ContractError
from antiphon.core.records import PastCompletion, PromptHistory
from antiphon.net.wire import prompt_history_from_proto, prompt_history_to_proto
from antiphon.protos import records_pb2

INT32 = 2**31 - 1
UNBOUNDED = 1 << 40


def past(tokens: list[int], epoch: int = 0, index: int = 0, reward: float = 0.0) -> PastCompletion:
    return PastCompletion(np.array(tokens, dtype=np.int32), epoch, epoch, index, reward)


def group(epoch: int, size: int, length: int = 3, seed: int = 0) -> list[PastCompletion]:
    rng = np.random.default_rng([epoch, size, seed])
    return [past(rng.integers(0, 50, length).tolist(), epoch, i, float(i % 2)) for i in range(size)]


def plain(history: PromptHistory | None) -> object:
    if history is None:
        return None
    rows = [(p.token_ids.tolist(), p.version, p.epoch, p.sample_index, p.reward) for p in history.completions]
    return history.prompt_key, history.epoch, rows


additions = st.lists(
    st.tuples(
        st.sampled_from("pqrs"), st.integers(0, 6), st.integers(1, 5), st.integers(0, 60), st.booleans()
    ),
    max_size=40,
)


def fill(store: HistoryStore, items: list[tuple[str, int, int, int, bool]]) -> list[HistoryChange]:
    return [
        store.add(key, epoch, group(epoch, size, length, seed), evaluated=key == "s")
        for seed, (key, epoch, size, length, _) in enumerate(items)
    ]


@given(additions, st.integers(1, 3), st.integers(1, 8), st.integers(0, 12_000))
def test_bounds_hold_and_the_journal_can_follow(
    items: list[tuple[str, int, int, int, bool]], epochs: int, responses: int, limit: int
) -> None:
    store = HistoryStore(epochs, responses, limit)
    mirror: set[tuple[str, int]] = set()
    for seed, (key, epoch, size, length, _) in enumerate(items):
        change = store.add(key, epoch, group(epoch, size, length, seed), evaluated=key == "s")
        assert store.bytes_used <= limit
        assert mirror.issuperset(change.gone)
        mirror.difference_update(change.gone)
        if change.kept:
            assert (key, epoch) not in mirror
            mirror.add((key, epoch))
        assert mirror == {(p, e) for p in "pqrs" for e in store.epochs_of(p)}
        for prompt in "pqr":
            assert len(store.epochs_of(prompt)) <= epochs
        for prompt in "pqrs":
            history = store.snapshot(prompt)
            assert (history is None) == (not store.epochs_of(prompt))
            if history is not None:
                assert 0 < len(history.completions) <= responses
                order = [(-p.epoch, p.sample_index) for p in history.completions]
                assert order == sorted(order) and history.epoch == -order[0][0]
    if not mirror:
        assert store.bytes_used == 0 and len(store) == 0


@given(additions, st.integers(1, 3))
def test_with_room_the_newest_epochs_survive(
    items: list[tuple[str, int, int, int, bool]], epochs: int
) -> None:
    store = HistoryStore(epochs, 4, UNBOUNDED)
    fill(store, items)
    for prompt in "pqrs":
        added = sorted({epoch for key, epoch, *_ in items if key == prompt}, reverse=True)
        window = max(epochs, 4) if prompt == "s" else epochs
        assert store.epochs_of(prompt) == tuple(added[:window])


@given(additions, st.integers(3_000, 12_000))
def test_a_newest_epoch_is_only_turned_away_when_no_older_one_is_left(
    items: list[tuple[str, int, int, int, bool]], limit: int
) -> None:
    store = HistoryStore(2, 4, limit)
    for seed, (key, epoch, size, length, _) in enumerate(items):
        before = store.epochs_of(key)
        change = store.add(key, epoch, group(epoch, size, length, seed))
        if not change.kept and epoch > max(before, default=-1):
            assert all(len(store.epochs_of(prompt)) <= 1 for prompt in "pqrs")
            others = {p for p, e in change.gone if p != key and not store.epochs_of(p)}
            assert not others  # no other prompt lost all it had to a newcomer


@given(additions, st.integers(1, 3), st.integers(0, 12_000))
def test_snapshots_never_change(
    items: list[tuple[str, int, int, int, bool]], epochs: int, limit: int
) -> None:
    store = HistoryStore(epochs, 6, limit)
    taken: list[tuple[PromptHistory, object]] = []
    for seed, (key, epoch, size, length, _) in enumerate(items):
        tokens = group(epoch, size, length, seed)
        store.add(key, epoch, tokens)
        for completion in tokens:
            completion.token_ids[:] = -1  # the sender's arrays are not the store's
        for prompt in "pqrs":
            history = store.snapshot(prompt)
            if history is not None:
                taken.append((history, plain(history)))
        assert all(plain(history) == before for history, before in taken)
    for history, _ in taken:
        for completion in history.completions:
            assert not completion.token_ids.flags.writeable


@given(additions, st.integers(1, 3), st.integers(0, 12_000))
def test_rows_that_were_kept_restore_the_same_snapshots(
    items: list[tuple[str, int, int, int, bool]], epochs: int, limit: int
) -> None:
    store = HistoryStore(epochs, 6, limit)
    rows: dict[tuple[str, int], list[PastCompletion]] = {}
    for seed, (key, epoch, size, length, _) in enumerate(items):
        completions = group(epoch, size, length, seed)
        change = store.add(key, epoch, completions, evaluated=key == "s")
        for gone in change.gone:
            del rows[gone]
        if change.kept:
            rows[key, epoch] = completions
    again = HistoryStore(epochs, 6, limit)
    for (key, epoch), completions in rows.items():
        assert again.add(key, epoch, completions, evaluated=key == "s") == HistoryChange(True, ())
    for prompt in "pqrs":
        assert plain(again.snapshot(prompt)) == plain(store.snapshot(prompt))
    assert again.bytes_used == store.bytes_used


def test_the_first_group_of_an_epoch_stays() -> None:
    store = HistoryStore(2, 8, UNBOUNDED)
    assert store.add("p", 1, group(1, 3)).kept
    before = plain(store.snapshot("p"))
    assert store.add("p", 1, group(1, 3)) == HistoryChange(False, ())
    assert store.add("p", 1, group(1, 4, seed=9)) == HistoryChange(False, ())
    assert store.add("q", 0, []) == HistoryChange(False, ())
    assert plain(store.snapshot("p")) == before and store.snapshot("q") is None


def test_newest_epoch_first_then_by_sample() -> None:
    store = HistoryStore(3, 5, UNBOUNDED)
    for epoch in (2, 0, 1):
        store.add("p", epoch, list(reversed(group(epoch, 2))))
    history = store.snapshot("p")
    assert history is not None and history.epoch == 2
    assert [(p.epoch, p.sample_index) for p in history.completions] == [
        (2, 0),
        (2, 1),
        (1, 0),
        (1, 1),
        (0, 0),
    ]


# Weights.


@given(
    st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=12),
    st.floats(0.0, 1.0),
    st.floats(0.01, 1.0),
    st.integers(0, 300),
)
def test_weights_are_positive_and_at_most_one(
    rewards: list[float], reward_weight: float, recency: float, apart: int
) -> None:
    completions = tuple(past([1], epoch=i * apart, index=i, reward=r) for i, r in enumerate(rewards))
    found = weighted(PromptHistory("p", 0, completions), recency, reward_weight)
    assert all(0.0 < weight <= 1.0 and math.isfinite(weight) for _, weight in found)


def test_rewards_and_age_order_the_weights() -> None:
    completions = (
        past([1], epoch=40, index=0, reward=1.0),
        past([2], epoch=40, index=1, reward=0.0),
        past([], epoch=40, index=2, reward=0.0),
        past([3], epoch=30, index=0, reward=0.5),
    )
    found = weighted(PromptHistory("p", 40, completions), recency=0.5, reward_weight=1.0)
    assert [tokens.tolist() for tokens, _ in found] == [[1], [2], [3]]
    good, bad, older = (weight for _, weight in found)
    assert good > bad
    assert older == pytest.approx(0.5 * 0.5)  # equal rewards: advantage 0; one known epoch older
    assert weighted(None, 0.5, 1.0) == []
    assert completion_weight(7.0, 0.0, 0.0, 2, 0.5, 0.0) == 0.25


# Encoding.

histories = st.builds(
    lambda rows: PromptHistory("p", max(e for _, e, *_ in rows), tuple(past(*row) for row in rows)),
    st.lists(
        st.tuples(
            st.lists(st.integers(-INT32, INT32), max_size=40),
            st.integers(0, 2**60),
            st.integers(0, 500),
            st.floats(allow_nan=False, allow_infinity=False),
        ),
        min_size=1,
        max_size=8,
    ),
)


@given(histories)
def test_reading_what_was_written_gives_the_same(history: PromptHistory) -> None:
    assert plain(decode_history(encode_history(history))) == plain(history)
    message = records_pb2.PromptHistory.FromString(prompt_history_to_proto(history).SerializeToString())
    assert plain(prompt_history_from_proto(message)) == plain(history)


@given(histories, st.integers(0, 1500))
def test_no_limit_is_exceeded_and_what_fits_goes_along(history: PromptHistory, limit: int) -> None:
    (fitting,) = fit_histories([history], limit, UNBOUNDED)
    whole = prompt_history_to_proto(history).ByteSize()
    if fitting is None:
        assert whole > limit - 200
        return
    assert prompt_history_to_proto(fitting).ByteSize() <= limit
    wanted = iter(map(id, history.completions))
    assert all(id(p) in wanted for p in fitting.completions)  # in the same order


def test_newest_completions_stay_where_not_all_fit() -> None:
    rng = np.random.default_rng(0)
    rows = tuple(past(rng.integers(0, 150_000, 500).tolist(), 3 - i // 4, i % 4) for i in range(12))
    (fitting,) = fit_histories([PromptHistory("p", 3, rows)], 9_000, UNBOUNDED)
    assert fitting is not None
    assert [p.token_ids.tolist() for p in fitting.completions] == [
        p.token_ids.tolist() for p in rows[: len(fitting.completions)]
    ]
    assert 4 <= len(fitting.completions) < 12


@given(st.lists(st.one_of(st.none(), histories), max_size=6), st.integers(0, 800), st.integers(0, 2500))
def test_a_reply_keeps_its_budget(found: list[PromptHistory | None], limit: int, budget: int) -> None:
    fitting = fit_histories(found, limit, budget)
    assert len(fitting) == len(found)
    sizes = [prompt_history_to_proto(history).ByteSize() for history in fitting if history is not None]
    assert all(size <= limit for size in sizes) and sum(sizes) <= budget


@given(histories, st.data())
@settings(max_examples=300)
def test_damaged_bytes_never_raise(history: PromptHistory, data: st.DataObject) -> None:
    payload = bytearray(prompt_history_to_proto(history).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    try:
        message = records_pb2.PromptHistory.FromString(bytes(payload))
    except DecodeError:  # no message at all; gRPC answers for that
        return
    prompt_history_from_proto(message)


def packed(tokens: list[int]) -> bytes:
    return zlib.compress(np.array(tokens, dtype="<i4").tobytes())


SOUND = EncodedHistory("p", 1, (2, 1), (0, 0), (1, 0), (0, 0), (1.0, 0.0), packed([5, 6, 7]))


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (replace(SOUND, lengths=()), "no completions"),
        (replace(SOUND, rewards=(1.0,)), "rows of"),
        (replace(SOUND, lengths=(-1, 4)), "-1 tokens"),
        (replace(SOUND, rewards=(1.0, math.nan)), "not finite"),
        (replace(SOUND, lengths=(2, 2)), "exactly the 16 bytes"),
        (replace(SOUND, lengths=(1, 1)), "exactly the 8 bytes"),
        (replace(SOUND, lengths=(INT32, INT32)), "allowed"),
        (replace(SOUND, tokens=b""), "exactly"),
        (replace(SOUND, tokens=b"not zlib at all"), "decompress"),
        (replace(SOUND, tokens=SOUND.tokens[:-3]), "exactly"),
        (replace(SOUND, tokens=SOUND.tokens + b"x"), "exactly"),
    ],
)
def test_what_cannot_be_read_says_why(encoded: EncodedHistory, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        decode_history(encoded)
    assert decode_history(SOUND).completions


def test_a_bomb_is_not_unpacked() -> None:
    bomb = replace(SOUND, tokens=zlib.compress(bytes(64 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(ContractError, match="exactly the 12 bytes"):
            decode_history(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_half_the_memory_finds_nearly_half_of_the_prompts() -> None:
    rng = np.random.default_rng(3)
    sizes = HistoryStore(1, 4, UNBOUNDED)
    sizes.add("p", 0, group(0, 4, 10))
    store, found, asked = HistoryStore(1, 4, 50 * sizes.bytes_used), 0, 0
    for epoch in range(10):
        for prompt in rng.permutation(100):
            key, length = f"prompt-{prompt}", 10 + epoch + int(rng.integers(-3, 4))
            if epoch > 1:
                asked, found = asked + 1, found + (store.snapshot(key) is not None)
            store.add(key, epoch, group(epoch, 4, length, int(prompt)))
    assert found / asked > 0.4
