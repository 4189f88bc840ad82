"""Manifests: nothing is allocated or fetched for a manifest that contradicts itself.

A manifest comes from the network. It is checked whole, by arithmetic alone, before a byte is
allocated: tensors cover the payload once, in order and without overlap, and so do the chunks.
"""

import json
import math
import re
from dataclasses import asdict
from typing import Any

from antiphon.core.digests import check_digest
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import ChunkEntry, SnapshotManifest, TensorEntry

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The dtypes a snapshot may hold, and the bytes of one element."""

PAYLOAD_LIMIT_BYTES = 1 << 40
"""Largest payload accepted."""
CHUNK_LIMIT_BYTES = 16 << 20
"""Largest chunk; the same bound as broadcast.chunk_bytes, well below the largest message."""
_DIMENSIONS_LIMIT = 8
_TENSORS_LIMIT = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,511}")


def check_manifest(manifest: SnapshotManifest) -> None:
    """Check that a manifest is sound before anything is allocated for it.

    Raises:
        IntegrityError: naming the entry that contradicts the others.
    """
    if manifest.version < 0:
        raise _broken(manifest, f"its version is {manifest.version}")
    if not 0 < manifest.payload_bytes <= PAYLOAD_LIMIT_BYTES:
        raise _broken(
            manifest, f"payload_bytes={manifest.payload_bytes} is not within 1..{PAYLOAD_LIMIT_BYTES}"
        )
    if len(manifest.tensors) > _TENSORS_LIMIT:
        raise _broken(manifest, f"it lists {len(manifest.tensors)} tensors, more than {_TENSORS_LIMIT}")
    _check_hex(manifest, manifest.weights_digest, "weights_digest")
    _check_tensors(manifest)
    _check_chunks(manifest)


def _check_tensors(manifest: SnapshotManifest) -> None:
    end = 0
    previous = ""
    for entry in manifest.tensors:
        if not _NAME.fullmatch(entry.name):
            raise _broken(manifest, f"tensor name {entry.name[:80]!r} is not allowed")
        if entry.name <= previous:
            raise _broken(manifest, f"tensor {entry.name} is out of order or named twice")
        if entry.dtype not in DTYPE_BYTES:
            raise _broken(
                manifest, f"tensor {entry.name} has dtype {entry.dtype[:40]!r}, which is not allowed"
            )
        if len(entry.shape) > _DIMENSIONS_LIMIT or any(size < 0 for size in entry.shape):
            raise _broken(manifest, f"tensor {entry.name} has an impossible shape {entry.shape[:16]}")
        if math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] != entry.length:
            raise _broken(
                manifest,
                f"tensor {entry.name} of shape {entry.shape} and dtype {entry.dtype} cannot have "
                f"{entry.length} bytes",
            )
        if entry.offset != end:
            raise _broken(manifest, f"tensor {entry.name} starts at byte {entry.offset} instead of {end}")
        end += entry.length
        previous = entry.name
    if end != manifest.payload_bytes:
        raise _broken(manifest, f"its tensors end at byte {end} of {manifest.payload_bytes}")


def _check_chunks(manifest: SnapshotManifest) -> None:
    end = 0
    lengths: dict[str, int] = {}
    for index, chunk in enumerate(manifest.chunks):
        _check_hex(manifest, chunk.digest, f"the digest of chunk {index}")
        if not 0 < chunk.length <= CHUNK_LIMIT_BYTES:
            raise _broken(manifest, f"chunk {index} has {chunk.length} bytes, not 1..{CHUNK_LIMIT_BYTES}")
        if chunk.offset != end:
            raise _broken(manifest, f"chunk {index} starts at byte {chunk.offset} instead of {end}")
        if lengths.setdefault(chunk.digest, chunk.length) != chunk.length:
            raise _broken(manifest, f"chunk {index} repeats a digest with another length")
        end += chunk.length
    if end != manifest.payload_bytes:
        raise _broken(manifest, f"its chunks end at byte {end} of {manifest.payload_bytes}")


def _check_hex(manifest: SnapshotManifest, text: str, field: str) -> None:
    try:
        check_digest(text)
    except ContractError as error:
        raise _broken(manifest, f"{field}: {error}") from None


def _broken(manifest: SnapshotManifest, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest of version {manifest.version} is not sound: {reason}; fetch it again from the origin"
    )


def manifest_to_json(manifest: SnapshotManifest) -> bytes:
    """Encode a manifest; equal manifests give equal bytes."""
    tree = {**asdict(manifest), "signature": manifest.signature.hex()}
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def manifest_from_json(payload: bytes) -> SnapshotManifest:
    """Decode a manifest; it is not checked for soundness yet.

    Raises:
        IntegrityError: when the bytes are no manifest.
    """
    try:
        tree: dict[str, Any] = json.loads(payload)
        return SnapshotManifest(
            run_id=str(tree["run_id"]),
            version=int(tree["version"]),
            weights_digest=str(tree["weights_digest"]),
            tensors=tuple(
                TensorEntry(
                    name=str(entry["name"]),
                    dtype=str(entry["dtype"]),
                    shape=tuple(int(size) for size in entry["shape"]),
                    offset=int(entry["offset"]),
                    length=int(entry["length"]),
                )
                for entry in tree["tensors"]
            ),
            chunks=tuple(
                ChunkEntry(str(entry["digest"]), int(entry["offset"]), int(entry["length"]))
                for entry in tree["chunks"]
            ),
            payload_bytes=int(tree["payload_bytes"]),
            origin=str(tree["origin"]),
            signature=bytes.fromhex(tree["signature"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"these {len(payload)} bytes are not a snapshot manifest: {error!r}") from error
