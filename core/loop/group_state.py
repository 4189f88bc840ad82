"""Group state: what a run knows of one group, one evaluation, one batch, and the groups between two batches.

The life of a group. Each arrow is an event of the journal; a group that ended is no longer in the table.

      GroupOpened, or EvaluationOpened for a held-out prompt
           |
           v        LeaseGranted                  LeaseDuplicated (a second
         OPEN ------------------------> LEASED ---+   worker samples it too)
          | ^                            | |  ^   |
          | |       LeaseExpired         | |  +---+
          | +----------------------------+ |          LeaseExpired of one of two
          |   (lost, refused, hung)        |          leases leaves it LEASED
          |                                |
          | GroupSubmitted, by the last    | GroupSubmitted
          | holder although it was late    |
          +-------------+------------------+
                        v                  GroupDropped
                    SUBMITTED ---------------------------> dropped: stale on arrival
                        |
                        | GroupRewarded    GroupDropped
                        |            +-------------------> dropped: filtered
                        v            |
                    REWARDED --------+--> dropped: untrusted (in fixed mode OPEN again)
                        |
                        |            BatchSealed
                        +--------------------------------> used, or filtered

A held-out prompt ends with GroupRewarded. A group that a client asked for begins with SamplesRequested and
ends with SamplesFinished, right after GroupSubmitted or, where no worker can sample it, in its place. What
was dropped frees its reservation: another group is opened for it, under a new id.
"""

import dataclasses
import math
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from antiphon.core.client_records import SampleRequest
from antiphon.core.frozen import frozen
from antiphon.core.loop.events import (
    BatchSealed,
    SamplesRequested,
    StepCommitted,
    TurnAnswered,
    TurnSampled,
)
from antiphon.core.records import BatchRef, DraftingStatistics, StepCommit
from antiphon.core.run_clock import RunTimes
from antiphon.core.voided_batch import VoidedBatch

RECENT_SCORES, RECENT_GROUPS = 256, 32
"""Newest answers of which at most reward.max_failed_share may have failed, and the groups' worth that they
are at least: with fewer, one worker's groups would leave no room for those of others to compare with."""


class GroupPhase(StrEnum):
    """Where a living group stands; one that ended is no longer in the table."""

    OPEN = "open"
    LEASED = "leased"
    SUBMITTED = "submitted"
    REWARDED = "rewarded"


@dataclass(slots=True)
class GroupState:
    """One living group: a training group, one held-out prompt of an evaluation, or a request of a client."""

    group_id: str
    number: int
    split: str
    prompt_index: int
    epoch: int
    samples: int
    step: int | None = None
    version: int | None = None
    """Sampled by exactly this version: all groups of fixed mode, every held-out prompt, and requests of
    clients that name one; else None."""
    refill: bool = False
    evaluation: int | None = None
    """Version under evaluation; None for any other group."""
    request: SampleRequest | None = None
    """What a client asked for; None for any other group."""
    oldest_wanted: int = 0
    """Of a request without a version: the oldest version that may sample it."""
    phase: GroupPhase = GroupPhase.OPEN
    attempt: int = 0
    lease_id: str = ""
    worker_id: str = ""
    holders: dict[str, str] = field(default_factory=dict)
    """Lease id -> name of the worker it was granted to, for every attempt, the first one first."""
    twin_lease_id: str = ""
    """Lease of a speculative duplicate; empty without one."""
    twin_worker_id: str = ""
    held_version: int = 0
    leased_at_s: float = 0.0
    submitted_at_s: float = 0.0
    rewarded_at_s: float = 0.0
    generation_s: float = 0.0
    oldest_version: int = 0
    token_counts: tuple[int, ...] = ()
    drafting: DraftingStatistics | None = None
    rewards: tuple[float, ...] = ()
    failures: dict[int, str] = field(default_factory=dict)
    """Sample -> why it could not be scored; its reward stands for nothing."""
    said: dict[int, str] = field(default_factory=dict)
    """Sample -> what its environment said at its end."""
    parts: dict[str, float] = field(default_factory=dict)
    """As in `GroupRewarded`."""
    answers: dict[str, TurnAnswered] = field(default_factory=dict)
    """What the environment said to its turns, by `core.loop.turns.answer_key`."""
    turns: dict[int, tuple[TurnSampled, ...]] = field(default_factory=dict)
    """Sample -> its turns that a host may ask for again, in order; what its next holder continues from."""
    turns_sampled: int = 0
    """How many were ever recorded."""

    @property
    def trains(self) -> bool:
        """Return whether it is meant for a batch."""
        return self.evaluation is None and self.request is None

    def offer_again(self) -> None:
        """Forget what was handed in; the leases that were granted stay known."""
        self.phase, self.lease_id, self.worker_id = GroupPhase.OPEN, "", ""
        self.token_counts, self.drafting, self.rewards, self.failures = (), None, (), {}
        self.said, self.parts = {}, {}

    @property
    def scored(self) -> tuple[int, ...]:
        """Return the samples that have a reward, ascending."""
        return tuple(index for index in range(len(self.rewards)) if index not in self.failures)

    @property
    def varied(self) -> bool:
        """Return whether the rewards differ, as `advantages.has_variance`; only known once rewarded."""
        scored = [self.rewards[index] for index in self.scored]
        return bool(scored) and min(scored) < max(scored)


