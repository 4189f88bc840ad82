from antiphon.protos import records_pb2 as _records_pb2
from antiphon.protos import rollout_pb2 as _rollout_pb2
from antiphon.protos import reward_pb2 as _reward_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepRequest(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class VersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class OptionalVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class OptionalManifest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: _records_pb2.SnapshotManifest
    def __init__(self, manifest: _Optional[_Union[_records_pb2.SnapshotManifest, _Mapping]] = ...) -> None: ...

class KitRequest(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class KitPart(_message.Message):
    __slots__ = ("digest", "total_bytes", "signature", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    total_bytes: int
    signature: bytes
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., total_bytes: _Optional[int] = ..., signature: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class KitFile(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Kit(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[KitFile]
    def __init__(self, files: _Optional[_Iterable[_Union[KitFile, _Mapping]]] = ...) -> None: ...

class OptionalKitPart(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: KitPart
    def __init__(self, part: _Optional[_Union[KitPart, _Mapping]] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ("worker_id", "version", "payload_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    version: int
    payload_digest: str
    def __init__(self, worker_id: _Optional[str] = ..., version: _Optional[int] = ..., payload_digest: _Optional[str] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("parents", "others", "depth", "bytes_per_s")
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    parents: _containers.RepeatedScalarFieldContainer[str]
    others: _containers.RepeatedScalarFieldContainer[str]
    depth: int
    bytes_per_s: float
    def __init__(self, parents: _Optional[_Iterable[str]] = ..., others: _Optional[_Iterable[str]] = ..., depth: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class TransferPlan(_message.Message):
    __slots__ = ("assignment", "addresses")
    class AddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    addresses: _containers.ScalarMap[str, str]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., addresses: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WorkerOrder(_message.Message):
    __slots__ = ("worker", "state", "instance", "reason", "up_s", "left_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    state: str
    instance: str
    reason: str
    up_s: float
    left_s: float
    def __init__(self, worker: _Optional[str] = ..., state: _Optional[str] = ..., instance: _Optional[str] = ..., reason: _Optional[str] = ..., up_s: _Optional[float] = ..., left_s: _Optional[float] = ...) -> None: ...

class OrdersRequest(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[WorkerOrder]
    def __init__(self, orders: _Optional[_Iterable[_Union[WorkerOrder, _Mapping]]] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SkipRequest(_message.Message):
    __slots__ = ("step", "reason", "operator")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    step: int
    reason: str
    operator: str
    def __init__(self, step: _Optional[int] = ..., reason: _Optional[str] = ..., operator: _Optional[str] = ...) -> None: ...

class AuditsReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_records_pb2.GroupToAudit]
    def __init__(self, groups: _Optional[_Iterable[_Union[_records_pb2.GroupToAudit, _Mapping]]] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("group_id", "samples", "worker_id", "reason")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    samples: _containers.RepeatedCompositeFieldContainer[_records_pb2.SampleStatistics]
    worker_id: str
    reason: str
    def __init__(self, group_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[_records_pb2.SampleStatistics, _Mapping]]] = ..., worker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CommitsRequest(_message.Message):
    __slots__ = ("after_step",)
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    after_step: int
    def __init__(self, after_step: _Optional[int] = ...) -> None: ...

class CommitsReply(_message.Message):
    __slots__ = ("commits", "more")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    commits: _containers.RepeatedCompositeFieldContainer[_records_pb2.StepCommit]
    more: bool
    def __init__(self, commits: _Optional[_Iterable[_Union[_records_pb2.StepCommit, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class EvaluationRecord(_message.Message):
    __slots__ = ("version", "prompts", "rewarded", "reward_mean", "completion_tokens_mean", "samples_digest", "reward_range")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    REWARDED_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REWARD_RANGE_FIELD_NUMBER: _ClassVar[int]
    version: int
    prompts: int
    rewarded: int
    reward_mean: float
    completion_tokens_mean: float
    samples_digest: str
    reward_range: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, version: _Optional[int] = ..., prompts: _Optional[int] = ..., rewarded: _Optional[int] = ..., reward_mean: _Optional[float] = ..., completion_tokens_mean: _Optional[float] = ..., samples_digest: _Optional[str] = ..., reward_range: _Optional[_Iterable[float]] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("stage", "number", "wait_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    stage: str
    number: int
    wait_s: float
    def __init__(self, stage: _Optional[str] = ..., number: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class StageReply(_message.Message):
    __slots__ = ("done", "waiting_for", "progress", "halted", "batch", "evaluation", "counter", "no_workers")
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HALTED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    NO_WORKERS_FIELD_NUMBER: _ClassVar[int]
    done: bool
    waiting_for: str
    progress: float
    halted: str
    batch: _records_pb2.BatchRef
    evaluation: EvaluationRecord
    counter: int
    no_workers: bool
    def __init__(self, done: _Optional[bool] = ..., waiting_for: _Optional[str] = ..., progress: _Optional[float] = ..., halted: _Optional[str] = ..., batch: _Optional[_Union[_records_pb2.BatchRef, _Mapping]] = ..., evaluation: _Optional[_Union[EvaluationRecord, _Mapping]] = ..., counter: _Optional[int] = ..., no_workers: _Optional[bool] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("worker_id", "state", "held_version", "open_leases", "tokens_generated", "busy_share", "seconds_since_heartbeat", "stands_still_s", "audited", "strikes", "tokens_per_s", "swap_error", "swap_failing_s", "missing_abilities")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STANDS_STILL_S_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    STRIKES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAP_ERROR_FIELD_NUMBER: _ClassVar[int]
    SWAP_FAILING_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_ABILITIES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    held_version: int
    open_leases: int
    tokens_generated: int
    busy_share: float
    seconds_since_heartbeat: float
    stands_still_s: float
    audited: int
    strikes: int
    tokens_per_s: float
    swap_error: str
    swap_failing_s: float
    missing_abilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., held_version: _Optional[int] = ..., open_leases: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., busy_share: _Optional[float] = ..., seconds_since_heartbeat: _Optional[float] = ..., stands_still_s: _Optional[float] = ..., audited: _Optional[int] = ..., strikes: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., swap_error: _Optional[str] = ..., swap_failing_s: _Optional[float] = ..., missing_abilities: _Optional[_Iterable[str]] = ...) -> None: ...

class CapacityRecord(_message.Message):
    __slots__ = ("need_tokens_per_s", "supply_tokens_per_s", "acceptance", "train_s", "broadcast_s", "group_s", "regime", "step_s", "measured_step_s", "publish_interval", "least_staleness", "place_s")
    NEED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SUPPLY_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_S_FIELD_NUMBER: _ClassVar[int]
    GROUP_S_FIELD_NUMBER: _ClassVar[int]
    REGIME_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    LEAST_STALENESS_FIELD_NUMBER: _ClassVar[int]
    PLACE_S_FIELD_NUMBER: _ClassVar[int]
    need_tokens_per_s: float
    supply_tokens_per_s: float
    acceptance: float
    train_s: float
    broadcast_s: float
    group_s: float
    regime: str
    step_s: float
    measured_step_s: float
    publish_interval: int
    least_staleness: int
    place_s: float
    def __init__(self, need_tokens_per_s: _Optional[float] = ..., supply_tokens_per_s: _Optional[float] = ..., acceptance: _Optional[float] = ..., train_s: _Optional[float] = ..., broadcast_s: _Optional[float] = ..., group_s: _Optional[float] = ..., regime: _Optional[str] = ..., step_s: _Optional[float] = ..., measured_step_s: _Optional[float] = ..., publish_interval: _Optional[int] = ..., least_staleness: _Optional[int] = ..., place_s: _Optional[float] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "steps_total", "committed_steps", "opened_steps", "sealed_steps", "newest_version", "groups_open", "groups_leased", "groups_to_reward", "groups_ready", "groups_dropped_stale", "groups_filtered", "groups_requeued", "staleness_histogram", "workers", "evaluations", "last_commit", "paused_reason", "waiting", "finished", "barred", "worker_seconds", "tokens_by_use", "capacity", "dollars_by_use", "seconds_by_class", "dollars_by_class", "work_done", "run_ahead", "voided", "trajectories_failed", "unaudited", "unaudited_reason", "unaudited_tokens", "deliveries", "order", "length_correlation", "last_failure", "reward_range", "environment_digest", "orders")
    class StalenessHistogramEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class BarredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WorkerSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TokensByUseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DollarsByUseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SecondsByClassEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DollarsByClassEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    OPENED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SEALED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_OPEN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_LEASED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_TO_REWARD_FIELD_NUMBER: _ClassVar[int]
    GROUPS_READY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_DROPPED_STALE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FILTERED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_REQUEUED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMIT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_REASON_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    WORKER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BY_USE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DOLLARS_BY_USE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BY_CLASS_FIELD_NUMBER: _ClassVar[int]
    DOLLARS_BY_CLASS_FIELD_NUMBER: _ClassVar[int]
    WORK_DONE_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FAILED_FIELD_NUMBER: _ClassVar[int]
    UNAUDITED_FIELD_NUMBER: _ClassVar[int]
    UNAUDITED_REASON_FIELD_NUMBER: _ClassVar[int]
    UNAUDITED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LENGTH_CORRELATION_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    REWARD_RANGE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    steps_total: int
    committed_steps: int
    opened_steps: int
    sealed_steps: int
    newest_version: int
    groups_open: int
    groups_leased: int
    groups_to_reward: int
    groups_ready: int
    groups_dropped_stale: int
    groups_filtered: int
    groups_requeued: int
    staleness_histogram: _containers.ScalarMap[int, int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerRecord]
    evaluations: _containers.RepeatedCompositeFieldContainer[EvaluationRecord]
    last_commit: _records_pb2.StepCommit
    paused_reason: str
    waiting: str
    finished: bool
    barred: _containers.ScalarMap[str, str]
    worker_seconds: _containers.ScalarMap[str, float]
    tokens_by_use: _containers.ScalarMap[str, int]
    capacity: CapacityRecord
    dollars_by_use: _containers.ScalarMap[str, float]
    seconds_by_class: _containers.ScalarMap[str, float]
    dollars_by_class: _containers.ScalarMap[str, float]
    work_done: int
    run_ahead: str
    voided: _containers.RepeatedCompositeFieldContainer[_records_pb2.VoidedBatch]
    trajectories_failed: int
    unaudited: int
    unaudited_reason: str
    unaudited_tokens: int
    deliveries: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.DeliveryRecord]
    order: str
    length_correlation: float
    last_failure: str
    reward_range: _containers.RepeatedScalarFieldContainer[float]
    environment_digest: str
    orders: _containers.RepeatedCompositeFieldContainer[WorkerOrder]
    def __init__(self, run_id: _Optional[str] = ..., steps_total: _Optional[int] = ..., committed_steps: _Optional[int] = ..., opened_steps: _Optional[int] = ..., sealed_steps: _Optional[int] = ..., newest_version: _Optional[int] = ..., groups_open: _Optional[int] = ..., groups_leased: _Optional[int] = ..., groups_to_reward: _Optional[int] = ..., groups_ready: _Optional[int] = ..., groups_dropped_stale: _Optional[int] = ..., groups_filtered: _Optional[int] = ..., groups_requeued: _Optional[int] = ..., staleness_histogram: _Optional[_Mapping[int, int]] = ..., workers: _Optional[_Iterable[_Union[WorkerRecord, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[EvaluationRecord, _Mapping]]] = ..., last_commit: _Optional[_Union[_records_pb2.StepCommit, _Mapping]] = ..., paused_reason: _Optional[str] = ..., waiting: _Optional[str] = ..., finished: _Optional[bool] = ..., barred: _Optional[_Mapping[str, str]] = ..., worker_seconds: _Optional[_Mapping[str, float]] = ..., tokens_by_use: _Optional[_Mapping[str, int]] = ..., capacity: _Optional[_Union[CapacityRecord, _Mapping]] = ..., dollars_by_use: _Optional[_Mapping[str, float]] = ..., seconds_by_class: _Optional[_Mapping[str, float]] = ..., dollars_by_class: _Optional[_Mapping[str, float]] = ..., work_done: _Optional[int] = ..., run_ahead: _Optional[str] = ..., voided: _Optional[_Iterable[_Union[_records_pb2.VoidedBatch, _Mapping]]] = ..., trajectories_failed: _Optional[int] = ..., unaudited: _Optional[int] = ..., unaudited_reason: _Optional[str] = ..., unaudited_tokens: _Optional[int] = ..., deliveries: _Optional[_Iterable[_Union[_rollout_pb2.DeliveryRecord, _Mapping]]] = ..., order: _Optional[str] = ..., length_correlation: _Optional[float] = ..., last_failure: _Optional[str] = ..., reward_range: _Optional[_Iterable[float]] = ..., environment_digest: _Optional[str] = ..., orders: _Optional[_Iterable[_Union[WorkerOrder, _Mapping]]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after_seq", "follow")
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after_seq: int
    follow: bool
    def __init__(self, after_seq: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("seq", "at", "kind", "data_json")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    seq: int
    at: float
    kind: str
    data_json: str
    def __init__(self, seq: _Optional[int] = ..., at: _Optional[float] = ..., kind: _Optional[str] = ..., data_json: _Optional[str] = ...) -> None: ...

class EventsReply(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "seeds", "sampling", "version", "max_staleness")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    sampling: _records_pb2.SamplingParameters
    version: int
    max_staleness: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., seeds: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_records_pb2.SamplingParameters, _Mapping]] = ..., version: _Optional[int] = ..., max_staleness: _Optional[int] = ...) -> None: ...

class SamplesRequest(_message.Message):
    __slots__ = ("request_id", "wait_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    wait_s: float
    def __init__(self, request_id: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class SampledReply(_message.Message):
    __slots__ = ("trajectories", "waiting_for", "cached_tokens")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    trajectories: _records_pb2.Completions
    waiting_for: str
    cached_tokens: int
    def __init__(self, trajectories: _Optional[_Union[_records_pb2.Completions, _Mapping]] = ..., waiting_for: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ClientStepRequest(_message.Message):
    __slots__ = ("step", "digest", "trajectories", "tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    digest: str
    trajectories: int
    tokens: int
    def __init__(self, step: _Optional[int] = ..., digest: _Optional[str] = ..., trajectories: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...
