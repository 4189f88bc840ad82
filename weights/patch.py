"""Patch: the changes between two versions as one file, or a full payload compressed, both without loss.

Works on canonical payload buffers: the bytes of every tensor, little-endian, in the order of the names.
Blocks are coded independently, by several threads; compiled kernels and zstd release the interpreter
lock. Memory is a few blocks per thread, whatever the model's size. The bytes written are the same for
any number of threads.

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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NoReturn, TypeVar

import numpy as np
import pyarrow
from blake3 import blake3

from antiphon.core.broadcast.patch_kernels import (
    FAULTS,
    Array,
    apply_changes,
    find_changes,
    join_values,
    split_values,
)
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import TensorEntry

LEVEL = 1
"""Of zstd: gaps and differences hardly repeat, so a longer search would find nothing."""
BLOCK_BYTES = 4 << 20
"""Bytes of a block that this program writes."""
BLOCK_LIMIT_BYTES = 16 << 20
"""Largest block accepted."""
CHECKSUM_BYTES = 32
NO_PARENT = "0" * 64
"""In place of a parent's weights digest: the file is a full payload."""
_HEADER = struct.Struct("<8sB3xIQ32s32s32s")
_MAGIC = b"antpatch"
_FULL, _PATCH = 1, 2
_WIDTHS = (1, 2, 4, 8)
_INTEGER = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview
"""Bytes of the tensors or of a file; anything mapped is a memoryview."""
_J = TypeVar("_J")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Span:
    """Where a block lies in the canonical payload."""

    offset: int
    length: int
    """Bytes; a multiple of the width."""
    width: int
    """Bytes of an element: 1, 2, 4 or 8."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a file, its numbers checked against its span."""

    span: Span
    changed: int
    """Elements."""
    gap_bytes: int
    frames: tuple[memoryview, ...]
    """zstd frames: gaps if there are any, then planes."""


