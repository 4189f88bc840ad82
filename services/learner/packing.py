"""Packing: rows of a batch become micro-batches under a token budget, in one canonical order.

A row whose context begins afresh (`Completion.breaks`) is several sequences, one for each branch, with the
advantage of all; each sampled token is in one of them. Sequences stand in the lexicographic order of their
tokens, so that neighbours begin alike, and what they have in common is computed once (`shared_rows`). The
last token of one predicts nothing and is left out. The output head gets each state that predicts a completion
token once for every token it predicts: neither prompts nor padding. The order depends on the rows alone,
never on arrival.

Legend: N positions the model computes, P pairs of a position and the token that follows it, R sequences of
the micro-batch, T completion tokens of the longest of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.errors import ContractError
from antiphon.core.ranks.plan import plan_ranks
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.core.spans import branches, check_cover, clipped, shifted, token_versions, within
from antiphon.cpu.copies import Copies, copies_of
from antiphon.cpu.shared_rows import SharedRows, common_lengths, share_rows


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass works on."""

    shared: SharedRows
    """Where prompts and completions, without their last tokens, are computed."""
    input_ids: torch.Tensor
    """[N] int64: the token at each position."""
    pairs: Copies
    """The position, among N, whose state predicts each of the P pairs' tokens."""
    pair_ids: torch.Tensor
    """[P] int64: the token that is predicted."""
    token_index: torch.Tensor
    """[R, T] int64: the pair of each completion token, among P; 0 where the mask is 0."""
    mask: torch.Tensor
    """[R, T] float32, 1 for completion tokens that the policy sampled."""
    behaviour_logprobs: torch.Tensor
    """[R, T] float32, nats; 0 where the mask is 0."""
    advantages: torch.Tensor
    """[R] float32."""
    staleness: torch.Tensor
    """[R, T] int64: step minus the version that sampled the token, versions."""
    shares: torch.Tensor
    """[R] float32: the part of its trajectory's sampled tokens that a sequence has; 1 where it is the only
    one."""
    rows: tuple[tuple[str, int], ...]
    """Group id and sample index of each of the R sequences; nothing for a dummy."""
    reference_logprobs: torch.Tensor | None = None
    """[R, T] float32, nats, as `behaviour_logprobs`; None where the run has no reference model."""

    @property
    def positions(self) -> int:
        """Return the positions that the layers compute, N."""
        return len(self.input_ids)

    @property
    def completion_tokens(self) -> int:
        return int(self.mask.sum())

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the same on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        moved: Any = {name: value.to(device) for name, value in values.items() if value is not None}
        return replace(self, **moved)


def with_behaviour(batches: Iterable[MicroBatch], logprobs: Sequence[torch.Tensor]) -> Iterator[MicroBatch]:
    """Yield micro-batches with other behaviour logprobs, [R, T] nats for each of them."""
    for batch, own in zip(batches, logprobs, strict=True):
        yield replace(batch, behaviour_logprobs=own.float() * batch.mask)


