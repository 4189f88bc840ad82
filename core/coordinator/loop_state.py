"""Loop state: all that decisions look at: the run's state, which is the fold of its events, and what memory
alone holds: deadlines, what heartbeats said, unfinished groups, who has which group to reward.

A decision is a generator. It yields what is to be done, and each piece is applied before it goes on, so the
next line sees it; what it returns is the reply. The executor (`services.coordinator.run_state_machine`) puts
all of it into one transaction. So a call is a function of the state, the request and the time, and after a
restart the journal alone makes the same state again; every lease then begins with a fresh deadline, and each
worker registers.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from antiphon.core.checks import TokenRules
from antiphon.core.config import RunConfig
from antiphon.core.coordinator.fleet import Fleet, Member
from antiphon.core.coordinator.planner import RunAheadPlanner
from antiphon.core.coordinator.running_leases import RunningLeases
from antiphon.core.digests import digest_bytes
from antiphon.core.frozen import frozen
from antiphon.core.loop import admission
from antiphon.core.loop import events as e
from antiphon.core.loop.client_groups import OtherWorker, version_wanted
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.partials import KeptGroup
from antiphon.core.loop.run_state import new_state, range_of
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import (
    GroupRewards,
    GroupSubmission,
    Prompt,
    SnapshotManifest,
    TurnLimits,
    TurnToAnswer,
)
from antiphon.core.status import EvaluationRecord

SEEDS_KEPT = 4096
"""Groups whose seeds are not derived again when they are handed in."""
LONGEST_REASON = 500
"""Characters of a reason that the journal keeps."""
NO_REASON = "no reason was given"


@frozen
class Keep:
    """A payload that the journal keeps until it is to be forgotten; a submission stands for itself."""

    name: str
    record: KeptGroup | SnapshotManifest | GroupRewards


@frozen
class Forget:
    """Payloads that nothing needs any more, in the journal or at hand."""

    names: tuple[str, ...]
    only_at_hand: bool = False
    """The journal still keeps them."""


@frozen
class KeepHistory:
    """A rewarded group that later drafts of its prompt may come from."""

    prompt_key: str
    group: GroupState
    submission: GroupSubmission
    rewards: tuple[float, ...]


@frozen
class News:
    """Workers may be given more now, although no event says so: all requests that wait look again."""


Effect = e.JournalEvent | GroupSubmission | Keep | Forget | KeepHistory | News
_Reply = TypeVar("_Reply")
Decision = Generator[Effect, None, _Reply]


class PromptSource(Protocol):
    """Where the coordinator gets prompts from."""

    def prompt(self, split: str, index: int) -> Prompt:
        """Return prompt `index` of `split` ("train" or "heldout").

        Raises:
            ConfigError: when there is no such prompt, or it is too long for the engine.
        """


@frozen
class Rewarding:
    """A group at a reward service until a deadline."""

    client_id: str
    deadline_s: float


@dataclass(slots=True)
class OpenTurn:
    """A turn that waits for its environment's answer."""

    question: TurnToAnswer
    deadline_s: float
    """Until then a reward service has it."""
    asked: tuple[str, int]
    """Lease id and sample index."""
    home: str = ""
    """The reward service that holds the conversation; "" while none does."""
    handed_out: int = 0
    """How often it was given to one."""


