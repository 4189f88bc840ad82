from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParameters(_message.Message):
    __slots__ = ("stop", "temperature", "top_k", "top_p", "max_tokens", "stop_token_ids")
    STOP_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stop: _Optional[_Iterable[str]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "stop", "kept_cache")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    KEPT_CACHE_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    stop: int
    kept_cache: bool
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., kept_cache: _Optional[bool] = ...) -> None: ...

class Completions(_message.Message):
    __slots__ = ("sample_indices", "seeds", "lengths", "token_ids", "behaviour_logprobs", "span_counts", "span_versions", "span_starts", "span_stops", "finish_reasons", "span_kept_caches", "observed_counts", "observed_starts", "observed_stops", "break_counts", "breaks")
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPAN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SPAN_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SPAN_STARTS_FIELD_NUMBER: _ClassVar[int]
    SPAN_STOPS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    SPAN_KEPT_CACHES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_STARTS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_STOPS_FIELD_NUMBER: _ClassVar[int]
    BREAK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BREAKS_FIELD_NUMBER: _ClassVar[int]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    behaviour_logprobs: bytes
    span_counts: _containers.RepeatedScalarFieldContainer[int]
    span_versions: _containers.RepeatedScalarFieldContainer[int]
    span_starts: _containers.RepeatedScalarFieldContainer[int]
    span_stops: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[str]
    span_kept_caches: _containers.RepeatedScalarFieldContainer[bool]
    observed_counts: _containers.RepeatedScalarFieldContainer[int]
    observed_starts: _containers.RepeatedScalarFieldContainer[int]
    observed_stops: _containers.RepeatedScalarFieldContainer[int]
    break_counts: _containers.RepeatedScalarFieldContainer[int]
    breaks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_indices: _Optional[_Iterable[int]] = ..., seeds: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., span_counts: _Optional[_Iterable[int]] = ..., span_versions: _Optional[_Iterable[int]] = ..., span_starts: _Optional[_Iterable[int]] = ..., span_stops: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[str]] = ..., span_kept_caches: _Optional[_Iterable[bool]] = ..., observed_counts: _Optional[_Iterable[int]] = ..., observed_starts: _Optional[_Iterable[int]] = ..., observed_stops: _Optional[_Iterable[int]] = ..., break_counts: _Optional[_Iterable[int]] = ..., breaks: _Optional[_Iterable[int]] = ...) -> None: ...

class PartialTrajectory(_message.Message):
    __slots__ = ("sample_index", "start", "token_ids", "behaviour_logprobs", "spans", "finish_reason", "observed", "breaks")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    BREAKS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    start: int
    token_ids: bytes
    behaviour_logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: str
    observed: _containers.RepeatedScalarFieldContainer[int]
    breaks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_index: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., observed: _Optional[_Iterable[int]] = ..., breaks: _Optional[_Iterable[int]] = ...) -> None: ...

class Authorship(_message.Message):
    __slots__ = ("worker_id", "stop")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    stop: int
    def __init__(self, worker_id: _Optional[str] = ..., stop: _Optional[int] = ...) -> None: ...

class KeptSample(_message.Message):
    __slots__ = ("whole", "authors")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    AUTHORS_FIELD_NUMBER: _ClassVar[int]
    whole: PartialTrajectory
    authors: _containers.RepeatedCompositeFieldContainer[Authorship]
    def __init__(self, whole: _Optional[_Union[PartialTrajectory, _Mapping]] = ..., authors: _Optional[_Iterable[_Union[Authorship, _Mapping]]] = ...) -> None: ...

