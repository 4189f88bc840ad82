"""Requests and replies of the coordinator, in our own records: what workers and the flow say and hear."""

from antiphon.core.dissemination.reports import NetworkReport
from antiphon.core.frozen import frozen, frozen_by_identity
from antiphon.core.records import (
    BatchRef,
    FinishReason,
    GroupSubmission,
    IntArray,
    KeptProgress,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    StepCommit,
)
from antiphon.core.status import EvaluationRecord


@frozen
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
    instance: str = ""
    """Drawn by its process when it begins: two processes with one bundle differ in it; "": not said."""


@frozen
class WorkerWelcome:
    """What a worker must know to take part."""

    worker_id: str
    run_id: str
    config_yaml: str
    """The resolved run configuration; sampling.rule is the one that the run was decided to have."""
    heartbeat_s: float
    learner_key: bytes = b""
    """Public key that manifests are signed with, 32 bytes; empty: this run's are not signed."""


@frozen
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
    missing_abilities: tuple[str, ...] = ()
    """Names of what its engine cannot do, see docs/concepts/engines.md."""


@frozen
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


@frozen
class LeaseRequest:
    """A worker asks for groups."""

    worker_id: str
    held_version: int | None
    """The gate counts with the version the worker holds, not the learner's."""
    groups: int
    """Most groups it can take now; an evaluation's lease counts as the evaluation.samples / loop.group_size
    of a group, so the reply may hold more leases than this number."""
    wait_s: float
    """Longest time to hold the call open when nothing can be leased; at most 30."""
    wants_history: bool = False
    """Send past completions of each prompt along; a worker that cannot draft saves their bytes."""


@frozen
class LeaseReply:
    """Leases granted, possibly none."""

    leases: tuple[Lease, ...]
    reason: str
    """Why nothing was granted; empty when something was."""
    newest_version: int | None
    wanted_version: int | None
    """The version that the next open group, or in elastic mode an evaluation, must be sampled with."""
    run_finished: bool


@frozen_by_identity
class TurnRequest:
    """A worker asks for the environment's answer to a turn that has ended."""

    worker_id: str
    lease_id: str
    piece: PartialTrajectory
    """Of the sample, what the coordinator does not keep yet; it ends with the turn."""
    wait_s: float
    """Longest time to hold the call open; at most 30."""


@frozen
class TurnReply:
    """The answer to a turn, or why there is none yet."""

    answered: bool
    token_ids: tuple[int, ...] = ()
    """To be observed."""
    finish_reason: FinishReason | None = None
    """Why the trajectory is over; None while it goes on."""
    kept: int = 0
    """Where it is not answered: tokens of the sample that the coordinator keeps; ask again from there on."""
    cancelled: bool = False
    """The lease is not the worker's any more."""
    fresh: bool = False
    """As in `TurnAnswer`."""


@frozen_by_identity
class PullReply:
    """Groups to reward as they were handed in, possibly none."""

    groups: tuple[GroupSubmission, ...]
    prompt_keys: tuple[str, ...]
    """Of each group; the coordinator's word, not its worker's."""
    unfinished: tuple[str, ...] = ()
    """Where hosts answer the turns, and there is nothing to reward: groups that were not handed in yet."""
    prompts: tuple[IntArray, ...] = ()
    """[P] int32 token ids of the prompt of each group, where a reference model scores them too."""


@frozen
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
    """It waits for workers, and none is active, or for hosts: no stall, since one that joins continues it."""

    def stalled(self, stage: str, number: int, still_s: float) -> str:
        """Say which counter stood still while a stage was waited for.

        >>> StageReply(False, "2 groups at w-1", 0.5).stalled("collect", 3, 300.0)
        'collect 3: no token, group or reward for 300 s; it waits for 2 groups at w-1'
        """
        counted = "byte or loaded version" if stage == "broadcast" else "token, group or reward"
        counted = "worker or host" if self.no_workers else counted
        said = f"{stage} {number}: no {counted} for {still_s:.3g} s; it waits for {self.waiting_for}"
        return said + "; start workers or hosts and give the same command again" * self.no_workers


@frozen
class CommitsReply:
    """Some committed steps, as many as travel in one message."""

    commits: tuple[StepCommit, ...]
    """In order."""
    more: bool
    """Whether there are later ones."""
