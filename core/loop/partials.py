"""Partials: unfinished groups as their holders reported them, kept so that another can continue.

Pieces come with heartbeats, in any order and any number of times; what is kept of a completion is
always a gapless beginning of it, and the answer says how long that is. The memory is bounded, counted by what
is held, since pieces are copies of what is new and keep no message alive: what
does not fit is not kept, which costs time if the holder is lost and never a token's correctness.
Who sampled which tokens stays known, because a beginning is handed on without being verified.

Legend: G samples of a group, T tokens of a piece.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from antiphon.core.errors import ContractError
from antiphon.core.frozen import frozen_by_identity
from antiphon.core.records import FinishReason, PartialTrajectory, Trajectory, VersionSpan
from antiphon.core.spans import (
    beginning_of,
    joined,
    kept_cache_tokens,
    may_follow,
    merged,
    rest_of,
    token_versions,
)

PIECE_BYTES = 1024
"""What a piece takes besides its tokens, log-probabilities and spans."""
SPAN_BYTES = 128
Authorship = tuple[int, str, int, int]
"""(sample index, worker id, start, stop): who sampled the tokens [start, stop) of a completion."""


@frozen_by_identity
class KeptSample:
    """The beginning of one completion, or all of it."""

    whole: PartialTrajectory
    """From token 0."""
    authors: tuple[tuple[str, int], ...]
    """(worker id, stop), in order: each sampled from where the one before it ended."""


@frozen_by_identity
class KeptGroup:
    """What the next holder of a group may continue from."""

    samples: tuple[KeptSample, ...]
    """Those with at least one token, by sample index."""

    @property
    def tokens(self) -> int:
        """Return how many tokens need not be sampled again."""
        return sum(sample.whole.stop for sample in self.samples)

    @property
    def held(self) -> int:
        """Return the bytes that are held for it."""
        return sum(_held(sample.whole) for sample in self.samples)

    @property
    def versions(self) -> set[int]:
        """Return the policy versions among the tokens; none where all of them were observed."""
        return {span.version for sample in self.samples for span in sample.whole.spans}

    def continued_by(self, version: int) -> bool:
        """Return whether a worker that holds `version` may go on: along a completion versions never fall."""
        rows = ([*(span.version for span in sample.whole.spans), version] for sample in self.samples)
        return all(row == sorted(row) for row in rows)

    def authors(self) -> set[str]:
        """Return the ids of the workers that sampled it."""
        return {author for sample in self.samples for author, _ in sample.authors}

    def pieces(self) -> tuple[PartialTrajectory, ...]:
        """Return what a lease carries."""
        return tuple(sample.whole for sample in self.samples)


@dataclass(slots=True)
class _Growing:
    """One completion while pieces come in."""

    pieces: list[PartialTrajectory] = field(default_factory=list)
    """Each begins where the one before it ends."""
    authors: list[tuple[str, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def last_span(self) -> VersionSpan | None:
        """Return the newest version span; None before the first one."""
        return next((piece.spans[-1] for piece in reversed(self.pieces) if piece.spans), None)

    @property
    def held(self) -> int:
        """Return the bytes that are held for it."""
        return sum(map(_held, self.pieces))

    def append(self, piece: PartialTrajectory, worker_id: str) -> None:
        """Keep a copy of what is new in a piece that continues what is here; its message is not held."""
        count = self.count
        new = None if piece.start > count else rest_of(piece, count)
        if new is None or not new.token_ids.size:
            return
        if self.pieces:
            reason, before = self.pieces[-1].finish_reason, self.last_span
            # After a turn, what the environment answered comes next.
            answered = bool(new.observed) and new.observed[0][0] == count
            if reason is not None and not (reason.ends_turn and answered):
                return
            if new.spans and before is not None and not may_follow(before, new.spans[0]):
                return
        tokens, logprobs, spans = new.token_ids.copy(), new.logprobs.copy(), merged(new.spans)
        self.pieces.append(replace(new, token_ids=tokens, logprobs=logprobs, spans=spans))
        while len(self.pieces) > 1 and self.pieces[-2].token_ids.size <= self.pieces[-1].token_ids.size:
            self.pieces[-2:] = [joined(self.pieces[-2:])]  # few pieces, each token copied few times
        if self.authors and self.authors[-1][0] == worker_id:
            self.authors.pop()
        self.authors.append((worker_id, new.stop))

    def kept(self) -> KeptSample:
        self.pieces = [joined(self.pieces)]
        return KeptSample(self.pieces[0], tuple(self.authors))


@dataclass(slots=True)
class _GrowingGroup:
    group_id: str
    size: int
    """G, of which a lease that begins at the first token has none in `samples` until a piece comes."""
    samples: dict[int, _Growing]
    given: int
    """Tokens that the lease came with."""
    counted: int = 0
    """Bytes that count as held for it."""

    @property
    def tokens(self) -> int:
        return sum(sample.count for sample in self.samples.values())


class PartialGroups:
    """Beginnings of the groups that are being sampled, by lease, and of those that wait for one."""

    def __init__(self, most_bytes: int) -> None:
        """Keep at most `most_bytes` bytes."""
        self._most_bytes = most_bytes
        self._growing: dict[str, _GrowingGroup] = {}
        self._waiting: dict[str, KeptGroup] = {}
        self.held = 0
        """Bytes held at the moment."""

    @property
    def tokens(self) -> int:
        """Return the tokens kept at the moment."""
        growing = sum(group.tokens for group in self._growing.values())
        return growing + sum(kept.tokens for kept in self._waiting.values())

    def waiting(self, group_id: str) -> KeptGroup | None:
        """Return what the next lease of a group can start from."""
        return self._waiting.get(group_id)

    def snapshot(self, lease_id: str) -> KeptGroup | None:
        """Return what is kept under a running lease, or None when that is nothing."""
        growing = self._growing.get(lease_id)
        return None if growing is None else _kept_group(growing.samples)

    def row(self, lease_id: str, sample_index: int) -> PartialTrajectory | None:
        """Return what is kept of one sample under a running lease, or None when that is nothing."""
        group = self._growing.get(lease_id)
        sample = None if group is None else group.samples.get(sample_index)
        return None if sample is None or not sample.pieces else sample.kept().whole

    def begin(self, lease_id: str, group_id: str, samples: int, given: KeptGroup | None) -> None:
        """Expect pieces of a lease of G samples that came with `given`."""
        self.forget(group_id)
        group = self._growing[lease_id] = _GrowingGroup(group_id, samples, {}, 0)
        if given is None:
            return
        for sample in given.samples:
            growing = group.samples[sample.whole.sample_index] = _Growing()
            growing.append(sample.whole, "")
            growing.authors = list(sample.authors)
        group.given = given.tokens
        group.counted = sum(sample.held for sample in group.samples.values())
        self.held += group.counted

    def take(self, lease_id: str, worker_id: str, piece: PartialTrajectory) -> None:
        """Keep a piece that `check_piece` passed; one that leaves a gap or does not fit is left out."""
        group = self._growing.get(lease_id)
        if group is None or self.held + _held(piece) > self._most_bytes:
            return
        sample = group.samples.setdefault(piece.sample_index, _Growing())
        before = sample.held
        sample.append(piece, worker_id)
        gained = sample.held - before
        group.counted += gained
        self.held += gained

    def kept(self, lease_id: str) -> tuple[int, ...]:
        """Return [G] how many tokens of each completion are kept."""
        group = self._growing.get(lease_id)
        if group is None:
            return ()
        samples = group.samples
        return tuple(samples[index].count if index in samples else 0 for index in range(group.size))

    def given(self, lease_id: str) -> int:
        """Return how many tokens a running lease came with."""
        group = self._growing.get(lease_id)
        return 0 if group is None else group.given

    def sampled(self, lease_id: str) -> int:
        """Return how many tokens its holder is known to have sampled under a lease."""
        group = self._growing.get(lease_id)
        return 0 if group is None else group.tokens - group.given

    def end(self, lease_id: str) -> KeptGroup | None:
        """Forget a lease and return what was kept under it, or None when that is nothing."""
        group = self._growing.pop(lease_id, None)
        if group is None:
            return None
        self.held -= group.counted
        return _kept_group(group.samples)

    def wait(self, group_id: str, kept: KeptGroup) -> None:
        """Keep the beginning of a group for its next lease."""
        self.forget(group_id)
        self._waiting[group_id] = kept
        self.held += kept.held

    def forget(self, group_id: str) -> None:
        """Drop what waits for a group's next lease."""
        kept = self._waiting.pop(group_id, None)
        self.held -= 0 if kept is None else kept.held