class LoopState:
    """What is known of one run while it is served; the caller gives the time."""

    def __init__(
        self, config: RunConfig, run_id: str, prompts: PromptSource, lease_key: bytes, now: float
    ) -> None:
        """Begin a run; `lease_key`, 32 bytes, is what lease ids are made with."""
        self.config, self.run_id, self.prompts, self.lease_key = config, run_id, prompts, lease_key
        self.begun_s = now
        self.run = new_state(config)
        self.leases = RunningLeases(config)
        self.fleet = Fleet(config.coordinator.heartbeat_s, config.broadcast.uplink_bytes_per_s)
        self.planner = RunAheadPlanner(
            config, self.fleet.speeds, lambda: self.run.lengths, self.fleet.supply, self.fleet.places
        )
        self.rewarding: dict[str, Rewarding] = {}
        """Groups at a reward service."""
        self.turns: dict[str, OpenTurn] = {}
        """Turns that wait for an answer, by group and `answer_key`, the longest waiting first."""
        self.answering: dict[str, float] = {}
        """When each reward service last asked for turns or answered one."""
        self.overdue: dict[str, int] = {}
        """How many deadlines of an unrewarded group have passed."""
        self.sealing: frozenset[str] = frozenset()
        """Groups of the batch that is being written."""
        self.evaluation_waits: tuple[int | None, float] = None, 0.0
        """Version whose held-out prompts wait, and since when, or since a worker went back for them."""
        self.held_back: Callable[[str], str] = lambda _: ""
        """Returns why a worker, by its name, gets no lease at the moment; "" when it may."""
        self.evaluation_records: dict[int, EvaluationRecord] = {}
        """Evaluations that are over, by version: a long run has many, and they change no more."""
        self.sampled_at: dict[str, float] = {}
        """When completions that clients asked for ended in this process, by group."""
        self.unfetched: dict[int, tuple[float, int]] = {}
        """Version that idle workers were asked to load and none holds -> since when nothing of it came, and
        the bytes that these had fetched by then."""
        self._seeds: dict[str, tuple[int, ...]] = {}

    @property
    def rules(self) -> TokenRules | None:
        """Return what is known of the model's tokens; None for prompts without a model."""
        rules = getattr(self.prompts, "rules", None)
        return rules if isinstance(rules, TokenRules) else None

    @property
    def stops(self) -> Callable[[Sequence[str]], Callable[[Sequence[int]], int | None]] | None:
        """Return what makes `TokenRules.stop` of texts; None where the prompts know no tokenizer."""
        return getattr(self.prompts, "stops", None)

    @property
    def limits(self) -> TurnLimits | None:
        """Return how long trajectories of the task may be; None for one without turns."""
        limits = getattr(self.prompts, "limits", None)
        return limits if isinstance(limits, TurnLimits) else None

    @property
    def hosted(self) -> bool:
        """Whether hosts of others' environments say prompts and answers; the run's own prompts are empty."""
        return bool(getattr(self.prompts, "hosted", False))

    @property
    def reward_range(self) -> RewardRange:
        """Return the least and the largest reward of the environment."""
        known = range_of(self.run.pinned)  # all there is of a run that is only looked at
        return known if known != UNIT_RANGE else getattr(self.prompts, "reward_range", known)

    def limits_of(self, group: GroupState) -> TurnLimits | None:
        """Return the limits of a group: a longer prompt leaves its row less room in the engine."""
        limits = self.limits
        if limits is None:
            return None
        if self.hosted:
            return replace(limits, context=self.config.rollout.max_model_tokens)
        room = self.config.rollout.max_model_tokens - len(self.prompt_of(group).token_ids)
        return TurnLimits(limits.turns, min(limits.tokens, room))

    def rules_of(self, group: GroupState) -> TokenRules | None:
        """Return what is known of a group's tokens: clients say what else ends a completion."""
        rules, request = self.rules, group.request
        if rules is None or request is None:
            return rules
        stop = self.stops(request.sampling.stop) if self.stops and request.sampling.stop else None
        more = frozenset(request.sampling.stop_token_ids) if rules.end_tokens else frozenset[int]()
        return TokenRules(rules.vocabulary, rules.end_tokens | more, stop)

    def places_of(self, worker_id: str) -> int:
        """Return for how many samples a worker has leases, those of evaluations counted as others."""
        return self.leases.count_of_worker(worker_id) * self.config.loop.group_size

    def prompt_of(self, group: GroupState) -> Prompt:
        """Return the prompt of a group; equal ones of clients have one key, so that they share drafts."""
        if group.request is not None:
            token_ids = group.request.prompt_token_ids
            packed = np.asarray(token_ids, "<i4").tobytes()
            return Prompt(f"{group.split}-{digest_bytes(packed)[:32]}", token_ids)
        return self.prompts.prompt(group.split, group.prompt_index)

    def seeds(self, group: GroupState) -> tuple[int, ...]:
        """Return one sampler seed for each sample of a group; while it is leased they stay at hand."""
        known = self._seeds.get(group.group_id)
        if known is None:
            if len(self._seeds) >= SEEDS_KEPT:
                self._seeds.clear()
            known = admission.group_seeds(self.config, group, self.prompt_of(group).key)
            self._seeds[group.group_id] = known
        return known

    def apply(self, event: e.JournalEvent, now: float) -> None:
        """Advance by an event; IntegrityError when it contradicts the state."""
        self.planner.observe(event, self.run, now)
        self.run.apply(event)
        note = _MEMORY.get(type(event))
        if note is not None:
            note(self, event, now)

    def able(self, member: Member) -> bool:
        """Return whether a worker can be given groups."""
        stands_still = self.leases.engines.most_leases(member.worker_id) == 0
        return not (member.draining or member.swap_error or stands_still or self.held_back(member.name))

    def version_requested(self, member: Member) -> tuple[int | None, bool]:
        """Return which version a worker should sample with for clients, and whether it must load it first."""
        others = [
            OtherWorker(
                one.held_version,
                one.sent_wanted,
                self.leases.count_of_worker(one.worker_id) < one.concurrent_groups,
            )
            for one in self.fleet.living()
            if one is not member and self.able(one)
        ]
        return version_wanted(self.run, self.config, member.held_version, member.sent_wanted, others)

    def version_wanted(self, member: Member, evaluated: int | None) -> int | None:
        """Return the version that a worker of elastic mode should sample with before any newer one, or None.

        It is the one whose held-out prompts wait. A worker that holds a newer one already goes back only if
        it was asked to.
        """
        went_on = evaluated is not None and (member.held_version or 0) > evaluated
        return None if went_on and member.sent_wanted != evaluated else evaluated

    def news_for(self, member: Member) -> int | None:
        """Note that a worker hears of the newest version; return what it is to sample with before."""
        member.sent_newest = self.run.newest_version
        if self.config.client_driven:
            member.sent_wanted, _ = self.version_requested(member)
            return member.sent_wanted
        if self.config.loop.mode == "elastic":
            evaluated = admission.version_to_evaluate(self.run, self.config)
            member.sent_wanted = self.version_wanted(member, evaluated)
            return member.sent_wanted
        return None


