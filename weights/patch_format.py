"""Patch format: the header, the blocks, and the checks that come before anything is decoded.

Layout of a file, all integers little-endian without sign:

    header      magic 8, kind 1, zeros 3, block_bytes 4, full_bytes 8,
                digests of parent (zeros in a full payload), result and table of tensors, 32 each
    blocks      in the order of the payload; of each: changed elements 4; if any are: gap bytes 4, sizes
                of the zstd frames 4 each, frames of the gaps (a patch only) and of each byte plane
    checksum    blake3 of everything before it, 32

A block is a span of the canonical payload of at most block_bytes within which all elements have one width;
it may hold several tensors. Receiver and sender derive the spans from the table of tensors. Every
length that a file states is compared with what the block can hold before anything is allocated.
"""

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from blake3 import blake3

from antiphon.core.errors import IntegrityError
from antiphon.core.records import TensorEntry

BLOCK_BYTES = 4 << 20
"""Bytes of a block that this program writes."""
BLOCK_LIMIT_BYTES = 16 << 20
"""Largest block accepted."""
CHECKSUM_BYTES = 32
_HEADER = struct.Struct("<8sB3xIQ32s32s32s")
_MAGIC = b"antpatch"
_FULL, _PATCH = 1, 2
_WIDTHS = (1, 2, 4, 8)
_NO_PARENT = bytes(32)
_INTEGER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PatchHeader:
    """What a patch or a compressed full payload says about itself."""

    parent: str | None
    """Weights digest of the version that is changed; None in a full payload."""
    result: str
    """Weights digest of the version that it makes."""
    table: str
    """`table_digest` of the tensors."""
    full_bytes: int
    block_bytes: int

    def encoded(self) -> bytes:
        """Return the first bytes of the file."""
        parent = _NO_PARENT if self.parent is None else bytes.fromhex(self.parent)
        kind = _FULL if self.parent is None else _PATCH
        digests = (parent, bytes.fromhex(self.result), bytes.fromhex(self.table))
        return _HEADER.pack(_MAGIC, kind, self.block_bytes, self.full_bytes, *digests)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a block lies in the canonical payload."""

    offset: int
    length: int
    """Bytes; a multiple of the width."""
    width: int
    """Bytes of an element: 1, 2, 4 or 8."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a file, its numbers checked against its span."""

    span: Span
    changed: int
    """Elements."""
    gap_bytes: int
    frames: tuple[memoryview, ...]
    """zstd frames: gaps if there are any, then planes."""