def with_turns(kept: KeptGroup | None, turns: Iterable[tuple[str, PartialTrajectory]]) -> KeptGroup | None:
    """Return what is kept of a group with what its holders sampled since: (worker id, piece), in order."""
    samples: dict[int, _Growing] = {}
    for sample in () if kept is None else kept.samples:
        samples[sample.whole.sample_index] = _Growing([sample.whole], list(sample.authors))
    for worker_id, piece in turns:
        samples.setdefault(piece.sample_index, _Growing()).append(piece, worker_id)
    return _kept_group(samples)


def authorship(
    given: KeptGroup | None, trajectories: Sequence[Trajectory], worker_id: str
) -> tuple[Authorship, ...]:
    """Return which tokens of a submission others had sampled: those that agree with what was handed on.

    `given` is what is known of the group, as when its lease was granted; the tokens of `worker_id`, who
    handed the trajectories in (in sample order), are not listed.
    """
    found: list[Authorship] = []
    for sample in () if given is None else given.samples:
        index = sample.whole.sample_index
        own, whole = trajectories[index], sample.whole
        common = min(own.token_ids.size, whole.stop)
        # A worker that alters a log-probability or a version of another's token answers for it, as for a
        # token.
        differs = np.flatnonzero(
            (own.token_ids[:common] != whole.token_ids[:common])
            | (own.logprobs[:common] != whole.logprobs[:common])
            | (token_versions(own)[:common] != token_versions(whole)[:common])
            | (kept_cache_tokens(own)[:common] != kept_cache_tokens(whole)[:common])
        )
        agreed, start = int(differs[0]) if differs.size else int(common), 0
        for author, stop in sample.authors:
            stop = min(stop, agreed)
            if stop > start and author != worker_id:
                found.append((index, author, start, stop))
            start = max(start, stop)
    return tuple(found)


