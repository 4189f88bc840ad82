"""Records: what travels between the planes, frozen, with dtypes and axes.

Legend: T tokens of one completion, P prompt tokens, G trajectories of one group,
B trajectories of one batch. Durations are seconds; instants never cross the wire.
"""

from dataclasses import KW_ONLY, field
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from antiphon.core.frozen import frozen, frozen_by_identity
from antiphon.core.run_clock import RunTimes
from antiphon.core.trust.audit import AuthoredSpan
from antiphon.core.voided_batch import VoidedBatch

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

PROTOCOL_VERSION = 7
"""Raised when an older peer could misread a message; a peer with another one is refused."""


class FinishReason(StrEnum):
    """Why a completion ended: a turn by the first two, a trajectory of several turns by another of these."""

    STOP = "stop"
    LENGTH = "length"
    ENVIRONMENT = "environment"
    """The environment said that it is over."""
    TURNS = "turns"
    """`environment.max_turns` were played."""
    TOKENS = "tokens"
    """The row has no room for another turn (`environment.max_trajectory_tokens`, or the engine's own)."""
    FAILED = "failed"
    """The environment failed; the trajectory trains nothing."""

    @property
    def ends_turn(self) -> bool:
        """Whether it says how one turn ended: all that a policy itself can say."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def cut_off(self) -> bool:
        """Whether the policy would have written more."""
        return self in (FinishReason.LENGTH, FinishReason.TOKENS)


@frozen
class SamplingParameters:
    """How tokens are drawn from the policy's distribution."""

    temperature: float = 1.0  # divides the logits; 0 means greedy
    top_k: int = 0  # keep only this many most probable tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability mass
    max_tokens: int = 256  # longest completion or, where there are several, turn; the end token included
    stop: tuple[str, ...] = ()  # a turn ends with the token that completes one of these texts
    stop_token_ids: tuple[int, ...] = ()  # or with one of these, besides the model's own end tokens


@frozen
class TurnLimits:
    """How long a trajectory of several turns may become."""

    turns: int
    """Most turns of the policy."""
    tokens: int
    """Most tokens after the prompt, sampled and observed."""
    context: int | None = None
    """Where a host gives the prompts, which are empty here: most tokens between two breaks of a row. None: a
    prompt and its row are one context."""

    @property
    def hosted(self) -> bool:
        """Whether a host of others' environments says what is observed, from the first token on."""
        return self.context is not None

    def longest(self, breaks: tuple[int, ...]) -> int:
        """Return how many tokens a row with these breaks may have before it ends or breaks again."""
        return (
            self.tokens if self.context is None else min(self.tokens, max(breaks, default=0) + self.context)
        )


@frozen
class Prompt:
    """One item of an environment, ready for the engine."""

    key: str  # stable within a run: environment split, seed and index
    token_ids: tuple[int, ...]


@frozen
class VersionSpan:
    """Tokens [start, stop) of a completion were sampled under one policy version."""

    version: int
    start: int
    stop: int
    kept_cache: bool = False  # over a cache that earlier versions filled: see docs/concepts/swaps.md


Observed = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of tokens that the environment wrote, in order."""


@frozen_by_identity
class Completion:
    """Tokens of one completion: all of it, or a piece that begins at token `start`.

    A completion of several turns is one row: between the tokens that the policy sampled stand those that it
    observed, which are the environment's answers.
    """

    token_ids: IntArray
    """[T] int32, the end token included when the model wrote it."""
    logprobs: FloatArray
    """[T] float32, nats, of the processed distribution (temperature, top-k, top-p) they were drawn from; 0 of
    observed tokens."""
    spans: tuple[VersionSpan, ...]
    """Of the sampled tokens, in order; with `observed` they cover [start, stop) without gaps. All count from
    the completion's first token."""
    finish_reason: FinishReason | None = None
    """Why the completion, or its last turn, ended with these tokens; None while it is unfinished."""
    _: KW_ONLY
    observed: Observed = ()
    """What the environment wrote: no version, no loss, no part in staleness."""
    breaks: tuple[int, ...] = ()
    """Where the context begins afresh, ascending; observed tokens stand at each. A token was sampled after
    those from the last break on; before the first one, after the prompt and all that came before."""

    @property
    def start(self) -> int:
        """Return how many tokens of the completion come before these."""
        first = self.spans[0].start if self.spans else None
        if self.observed:
            return self.observed[0][0] if first is None else min(first, self.observed[0][0])
        return first or 0

    @property
    def stop(self) -> int:
        """Return how many tokens the completion has with these."""
        return self.start + int(self.token_ids.size)

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version among the tokens; staleness counts from it."""
        return min(span.version for span in self.spans)

    @property
    def sampled_tokens(self) -> int:
        """Return how many of the tokens the policy sampled."""
        return int(self.token_ids.size) - sum(stop - start for start, stop in self.observed)


@frozen_by_identity
class Trajectory(Completion):
    """A whole completion of a group that is handed in."""

    finish_reason: FinishReason
    _: KW_ONLY
    sample_index: int
    """Place in its group, 0 .. G - 1."""
    seed: int
    """Unsigned 64-bit seed of the position-keyed sampler for this request."""


@frozen_by_identity
class PartialTrajectory(Completion):
    """A piece of one completion of a group that is not handed in yet."""

    _: KW_ONLY
    sample_index: int
    """Place in its group, 0 .. G - 1."""


@frozen_by_identity
class LeaseProgress:
    """What was sampled under one lease since the coordinator last said what it keeps."""

    lease_id: str
    pieces: tuple[PartialTrajectory, ...]


@frozen
class KeptProgress:
    """How much of a lease's group the coordinator keeps for a hand-over."""

    lease_id: str
    tokens: tuple[int, ...]
    """[G] tokens by sample; the next pieces start there."""


