from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "completions")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: bytes
    completions: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, prompt_token_ids: _Optional[bytes] = ..., completions: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, logprobs: _Optional[_Iterable[bytes]] = ...) -> None: ...
