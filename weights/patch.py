"""Patch: the changes between two versions as one file, and full payloads compressed, both without loss.

Works on canonical payload buffers: the bytes of every tensor, little-endian, in the order of the names.
Blocks are coded independently, by several threads; compiled kernels and zstd release the interpreter
lock. Memory is a few blocks per thread, whatever the model's size. The bytes written are the same for
any number of threads.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow
from blake3 import blake3

from antiphon.core.broadcast.patch_kernels import (
    FAULTS,
    apply_changes,
    find_changes,
    join_values,
    split_values,
)
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import TensorEntry
from antiphon.weights.patch_format import (
    BLOCK_BYTES,
    Block,
    PatchHeader,
    Span,
    encode_block,
    full_bytes,
    parse,
    refuse,
    spans,
    table_digest,
)

LEVEL = 1
"""Of zstd: gaps and differences hardly repeat, so a longer search would find nothing."""

Buffer = bytes | bytearray | memoryview
"""Bytes of the tensors or of a file; anything mapped is a memoryview."""
Array = npt.NDArray[Any]
_J = TypeVar("_J")
_R = TypeVar("_R")


def encode_patch(
    parent: Buffer,
    new: Buffer,
    tensors: Sequence[TensorEntry],
    write: Callable[[bytes], object],
    *,
    parent_digest: str,
    result_digest: str,
    threads: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> int:
    """Write the patch that makes `new` of `parent`, and return its bytes.

    Args:
        parent: canonical bytes of the version that receivers hold.
        new: those of the new version; the same tensors.
        tensors: names, dtypes, shapes and spans of both.
        write: takes the file's bytes in order.
        parent_digest: weights digest of the parent, 64 hex.
        result_digest: weights digest of the new version, 64 hex.
        threads: that work on blocks.
        block_bytes: of a block, a multiple of 8.

    Raises:
        ContractError: when the buffers are not as long as the tensors.
    """
    _check_length("the parent", parent, tensors)
    header = PatchHeader(
        parent_digest, result_digest, table_digest(tensors), full_bytes(tensors), block_bytes
    )
    return _write(header, new, tensors, write, partial(_patch_block, parent, new), threads)


def encode_full(
    new: Buffer,
    tensors: Sequence[TensorEntry],
    write: Callable[[bytes], object],
    *,
    result_digest: str,
    threads: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> int:
    """Write a full payload by byte planes, compressed, and return its bytes.

    Arguments and errors as of `encode_patch`.
    """
    header = PatchHeader(None, result_digest, table_digest(tensors), full_bytes(tensors), block_bytes)
    return _write(header, new, tensors, write, partial(_full_block, new), threads)


def apply_patch(
    parent: Buffer,
    patch: Buffer,
    tensors: Sequence[TensorEntry],
    write: Callable[[memoryview], object],
    *,
    parent_digest: str,
    result_digest: str,
    threads: int = 1,
) -> None:
    """Write the version that a patch makes of its parent.

    The patch's checksum, its structure, the parent and the tensors are checked before the first byte is
    written. Whether the result really has `result_digest` is for the caller to check: only a sender that
    signs wrong patches, or a parent whose bytes changed after they were checked, can break it.

    Args:
        parent: canonical bytes of the version held, such as a mapped file.
        patch: the file's bytes, from a peer.
        tensors: of the manifest, already checked.
        write: takes the canonical bytes in order, block by block; after an error they are of no use.
        parent_digest: weights digest of the version held, 64 hex.
        result_digest: weights digest of the version wanted, 64 hex.
        threads: that work on blocks.

    Raises:
        IntegrityError: when the patch is broken, or is for another parent, result or table of tensors, and
            when the parent is not as long as the tensors: its file was cut short.
    """
    if len(parent) != full_bytes(tensors):
        raise IntegrityError(_wrong_length("the parent", parent, tensors))
    header, blocks = parse(memoryview(patch), tensors, threads)
    if header.parent != parent_digest:
        raise IntegrityError(
            f"this payload changes {header.parent or 'no version: it is a full one'}, but {parent_digest} "
            "is held; choose a payload for the version held"
        )
    _restore(header, blocks, write, result_digest, parent, threads)


def decode_full(
    payload: Buffer,
    tensors: Sequence[TensorEntry],
    write: Callable[[memoryview], object],
    *,
    result_digest: str,
    threads: int = 1,
) -> None:
    """Write the version of a compressed full payload; arguments and errors as of `apply_patch`."""
    header, blocks = parse(memoryview(payload), tensors, threads)
    if header.parent is not None:
        raise IntegrityError(f"this payload is a patch of {header.parent}, not a full one")
    _restore(header, blocks, write, result_digest, None, threads)


def _write(
    header: PatchHeader,
    new: Buffer,
    tensors: Sequence[TensorEntry],
    write: Callable[[bytes], object],
    encode: Callable[[Span], bytes],
    threads: int,
) -> int:
    _check_length("the new version", new, tensors)
    hasher = blake3()
    written = 0
    with closing(in_order(encode, spans(tensors, header.block_bytes), threads)) as blocks:
        for piece in chain([header.encoded()], blocks):
            hasher.update(piece)
            write(piece)
            written += len(piece)
    write(hasher.digest())
    return written + len(hasher.digest())


def _restore(
    header: PatchHeader,
    blocks: list[Block],
    write: Callable[[memoryview], object],
    result_digest: str,
    parent: Buffer | None,
    threads: int,
) -> None:
    if header.result != result_digest:
        raise IntegrityError(f"this payload makes {header.result}, but {result_digest} is wanted")
    with closing(in_order(partial(_restored, parent), blocks, threads)) as restored:
        for data in restored:
            write(data.data)


def _patch_block(parent: Buffer, new: Buffer, span: Span) -> bytes:
    before, after = elements(parent, span), elements(new, span)
    gaps = np.empty(len(after) + len(after) // 255, dtype=np.uint8)
    planes = np.empty((span.width, len(after)), dtype=np.uint8)
    changed, gap_bytes = find_changes(before, after, gaps, planes)
    if not changed:
        return encode_block(0, 0, ())
    frames = [_compressed(gaps[:gap_bytes]), *(_compressed(plane[:changed]) for plane in planes)]
    return encode_block(changed, gap_bytes, frames)


def _full_block(new: Buffer, span: Span) -> bytes:
    values = elements(new, span)
    planes = np.empty((span.width, len(values)), dtype=np.uint8)
    split_values(values, planes)
    return encode_block(len(values), 0, [_compressed(plane) for plane in planes])


def _restored(parent: Buffer | None, block: Block) -> Array:
    """Return a block's bytes in the new version."""
    span = block.span
    if parent is not None and not block.changed:
        return np.frombuffer(parent, np.uint8, span.length, span.offset)
    planes = np.empty((span.width, block.changed), dtype=np.uint8)
    for plane, frame in zip(planes, block.frames[-span.width :], strict=True):
        plane[:] = _decompressed(frame, block.changed)
    if parent is None:
        values = np.empty(block.changed, dtype=f"<u{span.width}")
        join_values(values, planes)
    else:
        values = np.array(elements(parent, span))
        fault = apply_changes(values, _decompressed(block.frames[0], block.gap_bytes), planes)
        if fault:
            refuse(f"in the block at byte {span.offset} {FAULTS[fault]}")
    return values.view(np.uint8)


