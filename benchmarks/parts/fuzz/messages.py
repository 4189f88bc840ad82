"""Fuzz messages: hypothesis strategies for every message, made from its own descriptor.

Fields get values at the edges of their types, and now and then ones that mean something to a
coordinator (its workers, groups, leases), so that calls come past the first check.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

DEEPEST = 4
"""Messages within messages; deeper ones stay empty."""
MOST = 5
"""Elements of a repeated field."""

_INT32 = st.sampled_from([0, 1, 2, 3, 7, 63, 64, -1, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1)
_INT64 = st.sampled_from([0, 1, 2, 3, 4, -1, 2**62, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
_UINT64 = st.sampled_from([0, 1, 2**64 - 1]) | st.integers(0, 2**64 - 1)
_DOUBLE = (
    st.sampled_from([0.0, 1.0, 0.5, -1.0, float("nan"), float("inf"), -float("inf"), 1e308]) | st.floats()
)
_TEXT = st.sampled_from(
    ["", "w", "../x", "/etc/passwd", "a\x00b", "\u202e", "x" * 5000, "stop", "length"]
) | st.text(max_size=40)
_BYTES = st.sampled_from([b"", b"\x00" * 4, b"\x00" * 8, b"\xff" * 7, b"\x00\x00\xc0\x7f"]) | st.binary(
    max_size=64
)

_KINDS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_FIXED64: _UINT64,
    FieldDescriptor.TYPE_UINT64: _UINT64,
    FieldDescriptor.TYPE_DOUBLE: _DOUBLE,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: _TEXT,
    FieldDescriptor.TYPE_BYTES: _BYTES,
}


def messages(
    descriptor: Descriptor, known: Mapping[str, Sequence[Any]] | None = None, depth: int = 0
) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a type.

    Args:
        descriptor: the type.
        known: field name -> values worth trying, drawn half of the time.
        depth: how deep the message stands in another one.
    """
    known = known or {}
    fields = {
        field.name: _field(field, known, depth)
        for field in descriptor.fields
        if depth < DEEPEST or field.type != FieldDescriptor.TYPE_MESSAGE
    }
    made = st.fixed_dictionaries({}, optional=fields)
    return made.map(lambda values: GetMessageClass(descriptor)(**values))


def _field(field: Any, known: Mapping[str, Sequence[Any]], depth: int) -> st.SearchStrategy[Any]:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = (inner.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_value(key, known, depth), _value(value, known, depth), max_size=MOST)
    value = _value(field, known, depth)
    return st.lists(value, max_size=MOST) if field.is_repeated else value


def _value(field: Any, known: Mapping[str, Sequence[Any]], depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, known, depth + 1)
    value = _KINDS[field.type]
    if field.name in known:
        return st.sampled_from(list(known[field.name])) | value
    return value


def damaged(sound: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for bytes near sound ones: cut, flipped, spliced, doubled; or of no kind at all."""

    @st.composite
    def near(draw: Any) -> bytes:
        payload = bytearray(draw(st.sampled_from(list(sound))))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(0, len(payload) - 1)))
            match draw(st.sampled_from(["cut", "flip", "set", "insert", "splice", "drop"])):
                case "cut":
                    del payload[at:]
                case "flip" if payload:
                    payload[at] ^= 1 << draw(st.integers(0, 7))
                case "set" if payload:
                    payload[at] = draw(st.sampled_from([0, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B, 0x2D, 0x39]))
                case "insert":
                    payload[at:at] = draw(st.binary(min_size=1, max_size=8))
                case "splice":
                    other = draw(st.sampled_from(list(sound)))
                    payload[at:] = other[draw(st.integers(0, max(0, len(other) - 1))) :]
                case "drop":
                    del payload[at : at + draw(st.integers(1, 16))]
                case _:
                    pass  # nothing left to change
        return bytes(payload)

    return near() | st.binary(max_size=200)
