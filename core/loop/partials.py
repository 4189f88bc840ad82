"""Partials: unfinished groups as their holders reported them, kept so that another can go on.

Pieces come with heartbeats, in any order and any number of times; what is kept of a completion is
always a gapless beginning of it, and the answer says how long that is. The memory is bounded: what
does not fit is not kept, which costs time if the holder is lost and never a token's correctness.
Who sampled which tokens stays known, because a beginning is handed on without being verified.

Legend: G samples of a group, T tokens of a piece.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.errors import ContractError
from antiphon.core.loop.checks import LOGPROB_CEILING
from antiphon.core.records import (
    FinishReason,
    FloatArray,
    IntArray,
    PartialTrajectory,
    Trajectory,
    VersionSpan,
)

BYTES_PER_TOKEN = 8
"""One int32 and one float32; spans and authors are few."""
Authorship = tuple[int, str, int, int]
"""(sample index, worker id, start, stop): who sampled the tokens [start, stop) of a completion."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSample:
    """The beginning of one completion, or all of it."""

    whole: PartialTrajectory
    """From token 0."""
    authors: tuple[tuple[str, int], ...]
    """(worker id, stop), in order: each sampled from where the one before it ended."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptGroup:
    """What the next holder of a group may continue from."""

    samples: tuple[KeptSample, ...]
    """Those with at least one token, by sample index."""

    @property
    def tokens(self) -> int:
        """Return how many tokens need not be sampled again."""
        return sum(sample.whole.stop for sample in self.samples)

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version among the tokens."""
        return min(span.version for sample in self.samples for span in sample.whole.spans)

    def pieces(self) -> tuple[PartialTrajectory, ...]:
        """Return what a lease carries."""
        return tuple(sample.whole for sample in self.samples)