@frozen
class Receipt:
    """Proof that a group was accepted, kept after it ended."""

    lease_id: str
    payload_digest: str
    step: int
    """Oldest unsealed step when it was accepted; old receipts are forgotten by it."""
    stale: bool = False
    """It came too late for every step; a repetition hears the same."""
    authors: tuple[tuple[int, str, int, int], ...] = ()
    """(sample, worker id, start, stop) of tokens that earlier holders of the group had sampled."""


@frozen
class Sampled:
    """What a client asked for and will not change any more."""

    step: int
    """Newest version when it ended."""
    refusal: str = ""
    """Why there are no completions; empty where there are."""


@dataclass(slots=True)
class EvaluationState:
    """Held-out results of one version, by prompt."""

    prompts: int
    samples: int = 1
    """Of each prompt."""
    rewards: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Of its samples; 0 where one could not be scored."""
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failures: dict[int, dict[int, str]] = field(default_factory=dict)
    """Sample -> why it could not be scored."""
    said: dict[int, dict[int, str]] = field(default_factory=dict)
    """Sample -> what its environment said at its end."""
    finished: bool = False
    """All are rewarded, and the file of kept answers is in the store."""
    samples_digest: str = ""
    """Of that file; empty where none are kept."""

    @property
    def rewarded(self) -> int:
        return len(self.rewards)

    def counted(self, low: float = 0.0) -> list[tuple[float, ...]]:
        """Return the rewards of each prompt's samples, where what could not be scored has the least reward
        `low`: it solved nothing.
        """
        return [
            tuple(low if sample in self.failures.get(index, ()) else r for sample, r in enumerate(rewards))
            for index, rewards in self.rewards.items()
        ]

    def means(self, low: float = 0.0) -> tuple[float, float]:
        """Return the means over the prompts of their samples' mean reward, as `counted`, and mean completion
        tokens, whatever the order of rewarding.
        """
        count = max(1, self.rewarded)
        rewards = math.fsum(math.fsum(one) / self.samples for one in self.counted(low))
        return rewards / count, math.fsum(sum(one) / self.samples for one in self.tokens.values()) / count

    def best_of_k(self, low: float = 0.0) -> float:
        """Return the mean over the prompts of the best reward among their samples, as `counted`."""
        return math.fsum(max(one) for one in self.counted(low)) / max(1, self.rewarded)


@frozen
class GroupOutcome:
    """What a batch says of a rewarded group, used or filtered: its mean reward and length, its drafting."""

    rewards: tuple[float, ...]
    """Of the trajectories that could be scored."""
    token_counts: tuple[int, ...]
    drafting: DraftingStatistics | None
    failed: int
    """Trajectories that could not be scored."""
    group_id: str = ""
    prompt_index: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    """Sample -> why it could not be scored."""
    said: dict[int, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, group: GroupState) -> "GroupOutcome":
        scored = group.scored
        return cls(
            tuple(group.rewards[index] for index in scored),
            group.token_counts,
            group.drafting,
            len(group.rewards) - len(scored),
            group.group_id,
            group.prompt_index,
            dict(group.failures),
            dict(group.said),
            dict(group.parts),
        )


@dataclass(slots=True)
class Tally:
    """Finished groups that left before the batch they belonged to was sealed."""

    filtered: list[GroupOutcome] = field(default_factory=list)
    """Groups without variance; they count in the step's means."""
    groups_stale: int = 0
    tokens_stale: int = 0

    def copy(self) -> "Tally":
        return self.without(0, 0, 0)

    def without(self, filtered: int, stale: int, tokens_stale: int) -> "Tally":
        """Return what is left once a batch has booked its first groups.

        Groups may leave while the files of a batch are being written; they count with the next.
        """
        return Tally(self.filtered[filtered:], self.groups_stale - stale, self.tokens_stale - tokens_stale)


