from antiphon.protos import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerHello(_message.Message):
    __slots__ = ("worker_name", "protocol_version", "run_id", "concurrent_groups", "device", "relay_address", "instance")
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    worker_name: str
    protocol_version: int
    run_id: str
    concurrent_groups: int
    device: str
    relay_address: str
    instance: str
    def __init__(self, worker_name: _Optional[str] = ..., protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., concurrent_groups: _Optional[int] = ..., device: _Optional[str] = ..., relay_address: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...

class WorkerWelcome(_message.Message):
    __slots__ = ("worker_id", "run_id", "config_yaml", "heartbeat_s", "learner_key")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEARNER_KEY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    run_id: str
    config_yaml: str
    heartbeat_s: float
    learner_key: bytes
    def __init__(self, worker_id: _Optional[str] = ..., run_id: _Optional[str] = ..., config_yaml: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., learner_key: _Optional[bytes] = ...) -> None: ...

class LeaseProgress(_message.Message):
    __slots__ = ("lease_id", "pieces")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    pieces: _containers.RepeatedCompositeFieldContainer[_records_pb2.PartialTrajectory]
    def __init__(self, lease_id: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[_records_pb2.PartialTrajectory, _Mapping]]] = ...) -> None: ...

class KeptProgress(_message.Message):
    __slots__ = ("lease_id", "tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class DeliveryRecord(_message.Message):
    __slots__ = ("version", "worker_id", "seconds", "first_chunk_s", "bytes_from", "best_bytes_per_s", "culprits", "verify_s", "load_s")
    class BytesFromEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BestBytesPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CulpritsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FROM_FIELD_NUMBER: _ClassVar[int]
    BEST_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CULPRITS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    worker_id: str
    seconds: float
    first_chunk_s: float
    bytes_from: _containers.ScalarMap[str, int]
    best_bytes_per_s: _containers.ScalarMap[str, float]
    culprits: _containers.ScalarMap[str, str]
    verify_s: float
    load_s: float
    def __init__(self, version: _Optional[int] = ..., worker_id: _Optional[str] = ..., seconds: _Optional[float] = ..., first_chunk_s: _Optional[float] = ..., bytes_from: _Optional[_Mapping[str, int]] = ..., best_bytes_per_s: _Optional[_Mapping[str, float]] = ..., culprits: _Optional[_Mapping[str, str]] = ..., verify_s: _Optional[float] = ..., load_s: _Optional[float] = ...) -> None: ...

class NetworkReport(_message.Message):
    __slots__ = ("round_trip_s", "down_bytes_per_s", "held_payloads", "deliveries", "culprits")
    class CulpritsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    HELD_PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    CULPRITS_FIELD_NUMBER: _ClassVar[int]
    round_trip_s: float
    down_bytes_per_s: float
    held_payloads: _containers.RepeatedScalarFieldContainer[str]
    deliveries: _containers.RepeatedCompositeFieldContainer[DeliveryRecord]
    culprits: _containers.ScalarMap[str, str]
    def __init__(self, round_trip_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., held_payloads: _Optional[_Iterable[str]] = ..., deliveries: _Optional[_Iterable[_Union[DeliveryRecord, _Mapping]]] = ..., culprits: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WorkerHeartbeat(_message.Message):
    __slots__ = ("worker_id", "held_version", "weights_digest", "lease_ids", "tokens_generated", "busy_s", "uptime_s", "sampling", "progress", "released_leases", "leaving", "bytes_fetched", "numerics", "swap_error", "swap_failing_s", "network", "missing_abilities")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_LEASES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    SWAP_ERROR_FIELD_NUMBER: _ClassVar[int]
    SWAP_FAILING_S_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    MISSING_ABILITIES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    held_version: int
    weights_digest: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    tokens_generated: int
    busy_s: float
    uptime_s: float
    sampling: bool
    progress: _containers.RepeatedCompositeFieldContainer[LeaseProgress]
    released_leases: _containers.RepeatedScalarFieldContainer[str]
    leaving: bool
    bytes_fetched: int
    numerics: str
    swap_error: str
    swap_failing_s: float
    network: NetworkReport
    missing_abilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., held_version: _Optional[int] = ..., weights_digest: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., tokens_generated: _Optional[int] = ..., busy_s: _Optional[float] = ..., uptime_s: _Optional[float] = ..., sampling: _Optional[bool] = ..., progress: _Optional[_Iterable[_Union[LeaseProgress, _Mapping]]] = ..., released_leases: _Optional[_Iterable[str]] = ..., leaving: _Optional[bool] = ..., bytes_fetched: _Optional[int] = ..., numerics: _Optional[str] = ..., swap_error: _Optional[str] = ..., swap_failing_s: _Optional[float] = ..., network: _Optional[_Union[NetworkReport, _Mapping]] = ..., missing_abilities: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "cancelled_leases", "newest_version", "run_finished", "kept", "next_s", "leave", "wanted_version")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_LEASES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_S_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    WANTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    known: bool
    cancelled_leases: _containers.RepeatedScalarFieldContainer[str]
    newest_version: int
    run_finished: bool
    kept: _containers.RepeatedCompositeFieldContainer[KeptProgress]
    next_s: float
    leave: bool
    wanted_version: int
    def __init__(self, known: _Optional[bool] = ..., cancelled_leases: _Optional[_Iterable[str]] = ..., newest_version: _Optional[int] = ..., run_finished: _Optional[bool] = ..., kept: _Optional[_Iterable[_Union[KeptProgress, _Mapping]]] = ..., next_s: _Optional[float] = ..., leave: _Optional[bool] = ..., wanted_version: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("worker_id", "held_version", "groups", "wait_s", "wants_history")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WANTS_HISTORY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    held_version: int
    groups: int
    wait_s: float
    wants_history: bool
    def __init__(self, worker_id: _Optional[str] = ..., held_version: _Optional[int] = ..., groups: _Optional[int] = ..., wait_s: _Optional[float] = ..., wants_history: _Optional[bool] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("leases", "reason", "newest_version", "wanted_version", "run_finished")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    WANTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[_records_pb2.Lease]
    reason: str
    newest_version: int
    wanted_version: int
    run_finished: bool
    def __init__(self, leases: _Optional[_Iterable[_Union[_records_pb2.Lease, _Mapping]]] = ..., reason: _Optional[str] = ..., newest_version: _Optional[int] = ..., wanted_version: _Optional[int] = ..., run_finished: _Optional[bool] = ...) -> None: ...

class TurnRequest(_message.Message):
    __slots__ = ("worker_id", "lease_id", "piece", "wait_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lease_id: str
    piece: _records_pb2.PartialTrajectory
    wait_s: float
    def __init__(self, worker_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., piece: _Optional[_Union[_records_pb2.PartialTrajectory, _Mapping]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class TurnReply(_message.Message):
    __slots__ = ("answered", "token_ids", "finish_reason", "kept", "cancelled", "fresh")
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    answered: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    kept: int
    cancelled: bool
    fresh: bool
    def __init__(self, answered: _Optional[bool] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., kept: _Optional[int] = ..., cancelled: _Optional[bool] = ..., fresh: _Optional[bool] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("verdict",)
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    def __init__(self, verdict: _Optional[str] = ...) -> None: ...

class WorkRequest(_message.Message):
    __slots__ = ("id", "heartbeat", "lease", "submission", "turn", "cancel")
    ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    id: int
    heartbeat: WorkerHeartbeat
    lease: LeaseRequest
    submission: _records_pb2.GroupSubmission
    turn: TurnRequest
    cancel: bool
    def __init__(self, id: _Optional[int] = ..., heartbeat: _Optional[_Union[WorkerHeartbeat, _Mapping]] = ..., lease: _Optional[_Union[LeaseRequest, _Mapping]] = ..., submission: _Optional[_Union[_records_pb2.GroupSubmission, _Mapping]] = ..., turn: _Optional[_Union[TurnRequest, _Mapping]] = ..., cancel: _Optional[bool] = ...) -> None: ...

class WorkRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[WorkRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[WorkRequest, _Mapping]]] = ...) -> None: ...

class WorkError(_message.Message):
    __slots__ = ("status", "details")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    status: int
    details: str
    def __init__(self, status: _Optional[int] = ..., details: _Optional[str] = ...) -> None: ...

class WorkReply(_message.Message):
    __slots__ = ("id", "heartbeat", "lease", "submission", "turn", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    heartbeat: HeartbeatReply
    lease: LeaseReply
    submission: SubmitReply
    turn: TurnReply
    error: WorkError
    def __init__(self, id: _Optional[int] = ..., heartbeat: _Optional[_Union[HeartbeatReply, _Mapping]] = ..., lease: _Optional[_Union[LeaseReply, _Mapping]] = ..., submission: _Optional[_Union[SubmitReply, _Mapping]] = ..., turn: _Optional[_Union[TurnReply, _Mapping]] = ..., error: _Optional[_Union[WorkError, _Mapping]] = ...) -> None: ...

class WorkReplies(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[WorkReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[WorkReply, _Mapping]]] = ...) -> None: ...
