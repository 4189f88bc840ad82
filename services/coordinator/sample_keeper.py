"""Sample keeper: a few completions that no batch file holds, so that people can read them.

Groups without variance train nothing, and held-out answers never do: without this nothing would show why
a run learns nothing. `record.samples` of the best, the worst and random ones are kept of each step's
filtered groups and of each evaluation. Until their file is written, their submissions stay in the journal,
so at most three times that number of submissions for a step and for each running evaluation.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import islice

import numpy as np

from antiphon.core.config import RunConfig
from antiphon.core.loop import events as e
from antiphon.core.loop.assembly import SealPlan
from antiphon.core.loop.group_state import EvaluationState, GroupOutcome, GroupState, heldout_group_id
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import BatchRow
from antiphon.core.reporting.kept_samples import Candidate, drawn_number, kept
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.journal.submissions import Submissions
from antiphon.services.coordinator.prompts import PromptSource

DRAWS_KEPT = 4096
"""Groups whose random bits are not derived again when another group is dropped beside them."""


class SampleKeeper:
    """Chooses completions of one run, and makes the rows of their files."""

    def __init__(
        self, config: RunConfig, state: RunState, submissions: Submissions, prompts: PromptSource
    ) -> None:
        self._count, self._seed = config.record.samples, config.run.seed
        self._state, self._submissions, self._prompts = state, submissions, prompts
        self.booked = 0
        """Filtered groups, the oldest, that the batch being written takes: what is filtered meanwhile
        belongs to the next batch, and is chosen among its own."""
        self._answers: dict[int, dict[str, Candidate]] = {}
        """Version under evaluation -> held-out answers kept so far, by group."""
        self._unfinished: dict[int, EvaluationState] = {}
        self._seen = 0
        """Evaluations that were looked at; a long run has many, of which few are unfinished."""
        self._drawn = lru_cache(maxsize=DRAWS_KEPT)(self._draw)

    def unneeded(self, dropped: Sequence[e.GroupDropped]) -> list[str]:
        """Return the groups whose submissions can be forgotten once some are dropped."""
        if not dropped:  # nearly always: this is asked after every group
            return []
        before = self._state.since_seal.filtered[self.booked :]
        groups = self._state.groups
        leaving = [GroupOutcome.of(groups[x.group_id]) for x in dropped if x.reason == "filtered"]
        held, holds = self._chosen(before), self._chosen([*before, *leaving])
        gone = [*held, *(x.group_id for x in dropped)]
        return [group_id for group_id in gone if group_id not in holds]

    def unneeded_answers(self, group: GroupState, reward: float) -> list[str]:
        """Return the held-out groups whose submissions can be forgotten once this one is rewarded."""
        version = group.evaluation
        if version is None:
            return []
        held = self._answers_of(version)
        added = self._candidate(group.group_id, "heldout", group.prompt_index, (0,), reward)
        holds = self._answers[version] = kept([*held.values(), added], self._count)
        return [group_id for group_id in (*held, group.group_id) if group_id not in holds]

    def held(self) -> list[str]:
        """Return the dropped groups whose submissions waited for the file of the batch being written."""
        return list(self._chosen(self._state.since_seal.filtered[: self.booked]))

    async def rows_of_step(self, plan: SealPlan, booked_groups: int) -> list[BatchRow]:
        """Return the rows of the filtered groups of a step that are kept, in the order of their names.

        The step takes the `booked_groups` oldest ones that were filtered since the batch before.
        """
        self.booked = booked_groups
        booked = self._state.since_seal.filtered[: self.booked]
        filtered = [*map(GroupOutcome.of, plan.filtered), *booked]
        chosen, rows = self._chosen(filtered), []
        for group in sorted(filtered, key=lambda group: group.group_id):
            if group.group_id in chosen:
                index, _ = self._drawn("train", group.prompt_index, _shown(group))
                reward = 0.0 if index in group.failures or not group.rewards else group.rewards[0]
                failure = group.failures.get(index, "")
                rows += await self._row(group.group_id, "train", group.prompt_index, index, reward, failure)
        return rows

    async def next_ending(self, store: ArtifactStore) -> Callable[[], e.EvaluationFinished] | None:
        """Return what writes the kept answers of an evaluation and returns the event that ends it.

        None while no evaluation has all rewards and no end.
        """
        evaluations = self._state.evaluations
        self._unfinished |= islice(evaluations.items(), self._seen, None)
        self._seen = len(evaluations)
        self._unfinished = {
            version: found for version, found in self._unfinished.items() if not found.finished
        }
        for version, found in self._unfinished.items():
            if found.rewarded >= found.prompts:
                rows = await self.rows_of_evaluation(version)
                return partial(_finish_evaluation, version, found.means(), rows, store)
        return None

    async def rows_of_evaluation(self, version: int) -> list[BatchRow]:
        """Return the rows of the held-out answers that are kept, in the order of their names."""
        evaluation, rows = self._state.evaluations[version], []
        chosen = self._answers_of(version)
        for index in sorted(evaluation.rewards):
            group_id = heldout_group_id(version, index)
            if group_id in chosen:
                reward, failure = evaluation.rewards[index], evaluation.failures.get(index, "")
                rows += await self._row(group_id, "heldout", index, 0, reward, failure)
        return rows

    def forget(self, version: int) -> list[str]:
        """Return the held-out groups whose submissions are needed no more, now that their file is written."""
        return list(self._answers.pop(version, {}))

    def _answers_of(self, version: int) -> dict[str, Candidate]:
        if version not in self._answers:  # a restart knows the rewards, and so what was kept
            rewards = self._state.evaluations[version].rewards
            known = (
                self._candidate(heldout_group_id(version, index), "heldout", index, (0,), reward)
                for index, reward in rewards.items()
            )
            self._answers[version] = kept(known, self._count)
        return self._answers[version]

    def _chosen(self, groups: Sequence[GroupOutcome]) -> dict[str, Candidate]:
        if not self._count:
            return {}
        return kept(
            [
                self._candidate(
                    group.group_id,
                    "train",
                    group.prompt_index,
                    _shown(group),
                    group.rewards[0] if group.rewards else 0.0,
                )
                for group in groups
            ],
            self._count,
        )

    def _candidate(
        self, group_id: str, split: str, prompt_index: int, samples: tuple[int, ...], reward: float
    ) -> Candidate:
        return Candidate(group_id, reward, self._drawn(split, prompt_index, samples)[1])

    def _draw(self, split: str, prompt_index: int, samples: tuple[int, ...]) -> tuple[int, int]:
        """Return which of a group's samples stands for it, and its random bits."""
        key = self._prompts.prompt(split, prompt_index).key
        bits, index = min((drawn_number(self._seed, key, index), index) for index in samples)
        return index, bits

    async def _row(
        self, group_id: str, split: str, prompt_index: int, index: int, reward: float, failure: str
    ) -> list[BatchRow]:
        submission = await self._submissions.find(group_id)
        if submission is None:
            return []  # it left while another file was being written, or an older version forgot it
        trajectory, prompt = submission.trajectories[index], self._prompts.prompt(split, prompt_index)
        row = BatchRow(
            group_id=group_id,
            prompt_key=prompt.key,
            sample_index=trajectory.sample_index,
            prompt_token_ids=np.asarray(prompt.token_ids, dtype=np.int32),
            token_ids=trajectory.token_ids,
            logprobs=trajectory.logprobs,
            spans=trajectory.spans,
            finish_reason=trajectory.finish_reason,
            reward=reward,
            advantage=0.0,
            failure=failure,
        )
        return [row]


def write_samples(rows: Sequence[BatchRow], store: ArtifactStore) -> str:
    """Write kept completions as a table of a batch's form and return its digest; "" without any.

    Raises:
        UnavailableError: when the store cannot be written.
    """
    return store.put(encode_batch(rows)) if rows else ""


def _finish_evaluation(
    version: int, means: tuple[float, float], rows: Sequence[BatchRow], store: ArtifactStore
) -> e.EvaluationFinished:
    return e.EvaluationFinished(version, *means, samples_digest=write_samples(rows, store))


def _shown(group: GroupOutcome) -> tuple[int, ...]:
    """Return the samples of a group of which one may be shown: those scored, else all."""
    count = len(group.token_counts)
    return tuple(index for index in range(count) if index not in group.failures) or tuple(range(count))