@frozen_by_identity
class PastCompletion:
    """A completion that was sampled and rewarded before: what drafts are made from."""

    token_ids: IntArray
    """[T] int32, the end token included when the model wrote it."""
    version: int
    """Oldest policy version among its tokens."""
    epoch: int
    """Epoch of its group; the version evaluated, for a held-out prompt."""
    sample_index: int
    """Place in its group."""
    reward: float


@frozen_by_identity
class PromptHistory:
    """Past completions of one prompt, sent with a lease; drafts are verified, so it decides speed alone."""

    prompt_key: str
    epoch: int
    """Newest epoch among the completions."""
    completions: tuple[PastCompletion, ...]
    """Newest epoch first, then by sample index."""


@frozen
class DraftingStatistics:
    """What drafting did for some completions. Counts add up; `gain` is the engine's newest."""

    tokens: int
    """Completion tokens sampled."""
    passes: int
    """Forward passes these took, summed over completions; the prompt's own pass included."""
    drafted: int
    """Tokens drafted."""
    covered: int
    """Sampled tokens at whose place a draft stood: the accepted ones and each first rejected one."""
    accepted: int
    """Drafted tokens that were right."""
    with_history: int
    """Completions whose prompt came with history."""
    drafter_s: float
    """Seconds in the drafter, each step's shared out evenly among the completions it advanced."""
    sampler_s: float
    """Seconds in the sampler, shared out the same way."""
    gain: float
    """Tokens per second relative to the last undrafted probe; 0 before there was one."""
    completions: int = 1  # that these are about
    promising: int = 0
    """Tokens sampled while this many of the newest drafted tokens were right that drafts should pay."""
    rested: int = 0
    """Those of them that were sampled in steps for which the gate let drafts rest."""


@frozen
class Lease:
    """The right to produce one whole group until a deadline."""

    lease_id: str
    """32 hex digits; the fencing token of this attempt."""
    group_id: str
    prompt_key: str  # as `Prompt.key`
    prompt_token_ids: tuple[int, ...]
    epoch: int
    """How many times the prompt pool was finished before this group was opened."""
    seeds: tuple[int, ...]
    """One unsigned 64-bit seed per sample, from `core.seeds`; G of them."""
    sampling: SamplingParameters
    version: int | None
    """Sample with exactly this version, or None: the newest one held."""
    duration_s: float
    """Seconds until the lease expires unless a heartbeat extends it."""
    attempt: int
    """1 for the first lease of the group."""
    history: PromptHistory | None = None
    """Past completions of the prompt, for a worker that drafts; None when there are none."""
    prefix: tuple[PartialTrajectory, ...] = ()
    """What earlier holders of the group sampled, each from token 0: it is continued, not repeated."""
    limits: TurnLimits | None = None
    """Of a task with turns: each that ends is answered by the environment; None: the first one is all."""


@frozen_by_identity
class GroupSubmission:
    """What a worker hands in for a lease."""

    lease_id: str
    group_id: str
    worker_id: str
    trajectories: tuple[Trajectory, ...]
    generation_s: float
    """Seconds from the first to the last token of the group, as the worker measured them."""
    drafting: DraftingStatistics | None = None
    """What drafting did for the group; None from an engine that cannot draft."""
    cached_tokens: int = 0
    """Prompt tokens whose cache the engine had, of the completion with the fewest; 0: it does not say."""
    encoded: bytes | None = None
    """The message it came in, where it came over the wire: what is kept need not be encoded again."""