class KeptGroup(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[KeptSample]
    def __init__(self, samples: _Optional[_Iterable[_Union[KeptSample, _Mapping]]] = ...) -> None: ...

class PromptHistory(_message.Message):
    __slots__ = ("prompt_key", "epoch", "lengths", "versions", "epochs", "sample_indices", "rewards", "tokens")
    PROMPT_KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_key: str
    epoch: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    tokens: bytes
    def __init__(self, prompt_key: _Optional[str] = ..., epoch: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., rewards: _Optional[_Iterable[float]] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class DraftingStatistics(_message.Message):
    __slots__ = ("tokens", "passes", "drafted", "covered", "accepted", "with_history", "drafter_s", "sampler_s", "gain", "completions", "promising", "rested")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    WITH_HISTORY_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_S_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    PROMISING_FIELD_NUMBER: _ClassVar[int]
    RESTED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    passes: int
    drafted: int
    covered: int
    accepted: int
    with_history: int
    drafter_s: float
    sampler_s: float
    gain: float
    completions: int
    promising: int
    rested: int
    def __init__(self, tokens: _Optional[int] = ..., passes: _Optional[int] = ..., drafted: _Optional[int] = ..., covered: _Optional[int] = ..., accepted: _Optional[int] = ..., with_history: _Optional[int] = ..., drafter_s: _Optional[float] = ..., sampler_s: _Optional[float] = ..., gain: _Optional[float] = ..., completions: _Optional[int] = ..., promising: _Optional[int] = ..., rested: _Optional[int] = ...) -> None: ...

class TurnLimits(_message.Message):
    __slots__ = ("turns", "tokens", "context")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    turns: int
    tokens: int
    context: int
    def __init__(self, turns: _Optional[int] = ..., tokens: _Optional[int] = ..., context: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "group_id", "prompt_key", "prompt_token_ids", "epoch", "seeds", "sampling", "version", "duration_s", "attempt", "history", "prefix", "limits")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    group_id: str
    prompt_key: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    seeds: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParameters
    version: int
    duration_s: float
    attempt: int
    history: PromptHistory
    prefix: _containers.RepeatedCompositeFieldContainer[PartialTrajectory]
    limits: TurnLimits
    def __init__(self, lease_id: _Optional[str] = ..., group_id: _Optional[str] = ..., prompt_key: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., seeds: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., version: _Optional[int] = ..., duration_s: _Optional[float] = ..., attempt: _Optional[int] = ..., history: _Optional[_Union[PromptHistory, _Mapping]] = ..., prefix: _Optional[_Iterable[_Union[PartialTrajectory, _Mapping]]] = ..., limits: _Optional[_Union[TurnLimits, _Mapping]] = ...) -> None: ...

class GroupSubmission(_message.Message):
    __slots__ = ("lease_id", "group_id", "worker_id", "generation_s", "drafting", "trajectories", "cached_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    group_id: str
    worker_id: str
    generation_s: float
    drafting: DraftingStatistics
    trajectories: Completions
    cached_tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., group_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., generation_s: _Optional[float] = ..., drafting: _Optional[_Union[DraftingStatistics, _Mapping]] = ..., trajectories: _Optional[_Union[Completions, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class TurnToAnswer(_message.Message):
    __slots__ = ("group_id", "sample_index", "row_digest", "prompt_key", "prompt_token_ids", "token_ids", "observed", "limits", "logprobs", "spans", "breaks", "over")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROW_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    BREAKS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample_index: int
    row_digest: str
    prompt_key: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    observed: _containers.RepeatedCompositeFieldContainer[TokenRange]
    limits: TurnLimits
    logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    breaks: _containers.RepeatedScalarFieldContainer[int]
    over: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., row_digest: _Optional[str] = ..., prompt_key: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., observed: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., limits: _Optional[_Union[TurnLimits, _Mapping]] = ..., logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., breaks: _Optional[_Iterable[int]] = ..., over: _Optional[_Iterable[int]] = ...) -> None: ...

class TurnAnswer(_message.Message):
    __slots__ = ("group_id", "sample_index", "row_digest", "token_ids", "finish_reason", "reward", "failure", "fresh", "host", "service", "parts", "reason")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROW_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample_index: int
    row_digest: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    reward: float
    failure: str
    fresh: bool
    host: str
    service: str
    parts: _containers.ScalarMap[str, float]
    reason: str
    def __init__(self, group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., row_digest: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., reward: _Optional[float] = ..., failure: _Optional[str] = ..., fresh: _Optional[bool] = ..., host: _Optional[str] = ..., service: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ..., reason: _Optional[str] = ...) -> None: ...

class SampleReward(_message.Message):
    __slots__ = ("sample_index", "reward", "failure", "parts", "reason")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    reward: float
    failure: str
    parts: _containers.ScalarMap[str, float]
    reason: str
    def __init__(self, sample_index: _Optional[int] = ..., reward: _Optional[float] = ..., failure: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ..., reason: _Optional[str] = ...) -> None: ...

class GroupRewards(_message.Message):
    __slots__ = ("group_id", "samples", "reference_logprobs")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    samples: _containers.RepeatedCompositeFieldContainer[SampleReward]
    reference_logprobs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, group_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SampleReward, _Mapping]]] = ..., reference_logprobs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AuthoredSpan(_message.Message):
    __slots__ = ("sample_index", "worker_id", "start", "stop")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    worker_id: str
    start: int
    stop: int
    def __init__(self, sample_index: _Optional[int] = ..., worker_id: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class GroupToAudit(_message.Message):
    __slots__ = ("submission", "prompt_token_ids", "sampling", "rule", "authors")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    AUTHORS_FIELD_NUMBER: _ClassVar[int]
    submission: GroupSubmission
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParameters
    rule: str
    authors: _containers.RepeatedCompositeFieldContainer[AuthoredSpan]
    def __init__(self, submission: _Optional[_Union[GroupSubmission, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., rule: _Optional[str] = ..., authors: _Optional[_Iterable[_Union[AuthoredSpan, _Mapping]]] = ...) -> None: ...

class SampleStatistics(_message.Message):
    __slots__ = ("sample_index", "tokens", "missed", "impossible", "drift", "near", "gross", "author", "kept_cache")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    IMPOSSIBLE_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    GROSS_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    KEPT_CACHE_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    tokens: int
    missed: int
    impossible: int
    drift: float
    near: int
    gross: int
    author: str
    kept_cache: int
    def __init__(self, sample_index: _Optional[int] = ..., tokens: _Optional[int] = ..., missed: _Optional[int] = ..., impossible: _Optional[int] = ..., drift: _Optional[float] = ..., near: _Optional[int] = ..., gross: _Optional[int] = ..., author: _Optional[str] = ..., kept_cache: _Optional[int] = ...) -> None: ...

class VoidedBatch(_message.Message):
    __slots__ = ("step", "digest", "groups", "groups_filtered", "trajectories", "reason", "operator")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FILTERED_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    step: int
    digest: str
    groups: int
    groups_filtered: int
    trajectories: int
    reason: str
    operator: str
    def __init__(self, step: _Optional[int] = ..., digest: _Optional[str] = ..., groups: _Optional[int] = ..., groups_filtered: _Optional[int] = ..., trajectories: _Optional[int] = ..., reason: _Optional[str] = ..., operator: _Optional[str] = ...) -> None: ...

class BatchRef(_message.Message):
    __slots__ = ("step", "digest", "timings_digest", "trajectories", "groups", "groups_filtered", "groups_dropped_stale", "tokens", "reward_mean", "staleness_histogram", "completion_tokens_mean", "drafting", "reward_std", "replaced", "trajectories_failed", "tokens_dropped_stale", "samples_digest", "reward_parts")
    class StalenessHistogramEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FILTERED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_DROPPED_STALE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    REWARD_STD_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FAILED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DROPPED_STALE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    digest: str
    timings_digest: str
    trajectories: int
    groups: int
    groups_filtered: int
    groups_dropped_stale: int
    tokens: int
    reward_mean: float
    staleness_histogram: _containers.ScalarMap[int, int]
    completion_tokens_mean: float
    drafting: DraftingStatistics
    reward_std: float
    replaced: _containers.RepeatedCompositeFieldContainer[VoidedBatch]
    trajectories_failed: int
    tokens_dropped_stale: int
    samples_digest: str
    reward_parts: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., digest: _Optional[str] = ..., timings_digest: _Optional[str] = ..., trajectories: _Optional[int] = ..., groups: _Optional[int] = ..., groups_filtered: _Optional[int] = ..., groups_dropped_stale: _Optional[int] = ..., tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ..., staleness_histogram: _Optional[_Mapping[int, int]] = ..., completion_tokens_mean: _Optional[float] = ..., drafting: _Optional[_Union[DraftingStatistics, _Mapping]] = ..., reward_std: _Optional[float] = ..., replaced: _Optional[_Iterable[_Union[VoidedBatch, _Mapping]]] = ..., trajectories_failed: _Optional[int] = ..., tokens_dropped_stale: _Optional[int] = ..., samples_digest: _Optional[str] = ..., reward_parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SnapshotManifest(_message.Message):
    __slots__ = ("body", "origin", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    origin: str
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., origin: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class StepCommit(_message.Message):
    __slots__ = ("step", "version", "weights_digest", "batch_digest", "metrics", "published", "times", "exactness")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BATCH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    step: int
    version: int
    weights_digest: str
    batch_digest: str
    metrics: _containers.ScalarMap[str, float]
    published: bool
    times: RunTimes
    exactness: str
    def __init__(self, step: _Optional[int] = ..., version: _Optional[int] = ..., weights_digest: _Optional[str] = ..., batch_digest: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., published: _Optional[bool] = ..., times: _Optional[_Union[RunTimes, _Mapping]] = ..., exactness: _Optional[str] = ...) -> None: ...

class RunTimes(_message.Message):
    __slots__ = ("wall_s", "startup_s", "break_s", "breaks")
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    STARTUP_S_FIELD_NUMBER: _ClassVar[int]
    BREAK_S_FIELD_NUMBER: _ClassVar[int]
    BREAKS_FIELD_NUMBER: _ClassVar[int]
    wall_s: float
    startup_s: float
    break_s: float
    breaks: int
    def __init__(self, wall_s: _Optional[float] = ..., startup_s: _Optional[float] = ..., break_s: _Optional[float] = ..., breaks: _Optional[int] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
