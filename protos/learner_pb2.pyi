from antiphon.protos import records_pb2 as _records_pb2
from antiphon.protos import coordinator_pb2 as _coordinator_pb2
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

class LearnerStatus(_message.Message):
    __slots__ = ("version", "state", "idle_s", "busy_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    state: str
    idle_s: float
    busy_s: float
    def __init__(self, version: _Optional[int] = ..., state: _Optional[str] = ..., idle_s: _Optional[float] = ..., busy_s: _Optional[float] = ...) -> None: ...
