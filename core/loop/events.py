"""Events: what happened to a run, as small frozen facts with a JSON form.

The journal is a list of these; the state of a run is their fold. Each class has a kind of the form
noun.verb. Instants are seconds on the coordinator's monotonic clock: only their differences mean anything.
"""

import json
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from pydantic_core import to_json

from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.errors import IntegrityError
from antiphon.core.frozen import frozen
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import DraftingStatistics, SamplingParameters

_KINDS: dict[str, type["JournalEvent"]] = {}
_E = TypeVar("_E", bound="type[JournalEvent]")


class JournalEvent:
    """Root of all events; `kind` names the class in the journal."""

    __slots__ = ()
    kind: ClassVar[str]


@dataclass_transform(frozen_default=True)
def _event(kind: str) -> Callable[[_E], _E]:
    """Make a class an event of that kind, and a frozen dataclass."""

    def register(cls: _E) -> _E:
        made = frozen(cls)
        made.kind = kind
        _KINDS[kind] = made
        return cast(_E, made)

    return register


@_event("run.opened")
class RunOpened(JournalEvent):
    """The first event: which run this is and the configuration it must keep."""

    run_id: str
    pinned: dict[str, str]
    """Configuration values that may not change while the run lasts, as JSON, by field."""
    at_s: float | None = None


@_event("run.resumed")
class RunResumed(JournalEvent):
    """A coordinator opened the journal again; a pause ends with it."""

    at_s: float | None = None
    break_s: float = 0.0  # since the newest event with a time before it, on the wall clock


@_event("run.paused")
class RunPaused(JournalEvent):
    """No leases until the run is started again."""

    reason: str


@_event("run.finished")
class RunFinished(JournalEvent):
    """The run is complete; workers and reward services leave."""


@_event("step.opened")
class StepOpened(JournalEvent):
    """Groups of this step may be issued."""

    step: int


@_event("group.opened")
class GroupOpened(JournalEvent):
    """A prompt was given its place; from here on the group must end somehow."""

    group_id: str
    number: int
    """Order among the training groups of the run, or within its step in fixed mode."""
    prompt_index: int  # place in the train split
    epoch: int
    step: int | None  # fixed mode: the one that will train on it
    version: int | None  # fixed mode: the one that must sample it
    refill: bool  # fixed mode: one of the step's spare prompts


@_event("lease.granted")
class LeaseGranted(JournalEvent):
    """A worker may produce a group."""

    group_id: str
    lease_id: str
    worker_id: str
    attempt: int
    held_version: int
    """Version that the worker held, or the oldest one of the tokens that it continues from, if older."""
    at_s: float
    continued: int = 0  # tokens that it continues from


@_event("lease.duplicated")
class LeaseDuplicated(JournalEvent):
    """A second worker may produce a group that a batch waits for; the first to hand it in wins."""

    group_id: str
    lease_id: str
    worker_id: str
    attempt: int
    at_s: float
    continued: int = 0  # tokens that it continues from


@_event("lease.expired")
class LeaseExpired(JournalEvent):
    """A lease ended without a submission; the group is offered again, unless a duplicate still runs."""

    group_id: str
    lease_id: str
    worker_id: str
    reason: str
    at_s: float | None = None
    tokens: int = 0  # known to have been sampled under this lease
    kept: int = 0
    """Tokens of the group that its next holder can continue from; they stand beside the event."""
    silent_s: float = 0.0
    """Seconds since its worker was last heard of; of an engine that hung, since its last token."""
    waste: str = "preempted"  # or duplicate: what to call the work that is not continued
    hung: bool = False  # its worker was heard, but its engine stood still


@_event("group.moved_back")
class GroupMovedBack(JournalEvent):
    """A group that held up its step gave its place back: it trains after another one now."""

    group_id: str
    behind: str
    """The living training group that it stands behind from now on."""


@_event("group.submitted")
class GroupSubmitted(JournalEvent):
    """A worker's trajectories were accepted; their payload stands beside the event."""

    group_id: str
    lease_id: str
    worker_id: str
    attempt: int
    payload_digest: str
    oldest_version: int
    token_counts: tuple[int, ...]  # of each sample
    generation_s: float
    at_s: float
    drafting: DraftingStatistics | None = None
    authors: tuple[tuple[int, str, int, int], ...] = ()
    """(sample, worker id, start, stop) of tokens that earlier holders of the group had sampled."""
    newest_version: int | None = None
    """Of all tokens, as `oldest_version`; None in journals from before it was kept."""


