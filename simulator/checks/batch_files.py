"""Batch files: whether a learner trains on what was sampled, rewarded and compared, and on whose tokens."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from antiphon.core.config import RunConfig
from antiphon.core.loop import events as e
from antiphon.core.records import BatchRow, FinishReason, TurnLimits
from antiphon.core.spans import sampled_mask
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.simulator.checks import reasons
from antiphon.simulator.hostile_worker import NAME
from antiphon.simulator.standins import arithmetic

LYING_HOST = "host-lying"
SEAL_S = 5.0
"""Longest time that a batch takes to be written."""


class Authorship:
    """Who sampled what, as the journal tells it."""

    def __init__(self) -> None:
        """Begin without a group."""
        self._submitted: dict[str, e.GroupSubmitted] = {}
        """Group -> its newest submission."""
        self._shut_out: dict[str, float] = {}
        """Worker in quarantine -> the second since when."""
        self._written: set[str] = set()
        """Those of them since when a batch was sealed."""
        self.edited: set[str] = set()
        """Groups that trained with tokens of a liar that nobody had drawn."""

    @property
    def shut_out(self) -> frozenset[str]:
        """Names of the workers that are in quarantine."""
        return frozenset(self._shut_out)

    def submitted(self, event: e.GroupSubmitted) -> None:
        self._submitted[event.group_id] = event

    def quarantined(self, event: e.WorkerQuarantined, now: float) -> str:
        """Return what is wrong with shutting a worker out at a second, or ""."""
        self._shut_out[event.worker_name] = now
        if event.worker_name.startswith(NAME):
            return ""
        return f"{event.worker_name}, which is honest, was shut out: {event.reason}"

    def wrongly_dropped(self, group_id: str) -> str:
        """Return why a group should not have been dropped as untrusted, or ""."""
        if self._names(group_id) & self.shut_out:
            return ""
        return "was dropped as untrusted, but no worker in quarantine sampled any of it"

    def wrongly_sealed(self, group_ids: tuple[str, ...], now: float) -> list[str]:
        """Note a batch and return the sentences about groups that may not train any more.

        The batch that was being written when a worker was shut out may still have groups of it.
        """
        late = {name for name, at_s in self._shut_out.items() if name in self._written or now - at_s > SEAL_S}
        self._written |= set(self._shut_out)
        return [
            f"group {group_id} trains, but {', '.join(sorted(liars))} had been shut out before"
            for group_id in group_ids
            if (liars := self._names(group_id) & late)
        ]

    def lied(self, row: BatchRow) -> npt.NDArray[np.bool_]:
        """Return [T], which tokens of a row were sampled by a worker that lies."""
        event, length = self._submitted[row.group_id], row.token_ids.size
        found = np.full(length, name_of_worker(event.worker_id).startswith(NAME))
        for sample_index, worker_id, start, stop in event.authors:
            if sample_index == row.sample_index:
                found[start:stop] = name_of_worker(worker_id).startswith(NAME)
        return found

    def _names(self, group_id: str) -> set[str]:
        event = self._submitted[group_id]
        return {name_of_worker(w) for w in (event.worker_id, *(author[1] for author in event.authors))}


class BatchFiles:
    """The files of one run; the stand-ins compute instead of sampling, so every token is known."""

    def __init__(
        self,
        config: RunConfig,
        reward_rarity: int,
        failure_rarity: int,
        authorship: Authorship,
        limits: TurnLimits | None,
    ) -> None:
        """Begin without a file.

        The rarities are those of `arithmetic.reward` and `arithmetic.failure`; `authorship` knows who lies;
        `limits` are those of conversations, None for a task without.
        """
        self._config = config
        self._authorship = authorship
        self._reward_rarity = reward_rarity
        self._failure_rarity = failure_rarity
        self._limits = limits
        self._step_of: dict[tuple[str, int], int] = {}
        """Group and sample -> the step that trained on it."""

    def problems(
        self,
        step: int,
        rows: Sequence[BatchRow],
        snapshots: Mapping[int, str],
        seeds: Mapping[str, Sequence[int]],
    ) -> Iterator[str]:
        """Yield what is wrong with the file of a step.

        Args:
            step: the step.
            rows: of the file.
            snapshots: version -> digest of its weights.
            seeds: group -> seed of each sample, as leased.
        """
        groups: dict[str, list[BatchRow]] = {}
        for row in rows:
            groups.setdefault(row.group_id, []).append(row)
        for group_id, members in groups.items():
            scored = {row.sample_index: row.reward for row in members if not row.failure}
            given = {row.sample_index: row.advantage for row in members}
            if wrong := reasons.wrong_advantages(scored, given, self._config.algorithm):
                yield f"group {group_id} trains at step {step}: {wrong}"
        for row in rows:
            yield from self._problems_of_row(step, row, snapshots, seeds)

    def _problems_of_row(
        self, step: int, row: BatchRow, snapshots: Mapping[int, str], seeds: Mapping[str, Sequence[int]]
    ) -> Iterator[str]:
        where = f"step {step}, group {row.group_id}, sample {row.sample_index}"
        key = (row.group_id, row.sample_index)
        if self._step_of.setdefault(key, step) != step:
            yield f"{where} trained at step {self._step_of[key]} already"
        numbers: dict[int, int] = {}
        for span in row.spans:
            if not 0 <= step - span.version <= self._config.loop.max_staleness:
                yield f"{where} has tokens of version {span.version}, beyond the bound"
            if span.version not in snapshots:
                yield f"{where} has tokens of version {span.version}, which was never announced"
                return
            numbers[span.version] = arithmetic.weights_number(snapshots[span.version])
        seed = seeds.get(row.group_id, ())[row.sample_index]
        prompt = row.prompt_token_ids.tolist()
        tokens, logprobs = arithmetic.sampled(numbers, row.spans, prompt, row, seed)
        mask = sampled_mask(row)
        wrong = tokens.size != mask.sum() or tokens != row.token_ids[mask]
        if np.any(wrong) and np.all(self._authorship.lied(row)[mask] | ~np.asarray(wrong)):
            self._authorship.edited.add(row.group_id)
        elif np.any(wrong):
            yield f"{where} has tokens that its prompt, seed and versions cannot give"
        lied = row.failure.startswith(f"host {LYING_HOST}: ")  # the report of one was not believed
        if self._limits is not None and not _answered(row, self._limits, lied):
            yield f"{where} observed, or ended with, what its environment did not say"
        if not np.array_equal(logprobs, row.logprobs[mask]):
            yield f"{where} has log-probabilities that are not those of its tokens"
        failure, reward = "", 0.0
        if row.finish_reason not in (FinishReason.TURNS, FinishReason.TOKENS):  # which earn the least
            failure = arithmetic.failure(row.token_ids, self._failure_rarity)
            reward = arithmetic.reward(row.prompt_key, row.token_ids, self._reward_rarity)
        given = (0.0, row.failure) if lied else (0.0 if failure else reward, failure)
        if (row.reward, row.failure) != given:
            yield f"{where} has a reward that no reward service gave"


def _answered(row: BatchRow, limits: TurnLimits, lied: bool) -> bool:
    """Return whether a row observed what its environment answered to each turn, and ended as it said."""
    begin, turns = 0, 0
    for start, stop in row.observed:
        observed = tuple(int(token) for token in row.token_ids[start:stop])
        context = row.token_ids[begin:start]
        if start == 0:
            expected: object = arithmetic.opening(row.prompt_key)
        else:
            turns += 1
            expected = arithmetic.turn_answer(context, start, turns, limits)
        fresh = limits.hosted and start > 0 and arithmetic.begins_anew(context.tolist())
        if expected != observed or fresh != (start in row.breaks):
            return False
        begin = start if fresh else begin
    ended = arithmetic.turn_answer(row.token_ids[begin:], row.token_ids.size, turns + 1, limits)
    if row.finish_reason is FinishReason.FAILED:
        return lied or (bool(row.failure) and ended is FinishReason.ENVIRONMENT)
    return ended is row.finish_reason