def false_author(
    kept: KeptGroup | None, check: Callable[[PartialTrajectory], None]
) -> tuple[str, str] | None:
    """Return who wrote the first tokens of a group's beginning that cannot be, and why; None when all can.

    `check` raises a `ContractError` for what no completion of the group can have.
    """
    for sample in () if kept is None else kept.samples:
        for worker_id, stop in sample.authors:
            try:
                _check_beginning(sample.whole, stop, check)
            except ContractError as error:
                return worker_id, str(error)
    return None


def _check_beginning(whole: PartialTrajectory, stop: int, check: Callable[[PartialTrajectory], None]) -> None:
    """Check what a row has before token `stop`; where a turn ended there, it did so in one of two ways."""
    beginning = beginning_of(whole, stop)
    if not any(start == stop for start, _ in whole.observed):
        check(beginning)
        return
    try:
        check(replace(beginning, finish_reason=FinishReason.STOP))
    except ContractError:
        check(replace(beginning, finish_reason=FinishReason.LENGTH))


def _held(piece: PartialTrajectory) -> int:
    return piece.token_ids.nbytes + piece.logprobs.nbytes + PIECE_BYTES + SPAN_BYTES * len(piece.spans)


def _kept_group(samples: Mapping[int, _Growing]) -> KeptGroup | None:
    kept = tuple(sample.kept() for _, sample in sorted(samples.items()) if sample.pieces)
    return KeptGroup(kept) if kept else None