@_event("turn.answered")
class TurnAnswered(JournalEvent):
    """The environment answered a turn of a sample, or said that its trajectory is over."""

    group_id: str
    sample_index: int
    row_digest: str
    """Of the row after the prompt, this turn included: a worker that samples it again gets this answer."""
    token_ids: tuple[int, ...]
    """To be observed; empty at the end."""
    finish_reason: str
    """Why the trajectory is over; empty while it goes on."""
    reward: float
    failure: str
    """Why there is no reward; empty where there is one."""
    at_s: float
    fresh: bool = False  # the tokens begin a branch
    host: str = ""  # which host of others' environments said it; "" for an environment of the run's own
    service: str = ""
    """The reward service that said it."""
    parts: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, by name."""
    reason: str = ""
    """Why the environment ended it, in a few words."""


@_event("turn.sampled")
class TurnSampled(JournalEvent):
    """A turn of a sample ended that a host may ask for again; its tokens stand here before it is answered."""

    group_id: str
    sample_index: int
    worker_id: str
    start: int
    """Tokens of the row that earlier events have; 0 where it was begun again."""
    token_ids: str
    """The tokens from there to the end of the turn, observed ones included: base64 of little-endian int32."""
    logprobs: str  # of these tokens, base64 of little-endian float32
    spans: tuple[tuple[int, int, int, bool], ...]  # (version, start, stop, kept_cache), within the row
    observed: tuple[tuple[int, int], ...]
    breaks: tuple[int, ...]
    finish_reason: str  # stop or length
    at_s: float


@_event("group.rewarded")
class GroupRewarded(JournalEvent):
    """The environment's rewards of a group, by sample."""

    group_id: str
    rewards: tuple[float, ...]
    client_id: str
    at_s: float
    failures: tuple[tuple[int, str], ...] = ()
    """(sample, reason) of those that could not be scored; their reward is 0."""
    said: tuple[tuple[int, str], ...] = ()
    """(sample, line) of those whose environment said something at the end."""
    parts: dict[str, float] = field(default_factory=dict)
    """Means of what the rewards are made of, by name."""


@_event("group.dropped")
class GroupDropped(JournalEvent):
    """A finished group will never train; its reservation is free again."""

    group_id: str
    reason: str
    """stale_on_arrival (beyond the bound when handed in), filtered (no variance), or untrusted (a worker in
    quarantine sampled some of it); one of fixed mode that is untrusted is offered again."""


@_event("samples.requested")
class SamplesRequested(JournalEvent):
    """A client asked for completions of a prompt of its own; they are a group that no batch has."""

    group_id: str
    number: int
    """Order among the requests of the run."""
    prompt_token_ids: str
    """Base64 of little-endian int32."""
    seeds: tuple[int, ...]
    sampling: SamplingParameters
    version: int | None
    """Sampled by exactly this version; None: by any from `oldest` on."""
    oldest: int
    at_s: float


@_event("samples.finished")
class SamplesFinished(JournalEvent):
    """The completions of a request of a client are there, beside `group.submitted`, or none will be."""

    group_id: str
    refusal: str = ""
    """Why there will be none; empty where they are there."""


@_event("samples.forgotten")
class SamplesForgotten(JournalEvent):
    """Completions that clients asked for are kept no longer."""

    group_ids: tuple[str, ...]


@_event("batch.sealed")
class BatchSealed(JournalEvent):
    """The batch of a step: fixed for good, its files are in the store."""

    step: int
    group_ids: tuple[str, ...]
    filtered_ids: tuple[str, ...]
    digest: str
    timings_digest: str
    trajectories: int
    groups_filtered: int
    groups_dropped_stale: int
    tokens: int
    reward_mean: float
    completion_tokens_mean: float
    staleness: tuple[tuple[int, int], ...]  # (staleness, trajectories) pairs
    drafting: DraftingStatistics | None = None  # None where no engine could draft
    trajectories_failed: int = 0  # of used and filtered groups: they could not be scored, no mean counts them
    tokens_dropped_stale: int = 0  # of the groups that `groups_dropped_stale` counts
    samples_digest: str = ""  # of the file of kept completions of filtered groups; "" where none are kept
    reward_parts: dict[str, float] = field(default_factory=dict)  # means over its groups, by name


@_event("batch.voided")
class BatchVoided(JournalEvent):
    """An operator took back a sealed batch that no step trained on; an empty one stands in its place, or in
    older journals one of other groups."""

    step: int
    digest: str
    reason: str
    operator: str


@_event("step.committed")
class StepCommitted(JournalEvent):
    """The learner trained on a batch; the version advances."""

    step: int
    version: int
    weights_digest: str
    batch_digest: str
    metrics: dict[str, float]
    published: bool
    at_s: float | None = None
    plan: dict[str, float] | None = None  # what the capacity model expected then, beside what was measured
    exactness: str = ""


@_event("snapshot.announced")
class SnapshotAnnounced(JournalEvent):
    """Weights can be fetched; the manifest stands beside the event."""

    version: int
    weights_digest: str
    origin: str