def encode_patch(
    parent: Buffer | None,
    new: Buffer,
    tensors: Sequence[TensorEntry],
    write: Callable[[bytes], object],
    *,
    result_digest: str,
    parent_digest: str = NO_PARENT,
    threads: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> int:
    """Write the patch that makes `new` of `parent`, and return its bytes.

    Args:
        parent: canonical bytes of the version that receivers hold; None for a full payload, by byte planes.
        new: those of the new version; the same tensors.
        tensors: names, dtypes, shapes and spans of both.
        write: takes the file's bytes in order.
        result_digest: weights digest of the new version, 64 hex.
        parent_digest: that of the parent.
        threads: that work on blocks.
        block_bytes: of a block, a multiple of 8.

    Raises:
        ContractError: when the buffers are not as long as the tensors.
    """
    for what, buffer in (("the parent", parent), ("the new version", new)):
        if buffer is not None and (fault := _wrong_length(what, buffer, tensors)):
            raise ContractError(fault)
    digests = map(bytes.fromhex, (parent_digest, result_digest, _table_digest(tensors)))
    kind = _FULL if parent is None else _PATCH
    header = _HEADER.pack(_MAGIC, kind, block_bytes, full_bytes(tensors), *digests)
    hasher, written = blake3(), CHECKSUM_BYTES
    places = _spans(tensors, block_bytes)
    with closing(in_order(partial(_encoded, parent, new), places, threads)) as blocks:
        for piece in chain([header], blocks):
            hasher.update(piece)
            write(piece)
            written += len(piece)
    write(hasher.digest())
    return written


def apply_patch(
    parent: Buffer | None,
    patch: Buffer,
    tensors: Sequence[TensorEntry],
    write: Callable[[memoryview], object],
    *,
    result_digest: str,
    parent_digest: str = NO_PARENT,
    threads: int = 1,
) -> None:
    """Write the version that a patch makes of its parent, or the one of a compressed full payload.

    The patch's checksum, its structure, the parent and the tensors are checked before the first byte is
    written. Whether the result really has `result_digest` is for the caller to check: only a sender that
    signs wrong patches, or a parent whose bytes changed after they were checked, can break it.

    Args:
        parent: canonical bytes of the version held, such as a mapped file; None for a full payload.
        patch: the file's bytes, from a peer.
        tensors: of the manifest, already checked.
        write: takes the canonical bytes in order, block by block; after an error they are of no use.
        result_digest: weights digest of the version wanted, 64 hex.
        parent_digest: that of the version held.
        threads: that work on blocks.

    Raises:
        IntegrityError: when the patch is broken, or is for another parent, result or table of tensors, and
            when the parent is not as long as the tensors: its file was cut short.
    """
    if parent is not None and (fault := _wrong_length("the parent", parent, tensors)):
        raise IntegrityError(fault)
    changes, makes, blocks = _parse(memoryview(patch), tensors, threads)
    if parent is None and changes != NO_PARENT:
        raise IntegrityError(f"this payload is a patch of {changes}, not a full one")
    if changes != parent_digest:
        what = "no version: it is a full one" if changes == NO_PARENT else changes
        raise IntegrityError(
            f"this payload changes {what}, but {parent_digest} is held; choose a payload for the version held"
        )
    if makes != result_digest:
        raise IntegrityError(f"this payload makes {makes}, but {result_digest} is wanted")
    with closing(in_order(partial(_decoded, parent), blocks, threads)) as decoded:
        for data in decoded:
            write(data.data)


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


def elements(buffer: Buffer, span: Span) -> Array:
    """Return a span's elements as unsigned integers, read-only, at an address that fits their width."""
    found = np.frombuffer(buffer, f"<u{span.width}", span.length // span.width, span.offset)
    found = found if found.flags.aligned else found.copy()  # a narrow tensor may stand before a wide one
    found.flags.writeable = False  # one compiled kernel per width serves all
    return found


def in_order(work: Callable[[_J], _R], jobs: Iterable[_J], threads: int) -> Generator[_R, None, None]:
    """Yield the results of all jobs in order; at most one more than `threads` are held at a time.

    When it is closed or fails, it waits for the jobs that have begun, and begins no other.
    """
    if threads <= 1:
        yield from map(work, jobs)
        return
    waiting: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="patch") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(work, job))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _spans(tensors: Sequence[TensorEntry], block_bytes: int) -> Iterator[Span]:
    """Yield the blocks in order; `block_bytes` is a multiple of 8."""
    for run in runs(tensors):
        for start in range(0, run.length, block_bytes):
            yield Span(run.offset + start, min(block_bytes, run.length - start), run.width)


