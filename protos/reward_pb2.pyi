from antiphon.protos import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullRequest(_message.Message):
    __slots__ = ("client_id", "limit", "wait_s")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    limit: int
    wait_s: float
    def __init__(self, client_id: _Optional[str] = ..., limit: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("groups", "prompt_keys", "unfinished", "prompts")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_KEYS_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_records_pb2.GroupSubmission]
    prompt_keys: _containers.RepeatedScalarFieldContainer[str]
    unfinished: _containers.RepeatedScalarFieldContainer[str]
    prompts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, groups: _Optional[_Iterable[_Union[_records_pb2.GroupSubmission, _Mapping]]] = ..., prompt_keys: _Optional[_Iterable[str]] = ..., unfinished: _Optional[_Iterable[str]] = ..., prompts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RewardsRequest(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_records_pb2.GroupRewards]
    def __init__(self, groups: _Optional[_Iterable[_Union[_records_pb2.GroupRewards, _Mapping]]] = ...) -> None: ...

class RewardsReply(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, taken: _Optional[_Iterable[str]] = ...) -> None: ...

class TurnsToAnswer(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[_records_pb2.TurnToAnswer]
    def __init__(self, turns: _Optional[_Iterable[_Union[_records_pb2.TurnToAnswer, _Mapping]]] = ...) -> None: ...

class TurnAnswers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[_records_pb2.TurnAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[_records_pb2.TurnAnswer, _Mapping]]] = ...) -> None: ...
