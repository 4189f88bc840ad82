"""Pieces of completions come in any order and any number of times; what is kept is a true beginning."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.checks import TokenRules, check_piece
from antiphon.core.errors import ContractError
from antiphon.core.loop.partials import (
    PIECE_BYTES,
    KeptGroup,
    KeptSample,
    PartialGroups,
    authorship,
    false_author,
)
from antiphon.core.records import FinishReason, PartialTrajectory, Trajectory, VersionSpan

LENGTH, SAMPLES = 12, 2


def truth(sample: int, start: int, stop: int) -> PartialTrajectory:
    """Return tokens [start, stop) of a completion whose version changes after token 5."""
    tokens = np.arange(start, stop, dtype=np.int32) + 100 * sample
    spans = [VersionSpan(3, start, min(5, stop)), VersionSpan(4, max(5, start), stop)]
    return PartialTrajectory(
        tokens,
        -tokens.astype(np.float32) / 7,
        tuple(span for span in spans if span.stop > span.start),
        FinishReason.STOP if stop == LENGTH else None,
        sample_index=sample,
    )


def trajectory(tokens: np.ndarray, sample: int = 0) -> Trajectory:
    whole = truth(sample, 0, len(tokens))
    return Trajectory(tokens, whole.logprobs, whole.spans, FinishReason.STOP, sample_index=sample, seed=0)


@st.composite
def pieces(draw: st.DrawFn) -> PartialTrajectory:
    start = draw(st.integers(0, LENGTH - 1))
    return truth(draw(st.integers(0, SAMPLES - 1)), start, draw(st.integers(start + 1, LENGTH)))


Told = tuple[PartialTrajectory, str]
told = st.lists(st.tuples(pieces(), st.sampled_from(["a", "b"])), max_size=40)


@given(first=told, second=told)
def test_what_is_kept_is_a_gapless_beginning_whatever_came_in(first: list[Told], second: list[Told]) -> None:
    partial_groups = PartialGroups(1 << 20)
    kept: KeptGroup | None = None
    reached = [0] * SAMPLES
    for attempt, story in enumerate((first, second)):
        lease = f"lease-{attempt}"
        partial_groups.begin(lease, "g", SAMPLES, kept)
        before = sum(reached)
        for piece, worker in story:
            if piece.start <= reached[piece.sample_index]:
                reached[piece.sample_index] = max(reached[piece.sample_index], piece.stop)
            partial_groups.take(lease, worker, piece)
        assert partial_groups.kept(lease) == tuple(reached)
        assert partial_groups.sampled(lease) == sum(reached) - before
        assert partial_groups.tokens == sum(reached)
        kept = partial_groups.end(lease)
        assert (kept is None) == (not any(reached)) and partial_groups.tokens == 0
        if kept is None:
            continue
        partial_groups.wait("g", kept)
        assert partial_groups.tokens == kept.tokens == sum(reached)
        assert min(kept.versions) == 3
        for sample in kept.samples:
            whole = sample.whole
            expected = truth(whole.sample_index, 0, reached[whole.sample_index])
            assert whole.token_ids.tolist() == expected.token_ids.tolist()
            assert whole.logprobs.tobytes() == expected.logprobs.tobytes()
            assert (whole.spans, whole.finish_reason) == (expected.spans, expected.finish_reason)
            stops = [stop for _, stop in sample.authors]
            assert stops == sorted(set(stops)) and stops[-1] == whole.stop
    partial_groups.forget("g")
    assert partial_groups.tokens == 0


@given(story=told, room=st.integers(0, 8 * PIECE_BYTES))
def test_the_memory_is_bounded(story: list[Told], room: int) -> None:
    partial_groups = PartialGroups(room)
    partial_groups.begin("lease", "g", SAMPLES, None)
    for piece, worker in story:
        partial_groups.take("lease", worker, piece)
        assert 8 * partial_groups.tokens <= partial_groups.held <= room
    if (kept := partial_groups.end("lease")) is not None:
        assert partial_groups.held == 0
        partial_groups.wait("g", kept)
        assert 8 * partial_groups.tokens <= partial_groups.held
        partial_groups.begin("next", "g", SAMPLES, kept)
        partial_groups.end("next")
    assert partial_groups.held == 0


@pytest.mark.parametrize("overlapping", [False, True])
def test_what_is_counted_is_what_is_held(overlapping: bool) -> None:
    """One token a heartbeat, alone or after all those before it: no message stays in memory for one token."""
    count = 2000
    partial_groups = PartialGroups(64 << 20)
    partial_groups.begin("lease", "g", 1, None)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for stop in range(1, count + 1):
        start = 0 if overlapping else stop - 1
        spans = tuple(VersionSpan(0, at, at + 1) for at in range(start, stop)[-50:])
        spans = (VersionSpan(0, start, spans[0].start), *spans) if spans[0].start > start else spans
        tokens, logprobs = np.zeros(stop - start, np.int32), np.zeros(stop - start, np.float32)
        piece = PartialTrajectory(tokens, logprobs, spans, None, sample_index=0)
        partial_groups.take("lease", "w-1", piece)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert partial_groups.tokens == count
    assert held - before <= partial_groups.held + (
        256 << 10
    )  # numpy keeps small buffers, and the test numbers
    assert partial_groups.held <= 8 * count + 16 * PIECE_BYTES


def test_authors_are_those_whose_tokens_were_handed_in() -> None:
    partial_groups = PartialGroups(1 << 20)
    partial_groups.begin("one", "g", SAMPLES, None)
    partial_groups.take("one", "a", truth(0, 0, 4))
    given_to_b = partial_groups.end("one")
    partial_groups.begin("two", "g", SAMPLES, given_to_b)
    partial_groups.take("two", "b", truth(0, 2, 7))
    partial_groups.take("two", "b", truth(1, 0, 3))
    given_to_c = partial_groups.end("two")
    whole = [trajectory(truth(i, 0, LENGTH).token_ids, i) for i in range(SAMPLES)]
    assert authorship(given_to_c, whole, "c") == ((0, "a", 0, 4), (0, "b", 4, 7), (1, "b", 0, 3))
    assert authorship(given_to_c, whole, "b") == ((0, "a", 0, 4),)
    assert authorship(None, whole, "c") == ()
    # Who begins again, or changes what was handed on, is the author of what differs.
    other = truth(0, 0, LENGTH).token_ids.copy()
    other[2] += 1
    assert authorship(given_to_c, [trajectory(other), whole[1]], "c") == ((0, "a", 0, 2), (1, "b", 0, 3))
    # So is who alters a log-probability or a version of another's token: an audit would hold it against them.
    lied = whole[0].logprobs.copy()
    lied[1] -= 5.0
    false = [dataclasses.replace(whole[0], logprobs=lied), whole[1]]
    assert authorship(given_to_c, false, "c") == ((0, "a", 0, 1), (1, "b", 0, 3))
    renamed = [dataclasses.replace(whole[0], spans=(VersionSpan(9, 0, LENGTH),)), whole[1]]
    assert authorship(given_to_c, renamed, "c") == ((1, "b", 0, 3),)
    short = [trajectory(truth(0, 0, 1).token_ids), whole[1]]
    assert authorship(given_to_c, short, "c") == ((0, "a", 0, 1), (1, "b", 0, 3))


def changed(**fields: object) -> PartialTrajectory:
    made = {
        "sample_index": 0,
        "token_ids": np.array([5, 6], np.int32),
        "logprobs": np.array([-1.0, -2.0], np.float32),
        "spans": (VersionSpan(3, 2, 4),),
        "finish_reason": None,
    }
    return PartialTrajectory(**{**made, **fields})  # type: ignore[arg-type]


WRONG = {
    "sample too large": {"sample_index": SAMPLES},
    "sample negative": {"sample_index": -1},
    "negative start": {"spans": (VersionSpan(3, -1, 1),)},
    "no tokens": {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)},
    "logprobs missing": {"logprobs": np.zeros(1, np.float32)},
    "negative token": {"token_ids": np.array([-5, 6], np.int32)},
    "NaN": {"logprobs": np.array([np.nan, -1], np.float32)},
    "minus infinity": {"logprobs": np.array([-np.inf, -1], np.float32)},
    "above zero": {"logprobs": np.array([0.5, -1], np.float32)},
    "beyond the longest": {"spans": (VersionSpan(3, LENGTH - 1, LENGTH + 1),)},
    "full but not ended": {"spans": (VersionSpan(3, LENGTH - 2, LENGTH),)},
    "ended by length too early": {"finish_reason": FinishReason.LENGTH},
    "span with a gap": {"spans": (VersionSpan(3, 3, 4),)},
    "span too short": {"spans": (VersionSpan(3, 2, 3),)},
    "empty span": {"spans": (VersionSpan(3, 2, 2), VersionSpan(3, 2, 4))},
    "no spans": {"spans": ()},
    "version of the future": {"spans": (VersionSpan(9, 2, 4),)},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG.keys())
def test_progress_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    limits = {"samples": SAMPLES, "max_tokens": LENGTH, "version": None, "newest_version": 4}
    check_piece(changed(), "g", **limits)
    with pytest.raises(ContractError, match="progress of group g, sample"):
        check_piece(changed(**fields), "g", **limits)


def test_fixed_mode_takes_progress_of_one_version_alone() -> None:
    limits = {"samples": SAMPLES, "max_tokens": LENGTH, "newest_version": 4}
    check_piece(changed(), "g", version=3, **limits)
    with pytest.raises(ContractError, match=r"version 3, but its lease allows versions 4\.\.4"):
        check_piece(changed(), "g", version=4, **limits)


VOCABULARY, END = 8, 1
TOKEN_RULES = TokenRules(VOCABULARY, frozenset({END}))


def passes(piece: PartialTrajectory) -> bool:
    try:
        check_rules(piece)
    except ContractError:
        return False
    return True


def check_rules(piece: PartialTrajectory) -> None:
    limits = {"samples": SAMPLES, "max_tokens": LENGTH, "version": None, "newest_version": 4}
    check_piece(piece, "g", rules=TOKEN_RULES, keeps_cache=True, **limits)


@st.composite
def any_pieces(draw: st.DrawFn) -> PartialTrajectory:
    """Return a piece of tokens of all kinds, of which many cannot be."""
    start = draw(st.integers(0, LENGTH - 1))
    tokens = np.array(
        draw(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=LENGTH - start)), np.int32
    )
    return PartialTrajectory(
        tokens,
        np.full(tokens.size, draw(st.sampled_from([-1.0, 0.0, 0.5, -60.0])), np.float32),
        (VersionSpan(draw(st.integers(3, 5)), start, start + tokens.size, draw(st.booleans())),),
        draw(st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH])),
        sample_index=draw(st.integers(0, SAMPLES - 1)),
    )


@given(story=st.lists(st.tuples(any_pieces(), st.sampled_from(["a-1", "b-1"])), max_size=30))
def test_pieces_that_pass_make_a_beginning_that_passes(story: list[Told]) -> None:
    """Whatever was refused at its arrival, nothing is left that a whole group could be refused for."""
    partial_groups = PartialGroups(1 << 20)
    partial_groups.begin("lease", "g", SAMPLES, None)
    for piece, worker in story:
        if passes(piece):
            partial_groups.take("lease", worker, piece)
        assert false_author(partial_groups.snapshot("lease"), check_rules) is None


@given(
    stops=st.sets(st.integers(1, LENGTH - 1), min_size=1, max_size=4),
    place=st.integers(0, LENGTH - 2),
    bad=st.sampled_from([END, VOCABULARY]),
)
def test_a_false_beginning_is_held_against_who_wrote_its_first_false_token(
    stops: set[int], place: int, bad: int
) -> None:
    authors = tuple((f"w{number}-1", stop) for number, stop in enumerate(sorted(stops)))
    length = authors[-1][1]
    tokens = np.full(length, 3, np.int32)
    tokens[min(place, length - 1)] = bad
    spans, logprobs = (VersionSpan(3, 0, length),), -np.ones(length, np.float32)
    whole = PartialTrajectory(tokens, logprobs, spans, sample_index=1)
    true = KeptSample(truth(0, 0, 1), (("other-1", 1),))
    found = false_author(KeptGroup((true, KeptSample(whole, authors))), check_rules)
    guilty = next(worker for worker, stop in authors if stop > min(place, length - 1))
    assert found is not None and found[0] == guilty
    assert "progress of group g, sample 1" in found[1]
    assert false_author(None, check_rules) is None


@pytest.mark.parametrize(
    ("tokens", "finish_reason", "words"),
    [
        ([3, END, 4], None, "continues after its end token at 1 of 3"),
        ([3, 4], FinishReason.STOP, "finish_reason=stop, but token 4 is no end token"),
        ([3, END], None, "token 1 ends it, but it has no finish_reason"),
        ([3, VOCABULARY], None, "token id 8 is not in the vocabulary of 8"),
        ([3, END], FinishReason.STOP, ""),
        ([3, 4], None, ""),
    ],
)
def test_pieces_keep_the_rules_of_tokens(
    tokens: list[int], finish_reason: FinishReason | None, words: str
) -> None:
    piece = PartialTrajectory(
        np.array(tokens, np.int32),
        -np.ones(len(tokens), np.float32),
        (VersionSpan(3, 2, 2 + len(tokens)),),
        finish_reason,
        sample_index=0,
    )
    if not words:
        check_rules(piece)
        return
    with pytest.raises(ContractError, match=words):
        check_rules(piece)


@pytest.mark.parametrize(
    ("version", "kept_cache"), [(3, False), (4, True)], ids=["older", "kept without a swap"]
)
def test_a_piece_that_what_is_kept_cannot_go_on_with_is_left_out(version: int, kept_cache: bool) -> None:
    partial_groups = PartialGroups(1 << 20)
    partial_groups.begin("lease", "g", SAMPLES, None)
    partial_groups.take("lease", "a-1", changed(sample_index=0, spans=(VersionSpan(4, 0, 2),)))
    late = changed(sample_index=0, spans=(VersionSpan(version, 2, 4, kept_cache),))
    check_rules(late)
    partial_groups.take("lease", "b-1", late)
    assert partial_groups.kept("lease") == (2, *(0,) * (SAMPLES - 1))
    partial_groups.take("lease", "b-1", changed(sample_index=0, spans=(VersionSpan(5, 2, 4, True),)))
    assert partial_groups.kept("lease")[0] == 4
