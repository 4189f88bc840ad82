"""Batch files: whether the rows that a learner trains on are what was sampled, rewarded and compared."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antiphon.core.config import RunConfig
from antiphon.core.records import BatchRow
from antiphon.simulator.checks import reasons
from antiphon.simulator.checks.authorship import Authorship
from antiphon.simulator.standins import arithmetic


class BatchFiles:
    """The files of one run; the stand-ins compute instead of sampling, so every token is known."""

    def __init__(
        self, config: RunConfig, reward_rarity: int, failure_rarity: int, authorship: Authorship
    ) -> None:
        """Begin without a file.

        The rarities are those of `arithmetic.reward` and `arithmetic.failure`; `authorship` knows who lies.
        """
        self._config = config
        self._authorship = authorship
        self._reward_rarity = reward_rarity
        self._failure_rarity = failure_rarity
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
        prompt = arithmetic.prompt_number(tuple(int(token) for token in row.prompt_token_ids))
        seed = seeds.get(row.group_id, ())[row.sample_index]
        tokens, logprobs = arithmetic.completion(numbers, row.spans, prompt, seed)
        wrong = tokens.size != row.token_ids.size or tokens != row.token_ids
        if np.any(wrong) and np.all(self._authorship.lied(row) | ~np.asarray(wrong)):
            self._authorship.edited.add(row.group_id)
        elif np.any(wrong):
            yield f"{where} has tokens that its prompt, seed and versions cannot give"
        if not np.array_equal(logprobs, row.logprobs):
            yield f"{where} has log-probabilities that are not those of its tokens"
        failure = arithmetic.failure(row.token_ids, self._failure_rarity)
        reward = arithmetic.reward(row.prompt_key, row.token_ids, self._reward_rarity)
        if (row.reward, row.failure) != (0.0 if failure else reward, failure):
            yield f"{where} has a reward that no reward service gave"