def _table_digest(tensors: Sequence[TensorEntry]) -> str:
    """Return the digest of names, dtypes and shapes."""
    listed = [[entry.name, entry.dtype, list(entry.shape)] for entry in tensors]
    return blake3(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()


def _wrong_length(what: str, buffer: Buffer, tensors: Sequence[TensorEntry]) -> str:
    total = full_bytes(tensors)
    return "" if len(buffer) == total else f"{what} has {len(buffer)} bytes, the tensors {total}"


def _encoded(parent: Buffer | None, new: Buffer, span: Span) -> bytes:
    """Return a block's bytes in a file."""
    after = elements(new, span)
    changed, gap_bytes, parts = len(after), 0, list[Array]()
    if parent is None:
        planes = split_values(after)
    else:
        planes = np.empty((span.width, len(after)), dtype=np.uint8)
        gaps = np.empty(len(after) + len(after) // 255, dtype=np.uint8)
        changed, gap_bytes = find_changes(elements(parent, span), after, gaps, planes)
        if not changed:
            return _INTEGER.pack(0)
        parts = [gaps[:gap_bytes]]
    parts += [plane[:changed] for plane in planes]
    codec = pyarrow.Codec("zstd", LEVEL)
    frames: list[bytes] = [codec.compress(np.ascontiguousarray(part), asbytes=True) for part in parts]
    return struct.pack(f"<{2 + len(frames)}I", changed, gap_bytes, *map(len, frames)) + b"".join(frames)


def _decoded(parent: Buffer | None, block: _Block) -> Array:
    """Return a block's bytes in the new version."""
    span = block.span
    if parent is not None and not block.changed:
        return np.frombuffer(parent, np.uint8, span.length, span.offset)
    planes = np.empty((span.width, block.changed), dtype=np.uint8)
    for plane, frame in zip(planes, block.frames[-span.width :], strict=True):
        plane[:] = _decompressed(frame, block.changed)
    if parent is None:
        values = join_values(planes)
    else:
        values = np.array(elements(parent, span))
        fault = apply_changes(values, _decompressed(block.frames[0], block.gap_bytes), planes)
        if fault:
            _refuse(f"in the block at byte {span.offset} {FAULTS[fault]}")
    return values.view(np.uint8)


def _decompressed(frame: memoryview, size: int) -> Array:
    """Return exactly `size` bytes; a frame that holds more or fewer is refused."""
    try:
        data = pyarrow.Codec("zstd").decompress(frame, decompressed_size=size)
    except (OSError, pyarrow.ArrowException) as error:
        _refuse(f"a zstd frame does not hold the {size} bytes it should: {error}")
    return np.frombuffer(data, dtype=np.uint8)


def _parse(
    payload: memoryview, tensors: Sequence[TensorEntry], threads: int
) -> tuple[str, str, list[_Block]]:
    """Check a file whole, without decoding or allocating anything of a size that it states.

    Args:
        payload: the file's bytes, from a peer.
        tensors: of the manifest, already checked.
        threads: at most this many compute the checksum.

    Returns:
        The weights digests of parent and result, and the blocks.

    Raises:
        IntegrityError: naming what is wrong.
    """
    end = len(payload) - CHECKSUM_BYTES
    if end < _HEADER.size:
        _refuse(f"it has {len(payload)} bytes only")
    magic, kind, block_bytes, stated_bytes, *digests = _HEADER.unpack_from(payload)
    parent, result, table = (digest.hex() for digest in digests)
    if magic != _MAGIC or kind not in (_FULL, _PATCH) or any(payload[9:12]):
        _refuse("it does not begin like a patch or a compressed payload")
    if blake3(payload[:end], max_threads=threads).digest() != payload[end:]:
        _refuse("its bytes do not match its checksum")
    if not 0 < block_bytes <= BLOCK_LIMIT_BYTES or block_bytes % 8:
        _refuse(f"block_bytes={block_bytes} is no multiple of 8 within 8..{BLOCK_LIMIT_BYTES}")
    if stated_bytes != full_bytes(tensors):
        _refuse(f"it is for {stated_bytes} bytes of tensors, the manifest lists {full_bytes(tensors)}")
    if table != _table_digest(tensors):
        _refuse("it is for tensors of other names, dtypes or shapes")
    is_patch = kind == _PATCH
    if is_patch == (parent == NO_PARENT):
        _refuse("only a patch has a parent")
    at = _HEADER.size
    blocks: list[_Block] = []

    def taken(size: int) -> memoryview:
        nonlocal at
        if at + size > end:
            _refuse(f"it ends within block {len(blocks)}")
        at += size
        return payload[at - size : at]

    def integer() -> int:
        value: int = _INTEGER.unpack(taken(_INTEGER.size))[0]
        return value

    for span in _spans(tensors, block_bytes):
        count, changed, gap_bytes = span.length // span.width, integer(), 0
        frames: list[memoryview] = []
        if not changed <= count or (not is_patch and changed != count):
            _refuse(f"block {len(blocks)} has {changed} of {count} elements")
        if changed:
            gap_bytes = integer()
            least, most = (changed, changed + (count - changed) // 255) if is_patch else (0, 0)
            if not least <= gap_bytes <= most:
                _refuse(f"block {len(blocks)} has {gap_bytes} gap bytes for {changed} of {count} elements")
            frames = [taken(size) for size in [integer() for _ in range(is_patch + span.width)]]
        blocks.append(_Block(span, changed, gap_bytes, tuple(frames)))
    if at != end:
        _refuse(f"{end - at} bytes follow its last block")
    return parent, result, blocks


def _refuse(reason: str) -> NoReturn:
    """Raise the error of a file that is not used."""
    raise IntegrityError(f"this patch or compressed payload is not sound: {reason}; fetch it again")