@dataclass(slots=True)
class _Growing:
    """One completion while pieces come in."""

    tokens: list[IntArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    authors: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    count: int = 0

    def append(self, piece: PartialTrajectory, worker_id: str) -> int:
        """Keep what is new in a piece that continues what is here; return the tokens gained."""
        known = self.count - piece.start
        gained = piece.stop - self.count
        if self.finish_reason is not None or known < 0 or gained <= 0:
            return 0
        self.tokens.append(piece.token_ids[known:])
        self.logprobs.append(piece.behaviour_logprobs[known:])
        for span in piece.spans:
            _extend(self.spans, span, self.count)
        if self.authors and self.authors[-1][0] == worker_id:
            self.authors.pop()
        self.authors.append((worker_id, piece.stop))
        self.count, self.finish_reason = piece.stop, piece.finish_reason
        return gained

    def kept(self, sample_index: int) -> KeptSample:
        """Return what is here as one piece."""
        self.tokens, self.logprobs = [np.concatenate(self.tokens)], [np.concatenate(self.logprobs)]
        whole = PartialTrajectory(
            sample_index, 0, self.tokens[0], self.logprobs[0], tuple(self.spans), self.finish_reason
        )
        return KeptSample(whole, tuple(self.authors))


@dataclass(slots=True)
class _GrowingGroup:
    group_id: str
    samples: list[_Growing]
    given: int
    """Tokens that the lease came with."""

    @property
    def tokens(self) -> int:
        return sum(sample.count for sample in self.samples)


class PartialGroups:
    """Beginnings of the groups that are being sampled, by lease, and of those that wait for one."""

    def __init__(self, most_bytes: int) -> None:
        """Keep at most `most_bytes` bytes of tokens and log-probabilities."""
        self._most_tokens = most_bytes // BYTES_PER_TOKEN
        self._growing: dict[str, _GrowingGroup] = {}
        self._waiting: dict[str, KeptGroup] = {}
        self.tokens = 0
        """Tokens kept at the moment."""

    def waiting(self, group_id: str) -> KeptGroup | None:
        """Return what the next lease of a group can start from."""
        return self._waiting.get(group_id)

    def snapshot(self, lease_id: str) -> KeptGroup | None:
        """Return what is kept under a running lease, or None when that is nothing."""
        growing = self._growing.get(lease_id)
        return None if growing is None else _snapshot(growing)

    def begin(self, lease_id: str, group_id: str, samples: int, given: KeptGroup | None) -> None:
        """Expect pieces of a lease of G samples that came with `given`."""
        self.forget(group_id)
        group = self._growing[lease_id] = _GrowingGroup(
            group_id, [_Growing() for _ in range(samples)], 0 if given is None else given.tokens
        )
        for sample in () if given is None else given.samples:
            whole, growing = sample.whole, group.samples[sample.whole.sample_index]
            growing.append(whole, "")
            growing.authors = list(sample.authors)
        self.tokens += group.tokens

    def take(self, lease_id: str, worker_id: str, piece: PartialTrajectory) -> None:
        """Keep a piece that `check_piece` passed; one that leaves a gap or does not fit is left out."""
        group = self._growing.get(lease_id)
        if group is None or self.tokens + piece.token_ids.size > self._most_tokens:
            return
        self.tokens += group.samples[piece.sample_index].append(piece, worker_id)

    def kept(self, lease_id: str) -> tuple[int, ...]:
        """Return [G] how many tokens of each completion are kept."""
        group = self._growing.get(lease_id)
        return () if group is None else tuple(sample.count for sample in group.samples)

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
        self.tokens -= group.tokens
        return _snapshot(group)

    def wait(self, group_id: str, kept: KeptGroup) -> None:
        """Keep the beginning of a group for its next lease."""
        self.forget(group_id)
        self._waiting[group_id] = kept
        self.tokens += kept.tokens

    def forget(self, group_id: str) -> None:
        """Drop what waits for a group's next lease."""
        kept = self._waiting.pop(group_id, None)
        self.tokens -= 0 if kept is None else kept.tokens


def check_piece(
    piece: PartialTrajectory,
    group_id: str,
    *,
    samples: int,
    max_tokens: int,
    version: int | None,
    newest_version: int,
) -> None:
    """Refuse a piece that no completion of the lease can have.

    Args:
        piece: what a heartbeat says was sampled.
        group_id: for the message.
        samples: G of the lease.
        max_tokens: longest completion allowed.
        version: fixed mode: the only version allowed, else None.
        newest_version: no token can come from a newer one.

    Raises:
        ContractError: naming the group, the field and what was expected.
    """
    where = f"progress of group {group_id}, sample {piece.sample_index}"
    tokens, logprobs = piece.token_ids, piece.behaviour_logprobs
    if not 0 <= piece.sample_index < samples:
        raise ContractError(f"{where}: sample_index must be in [0, {samples})")
    if tokens.ndim != 1 or not tokens.size or logprobs.shape != tokens.shape or piece.start < 0:
        raise ContractError(
            f"{where}: start={piece.start} with {tokens.size} tokens and {logprobs.size} behaviour logprobs; "
            "a piece has at least one token and one logprob for each"
        )
    if int(tokens.min()) < 0:
        raise ContractError(f"{where}: token id {int(tokens.min())} is negative")
    if not math.isfinite(float(logprobs.sum(dtype=np.float64))) or float(logprobs.max()) > LOGPROB_CEILING:
        raise ContractError(f"{where}: behaviour logprobs must be finite and at most 0")
    full, ended = piece.stop == max_tokens, piece.finish_reason
    if piece.stop > max_tokens or (full and ended is None) or (not full and ended is FinishReason.LENGTH):
        raise ContractError(
            f"{where}: {piece.stop} tokens with finish_reason={ended}, but sampling.max_tokens={max_tokens}"
        )
    at = piece.start
    for span in piece.spans:
        right = span.version == version if version is not None else 0 <= span.version <= newest_version
        if span.start != at or span.stop <= at or not right:
            raise ContractError(
                f"{where}: span [{span.start}, {span.stop}) of version {span.version} where {at} was due and "
                f"{f'version {version}' if version is not None else f'versions 0..{newest_version}'} can be"
            )
        at = span.stop
    if at != piece.stop:
        raise ContractError(f"{where}: version spans end at {at}, but there are {piece.stop} tokens")


def authorship(
    given: KeptGroup | None, trajectories: Sequence[Trajectory], worker_id: str
) -> tuple[Authorship, ...]:
    """Return which tokens of a submission others had sampled: those that agree with what was handed on.

    Args:
        given: what the lease came with, or what is known of the group.
        trajectories: what was handed in, in sample order.
        worker_id: who handed it in; its own tokens are not listed.
    """
    found: list[Authorship] = []
    for sample in () if given is None else given.samples:
        index = sample.whole.sample_index
        tokens = trajectories[index].token_ids
        common = min(tokens.size, sample.whole.stop)
        differs = np.flatnonzero(tokens[:common] != sample.whole.token_ids[:common])
        agreed, start = int(differs[0]) if differs.size else int(common), 0
        for author, stop in sample.authors:
            stop = min(stop, agreed)
            if stop > start and author != worker_id:
                found.append((index, author, start, stop))
            start = max(start, stop)
    return tuple(found)


def _extend(spans: list[VersionSpan], span: VersionSpan, known: int) -> None:
    """Add the part of a span from token `known` on, merged with the last one where versions agree."""
    start = max(span.start, known)
    if span.stop <= start:
        return
    if spans and spans[-1].version == span.version:
        start = spans.pop().start
    spans.append(VersionSpan(span.version, start, span.stop))


def _snapshot(group: _GrowingGroup) -> KeptGroup | None:
    kept = tuple(sample.kept(index) for index, sample in enumerate(group.samples) if sample.count)
    return KeptGroup(kept) if kept else None
