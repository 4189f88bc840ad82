"""Span arithmetic against the plain table of which version sampled which token."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, PartialTrajectory, VersionSpan
from antiphon.core.spans import (
    beginning_of,
    branches,
    check_cover,
    clipped,
    joined,
    kept_cache_tokens,
    merged,
    rest_of,
    shifted,
    spans_of_changes,
    token_versions,
)
from tests.support.branched_rows import row_of, sampled_of, stories

LENGTH = 12
versions_of_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=LENGTH)


def single_spans(versions: list[int], start: int = 0) -> list[VersionSpan]:
    """Return one span for each token."""
    return [VersionSpan(version, at, at + 1) for at, version in enumerate(versions, start)]


def table(spans: tuple[VersionSpan, ...]) -> dict[int, int]:
    """Return token -> version."""
    return {at: span.version for span in spans for at in range(span.start, span.stop)}


def whole(versions: list[int], reason: FinishReason | None = FinishReason.STOP) -> PartialTrajectory:
    tokens = np.arange(len(versions), dtype=np.int32)
    logprobs = -tokens.astype(np.float32)
    return PartialTrajectory(tokens, logprobs, merged(single_spans(versions)), reason, sample_index=3)


@given(versions_of_tokens)
def test_merged_spans_say_the_same_with_no_equal_neighbours(versions: list[int]) -> None:
    spans = merged(single_spans(versions))
    assert table(spans) == dict(enumerate(versions))
    assert all(a.version != b.version for a, b in pairwise(spans))
    assert merged(spans) == spans
    check_cover(spans, 0, len(versions), "here")


@given(versions_of_tokens, st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_clipping_keeps_what_lies_inside(versions: list[int], start: int, stop: int) -> None:
    kept = {at: version for at, version in enumerate(versions) if start <= at < stop}
    assert table(clipped(merged(single_spans(versions)), start, stop)) == kept


@given(versions_of_tokens, st.integers(0, 50))
def test_shifting_moves_every_token(versions: list[int], by: int) -> None:
    spans = merged(single_spans(versions))
    assert table(shifted(spans, by)) == {at + by: version for at, version in enumerate(versions)}
    assert shifted(shifted(spans, by), -by) == spans


@given(versions_of_tokens, st.data())
def test_changes_of_version_become_spans(versions: list[int], data: st.DataObject) -> None:
    changes = [(versions[0], 0)] + [
        (version, at) for at, version in enumerate(versions) if at and version != versions[at - 1]
    ]
    start = data.draw(st.integers(0, len(versions) - 1))
    spans = spans_of_changes(changes, start, len(versions))
    assert spans == merged(single_spans(versions[start:], start))
    # A version that was replaced before it sampled anything leaves no trace.
    assert spans_of_changes([(9, 0), *changes], start, len(versions)) == spans


@given(versions_of_tokens, st.data())
def test_pieces_joined_again_are_the_whole(versions: list[int], data: st.DataObject) -> None:
    expected = whole(versions)
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH))))
    pieces, rest = [], expected
    for cut in cuts:
        if (later := rest_of(rest, cut)) is None:
            break
        before = rest.token_ids.size - later.token_ids.size
        pieces.append(
            PartialTrajectory(
                rest.token_ids[:before],
                rest.logprobs[:before],
                clipped(rest.spans, rest.start, cut),
                sample_index=3,
            )
        )
        assert pieces[-1].stop == later.start == cut
        check_cover(later.spans, later.start, later.stop, "here")
        rest = later
    found = joined([*pieces, rest])
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()
    assert (found.spans, found.finish_reason, found.sample_index) == (expected.spans, FinishReason.STOP, 3)
    assert (found.start, found.stop, found.oldest_version) == (0, len(versions), min(versions))


def test_the_rest_of_a_piece_may_be_all_of_it_or_nothing() -> None:
    piece = whole([1, 1, 2])
    assert rest_of(piece, 0) is piece and rest_of(piece, 3) is None and rest_of(piece, 9) is None


@given(versions_of_tokens)
def test_every_token_has_its_version(versions: list[int]) -> None:
    assert token_versions(whole(versions)).tolist() == versions


@given(versions_of_tokens, st.data())
def test_whatever_does_not_cover_the_tokens_is_refused(versions: list[int], data: st.DataObject) -> None:
    spans = list(merged(single_spans(versions)))
    place = data.draw(st.integers(0, len(spans) - 1))
    span, kind = spans[place], data.draw(st.sampled_from(["missing", "later", "longer", "empty", "twice"]))
    spans[place : place + 1] = {
        "missing": [],
        "later": [VersionSpan(span.version, span.start + 1, span.stop + 1)],
        "longer": [VersionSpan(span.version, span.start, span.stop + 1)],
        "empty": [VersionSpan(span.version, span.start, span.start), span],
        "twice": [span, span],
    }[kind]
    with pytest.raises(ContractError, match="here: version spans"):
        check_cover(spans, 0, len(versions), "here")


def test_versions_beyond_what_is_allowed_are_refused() -> None:
    spans = (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))
    check_cover(spans, 0, 3, "here", range(6))
    with pytest.raises(ContractError, match=r"version 5, but its lease allows versions 0\.\.4"):
        check_cover(spans, 0, 3, "here", range(5))


marked_tokens = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=LENGTH)


@given(marked_tokens, st.data())
def test_a_kept_cache_stays_with_its_tokens(tokens: list[tuple[int, bool]], data: st.DataObject) -> None:
    spans = merged(VersionSpan(version, at, at + 1, kept) for at, (version, kept) in enumerate(tokens))
    assert all((a.version, a.kept_cache) != (b.version, b.kept_cache) for a, b in pairwise(spans))
    one = replace(whole([version for version, _ in tokens]), spans=spans)
    marks = [kept for _, kept in tokens]
    assert kept_cache_tokens(one).tolist() == marks
    cut = data.draw(st.integers(0, len(tokens)))
    parts = [span for a, b in ((0, cut), (cut, len(tokens))) for span in clipped(spans, a, b)]
    assert merged(parts) == spans
    assert shifted(shifted(spans, 5), -5) == spans
    if (rest := rest_of(one, cut)) is not None and cut:
        begun = beginning_of(one, cut)
        assert joined([begun, rest]).spans == spans


@given(stories(), st.data())
def test_a_row_with_branches_is_cut_and_joined_again(story, data: st.DataObject) -> None:
    row = row_of(story)
    spans = merged(row.spans)
    whole = PartialTrajectory(
        row.token_ids, row.logprobs, spans, None, sample_index=0, observed=row.observed, breaks=row.breaks
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, row.stop), max_size=4)) | {*row.breaks, row.stop})
    pieces = []
    for start, stop in pairwise([0, *cuts]):
        piece = rest_of(beginning_of(whole, stop), start)
        assert piece is not None and (piece.start, piece.stop) == (start, stop)
        pieces.append(piece)
    again = joined(pieces)
    assert (again.spans, again.observed, again.breaks) == (spans, row.observed, row.breaks)
    assert again.token_ids.tolist() == row.token_ids.tolist()
    assert again.logprobs.tolist() == row.logprobs.tolist()


@given(stories())
def test_branches_hold_each_sampled_token_once_behind_what_it_saw(story) -> None:
    row, found = row_of(story), []
    versions = token_versions(row)
    for number, branch in enumerate(branches(row.prompt_token_ids, row)):
        assert branch.number == number
        text = [*branch.context.tolist(), *row.token_ids[branch.start : branch.stop].tolist()]
        for place in range(branch.start, branch.stop):
            if versions[place] >= 0:
                position = branch.shift + place
                sampled = text[position], float(row.logprobs[place]), int(versions[place])
                found.append((tuple(text[:position]), *sampled))
    assert found == sampled_of(story)