class SubmitVerdict(StrEnum):
    """The one well-defined answer to a submission."""

    ACCEPTED = "accepted"
    ALREADY_ACCEPTED = "already_accepted"
    """The same group was accepted before; the sender may forget it."""
    CONFLICT = "conflict"
    """The same lease had handed in something else."""
    STALE = "stale"
    """No later step could train on it within the bound."""
    LATE = "late"
    """The lease had expired and the group went elsewhere or is closed."""


@frozen_by_identity
class TurnToAnswer:
    """A turn that has ended and that the environment is to answer, with the row so far."""

    group_id: str
    sample_index: int
    row_digest: str
    """Of the row so far, 32 hex digits: what the answer is an answer to."""
    prompt_key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: IntArray
    """[T] int32, after the prompt: what the policy sampled and what it observed."""
    observed: Observed
    limits: TurnLimits
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """[T] float32, as in `Completion`; these, spans and breaks are told where a host answers, else empty."""
    spans: tuple[VersionSpan, ...] = ()
    breaks: tuple[int, ...] = ()
    over: tuple[int, ...] = ()
    """Samples of a hosted group whose trajectories are over: nothing more is asked of them."""


@frozen
class TurnAnswer:
    """What the environment says to a turn: tokens to go on from, or the end of the trajectory."""

    group_id: str
    sample_index: int
    row_digest: str
    """As in `TurnToAnswer`."""
    token_ids: tuple[int, ...] = ()
    """To be observed; the policy goes on after them. Empty at the end."""
    finish_reason: FinishReason | None = None
    """Why the trajectory is over; None while it goes on."""
    reward: float = 0.0
    """Of the whole trajectory, at its end."""
    failure: str = ""
    """Why it could not be scored, in a line; empty where it was."""
    fresh: bool = False
    """Whether the tokens begin a branch: the policy sees them alone, and nothing of the row before them."""
    host: str = ""
    """Which host of others' environments said it; empty for an environment of the run's own."""
    service: str = ""
    """The reward service that says it: it holds the conversation, and gets the trajectory's next turns."""
    parts: dict[str, float] = field(default_factory=dict)
    """As in `core.messages.Ended`."""
    reason: str = ""


@frozen
class SampleReward:
    """The environment's score of one trajectory."""

    sample_index: int
    reward: float  # within its environment's range; 0 where there is none
    failure: str = ""  # why the trajectory could not be scored, in a line; empty where it was
    parts: dict[str, float] = field(default_factory=dict)
    """As in `core.messages.Ended`."""
    reason: str = ""


@frozen
class GroupRewards:
    """The environment's scores of one group."""

    group_id: str
    samples: tuple[SampleReward, ...]
    reference_logprobs: tuple[FloatArray, ...] = field(default=(), compare=False)
    """[G] of [T] float32 each, nats, by sample: the reference model's; empty where the run has none."""


@frozen_by_identity
class GroupToAudit:
    """An accepted group on its way to the auditor."""

    submission: GroupSubmission
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParameters | None = None  # as leased; None: as the configuration says of training
    rule: str = "inverse_cdf"  # as in `sampling.rule`
    authors: tuple[AuthoredSpan, ...] = ()  # tokens that earlier holders had sampled


@frozen_by_identity
class BatchRow(Completion):
    """One trajectory as the learner trains on it: nothing about hosts or clocks."""

    finish_reason: FinishReason
    _: KW_ONLY
    group_id: str
    prompt_key: str
    sample_index: int
    prompt_token_ids: IntArray  # [P] int32
    reward: float
    advantage: float
    """Reward relative to the group, from `core.loop.advantages`."""
    failure: str = ""
    """Why there is no reward; such a row trains nothing and counts as never sampled."""
    said: str = ""
    """What the environment said at its end, in a line; a batch's file leaves it to the timings."""
    reference_logprobs: FloatArray | None = None
    """[T] float32, nats: the reference model's of the same tokens; None where the run has none."""


