"""Coordinator: the contract, in our own records.

Everyone calls the coordinator and it calls no one. Waits are long polls: each names how long
the caller will wait, and the answer says who is being waited for, so a stall explains itself.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.core.client_records import SampledReply, SampleRequest
from antiphon.core.dissemination.plan import TransferPlan
from antiphon.core.records import (
    BatchRef,
    GroupRewards,
    GroupSubmission,
    GroupToAudit,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
    TurnAnswer,
    TurnToAnswer,
)
from antiphon.core.requests import (
    CommitsReply,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    PullReply,
    StageReply,
    TurnReply,
    TurnRequest,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
)
from antiphon.core.status import Event, RunStatus, WorkerOrder
from antiphon.core.trust.audit import SampleStatistics
from antiphon.core.voided_batch import VoidedBatch


@dataclass(frozen=True, slots=True)
class KitPart:
    """A part of what a worker needs of the model besides its weights: see net/worker_kit.py."""

    digest: str
    """blake3 of the whole archive."""
    total_bytes: int
    """Of the archive."""
    signature: bytes
    """The learner's, over run and digest; zeros where the run signs nothing."""
    data: bytes
    """Bytes of the archive from the offset on that was asked for; none behind its end."""


class Coordinator(Protocol):
    """The data plane: prompts, leases, staleness gate, group buffer, ledger of steps."""

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        """Admit a worker.

        Raises:
            ContractError: another protocol version, or a worker of another run.
        """

    async def worker_kit(self, offset: int) -> KitPart | None:
        """Return the part of the model's kit that begins at `offset`, or None while there is no kit."""

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> HeartbeatReply:
        """Extend the worker's leases and learn what it should give up."""

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        """Grant up to `request.groups` leases, waiting up to `request.wait_s` for the first.

        It also returns, with nothing, when the worker should load another version first.
        """

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        """Accept a finished group once; the answer to a repetition is the same.

        Raises:
            RefusedError: when the lease is not the worker's, or the trajectories do not fit it (count,
                seeds, tokens). It concerns this group alone.
        """

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> PullReply:
        """Hand out groups to reward; a service that never answers loses them after a deadline."""

    async def submit_rewards(self, groups: Sequence[GroupRewards]) -> Sequence[str]:
        """Take the rewards of groups; return the ids of those that had none yet and were not gone.

        Raises:
            ContractError: when a reward is missing or outside of its range; other groups of the call count.
        """

    async def answer_turn(self, request: TurnRequest) -> TurnReply:
        """Return the environment's answer to a turn of a leased sample, waiting up to `request.wait_s`.

        It is on the disk before it is returned; asking again for the same row gets the same answer.

        Raises:
            RefusedError: when the lease cannot have these tokens, or the sample observed something else.
        """

    async def pull_turns(self, client_id: str, limit: int, wait_s: float) -> Sequence[TurnToAnswer]:
        """Hand out turns to answer, waiting up to `wait_s` for the first."""

    async def submit_turns(self, answers: Sequence[TurnAnswer]) -> None:
        """Take the answers to turns; one that nobody waits for changes nothing.

        Raises:
            ContractError: when one can be none; others of the call count.
        """

    async def request_samples(self, request: SampleRequest) -> None:
        """Have a prompt of a client sampled; it is on the disk before this returns, and repeating it changes
        nothing.

        Raises:
            ContractError: when no client drives the run, or the request cannot be: another one of this id, a
                token beyond the vocabulary, no room for `max_tokens`, a version that was never announced.
        """

    async def await_samples(self, request_id: str, wait_s: float) -> SampledReply:
        """Wait up to `wait_s` seconds, at most 30, for the completions of a request.

        Raises:
            ContractError: for a request that is not known, or not any more, and for one whose version no
                worker can fetch.
        """

    async def seal_client_step(self, step: int, digest: str, trajectories: int, tokens: int) -> BatchRef:
        """Make a step file of a client, by its digest in the artifact store, the batch of the next step.

        Repeating it changes nothing.

        Args:
            step: opened by this, where it is not.
            digest: of the file.
            trajectories: sequences that it trains on.
            tokens: targets of these.

        Raises:
            ContractError: when no client drives the run, the step is not the next one, has another batch, or
                the store has no such file.
        """

    async def open_step(self, step: int) -> None:
        """Allow groups of `step` to be issued; repeating it changes nothing.

        Raises:
            ContractError: for a step outside the run, or when the run is finished.
        """

    async def open_evaluation(self, version: int) -> None:
        """Queue the held-out prompts for `version`; repeating it changes nothing.

        Raises:
            ContractError: for a version that cannot exist in this run.
        """

    async def await_stage(self, stage: str, number: int, wait_s: float) -> StageReply:
        """Wait up to `wait_s` seconds for the end of a stage and return how far it is.

        At most 30 seconds. The stages: `collect`: every group of step `number` was handed in; `reward`:
        its batch is sealed; `broadcast`: version `number` is announced, and workers with a share of
        broadcast.quorum of the tokens per second, at least one, hold it or a newer one; `evaluate`: every
        held-out prompt of version `number` is rewarded.

        Raises:
            ContractError: for another stage.
        """

    async def commit_step(self, commit: StepCommit) -> None:
        """Record that `commit.step` was trained; the only way the version advances.

        Repeating the same commit changes nothing.

        Raises:
            IntegrityError: for a step out of order, another batch, or another digest for a
                step that was already committed.
        """

    async def announce_snapshot(self, manifest: SnapshotManifest) -> None:
        """Make a published version known to the workers; repeating it changes nothing.

        Raises:
            ContractError: for the snapshot of another run.
            IntegrityError: for a version that no step made, other weights under a known version, or
                a signature that is not the learner's.
        """

    async def latest_manifest(self, version: int | None) -> SnapshotManifest | None:
        """Return the manifest of `version`, or of the newest one, or None."""

    async def plan_transfer(self, worker_id: str, version: int, payload_digest: str) -> TransferPlan:
        """Return whom a worker should fetch a payload of `version` from, which may be the origin alone.

        Raises:
            ContractError: when the version, as last announced, has no such payload.
        """

    async def skip_step(self, step: int, reason: str, operator: str) -> VoidedBatch:
        """Let a step train nothing: an empty batch takes the place of its sealed one, which is returned.

        Skipping the same step again changes nothing.

        Raises:
            ContractError: when the step has no batch yet, or is committed.
        """

    async def pause(self, reason: str) -> None:
        """Stop granting leases until the run is started again, and say why."""

    async def finish(self) -> None:
        """Declare the run complete: workers and reward services leave."""

    async def drain(self, name: str) -> None:
        """Give the workers of a name no further group, and tell them to hand over and leave.

        Repeating it changes nothing; it is forgotten when they register again, and at a restart.
        """

    async def note_orders(self, orders: Sequence[WorkerOrder]) -> None:
        """Note in the journal how orders of the pool's workers stand; repeating it changes nothing.

        Raises:
            ContractError: for a worker that is none of the pool's.
        """

    async def revoke(self, name: str, reason: str) -> None:
        """Let a token (by its id) or a worker (by its name) count no more; repeating it changes nothing.

        Raises:
            ContractError: when it is neither a token's id nor a possible name.
        """

    async def pardon(self, name: str, reason: str) -> None:
        """Let a worker that was shut out try again, as a stranger."""

    async def pull_for_audit(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToAudit]:
        """Hand out groups to score again, waiting up to `wait_s` for the first."""

    async def submit_audit(
        self, group_id: str, samples: Sequence[SampleStatistics], worker_id: str = "", reason: str = ""
    ) -> None:
        """Take what an audit found; a repetition, or a group that was not asked for, changes nothing.

        `worker_id` says who handed it in, where the learner itself saw this in training; it is "" for a
        group that was handed out to be audited. `reason` says why no token of it could be scored.
        """

    async def commits_after(self, after_step: int) -> CommitsReply:
        """Return the first committed steps greater than `after_step` (-1 for all), a message full of them."""

    async def commits(self, after_step: int) -> Sequence[StepCommit]:
        """Return every committed step greater than `after_step`, in order, asked for page by page."""
        found: list[StepCommit] = []
        more = True
        while more:
            page = await self.commits_after(found[-1].step if found else after_step)
            found.extend(page.commits)
            more = page.more
        return found

    async def status(self) -> RunStatus:
        """Return the run at a glance."""

    def event_pages(self, after_seq: int, follow: bool) -> AsyncIterator[Sequence[Event]]:
        """Yield journal events after `after_seq`, as many as fit a message; with `follow`, wait for more."""

    async def watch_events(self, after_seq: int, follow: bool) -> AsyncIterator[Event]:
        """Yield journal events after `after_seq`; with `follow`, wait for new ones."""
        async for page in self.event_pages(after_seq, follow):
            for event in page:
                yield event
