"""Pieces of completions come in any order and any number of times; what is kept is a true beginning."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ContractError
from antiphon.core.loop.checks import check_piece
from antiphon.core.loop.partials import BYTES_PER_TOKEN, KeptGroup, PartialGroups, authorship
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
        assert kept.oldest_version == 3
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


@given(story=told, room=st.integers(0, 2 * LENGTH))
def test_the_memory_is_bounded(story: list[Told], room: int) -> None:
    partial_groups = PartialGroups(room * BYTES_PER_TOKEN)
    partial_groups.begin("lease", "g", SAMPLES, None)
    for piece, worker in story:
        partial_groups.take("lease", worker, piece)
        assert partial_groups.tokens <= room


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
    # Who begins anew, or changes what was handed on, is the author of what differs.
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
