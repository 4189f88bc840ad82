"""Spans: all arithmetic of version spans, and of the completions that carry them.

Legend: T tokens of a completion or of a piece of one. Spans count from the completion's first token.
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ContractError
from antiphon.core.frozen import frozen_by_identity
from antiphon.core.records import (
    Completion,
    IntArray,
    Observed,
    PartialTrajectory,
    TurnToAnswer,
    VersionSpan,
)

_Piece = TypeVar("_Piece", bound=Completion)


def spans_of_changes(
    changes: Sequence[tuple[int, int]], start: int, stop: int, kept: Collection[int] = ()
) -> tuple[VersionSpan, ...]:
    """Return the spans of tokens [start, stop) of a completion whose policy changed while it was sampled.

    `changes`: (version, first token that it sampled), in order. `kept`: those of the first tokens before
    which the engine kept its cache.

    >>> spans_of_changes([(3, 0), (4, 5)], 2, 6)  # doctest: +NORMALIZE_WHITESPACE
    (VersionSpan(version=3, start=2, stop=5, kept_cache=False),
     VersionSpan(version=4, start=5, stop=6, kept_cache=False))
    """
    ends = [first for _, first in changes[1:]] + [stop]
    return clipped(
        [
            VersionSpan(version, first, end, first in kept)
            for (version, first), end in zip(changes, ends, strict=True)
        ],
        start,
        stop,
    )


def clipped(spans: Iterable[VersionSpan], start: int, stop: int) -> tuple[VersionSpan, ...]:
    """Return what spans say of tokens [start, stop)."""
    found = (
        VersionSpan(span.version, max(span.start, start), min(span.stop, stop), span.kept_cache)
        for span in spans
    )
    return tuple(span for span in found if span.start < span.stop)


def shifted(spans: Iterable[VersionSpan], by: int) -> tuple[VersionSpan, ...]:
    """Return spans of tokens that stand `by` places later."""
    return tuple(
        VersionSpan(span.version, span.start + by, span.stop + by, span.kept_cache) for span in spans
    )


def merged(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return spans with neighbours of the same version made one, where both or none kept a cache."""
    found: list[VersionSpan] = []
    for span in spans:
        last = found[-1] if found else None
        same = last is not None and (last.version, last.kept_cache, last.stop) == (
            span.version,
            span.kept_cache,
            span.start,  # what the environment wrote may stand between them
        )
        start = found.pop().start if same else span.start
        found.append(VersionSpan(span.version, start, span.stop, span.kept_cache))
    return tuple(found)


def may_follow(last: VersionSpan, first: VersionSpan) -> bool:
    """Tell whether a span can follow another: versions never fall, and only a swap keeps a cache."""
    if first.version == last.version:
        return last.kept_cache or not first.kept_cache
    return first.version > last.version


def check_cover(
    spans: Iterable[VersionSpan],
    start: int,
    stop: int,
    where: str,
    versions: range | None = None,
    observed: Observed = (),
) -> None:
    """Check that spans, and what was observed, cover tokens [start, stop) in order without gaps.

    `where` names the completion in the error; `versions` are those that may have sampled it, None for any.

    Raises:
        ContractError: naming the first span that does not fit.
    """
    at, between = start, deque(observed)

    def step_over() -> None:
        nonlocal at
        while between and between[0][0] == at < between[0][1]:
            at = between.popleft()[1]

    for span in spans:
        if between:
            step_over()
        if span.start != at or span.stop <= at:
            raise ContractError(
                f"{where}: version spans must cover [{start}, {stop}) in order without gaps, "
                f"but one is [{span.start}, {span.stop}) where {at} was due"
            )
        at = span.stop
        if versions is not None and span.version not in versions:
            raise ContractError(
                f"{where}: sampled with version {span.version}, but its lease allows versions "
                f"{versions.start}..{versions.stop - 1}"
            )
    if between:
        step_over()
    if between:
        first, last = between[0]
        raise ContractError(
            f"{where}: observed tokens [{first}, {last}) overlap, or stand where sampled ones do"
        )
    if at != stop:
        raise ContractError(
            f"{where}: version spans must cover [{start}, {stop}) in order without gaps, but end at {at}"
        )