def heldout_group_id(version: int, prompt_index: int) -> str:
    """Return the id of the group of a held-out prompt in the evaluation of a version."""
    return f"v{version:06d}-e{prompt_index:04d}"


def is_heldout(group_id: str) -> bool:
    """Return whether a group is a held-out prompt's, by its id."""
    return group_id.startswith("v")


def heldout_group(version: int, prompt_index: int, samples: int) -> GroupState:
    """Return the group of a held-out prompt that waits to be sampled, this often, for an evaluation."""
    return GroupState(
        group_id=heldout_group_id(version, prompt_index),
        number=prompt_index,
        split="heldout",
        prompt_index=prompt_index,
        epoch=0,
        samples=samples,
        version=version,
        evaluation=version,
    )


CLIENT_GROUP = "c-"
"""What ids of groups begin with that clients asked for; the id of the request follows."""


def requested_group(event: SamplesRequested) -> GroupState:
    """Return the group of a client's request, which waits to be sampled."""
    tokens = tuple(np.frombuffer(b64decode(event.prompt_token_ids), "<i4").tolist())
    request_id = event.group_id.removeprefix(CLIENT_GROUP)
    return GroupState(
        group_id=event.group_id,
        number=event.number,
        split="client",
        prompt_index=event.number,
        epoch=event.number,
        samples=len(event.seeds),
        version=event.version,
        request=SampleRequest(request_id, tokens, event.seeds, event.sampling, event.version),
        oldest_wanted=event.oldest,
    )


Scored = tuple[str, bool]
"""Name of the worker that sampled most of an answer, and whether it could not be scored."""


def remembered_scores(group_size: int) -> int:
    """Return how many of the newest answers failures are counted among."""
    return max(RECENT_SCORES, RECENT_GROUPS * group_size)


def newest_scored(
    before: Sequence[Scored], authors: Sequence[str], failed: Collection[int], group_size: int
) -> list[Scored]:
    """Return the newest `remembered_scores`, oldest first.

    `before` is what this was before a group whose samples have these authors, of which `failed` could not be
    scored.
    """
    scored = ((author, index in failed) for index, author in enumerate(authors))
    return [*before, *scored][-remembered_scores(group_size) :]


def mean_parts(given: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part of a reward over those that have it, by name.

    >>> mean_parts([{"right": 1.0}, {"right": 0.0, "short": 0.5}, {}])
    {'right': 0.5, 'short': 0.5}
    """
    found: dict[str, list[float]] = {}
    for parts in given:
        for name, value in parts.items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}


def sealed_batch(event: BatchSealed, rewards: Sequence[float], voided: Iterable[VoidedBatch]) -> BatchRef:
    """Return what is kept of a sealed batch.

    `rewards` are those that `event.reward_mean` is the mean of, `voided` the voided batches of the run.
    """
    return BatchRef(
        step=event.step,
        digest=event.digest,
        timings_digest=event.timings_digest,
        trajectories=event.trajectories,
        groups=len(event.group_ids),
        groups_filtered=event.groups_filtered,
        groups_dropped_stale=event.groups_dropped_stale,
        tokens=event.tokens,
        reward_mean=event.reward_mean,
        reward_std=math.sqrt(math.fsum((r - event.reward_mean) ** 2 for r in rewards) / max(1, len(rewards))),
        staleness_histogram=dict(event.staleness),
        completion_tokens_mean=event.completion_tokens_mean,
        drafting=event.drafting,
        replaced=tuple(batch for batch in voided if batch.step == event.step),
        trajectories_failed=event.trajectories_failed,
        tokens_dropped_stale=event.tokens_dropped_stale,
        samples_digest=event.samples_digest,
        reward_parts=event.reward_parts,
    )


def committed_step(event: StepCommitted, times: RunTimes) -> StepCommit:
    """Return what is kept of a commit that came at these `times` of the run."""
    told = dataclasses.asdict(event)
    del told["at_s"], told["plan"]
    return StepCommit(**told, times=times)


def voided_batch(batch: BatchRef, reason: str, operator: str) -> VoidedBatch:
    """Return what is kept of a batch that is voided."""
    sizes = (batch.groups, batch.groups_filtered, batch.trajectories)
    return VoidedBatch(batch.step, batch.digest, *sizes, reason, operator)