@_event("snapshot.delivered")
class SnapshotDelivered(DeliveryRecord, JournalEvent):
    """A worker has a version, and says from whom it came and how long that took."""


@_event("evaluation.opened")
class EvaluationOpened(JournalEvent):
    """The held-out prompts 0 .. prompts - 1 are queued for a version."""

    version: int
    prompts: int
    samples: int = 1  # of each prompt


@_event("evaluation.finished")
class EvaluationFinished(JournalEvent):
    """Every held-out prompt of an evaluation was rewarded, and its kept answers are in the store."""

    version: int
    reward_mean: float
    completion_tokens_mean: float
    samples_digest: str = ""  # of the file of kept answers; "" where none are kept
    samples: int = 1  # of each prompt; reward_mean is the mean over prompts of the mean over these
    best_of_k: float | None = None  # mean over prompts of the best of several samples
    reward_range: RewardRange = UNIT_RANGE


@_event("worker.registered")
class WorkerRegistered(JournalEvent):
    """A worker joined the fleet."""

    worker_id: str
    worker_name: str
    concurrent_groups: int
    at_s: float | None = None
    sampling_rule: str = ""  # how keyed random numbers choose a token; the first worker's holds for all
    usd_per_hour: float = 0.0  # what it costs from here on
    worker_class: str = ""  # of the pool; "" for one that is not of it


@_event("worker.priced")
class WorkerPriced(JournalEvent):
    """The price of a worker's class changed."""

    worker_id: str
    usd_per_hour: float  # what it costs from here on
    at_s: float


@_event("worker.ordered")
class WorkerOrdered(JournalEvent):
    """The order of a worker of the pool changed its state: asked, pending, up, stopping or gone."""

    worker_name: str
    state: str
    instance: str  # what its engine calls it
    reason: str
    up_s: float  # for how long it had been up
    left_s: float  # that were left to it for this state
    at_s: float
    usd_per_hour: float  # of its class
    worker_class: str


@_event("worker.loaded")
class WorkerLoaded(JournalEvent):
    """A worker reported that it samples with another version now."""

    worker_id: str
    version: int


@_event("access.revoked")
class AccessRevoked(JournalEvent):
    """A token, by its id, or a worker, by its name, counts no more in this run."""

    name: str
    reason: str


@_event("group.audited")
class GroupAudited(JournalEvent):
    """What a worker sampled of a group was scored again, and nothing speaks against it."""

    group_id: str
    worker_name: str
    tokens: int
    missed: int
    drift: float  # mean |auditor - worker| logprob of the worst trajectory, nats
    near: int = 0
    most: bool = True  # it sampled most of the group's tokens; a smaller part makes no one more trusted
    unaudited: str = ""  # why none of them could be scored; empty where they were
    kept_cache: int = 0  # tokens that are not judged: their engine kept its cache over a swap


@_event("worker.struck")
class WorkerStruck(JournalEvent):
    """Something speaks against a worker."""

    worker_name: str
    group_id: str
    check: str
    """sampling, tokens, support or logprobs from an audit; refused for work or a lease that was not taken;
    scoring for answers that end their scorer."""
    reason: str
    gross: int = 0


@_event("worker.quarantined")
class WorkerQuarantined(JournalEvent):
    """A worker gets no leases and hands in nothing until it is pardoned."""

    worker_name: str
    reason: str


@_event("worker.pardoned")
class WorkerPardoned(JournalEvent):
    """A worker may try again, and nothing is remembered against it; a revocation of its name ends too."""

    worker_name: str
    reason: str


@_event("worker.lost")
class WorkerLost(JournalEvent):
    """A worker stopped answering, or was replaced by its successor."""

    worker_id: str
    reason: str
    at_s: float | None = None


def event_kinds() -> tuple[str, ...]:
    """Return every kind, sorted."""
    return tuple(sorted(_KINDS))


def dump_event(event: JournalEvent) -> str:
    """Return the event's fields as compact JSON, such as `{"step":3}`; floats keep every bit."""
    return to_json(event, inf_nan_mode="constants").decode()


def load_event(kind: str, body: str) -> JournalEvent:
    """Read what `dump_event` wrote.

    Raises:
        IntegrityError: for an unknown kind or fields that do not fit it.
    """
    if (cls := _KINDS.get(kind)) is None:
        raise IntegrityError(f"the journal has an event of unknown kind {kind!r}; another version wrote it")
    try:
        fields = {
            name: _frozen(value) if isinstance(value, list) else value
            for name, value in json.loads(body).items()
        }
        if fields.get("drafting") is not None:
            fields["drafting"] = DraftingStatistics(**fields["drafting"])
        if isinstance(sampling := fields.get("sampling"), dict):
            fields["sampling"] = SamplingParameters(**{k: _frozen(v) for k, v in sampling.items()})
        return cls(**fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"the journal's event {kind} cannot be read: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
