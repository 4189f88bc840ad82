"""Status: a run at a glance, as the coordinator reports it and everyone shows it."""

from dataclasses import dataclass, field
from enum import StrEnum

from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import StepCommit
from antiphon.core.voided_batch import VoidedBatch


class WorkerState(StrEnum):
    """Where a worker stands in the fleet."""

    JOINING = "joining"
    """Registered; its engine holds no version yet, so nothing waits for it."""
    ACTIVE = "active"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Held-out score of one policy version."""

    version: int
    prompts: int
    rewarded: int
    """Equal to prompts when the evaluation is complete and what is kept of its answers is in the store."""
    reward_mean: float
    """pass@1 where rewards are 0 or 1; over the rewarded prompts, of each the mean of its samples."""
    completion_tokens_mean: float
    samples_digest: str = ""
    """blake3 of the file of kept answers; empty where none are kept."""
    reward_range: RewardRange = UNIT_RANGE

    @property
    def complete(self) -> bool:
        return self.rewarded >= self.prompts


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker as the coordinator sees it."""

    worker_id: str
    state: WorkerState
    held_version: int | None
    open_leases: int
    tokens_generated: int
    busy_share: float
    """Share of its time in which its engine had work, 0..1."""
    seconds_since_heartbeat: float
    stands_still_s: float = 0.0
    """Seconds without a token of an engine that was found to hang; it gets no leases. 0 for others."""
    audited: int = 0
    """Groups of this worker's name that were audited."""
    strikes: int = 0
    tokens_per_s: float = 0.0
    """Completion tokens over the seconds since it was ready to sample."""
    swap_error: str = ""
    """Why it could not load newer weights, in its own words; empty once it could."""
    swap_failing_s: float = 0.0
    """Seconds since its swaps fail."""
    missing_abilities: tuple[str, ...] = ()
    """Names of what its engine cannot do, as it says."""


