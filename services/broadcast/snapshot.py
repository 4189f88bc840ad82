"""Snapshots: the weights of one version as bytes that anyone can check.

The canonical payload is every tensor's little-endian contiguous bytes, in the order of the
names, without gaps. The weights digest covers names, dtypes, shapes and bytes; two snapshots
with one digest are the same policy, bit for bit.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from blake3 import blake3

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import ChunkEntry, SnapshotManifest, TensorEntry
from antiphon.services.broadcast.manifest import DTYPE_BYTES, check_manifest


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of a policy: blake3 over names, dtypes, shapes and canonical bytes.

    Raises:
        ContractError: when a tensor's dtype cannot be published.
    """
    entries = _entries(tensors)
    hasher = blake3(_header(entries))
    for entry in entries:
        hasher.update(_bytes_of(tensors[entry.name]))
    return hasher.hexdigest()


def build_snapshot(
    run_id: str,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    chunk_bytes: int,
    origin: str,
    put: Callable[[str, bytes], None],
) -> SnapshotManifest:
    """Cut the canonical payload into chunks, hand each to `put`, and return the manifest.

    Args:
        run_id: the run the version belongs to.
        version: the policy version.
        tensors: its weights; a tied head is to be left out by the caller.
        chunk_bytes: bytes of each chunk but the last.
        origin: host:port of the service that will serve the chunks.
        put: takes (digest, bytes) of each chunk in order; called before the manifest exists.
    """
    entries = _entries(tensors)
    hasher = blake3(_header(entries))
    chunks: list[ChunkEntry] = []
    offset = 0
    for payload in _cut((_bytes_of(tensors[entry.name]) for entry in entries), chunk_bytes):
        hasher.update(payload)
        digest = digest_bytes(payload)
        put(digest, payload)
        chunks.append(ChunkEntry(digest=digest, offset=offset, length=len(payload)))
        offset += len(payload)
    return SnapshotManifest(
        run_id=run_id,
        version=version,
        weights_digest=hasher.hexdigest(),
        tensors=entries,
        chunks=tuple(chunks),
        payload_bytes=offset,
        origin=origin,
    )


def rebuild(manifest: SnapshotManifest, chunks: Callable[[str], bytes]) -> dict[str, torch.Tensor]:
    """Assemble the tensors of a snapshot from `chunks` by digest, checking every chunk and the whole.

    Returns:
        Name -> tensor on the CPU; the tensors are views of one buffer.

    Raises:
        IntegrityError: naming the chunk or tensor that does not match; nothing is returned then.
    """
    check_manifest(manifest)
    buffer = bytearray(manifest.payload_bytes)
    for index, chunk in enumerate(manifest.chunks):
        payload = chunks(chunk.digest)
        if len(payload) != chunk.length or digest_bytes(payload) != chunk.digest:
            raise IntegrityError(
                f"chunk {index} ({chunk.digest}) of version {manifest.version} has {len(payload)} bytes "
                f"that do not match its digest; expected {chunk.length}; fetch it again"
            )
        buffer[chunk.offset : chunk.offset + chunk.length] = payload
    tensors: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        dtype = getattr(torch, entry.dtype)
        count = entry.length // DTYPE_BYTES[entry.dtype]
        flat = (
            torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry.offset)
            if count and entry.offset % DTYPE_BYTES[entry.dtype] == 0
            else _copied(buffer, entry, dtype)
        )
        tensors[entry.name] = flat.reshape(entry.shape)
    digest = weights_digest(tensors)
    if digest != manifest.weights_digest:
        raise IntegrityError(
            f"the weights of version {manifest.version} have digest {digest}, but the manifest says "
            f"{manifest.weights_digest}; they are not loaded"
        )
    return tensors


def _copied(buffer: bytearray, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    # A narrow tensor may leave the next one at an odd address, where no view is possible.
    if not entry.length:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer[entry.offset : entry.offset + entry.length], dtype=dtype)


def _entries(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    entries = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ContractError(f"tensor {name} has dtype {dtype}, which no snapshot may hold; convert it")
        length = tensor.numel() * DTYPE_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset, length))
        offset += length
    return tuple(entries)


def _header(entries: tuple[TensorEntry, ...]) -> bytes:
    listed = [[entry.name, entry.dtype, list(entry.shape)] for entry in entries]
    text = json.dumps(listed, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    width = flat.element_size()
    data = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big" and width > 1:
        data = data.reshape(-1, width)[:, ::-1].reshape(-1).copy()
    return memoryview(data)


def _cut(pieces: Iterator[memoryview], chunk_bytes: int) -> Iterator[bytes]:
    pending = bytearray()
    for piece in pieces:
        start = 0
        while start < len(piece):
            taken = piece[start : start + chunk_bytes - len(pending)]
            pending += taken
            start += len(taken)
            if len(pending) == chunk_bytes:
                yield bytes(pending)
                pending.clear()
    if pending:
        yield bytes(pending)