def _granted(loop: LoopState, event: e.LeaseGranted, now: float) -> None:
    given = loop.leases.partial_groups.waiting(event.group_id) if event.continued else None
    loop.leases.begin(event.lease_id, loop.run.groups[event.group_id], event.worker_id, now, given)


def _duplicated(loop: LoopState, event: e.LeaseDuplicated, now: float) -> None:
    group = loop.run.groups[event.group_id]
    given = loop.leases.partial_groups.snapshot(group.lease_id) if event.continued else None
    loop.leases.begin(event.lease_id, group, event.worker_id, now, given)


def _expired(loop: LoopState, event: e.LeaseExpired, now: float) -> None:
    kept = loop.leases.stop(event.lease_id)
    if event.kept and kept is not None:
        loop.leases.partial_groups.wait(event.group_id, kept)


def _submitted(loop: LoopState, event: e.GroupSubmitted, now: float) -> None:
    loop.leases.measure(event.lease_id, event.token_counts, now)
    loop.leases.done(event.lease_id, event.group_id)


def _samples_finished(loop: LoopState, event: e.SamplesFinished, now: float) -> None:
    loop.sampled_at[event.group_id] = now


def _registered(loop: LoopState, event: e.WorkerRegistered, now: float) -> None:
    loop.fleet.add(
        event.worker_id, event.worker_name, event.concurrent_groups, now, usd_per_hour=event.usd_per_hour
    )


def _lost(loop: LoopState, event: e.WorkerLost, now: float) -> None:
    member = loop.fleet.get(event.worker_id)
    if member is not None:
        loop.fleet.lose(member)
    loop.leases.forget_worker(event.worker_id)


_MEMORY: dict[type[e.JournalEvent], Callable[[LoopState, Any, float], None]] = {
    e.LeaseGranted: _granted,
    e.LeaseDuplicated: _duplicated,
    e.LeaseExpired: _expired,
    e.GroupSubmitted: _submitted,
    e.SamplesFinished: _samples_finished,
    e.WorkerRegistered: _registered,
    e.WorkerLost: _lost,
}
"""What an event changes of what memory holds."""


def prefix_name(group_id: str) -> str:
    """Return the name under which the beginning of a handed-over group is kept."""
    return f"prefix-{group_id}"


def reference_name(group_id: str) -> str:
    """Return the name under which the reference model's log-probabilities of a group are kept."""
    return f"reference-{group_id}"


def manifest_name(version: int) -> str:
    """Return the name under which the manifest of a version is kept."""
    return f"manifest-{version:06d}"