def table_digest(tensors: Sequence[TensorEntry]) -> str:
    """Return the digest of names, dtypes and shapes."""
    listed = [[entry.name, entry.dtype, list(entry.shape)] for entry in tensors]
    return blake3(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()


def full_bytes(tensors: Sequence[TensorEntry]) -> int:
    """Return the bytes of all tensors; they follow each other without gaps."""
    return tensors[-1].offset + tensors[-1].length if tensors else 0


def runs(tensors: Sequence[TensorEntry]) -> list[Span]:
    """Return the longest spans with elements of one width; any other width counts as bytes.

    Raises:
        IntegrityError: when the tensors do not follow each other without gaps.
    """
    found: list[Span] = []
    end = 0
    for entry in tensors:
        if entry.offset != end or entry.length < 0:
            raise IntegrityError(f"tensor {entry.name[:80]} starts at byte {entry.offset} instead of {end}")
        end += entry.length
        if not entry.length:
            continue
        width, left = divmod(entry.length, max(1, math.prod(entry.shape)))
        if left or width not in _WIDTHS:
            width = 1
        if found and found[-1].width == width:
            found[-1] = Span(found[-1].offset, found[-1].length + entry.length, width)
        else:
            found.append(Span(entry.offset, entry.length, width))
    return found


def spans(tensors: Sequence[TensorEntry], block_bytes: int) -> Iterator[Span]:
    """Yield the blocks in order; `block_bytes` is a multiple of 8."""
    for run in runs(tensors):
        for start in range(0, run.length, block_bytes):
            yield Span(run.offset + start, min(block_bytes, run.length - start), run.width)


def encode_block(changed: int, gap_bytes: int, frames: Sequence[bytes]) -> bytes:
    """Return a block's bytes."""
    if not changed:
        return _INTEGER.pack(0)
    sizes = [len(frame) for frame in frames]
    return b"".join([struct.pack(f"<{2 + len(sizes)}I", changed, gap_bytes, *sizes), *frames])


def parse(
    payload: memoryview, tensors: Sequence[TensorEntry], threads: int
) -> tuple[PatchHeader, list[Block]]:
    """Check a file whole, without decoding or allocating anything of a size that it states.

    Args:
        payload: the file's bytes, from a peer.
        tensors: of the manifest, already checked.
        threads: at most this many compute the checksum.

    Raises:
        IntegrityError: naming what is wrong.
    """
    end = len(payload) - CHECKSUM_BYTES
    if end < _HEADER.size:
        refuse(f"it has {len(payload)} bytes only")
    magic, kind, block_bytes, stated_bytes, parent, result, table = _HEADER.unpack_from(payload)
    if magic != _MAGIC or kind not in (_FULL, _PATCH) or any(payload[9:12]):
        refuse("it does not begin like a patch or a compressed payload")
    if blake3(payload[:end], max_threads=threads).digest() != payload[end:]:
        refuse("its bytes do not match its checksum")
    if not 0 < block_bytes <= BLOCK_LIMIT_BYTES or block_bytes % 8:
        refuse(f"block_bytes={block_bytes} is no multiple of 8 within 8..{BLOCK_LIMIT_BYTES}")
    if stated_bytes != full_bytes(tensors):
        refuse(f"it is for {stated_bytes} bytes of tensors, the manifest lists {full_bytes(tensors)}")
    if table.hex() != table_digest(tensors):
        refuse("it is for tensors of other names, dtypes or shapes")
    if (parent == _NO_PARENT) != (kind == _FULL):
        refuse("only a patch has a parent")
    header = PatchHeader(
        parent.hex() if kind == _PATCH else None, result.hex(), table.hex(), stated_bytes, block_bytes
    )
    return header, _blocks(payload[:end], spans(tensors, block_bytes), kind == _PATCH)


def _blocks(payload: memoryview, places: Iterator[Span], patch: bool) -> list[Block]:
    at = _HEADER.size
    found: list[Block] = []

    def integer() -> int:
        nonlocal at
        if at + _INTEGER.size > len(payload):
            refuse(f"it ends within block {len(found)}")
        value: int = _INTEGER.unpack_from(payload, at)[0]
        at += _INTEGER.size
        return value

    for span in places:
        elements = span.length // span.width
        changed = integer()
        gap_bytes = 0
        frames: list[memoryview] = []
        if not changed <= elements or (not patch and changed != elements):
            refuse(f"block {len(found)} has {changed} of {elements} elements")
        if changed:
            gap_bytes = integer()
            most = changed + (elements - changed) // 255 if patch else 0
            if not (changed if patch else 0) <= gap_bytes <= most:
                refuse(f"block {len(found)} has {gap_bytes} gap bytes for {changed} of {elements} elements")
            for size in [integer() for _ in range(patch + span.width)]:
                if at + size > len(payload):
                    refuse(f"it ends within block {len(found)}")
                frames.append(payload[at : at + size])
                at += size
        found.append(Block(span, changed, gap_bytes, tuple(frames)))
    if at != len(payload):
        refuse(f"{len(payload) - at} bytes follow its last block")
    return found


def refuse(reason: str) -> NoReturn:
    """Raise the error of a file that is not used."""
    raise IntegrityError(f"this patch or compressed payload is not sound: {reason}; fetch it again")
