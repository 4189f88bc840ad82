"""Submissions: what was handed in and accepted, in memory until its group ends, and in the journal."""

import dataclasses
from collections.abc import Iterable

from antiphon.core.checks import submission_digest
from antiphon.core.errors import IntegrityError
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import GroupSubmission
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.journal.journal import Journal


class Submissions:
    """The accepted submissions of one run, by group."""

    def __init__(self, state: RunState, journal: Journal) -> None:
        self._state = state
        self._journal = journal
        self._known: dict[str, GroupSubmission] = {}

    def remember(self, submission: GroupSubmission) -> None:
        """Keep an accepted submission at hand until its group ends."""
        self._known[submission.group_id] = dataclasses.replace(submission, encoded=None)

    def forget(self, group_ids: Iterable[str]) -> None:
        """Drop what is kept at hand of groups that ended; other names are ignored."""
        for group_id in group_ids:
            self._known.pop(group_id, None)

    async def get(self, group_id: str) -> GroupSubmission:
        """Return an accepted submission.

        Raises:
            IntegrityError: when the journal has lost it.
        """
        found = await self.find(group_id)
        if found is None:
            raise self.lost(group_id)
        return found

    async def find(self, group_id: str) -> GroupSubmission | None:
        """Return an accepted submission; None when it was forgotten.

        Raises:
            IntegrityError: when the journal has another one than was accepted.
        """
        known = self._known.get(group_id)
        if known is not None:
            return known
        body = await self._journal.payload(group_id)
        if body is None:
            return None
        submission = payloads.load_submission(body)
        receipt = self._state.receipts.get(group_id)
        if receipt is not None and submission_digest(submission) != receipt.payload_digest:
            raise IntegrityError(
                f"the payload of group {group_id} in the journal is not what was accepted; "
                "restore the journal from a copy"
            )
        if group_id in self._state.groups:
            self._known[group_id] = submission
        return submission

    def lost(self, group_id: str) -> IntegrityError:
        """Return the error of an unfinished group without what was handed in for it."""
        return IntegrityError(f"the journal has no payload for group {group_id}; restore it from a copy")
