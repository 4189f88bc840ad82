"""Kill audit: what a run that was killed again and again left behind, recomputed from its files.

The journal is folded, every batch file is read, every weight and every token is computed again,
and all of it is compared with what the workers saw acknowledged.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.core.config import RunConfig
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import group_seeds
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.run_state import RunState, fold, new_state
from antiphon.core.records import BatchRow
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.journal.journal import Journal, journal_place
from antiphon.services.coordinator.journal.payloads import load_submission
from antiphon.services.coordinator.journal.store import StoreTotals
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.standins.engines import ArithmeticPrompts


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found; everything after `trained` should be 0."""

    acked: int
    """Groups that a worker saw accepted."""
    trained: int
    """Trajectories in committed batches."""
    lost: int
    """Acknowledged groups that the journal does not have as they were handed in."""
    twice: int
    """Groups in more than one batch, more than once in one, or in the tables more or less than in them."""
    beyond_bound: int
    """Trajectories that trained with a token older than S."""
    wrong: int
    """Weights or tokens that are not what the recorded history makes of them."""
    digests: tuple[str, ...]
    """Of the weights after each step."""
    hung_leases: int
    """Leases that ended because their worker's engine stood still."""


async def audit(folder: Path, config: RunConfig, light: bool = True, seen: Path | None = None) -> Audit:
    """Recompute a run whose processes are gone; the weights too, if a light learner made them.

    Args:
        folder: with its journal and store.
        config: the run's.
        light: whether a light learner made the weights.
        seen: folder with what workers saw acknowledged; by default the same.
    """
    journal = Journal(journal_place(config, folder), config.run.name)
    try:
        totals = journal.totals()
        events = list(journal.replay())
        state = fold(new_state(config), events)
        lost, acked = await _lost(seen or folder, journal, events, state)
    finally:
        await journal.close()
    store = ArtifactStore(folder / "store")
    bound, weights = config.loop.max_staleness, {0: state.snapshots.get(0, arithmetic.BASE_WEIGHTS)}
    wrong_base = light and weights[0] != arithmetic.BASE_WEIGHTS
    beyond, wrong = 0, int(wrong_base)
    trained: Counter[tuple[str, int]] = Counter()
    check = _TokenCheck(config, events, weights)
    for commit, batch in zip(state.commits, state.sealed, strict=False):
        rows = decode_batch(store.get(commit.batch_digest))
        for row in rows:
            trained[row.group_id, row.sample_index] += 1
            wrong += not check.holds(row)
            beyond += commit.step - row.oldest_version > bound
        wrong += commit.batch_digest != batch.digest
        before = weights[commit.step]
        made = arithmetic.next_weights(before, commit.batch_digest) if rows else before
        wrong += light and made != commit.weights_digest
        weights[commit.version] = commit.weights_digest
    groups = sum(batch.groups for batch in state.sealed[: len(state.commits)])
    twice = sum(count - 1 for count in trained.values())
    twice += totals != StoreTotals(len(state.commits), groups)
    digests = tuple(commit.weights_digest for commit in state.commits)
    hung = sum(isinstance(event, e.LeaseExpired) and event.hung for event in events)
    return Audit(acked, sum(trained.values()), lost, twice, beyond, wrong, digests, hung)


class _TokenCheck:
    """Draws every token of a row again, from its group's seeds and the weights of its versions."""

    def __init__(self, config: RunConfig, events: list[e.JournalEvent], weights: dict[int, str]) -> None:
        self._config = config
        self._weights = weights
        self._opened = {event.group_id: event for event in events if isinstance(event, e.GroupOpened)}

    def holds(self, row: BatchRow) -> bool:
        """Tell whether the row's tokens are the ones that its seed gives under its versions."""
        opened = self._opened[row.group_id]
        group = GroupState(
            group_id=row.group_id,
            number=opened.number,
            split="train",
            prompt_index=opened.prompt_index,
            epoch=opened.epoch,
            samples=self._config.loop.group_size,
            step=opened.step,
            refill=opened.refill,
        )
        seeds = group_seeds(self._config, group, row.prompt_key)
        numbers = {span.version: arithmetic.weights_number(self._weights[span.version]) for span in row.spans}
        prompt = arithmetic.prompt_number(ArithmeticPrompts().prompt("train", opened.prompt_index).token_ids)
        tokens, logprobs = arithmetic.completion(numbers, row.spans, prompt, seeds[row.sample_index])
        return np.array_equal(tokens, row.token_ids) and np.array_equal(logprobs, row.logprobs)


async def _lost(
    folder: Path, journal: Journal, events: list[e.JournalEvent], state: RunState
) -> tuple[int, int]:
    """Return how many acknowledged groups are not as they were, and how many were acknowledged."""
    submitted = {event.group_id: event for event in events if isinstance(event, e.GroupSubmitted)}
    acknowledged = acknowledgements(folder)
    lost = 0
    for group_id, digest in acknowledged.items():
        event = submitted.get(group_id)
        if event is None or event.payload_digest != digest:
            lost += 1
        elif group_id in state.groups:
            body = await journal.payload(group_id)
            lost += body is None or load_submission(body).group_id != group_id
    return lost, len(acknowledged)


def acknowledgements(folder: Path) -> dict[str, str]:
    """Return group -> digest of what a worker saw accepted; a line that a kill cut short is none."""
    found = {}
    for path in folder.glob("*.acknowledged"):
        for line in path.read_text().splitlines(keepends=True):
            words = line.split()
            if line.endswith("\n") and len(words) == 3 and words[2] in ("accepted", "already_accepted"):
                found[words[0]] = words[1]
    return found
