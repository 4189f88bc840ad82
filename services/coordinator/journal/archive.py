"""Archive: what was rewarded is kept for later drafts and sent along with the leases of its prompt.

It follows `core.drafting.history` in memory and returns what the journal should keep and delete, in
the transaction of the rewards; so after a restart it holds what it held. The run's state and
its digests know nothing of it: without an archive a run is the same, only slower.
"""

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise

import structlog

from antiphon.core.drafting.config import DraftingSection
from antiphon.core.drafting.history import HistoryStore
from antiphon.core.drafting.history_codec import fit_histories, most_bytes
from antiphon.core.loop.group_state import GroupState
from antiphon.core.message_sizes import MARGIN_BYTES, MESSAGE_BYTES, group_bytes
from antiphon.core.records import GroupSubmission, Lease, PastCompletion, PromptHistory
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.journal.journal import HistoryEdit, HistoryRow

REPLY_BYTES = 32 << 20
"""Most history in one reply, half of the largest message, less where unfinished groups need it; leases
beyond it go without."""

_log = structlog.get_logger("coordinator")


class Archive:
    """The history of one run."""

    def __init__(self, section: DraftingSection) -> None:
        """Begin without history; nothing is ever kept when drafting or its history is switched off."""
        self._lease_bytes = section.lease_kib << 10
        self._store: HistoryStore | None = None
        if section.enabled and section.epochs:
            self._store = HistoryStore(section.epochs, section.responses, section.store_mib << 20)

    @property
    def keeps(self) -> bool:
        """Return whether rewarded completions are kept at all."""
        return self._store is not None

    def load(self, rows: Iterable[HistoryRow]) -> HistoryEdit | None:
        """Take back what the journal kept.

        Returns:
            What to delete: damaged rows, and what no longer fits under another configuration.
        """
        store = self._store
        if store is None:
            return None
        gone: list[tuple[str, int]] = []
        for row in rows:
            history = payloads.load_history(row.body)
            completions = () if history is None else history.completions
            change = store.add(row.prompt_key, row.epoch, completions, row.evaluated)
            gone.extend(change.gone)
            if not change.kept:
                gone.append((row.prompt_key, row.epoch))
        if len(store) or gone:
            _log.info("history.loaded", prompts=len(store), bytes=store.bytes_used, dropped=len(gone))
        return HistoryEdit(gone=tuple(gone)) if gone else None

    def take(
        self, prompt_key: str, group: GroupState, submission: GroupSubmission, rewards: Sequence[float]
    ) -> HistoryEdit | None:
        """Keep a rewarded group and return what the journal must do; None when nothing changes.

        The group is one of training or one prompt of an evaluation; rewards are by sample.
        """
        if self._store is None:
            return None
        evaluated = group.evaluation is not None
        epoch = group.epoch if group.evaluation is None else group.evaluation
        completions = tuple(
            PastCompletion(t.token_ids[start:stop], t.oldest_version, epoch, t.sample_index, reward)
            for t, reward in zip(submission.trajectories, rewards, strict=True)
            for start, stop in pairwise((0, *t.breaks, t.stop))  # a text for each context
            if t.spans
        )
        change = self._store.add(prompt_key, epoch, completions, evaluated)
        if not (change.kept or change.gone):
            return None
        kept: tuple[HistoryRow, ...] = ()
        if change.kept:
            body = payloads.dump_history(PromptHistory(prompt_key, epoch, completions))
            kept = (HistoryRow(prompt_key, epoch, evaluated, body),)
        return HistoryEdit(kept, change.gone)

    def history(self, prompt_key: str) -> PromptHistory | None:
        """Return what a lease for this prompt would carry if it were not limited."""
        return None if self._store is None else self._store.snapshot(prompt_key)

    async def attach(self, leases: Sequence[Lease]) -> list[Lease]:
        """Return the leases with the history of their prompts, as much as fits one reply."""
        histories = [self.history(lease.prompt_key) for lease in leases]
        sizes = [most_bytes(history) for history in histories if history is not None]
        room = min(REPLY_BYTES, max(0, MESSAGE_BYTES - MARGIN_BYTES - sum(map(_bytes, leases))))
        if sum(sizes) > room or max(sizes, default=0) > self._lease_bytes:
            # Compressing what is near the limit takes milliseconds, so others need not wait for it.
            histories = await asyncio.to_thread(fit_histories, histories, self._lease_bytes, room)
        return [
            dataclasses.replace(lease, history=history)
            for lease, history in zip(leases, histories, strict=True)
        ]


def _bytes(lease: Lease) -> int:
    tokens = sum(piece.token_ids.size for piece in lease.prefix)
    return group_bytes(len(lease.seeds), tokens, len(lease.prompt_token_ids))