@frozen
class RowTiming:
    """What is known about a row's making that is no part of the batch digest."""

    group_id: str
    sample_index: int
    worker_id: str
    lease_id: str
    attempt: int
    generation_s: float
    """Seconds the worker needed for the whole group."""
    leased_at_s: float
    submitted_at_s: float
    rewarded_at_s: float
    """Coordinator's monotonic seconds; only differences mean anything."""
    passes: int | None = None
    """Of the whole group, as the next three: see `DraftingStatistics`; None: its engine cannot draft."""
    drafted: int | None = None
    covered: int | None = None
    accepted: int | None = None
    said: str = ""
    """What the environment said at the trajectory's end, in a line."""


@frozen
class BatchRef:
    """A handle on one sealed batch: the file itself is in the store under its digest."""

    step: int
    digest: str
    """blake3 of the Parquet file that the step uses, 64 hex digits; *the* batch digest."""
    timings_digest: str
    """blake3 of the Parquet file beside it: timings, worker and lease ids."""
    trajectories: int
    groups: int  # in the file, after filtering
    groups_filtered: int  # without reward variance, and left out
    groups_dropped_stale: int
    """Finished groups dropped beyond the bound since the batch before."""
    tokens: int
    """Completion tokens in the file."""
    reward_mean: float
    """Mean reward of all scored trajectories of the step, filtered groups included."""
    staleness_histogram: dict[int, int]  # staleness in versions -> trajectories of the file
    completion_tokens_mean: float  # over all rewarded trajectories of the step
    drafting: DraftingStatistics | None = None
    """What drafting did for the rewarded trajectories of the step; None where no engine could draft."""
    reward_std: float = 0.0
    """Standard deviation of the rewards that `reward_mean` is the mean of."""
    replaced: tuple[VoidedBatch, ...] = ()  # batches of this step that were voided before, oldest first
    trajectories_failed: int = 0  # of the step: they could not be scored, no mean counts them
    tokens_dropped_stale: int = 0  # of the groups that `groups_dropped_stale` counts
    samples_digest: str = ""  # of the file of kept completions of filtered groups; "" where none are kept
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Means of what the rewards are made of, over the groups whose environment says it, by name."""


@frozen
class TensorEntry:
    """One tensor of a snapshot: where its bytes lie among those of all tensors."""

    name: str
    dtype: str  # name of the torch dtype without the prefix: float32, bfloat16, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the first byte of the first tensor
    length: int  # bytes


@frozen
class Payload:
    """One file that brings a version; chunk i is its bytes [i, i + 1) * chunk_bytes, the last may be less."""

    kind: Literal["full", "patch"]
    parent: int | None  # version that a patch changes; None for a full payload
    encoding: Literal["raw", "zstd", "lora"]  # a full raw payload is a safetensors file, an adapter is peft's
    digest: str  # the payload's address: blake3 over both sizes and the chunks' digests
    payload_bytes: int
    chunk_bytes: int  # of every chunk but the last
    chunk_digests: tuple[str, ...]  # blake3 of each chunk, in order

    def span(self, index: int) -> tuple[int, int]:
        """Return the offset of a chunk in the file and its length, in bytes."""
        start = index * self.chunk_bytes
        return start, min(self.chunk_bytes, self.payload_bytes - start)


@frozen
class Probe:
    """Fixed tokens and the learner's log-probabilities of them: see core/broadcast/probe.py."""

    tokens: tuple[int, ...]  # [T + 1]
    logprobs: tuple[float, ...]  # [T], nats, of each token but the first, at temperature 1; float32
    dtype: str  # in which the learner computed them, as torch spells it


@frozen
class SnapshotManifest:
    """Published weights of one policy version: what to fetch and how to check it."""

    run_id: str
    version: int
    weights_digest: str  # blake3 over names, dtypes, shapes and canonical bytes; the version's digest
    tensors: tuple[TensorEntry, ...]
    full_bytes: int  # of all tensors
    payloads: tuple[Payload, ...]  # ways to the version, any of which is enough
    origin: str
    """host:port of the broadcast service that serves the chunks; peers may hold them too."""
    signature: bytes = b""
    """The learner's, over everything but the origin: see weights/signature.py."""
    probe: Probe | None = None
    """What an engine that loaded the version computes; None of versions that were published without."""


@frozen
class StepCommit:
    """What one learner step left behind."""

    step: int
    version: int  # step + 1
    weights_digest: str
    batch_digest: str
    metrics: dict[str, float] = field(default_factory=dict)  # names as in `core.metrics`
    published: bool = False
    """Whether the version is (to be) published as a snapshot."""
    times: RunTimes | None = None  # of the run, when the coordinator took it; None before that
    exactness: str = ""
    """Where the step repeats bit for bit, such as `exact on CPU x 2`; empty for `exact here`."""
