"""Witnessed: clients that report to the witness of a simulated run what its processes received."""

import asyncio
from collections.abc import Sequence

from antiphon.api.coordinator import HeartbeatReply, LeaseReply, LeaseRequest, WorkerHeartbeat
from antiphon.core.records import GroupRewards, GroupSubmission, StepCommit, SubmitVerdict
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.simulator import processes
from antiphon.simulator.checks.invariants import Witness
from antiphon.simulator.process_table import ProcessEntry

CALL_S = 10.0
"""Deadline of a call, as in production."""


class Witnessed(CoordinatorClient):
    """A client that reports to the witness what its process claims and receives."""

    def __init__(
        self, shared: processes.SharedRun, witness: Witness, entry: ProcessEntry, worker: str = ""
    ) -> None:
        """Call as the worker of that name, or as one of the run's own services."""
        channel = shared.channel(processes.COORDINATOR, worker)
        super().__init__(processes.COORDINATOR, CALL_S, channel=channel)
        self._witness = witness
        self._entry = entry
        self._shared = shared

    async def heartbeat(self, beat: WorkerHeartbeat) -> HeartbeatReply:
        self._witness.held(self._entry.name, self._entry.held, beat.held_version)
        self._entry.held = beat.held_version
        self._witness.holders.told(beat.lease_ids, beat.released_leases)
        sent_s = self._witness.now()
        reply = await super().heartbeat(beat)
        self._witness.holders.heard(beat.lease_ids, sent_s)
        return reply

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        reply = await super().lease_group(request)
        for lease in reply.leases:
            self._witness.leased(lease)
        return reply

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        if seconds := self._shared.upload_s(self._entry.name):
            await asyncio.sleep(seconds)
        verdict = await super().submit_group(submission)
        self._witness.answered(submission, verdict)
        return verdict

    async def submit_rewards(self, groups: list[GroupRewards]) -> Sequence[str]:  # type: ignore[override]
        taken = await super().submit_rewards(groups)
        for group_id in taken:
            self._witness.rewarded(group_id)
        return taken

    async def commit_step(self, commit: StepCommit) -> None:
        await super().commit_step(commit)
        self._witness.committed(commit)