def elements(buffer: Buffer, span: Span) -> Array:
    """Return a span's elements as unsigned integers, read-only, at an address that fits their width."""
    found = np.frombuffer(buffer, f"<u{span.width}", span.length // span.width, span.offset)
    found = found if found.flags.aligned else found.copy()  # a narrow tensor may stand before a wide one
    found.flags.writeable = False  # one compiled kernel per width serves all
    return found


def _compressed(data: Array) -> bytes:
    found: bytes = pyarrow.Codec("zstd", LEVEL).compress(np.ascontiguousarray(data), asbytes=True)
    return found


def _decompressed(frame: memoryview, size: int) -> Array:
    """Return exactly `size` bytes; a frame that holds more or fewer is refused."""
    try:
        data = pyarrow.Codec("zstd").decompress(frame, decompressed_size=size)
    except (OSError, pyarrow.ArrowException) as error:
        refuse(f"a zstd frame does not hold the {size} bytes it should: {error}")
    return np.frombuffer(data, dtype=np.uint8)


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


def _check_length(what: str, buffer: Buffer, tensors: Sequence[TensorEntry]) -> None:
    if len(buffer) != full_bytes(tensors):
        raise ContractError(_wrong_length(what, buffer, tensors))


def _wrong_length(what: str, buffer: Buffer, tensors: Sequence[TensorEntry]) -> str:
    return f"{what} has {len(buffer)} bytes, the tensors {full_bytes(tensors)}"