class Packing:
    """The micro-batches of one update; each is made when it is asked for."""

    def __init__(self, rows: Sequence[BatchRow], step: int, token_budget: int, ranks: int = 1) -> None:
        """Cut rows into micro-batches of at most `token_budget` positions each, and deal them to ranks.

        A row longer than the budget gets a micro-batch of its own.

        Args:
            rows: any order.
            step: the learner step that trains on them; staleness counts from it.
            token_budget: positions the model may compute at once.
            ranks: how many train together.

        Raises:
            ContractError: when a row has no prompt, no completion or arrays of different lengths.
        """
        for row in rows:
            _check_row(row)
        self._step = step
        self._sampled = {(row.group_id, row.sample_index): row.sampled_tokens for row in rows}
        parts = [(_inputs(part), part) for row in rows for part in sequences_of(row)]
        # Of unsigned numbers, the largest byte first, the bytes stand in the order of the numbers.
        parts.sort(key=lambda pair: (pair[0].astype(">u8").tobytes(), pair[1].group_id, pair[1].sample_index))
        self._rows = [row for _, row in parts]
        inputs = [ids for ids, _ in parts]
        self._lengths, self._common = [len(ids) for ids in inputs], common_lengths(inputs)
        self.plan = plan_ranks(self._lengths, self._common, token_budget, ranks)

    @property
    def referred(self) -> bool:
        """Return whether the rows have a reference model's logprobs."""
        return self._rows[0].reference_logprobs is not None

    @property
    def trajectories(self) -> int:
        """Return how many trajectories the sequences belong to."""
        return len(self._sampled)

    @property
    def completion_tokens(self) -> int:
        """Return how many tokens of them the policy sampled."""
        return sum(self._sampled.values())

    def listed(self, number: int) -> tuple[list[tuple[str, int]], list[int]]:
        """Return group id and sample index of a micro-batch's sequences, and the sampled tokens of each."""
        rows = self._rows[self.plan.micro_batches[number]]
        return [(row.group_id, row.sample_index) for row in rows], [row.sampled_tokens for row in rows]

    def of_rank(self, rank: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one rank in order; while one is used, the next is made."""
        numbers = self.plan.ranks[rank]
        with ThreadPoolExecutor(1, "packing") as thread:
            ahead = [thread.submit(self.make, number) for number in numbers[:1]]
            for number in numbers[1:]:
                made = ahead.pop().result()
                ahead.append(thread.submit(self.make, number))
                yield made
            for last in ahead:
                yield last.result()

    def make(self, number: int | None) -> MicroBatch:
        """Make a micro-batch of the plan; None makes a dummy, of one token whose advantage is 0."""
        if number is None:
            given = self._rows[0].reference_logprobs
            row = replace(
                self._rows[0],
                reference_logprobs=None if given is None else given[:1],
                prompt_token_ids=self._rows[0].prompt_token_ids[:1],
                token_ids=self._rows[0].token_ids[:1],
                logprobs=np.zeros(1, np.float32),
                spans=(VersionSpan(self._step, 0, 1),),
                observed=(),
                advantage=0.0,
            )
            return replace(self._make([row], [1], [0]), rows=())
        places = self.plan.micro_batches[number]
        return self._make(self._rows[places], self._lengths[places], self._common[places])

    def _make(self, rows: Sequence[BatchRow], lengths: Sequence[int], common: Sequence[int]) -> MicroBatch:
        shared, positions = share_rows(lengths, common)
        ids = np.zeros(len(shared.position_ids), dtype=np.int64)
        shape = (len(rows), max(len(row.token_ids) for row in rows))
        pairs, staleness = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        mask, behaviour = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
        reference = None if rows[0].reference_logprobs is None else np.zeros(shape, dtype=np.float32)
        vocabulary = 1 + max(int(row.token_ids.max()) for row in rows)
        for at, (row, own) in enumerate(zip(rows, positions, strict=True)):
            count = len(row.token_ids)
            ids[own] = _inputs(row)
            pairs[at, :count] = own[-count:] * vocabulary + row.token_ids
            behaviour[at, :count] = row.logprobs
            if reference is not None:
                reference[at, :count] = row.reference_logprobs
            staleness[at, :count] = self._step - token_versions(row)
            mask[at, :count] = 1.0
            for start, stop in row.observed:  # the policy wrote none of it
                behaviour[at, start:stop] = staleness[at, start:stop] = mask[at, start:stop] = 0
        distinct, numbers = np.unique(pairs[mask > 0], return_inverse=True)
        index = np.zeros(shape, dtype=np.int64)
        index[mask > 0] = numbers
        return MicroBatch(
            shared=shared,
            input_ids=torch.from_numpy(ids),
            pairs=copies_of(distinct // vocabulary, len(ids)),
            pair_ids=torch.from_numpy(distinct % vocabulary),
            token_index=torch.from_numpy(index),
            mask=torch.from_numpy(mask),
            behaviour_logprobs=torch.from_numpy(behaviour),
            advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
            staleness=torch.from_numpy(staleness),
            shares=torch.tensor(
                [row.sampled_tokens / self._sampled[row.group_id, row.sample_index] for row in rows],
                dtype=torch.float32,
            ),
            rows=tuple((row.group_id, row.sample_index) for row in rows),
            reference_logprobs=None if reference is None else torch.from_numpy(reference),
        )


def make_micro_batches(rows: Sequence[BatchRow], step: int, token_budget: int) -> list[MicroBatch]:
    """Return all micro-batches of one rank, as `Packing` makes them."""
    return list(Packing(rows, step, token_budget).of_rank(0))


def probe_batch(tokens: Sequence[int]) -> MicroBatch:
    """Return a batch whose logprobs, [1, T], are those of all `tokens` [T + 1] but the first."""
    ids = np.array(tokens, dtype=np.int32)
    row = BatchRow(
        ids[1:],
        np.zeros(len(ids) - 1, dtype=np.float32),
        (VersionSpan(0, 0, len(ids) - 1),),
        FinishReason.LENGTH,
        group_id="",
        prompt_key="",
        sample_index=0,
        prompt_token_ids=ids[:1],
        reward=0.0,
        advantage=0.0,
    )
    return make_micro_batches([row], 0, len(ids))[0]


def sequences_of(row: BatchRow) -> list[BatchRow]:
    """Return the branches of a row as rows without breaks, whose prompts are what they began with."""
    found = []
    for branch in branches(row.prompt_token_ids, row):
        start, stop = branch.start, branch.stop
        observed = within(row.observed, start, stop)
        part = replace(
            row,
            prompt_token_ids=branch.context,
            token_ids=row.token_ids[start:stop],
            logprobs=row.logprobs[start:stop],
            spans=shifted(clipped(row.spans, start, stop), -start),
            observed=tuple((first - start, last - start) for first, last in observed),
            breaks=(),
        )
        if part.spans:
            found.append(part)
    return found


def _inputs(row: BatchRow) -> npt.NDArray[np.int64]:
    """Return the tokens that the model reads: the last one predicts nothing."""
    return np.concatenate([row.prompt_token_ids, row.token_ids[:-1]], dtype=np.int64)


def deal_groups(group_ids: Iterable[str], updates: int) -> list[frozenset[str]]:
    """Deal the groups of a step, those left out of its batch among them, to its updates.

    It goes by the order of their ids, so that what a filter leaves out moves no other group.
    """
    ordered = sorted(set(group_ids))
    return [frozenset(ordered[start::updates]) for start in range(updates)]


def _check_row(row: BatchRow) -> None:
    where = f"sample {row.sample_index} of group {row.group_id}"
    if not row.sampled_tokens or any(
        not branch.context.size for branch in branches(row.prompt_token_ids, row)
    ):
        raise ContractError(
            f"{where} has {len(row.prompt_token_ids)} prompt and {len(row.token_ids)} completion tokens; "
            "both must be at least 1"
        )
    if len(row.logprobs) != len(row.token_ids):
        raise ContractError(
            f"{where} has {len(row.logprobs)} behaviour logprobs for {len(row.token_ids)} tokens"
        )
    check_cover(row.spans, 0, len(row.token_ids), where, observed=row.observed)