class OrderState(StrEnum):
    """How the order of a worker of the pool stands."""

    ASKED = "asked"
    """Its engine was asked, or will be, and has not answered."""
    PENDING = "pending"
    """It waits in its engine's queue and costs nothing."""
    UP = "up"
    """It runs and costs."""
    STOPPING = "stopping"
    """Its engine was asked to stop it; it still costs."""
    GONE = "gone"
    """Nothing of it is left."""


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """One worker of the pool as it was last noted in the journal."""

    worker: str
    """Its name."""
    state: OrderState
    instance: str = ""
    """What its engine calls it."""
    reason: str = ""
    """Why it is in that state."""
    up_s: float = 0.0
    """Seconds for which its instance had been up then."""
    left_s: float = 0.0
    """Seconds that were left to it for this state; 0 where there is no limit."""


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """What the learner does at the moment, and how much of it is done."""

    doing: str
    """Such as `training step 12`, `restoring: step 3 of 9`, `publishing version 12`; `idle` between two."""
    counter: int
    """Grows with everything that it does; patience with the learner counts from the last change."""
    counted: str
    """What is counted at the moment, in the singular: micro-batch, byte, step."""


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """What the capacity model expects of a run by what it measured: see docs/concepts/capacity.md."""

    need_tokens_per_s: float
    """What keeps the learner busy, completion tokens per second."""
    supply_tokens_per_s: float
    """What the active workers sample while their engines run."""
    acceptance: float
    """Share of the groups that is trained on, 0..1."""
    train_s: float
    """T: a learner step."""
    broadcast_s: float
    """T_b: from a commit until a worker holds its version."""
    group_s: float
    """L: from the lease to the rewards of the group that a batch waits for."""
    place_s: float
    """L_0: the same of the slowest place, with the groups that were left out before."""
    regime: str
    """What the learner waits for: training (nothing), sampling, broadcast or staleness."""
    step_s: float
    """Seconds per step that the model expects."""
    measured_step_s: float
    """Seconds per step of late; 0 while that is not known."""
    publish_interval: int
    """The one that gives the least seconds per step within the bound."""
    least_staleness: int
    """S_min, from which on the learner never waits for the bound."""

    def numbers(self) -> dict[str, float]:
        """Return what is logged with each step, by name."""
        logged = (
            *("step_s", "measured_step_s", "need_tokens_per_s", "supply_tokens_per_s", "acceptance"),
            *("train_s", "broadcast_s", "group_s", "place_s", "publish_interval"),
        )
        return {f"plan_{name}": float(getattr(self, name)) for name in logged}

    def describe(self) -> str:
        """Say it in a sentence."""
        measured = f", {self.measured_step_s:.3g} measured" if self.measured_step_s else ""
        return (
            f"{self.need_tokens_per_s:,.0f} tokens/s keep the learner busy, {self.supply_tokens_per_s:,.0f} "
            f"are there; {self.regime}-bound, {self.step_s:.3g} s a step expected{measured}; "
            f"publish interval {self.publish_interval}, S_min {self.least_staleness}"
        )


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at a glance."""

    run_id: str
    steps_total: int
    committed_steps: int
    """Equals the newest policy version."""
    opened_steps: int
    sealed_steps: int
    newest_version: int | None
    """Newest announced snapshot."""
    groups_open: int
    groups_leased: int
    groups_to_reward: int
    groups_ready: int
    """Rewarded and waiting for a batch."""
    groups_dropped_stale: int
    groups_filtered: int
    groups_requeued: int
    """Leases that expired or were released, whose groups were offered again."""
    staleness_histogram: dict[int, int] = field(default_factory=dict)
    """Staleness -> trajectories, over all sealed batches."""
    workers: tuple[WorkerRecord, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()
    last_commit: StepCommit | None = None
    paused_reason: str = ""
    """Why the run is paused, as a sentence; empty while it continues."""
    waiting: str = ""
    """What the data plane waits for at the moment, as a sentence."""
    run_ahead: str = ""
    """What elastic mode keeps in flight, and what that is expected to give, as a sentence."""
    order: str = ""
    """What groups are leased by, and how well remembered lengths rank them, as a sentence."""
    length_correlation: float = 0.0
    """Spearman's rank correlation of remembered and sampled lengths, -1..1; 0 also while it is not known."""
    finished: bool = False
    barred: dict[str, str] = field(default_factory=dict)
    """Workers and tokens that are shut out -> why."""
    worker_seconds: dict[str, float] = field(default_factory=dict)
    """Use -> seconds of workers, each booked once: see `core.loop.work_account`."""
    tokens_by_use: dict[str, int] = field(default_factory=dict)
    """Use -> completion tokens."""
    dollars_by_use: dict[str, float] = field(default_factory=dict)
    """Use -> US dollars of those seconds; beside them `transfer` (egress) and `learner`."""
    seconds_by_class: dict[str, float] = field(default_factory=dict)
    """Class of worker ("" for those of no pool) -> seconds, whatever their use."""
    dollars_by_class: dict[str, float] = field(default_factory=dict)
    """The same in US dollars."""
    voided: tuple[VoidedBatch, ...] = ()
    """Batches that operators voided, oldest void first."""
    trajectories_failed: int = 0
    """Answers that could not be scored, held-out ones included."""
    last_failure: str = ""
    """Why the last of them could not."""
    unaudited: int = 0
    """Groups that were drawn for an audit and could not be checked."""
    unaudited_reason: str = ""
    """Why the last one of some worker could not."""
    unaudited_tokens: int = 0
    """Tokens of audited groups that no audit judges, since their engine kept its cache over a swap."""
    capacity: CapacityRecord | None = None
    """What is needed and expected by what was measured; None before a batch was trained."""
    work_done: int = 0
    """Grows with each token, group, reward and fetched byte; the workers stand still when it does."""
    deliveries: tuple[DeliveryRecord, ...] = ()
    """How versions came to the workers, newest last; the journal's events `snapshot.delivered` are all."""
    reward_range: RewardRange = UNIT_RANGE
    """Of the environment."""
    environment_digest: str = ""
    """Of the environment's files, as the run was opened with them; "" for an environment without."""
    orders: tuple[WorkerOrder, ...] = ()
    """Of the pool's workers that were ever ordered."""

    @property
    def evaluated(self) -> frozenset[int]:
        """Return the versions whose evaluation was opened, complete or not."""
        return frozenset(e.version for e in self.evaluations)

    @property
    def scored(self) -> frozenset[int]:
        """Return the versions whose evaluation is complete."""
        return frozenset(e.version for e in self.evaluations if e.complete)

    @property
    def scores(self) -> list[EvaluationRecord]:
        """Return the complete evaluations, oldest version first."""
        return sorted((e for e in self.evaluations if e.complete), key=lambda e: e.version)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the journal, for people and dashboards."""

    seq: int
    at: float
    """Unix seconds, for display only; no decision uses it."""
    kind: str
    """noun.verb, such as lease.expired."""
    data_json: str