@frozen_by_identity
class Branch:
    """Tokens of a row that were sampled and observed in one context, behind the one that it began with."""

    number: int
    context: IntArray
    """[C] int32: the prompt, and what is observed before the first sampled token."""
    start: int
    """First token of the row after them."""
    stop: int

    @property
    def shift(self) -> int:
        """Return what is added to the place of a token in its row to get its position in its context."""
        return int(self.context.size) - self.start


def branches(prompt_token_ids: Sequence[int] | IntArray, row: Completion) -> list[Branch]:
    """Return the branches of a whole row, in order; without breaks there is one.

    What stands in a context as observed was sampled in an earlier branch, or by no policy: each sampled token
    is in one branch.
    """
    found, starts = [], [0, *row.breaks]
    ranges = dict(row.observed)
    for number, (first, stop) in enumerate(zip(starts, [*row.breaks, row.stop], strict=True)):
        start = min(stop, ranges.get(first, first))
        before: Sequence[int] | IntArray = () if number else prompt_token_ids
        context = np.concatenate([np.asarray(before, dtype=np.int32), row.token_ids[first:start]])
        found.append(Branch(number, context, start, stop))
    return found


def turns_of(row: Completion | TurnToAnswer, start: int = 0) -> list[tuple[int, int]]:
    """Return the tokens [start, stop) of each turn that a row shows from token `start` on, in order."""
    starts = [start, *(last for _, last in row.observed)]
    stops = [*(first for first, _ in row.observed), start + row.token_ids.size]
    return [(first, last) for first, last in zip(starts, stops, strict=True) if first < last]


def sampled_mask(completion: Completion) -> npt.NDArray[np.bool_]:
    """Return for each token [T] of a whole completion whether the policy sampled it."""
    mask = np.ones(completion.token_ids.size, dtype=bool)
    for start, stop in completion.observed:
        mask[start:stop] = False
    return mask


def token_versions(completion: Completion) -> npt.NDArray[np.int64]:
    """Return the version [T] that sampled each token of a whole completion; -1 where none did."""
    versions = np.full(completion.token_ids.size, -1, dtype=np.int64)
    for span in completion.spans:
        versions[span.start : span.stop] = span.version
    return versions


def kept_cache_tokens(completion: Completion) -> npt.NDArray[np.bool_]:
    """Return for each token [T] of a whole completion whether it was sampled over a kept cache."""
    kept = np.zeros(completion.token_ids.size, dtype=bool)
    for span in completion.spans:
        kept[span.start : span.stop] = span.kept_cache
    return kept


def joined(pieces: Sequence[_Piece]) -> _Piece:
    """Return pieces that follow one another as one; it ends as the last of them does."""
    if len(pieces) == 1:
        return pieces[0]
    return dataclasses.replace(
        pieces[0],
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        spans=merged(span for piece in pieces for span in piece.spans),
        finish_reason=pieces[-1].finish_reason,
        observed=_merged_ranges([one for piece in pieces for one in piece.observed]),
        breaks=tuple(place for piece in pieces for place in piece.breaks),
    )


def within(observed: Observed, start: int, stop: int) -> Observed:
    """Return what of some ranges lies in [start, stop)."""
    found = ((max(first, start), min(last, stop)) for first, last in observed)
    return tuple((first, last) for first, last in found if first < last)


def _merged_ranges(ranges: Sequence[tuple[int, int]]) -> Observed:
    """Return ranges in order with those made one that a cut between pieces parted."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def beginning_of(piece: PartialTrajectory, stop: int) -> PartialTrajectory:
    """Return what a piece has before token `stop`, unfinished unless that is all of it."""
    if stop >= piece.stop:
        return piece
    size = stop - piece.start
    return dataclasses.replace(
        piece,
        token_ids=piece.token_ids[:size],
        logprobs=piece.logprobs[:size],
        spans=clipped(piece.spans, piece.start, stop),
        finish_reason=None,
        observed=within(piece.observed, piece.start, stop),
        breaks=tuple(place for place in piece.breaks if place < stop),
    )


def rest_of(piece: _Piece, start: int) -> _Piece | None:
    """Return a piece from token `start` on; None when nothing of it is left."""
    skipped = start - piece.start
    if skipped <= 0:
        return piece
    if start >= piece.stop:
        return None
    return dataclasses.replace(
        piece,
        token_ids=piece.token_ids[skipped:],
        logprobs=piece.logprobs[skipped:],
        spans=clipped(piece.spans, start, piece.stop),
        observed=within(piece.observed, start, piece.stop),
        breaks=tuple(place for place in piece.breaks if place >= start),
    )
