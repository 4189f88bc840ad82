"""Coordinator: the contract, in our own records.

Everyone calls the coordinator and it calls no one. Waits are long polls: each names how long
the caller will wait, and the answer says who is being waited for, so a stall explains itself.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.core.dissemination.plan import TransferPlan
from antiphon.core.dissemination.reports import NetworkReport
from antiphon.core.records import (
    BatchRef,
    GroupRewards,
    GroupSubmission,
    GroupToAudit,
    GroupToReward,
    KeptProgress,
    Lease,
    LeaseProgress,
    SnapshotManifest,
    StepCommit,
    SubmitVerdict,
)
from antiphon.core.status import EvaluationRecord, Event, RunStatus
from antiphon.core.trust.audit import SampleStatistics
from antiphon.core.voided_batch import VoidedBatch


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """How a worker introduces itself."""

    worker_name: str
    """Chosen by the worker's owner; letters, digits, dot, dash, underscore."""
    protocol_version: int
    run_id: str
    """The run it means to serve, or "" for whichever the coordinator serves."""
    concurrent_groups: int
    """Groups it samples at the same time; 0: as many as the run's configuration says."""
    device: str = "cpu"
    """cpu or gpu: what its engine samples on."""
    relay_address: str = ""
    """host:port at which other workers may take payloads from it; "": none can reach it."""


@dataclass(frozen=True, slots=True)
class WorkerWelcome:
    """What a worker must know to take part."""

    worker_id: str
    run_id: str
    config_yaml: str
    """The resolved run configuration; sampling.rule is the one that the run was decided to have."""
    heartbeat_s: float
    learner_key: bytes = b""
    """Public key that manifests are signed with, 32 bytes; empty: this run's are not signed."""


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


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """Sign of life; extends the worker's leases."""

    worker_id: str
    held_version: int | None
    """Version whose weights sample now, after their digest was checked."""
    weights_digest: str | None
    lease_ids: tuple[str, ...]
    """Leases still being worked on."""
    tokens_generated: int
    """Completion tokens since the worker started."""
    busy_s: float
    """Seconds since the worker started in which the engine had requests to run."""
    uptime_s: float
    """Seconds since the worker was ready to sample."""
    progress: tuple[LeaseProgress, ...] = ()
    """What was sampled since the reply that said what is kept, so that another worker could continue."""
    sampling: bool = False
    """The engine has requests and is not taking in weights: tokens are due."""
    released_leases: tuple[str, ...] = ()
    """Leases given up with this heartbeat; their groups are offered again at once, progress included."""
    leaving: bool = False
    """The last heartbeat: the worker needs no more replies and counts as gone."""
    bytes_fetched: int = 0
    """Bytes of snapshots that arrived since the worker started."""
    numerics: str = ""
    """What decides its engine's bits; workers that say the same sample the same. "": nobody does."""
    swap_error: str = ""
    """Why it could not load newer weights, as a sentence; empty once it could."""
    swap_failing_s: float = 0.0
    """Seconds since its swaps fail."""
    network: NetworkReport | None = None
    """What it measured of its network; None: nothing since the last time."""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """What the worker should know or give up."""

    known: bool
    """False: the coordinator does not know this worker (any more); register again."""
    cancelled_leases: tuple[str, ...]
    """Those that it named and does not hold any more, or never did."""
    newest_version: int | None
    """Newest announced snapshot."""
    run_finished: bool
    kept: tuple[KeptProgress, ...] = ()
    """For each running lease that the heartbeat had progress of: what the coordinator keeps of it now."""
    next_s: float = 0.0
    """Seconds until the next heartbeat of a worker that has no lease by then; 0: the usual pause."""
    leave: bool = False
    """It is not needed any more: hand over and leave."""
    wanted_version: int | None = None
    """Elastic mode: the version to sample with before any newer one, since it is evaluated."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A worker asks for groups."""

    worker_id: str
    held_version: int | None
    """The gate counts with the version the worker holds, not the learner's."""
    groups: int
    """Most groups it can take now; an evaluation's lease has one sample and counts as the
    1 / loop.group_size of a group, so the reply may hold more leases than this number."""
    wait_s: float
    """Longest time to hold the call open when nothing can be leased; at most 30."""
    wants_history: bool = False
    """Send past completions of each prompt along; a worker that cannot draft saves their bytes."""


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Leases granted, possibly none."""

    leases: tuple[Lease, ...]
    reason: str
    """Why nothing was granted; empty when something was."""
    newest_version: int | None
    wanted_version: int | None
    """The version that the next open group, or in elastic mode an evaluation, must be sampled with."""
    run_finished: bool


@dataclass(frozen=True, slots=True)
class StageReply:
    """Whether a stage of the flow is over at the coordinator, or what it waits for."""

    done: bool
    waiting_for: str = ""
    """Which groups or workers, when it is not over."""
    progress: float = 1.0
    """How far it is, 0..1; it may fall, when groups are dropped."""
    halted: str = ""
    """Why nothing moves before the run is started again: it is paused, or finished."""
    batch: BatchRef | None = None
    """The sealed batch, when `reward` is over."""
    evaluation: EvaluationRecord | None = None
    """The complete evaluation, when `evaluate` is over."""
    counter: int = 0
    """Grows with everything that moves the stage; a stage whose counter stands still for long has stalled."""
    no_workers: bool = False
    """It waits for workers, and none is active: no stall, since one that joins continues it."""

    def stalled(self, stage: str, number: int, still_s: float) -> str:
        """Say which counter stood still while a stage was waited for.

        >>> StageReply(False, "2 groups at w-1", 0.5).stalled("collect", 3, 300.0)
        'collect 3: no token, group or reward for 300 s; it waits for 2 groups at w-1'
        """
        counted = "byte or loaded version" if stage == "broadcast" else "token, group or reward"
        said = f"{stage} {number}: no {'worker' if self.no_workers else counted} for {still_s:.3g} s; "
        hint = (
            "; start workers (`antiphon worker`) and give the same command again" if self.no_workers else ""
        )
        return f"{said}it waits for {self.waiting_for}{hint}"


@dataclass(frozen=True, slots=True)
class CommitsReply:
    """Some committed steps, as many as travel in one message."""

    commits: tuple[StepCommit, ...]
    """In order."""
    more: bool
    """Whether there are later ones."""


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

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> Sequence[GroupToReward]:
        """Hand out groups to reward; a service that never answers loses them after a deadline."""

    async def submit_rewards(self, groups: Sequence[GroupRewards]) -> Sequence[str]:
        """Take the rewards of groups; return the ids of those that had none yet and were not gone.

        Raises:
            ContractError: when a reward is missing or outside [0, 1]; other groups of the call count.
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

    async def plan_transfer(self, worker_id: str, version: int, payload: int) -> TransferPlan:
        """Return whom a worker should fetch a payload of `version` from, which may be the origin alone.

        `payload` is its place in the version's manifest, which both sides have.

        Raises:
            ContractError: when the manifest of that version has no such place.
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
