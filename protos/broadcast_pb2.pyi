from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ChunksRequest(_message.Message):
    __slots__ = ("payload_digest", "indices", "held_only")
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    HELD_ONLY_FIELD_NUMBER: _ClassVar[int]
    payload_digest: str
    indices: _containers.RepeatedScalarFieldContainer[int]
    held_only: bool
    def __init__(self, payload_digest: _Optional[str] = ..., indices: _Optional[_Iterable[int]] = ..., held_only: _Optional[bool] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Place(_message.Message):
    __slots__ = ("folder", "token")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    folder: str
    token: str
    def __init__(self, folder: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class BlocksRequest(_message.Message):
    __slots__ = ("payload_digest",)
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    payload_digest: str
    def __init__(self, payload_digest: _Optional[str] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("peer_id", "port", "addresses")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    port: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., port: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...
