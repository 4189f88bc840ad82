from antiphon.protos import records_pb2 as _records_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepResult(_message.Message):
    __slots__ = ("commit", "idle_s", "train_s")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    commit: _records_pb2.StepCommit
    idle_s: float
    train_s: float
    def __init__(self, commit: _Optional[_Union[_records_pb2.StepCommit, _Mapping]] = ..., idle_s: _Optional[float] = ..., train_s: _Optional[float] = ...) -> None: ...

class LearnerProgress(_message.Message):
    __slots__ = ("doing", "counter", "counted")
    DOING_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    doing: str
    counter: int
    counted: str
    def __init__(self, doing: _Optional[str] = ..., counter: _Optional[int] = ..., counted: _Optional[str] = ...) -> None: ...

class AwaitStepRequest(_message.Message):
    __slots__ = ("step", "wait_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    wait_s: float
    def __init__(self, step: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: LearnerProgress
    result: StepResult
    def __init__(self, progress: _Optional[_Union[LearnerProgress, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ...) -> None: ...

class AwaitSnapshotRequest(_message.Message):
    __slots__ = ("version", "wait_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    wait_s: float
    def __init__(self, version: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("progress", "manifest")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    progress: LearnerProgress
    manifest: _records_pb2.SnapshotManifest
    def __init__(self, progress: _Optional[_Union[LearnerProgress, _Mapping]] = ..., manifest: _Optional[_Union[_records_pb2.SnapshotManifest, _Mapping]] = ...) -> None: ...

class LearnerStatus(_message.Message):
    __slots__ = ("version", "state", "progress")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    version: int
    state: str
    progress: LearnerProgress
    def __init__(self, version: _Optional[int] = ..., state: _Optional[str] = ..., progress: _Optional[_Union[LearnerProgress, _Mapping]] = ...) -> None: ...

class AwaitCallRequest(_message.Message):
    __slots__ = ("step", "place", "digest", "forward_only", "wait_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    place: int
    digest: str
    forward_only: bool
    wait_s: float
    def __init__(self, step: _Optional[int] = ..., place: _Optional[int] = ..., digest: _Optional[str] = ..., forward_only: _Optional[bool] = ..., wait_s: _Optional[float] = ...) -> None: ...

class CallReply(_message.Message):
    __slots__ = ("progress", "held", "done")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    progress: LearnerProgress
    held: int
    done: bool
    def __init__(self, progress: _Optional[_Union[LearnerProgress, _Mapping]] = ..., held: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class AwaitSavedRequest(_message.Message):
    __slots__ = ("kind", "name", "version", "wait_s", "expires_at")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    version: int
    wait_s: float
    expires_at: float
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[int] = ..., wait_s: _Optional[float] = ..., expires_at: _Optional[float] = ...) -> None: ...

class SavedReply(_message.Message):
    __slots__ = ("progress", "digest", "bytes")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    progress: LearnerProgress
    digest: str
    bytes: int
    def __init__(self, progress: _Optional[_Union[LearnerProgress, _Mapping]] = ..., digest: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class DropSavedRequest(_message.Message):
    __slots__ = ("kind", "name")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ScoreTokensRequest(_message.Message):
    __slots__ = ("version", "token_ids", "top")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    version: int
    token_ids: bytes
    top: int
    def __init__(self, version: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., top: _Optional[int] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("logprobs", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...
