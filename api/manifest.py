"""Manifests: nothing is allocated or fetched for a manifest that contradicts itself.

A manifest comes from the network. It is checked whole, by arithmetic alone, before a byte is
allocated: tensors cover their bytes once, in order and without overlap, and so do the chunks of each
payload. Its encoding is canonical: one manifest has one, and any other is refused.
"""

import base64
import json
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from blake3 import blake3

from antiphon.api.policy_file import DTYPES, policy_header
from antiphon.core.broadcast.probe import ROUNDING
from antiphon.core.digests import is_digest
from antiphon.core.errors import IntegrityError
from antiphon.core.records import Payload, Probe, SnapshotManifest, TensorEntry

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
BODY_LIMIT_BYTES = 16 << 20
"""Largest encoded manifest; one of a model of 140 GB takes less than 1 MB."""
_SMALLEST_CHUNK, _CHUNKS = 32 << 10, 256
_KINDS = {("full", "raw"), ("full", "zstd"), ("patch", "zstd"), ("patch", "lora")}
_DIMENSIONS_LIMIT = 8
_TENSORS_LIMIT = 1_000_000
_PAYLOADS_LIMIT = 64
_PROBE_LIMIT = 1024
_NAME_LIMIT = 512
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.\-]{{0,{_NAME_LIMIT - 1}}}")
_LONG = {short: name for name, short in DTYPES.items() if name in DTYPE_BYTES}


def auto_chunk_bytes(payload_bytes: int) -> int:
    """Return the size of chunks that suits a payload: a power of two from 32 KiB to 16 MiB.

    One payload serves near and far workers, so a chunk is as small as the longest way wants it: a worker
    passes it on when it is whole, and over s streams beside each other it takes s times as long, so a chain
    of n hops takes about 1 + (n - 1) s / C copies. A near link carries many in one message (`PiecePace`).

    >>> [auto_chunk_bytes(size) >> 10 for size in (8 << 20, 32 << 20, 1 << 30, 140 << 30)]
    [32, 128, 4096, 16384]
    """
    wanted = 1 << (max(1, -(-payload_bytes // _CHUNKS)) - 1).bit_length()
    return min(max(wanted, _SMALLEST_CHUNK), CHUNK_LIMIT_BYTES)


def payload_digest(payload_bytes: int, chunk_bytes: int, chunk_digests: Sequence[str]) -> str:
    """Return the address of a payload: blake3 over both sizes, 8 bytes each, and the chunks' digests.

    It names every byte without a further pass over them.
    """
    head = payload_bytes.to_bytes(8, "little") + chunk_bytes.to_bytes(8, "little")
    return blake3(head + b"".join(map(bytes.fromhex, chunk_digests))).hexdigest()


def check_manifest(manifest: SnapshotManifest) -> None:
    """Check that a manifest is sound before anything is allocated for it.

    Raises:
        IntegrityError: naming the entry that contradicts the others.
    """
    if manifest.version < 0:
        raise _broken(manifest, f"its version is {manifest.version}")
    if not 0 <= manifest.full_bytes <= PAYLOAD_LIMIT_BYTES:
        raise _broken(manifest, f"full_bytes={manifest.full_bytes} is not within 0..{PAYLOAD_LIMIT_BYTES}")
    if len(manifest.tensors) > _TENSORS_LIMIT:
        raise _broken(manifest, f"it lists {len(manifest.tensors)} tensors, more than {_TENSORS_LIMIT}")
    if not 0 < len(manifest.payloads) <= _PAYLOADS_LIMIT:
        raise _broken(manifest, f"it lists {len(manifest.payloads)} payloads, not 1..{_PAYLOADS_LIMIT}")
    _check_tensors(manifest)
    _check_payloads(manifest)
    if manifest.probe is not None:
        _check_probe(manifest, manifest.probe)


def full_payload(manifest: SnapshotManifest) -> Payload:
    """Return the payload that is the policy file itself.

    Raises:
        IntegrityError: when the manifest has none.
    """
    for payload in manifest.payloads:
        if (payload.kind, payload.encoding) == ("full", "raw"):
            return payload
    raise _broken(manifest, "it lists no full payload")


def header_of(manifest: SnapshotManifest) -> bytes:
    """Return what stands before the first tensor in the version's policy file."""
    return policy_header(manifest.run_id, manifest.version, manifest.weights_digest, manifest.tensors)


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
    if end != manifest.full_bytes:
        raise _broken(manifest, f"its tensors end at byte {end} of {manifest.full_bytes}")


def _check_payloads(manifest: SnapshotManifest) -> None:
    if not is_digest(manifest.weights_digest):
        raise _broken(manifest, f"weights_digest {manifest.weights_digest[:80]!r} is not a digest")
    for payload in manifest.payloads:
        what = f"the {payload.kind[:16]} payload {payload.digest[:12]}"
        if (payload.kind, payload.encoding) not in _KINDS:
            raise _broken(manifest, f"{what} is of kind {payload.kind[:16]!r}, {payload.encoding[:16]!r}")
        if payload.kind == "full" and payload.parent is not None:
            raise _broken(manifest, f"{what} has the parent {payload.parent}")
        if payload.kind == "patch" and not 0 <= (-1 if payload.parent is None else payload.parent) < (
            manifest.version
        ):
            raise _broken(manifest, f"{what} changes version {payload.parent}")
        for name, limit in (("payload_bytes", PAYLOAD_LIMIT_BYTES), ("chunk_bytes", CHUNK_LIMIT_BYTES)):
            if not 0 < getattr(payload, name) <= limit:
                raise _broken(manifest, f"{name}={getattr(payload, name)} is not within 1..{limit}")
        chunks = -(-payload.payload_bytes // payload.chunk_bytes)
        if len(payload.chunk_digests) != chunks:
            raise _broken(manifest, f"{what} has {len(payload.chunk_digests)} chunks instead of {chunks}")
        if not is_digest(payload.digest):
            raise _broken(manifest, f"the digest of a payload, {payload.digest[:80]!r}, is not a digest")
        for index, digest in enumerate(payload.chunk_digests):
            if not is_digest(digest):
                raise _broken(manifest, f"the digest of chunk {index}, {digest[:80]!r}, is not a digest")
        made = payload_digest(payload.payload_bytes, payload.chunk_bytes, payload.chunk_digests)
        if made != payload.digest:
            raise _broken(manifest, f"{what} has another digest than its chunks make")
        if (payload.kind, payload.encoding) == ("full", "raw"):
            whole = len(header_of(manifest)) + manifest.full_bytes
            if payload.payload_bytes != whole:
                raise _broken(manifest, f"{what} has {payload.payload_bytes} bytes instead of {whole}")


def _check_probe(manifest: SnapshotManifest, probe: Probe) -> None:
    if not 0 < len(probe.logprobs) == len(probe.tokens) - 1 < _PROBE_LIMIT:
        counts = f"{len(probe.tokens)} tokens and {len(probe.logprobs)} log-probabilities"
        raise _broken(manifest, f"its probe has {counts}, not one more token, {_PROBE_LIMIT} at most")
    if probe.dtype not in ROUNDING:
        raise _broken(manifest, f"its probe was computed in {probe.dtype[:40]!r}, which is not known")
    if min(probe.tokens) < 0 or not all(map(math.isfinite, probe.logprobs)):
        raise _broken(manifest, "its probe holds something else than tokens and numbers")


def _broken(manifest: SnapshotManifest, reason: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest of version {manifest.version} is not sound: {reason}; fetch it again from the origin"
    )


def encode_manifest(manifest: SnapshotManifest) -> bytes:
    """Encode everything but origin and signature, so what is signed; equal manifests give equal bytes.

    Many experts take little space: names are written as what they share with the one before, each pair of
    dtype and shape once, and spans not at all, since they follow from the shapes.
    """
    return _encode(replace(manifest, origin="", signature=b""))


@lru_cache(maxsize=8)
def _encode(manifest: SnapshotManifest) -> bytes:
    tensors: list[str | int] = []
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    previous = ""
    for entry in manifest.tensors:
        shared = len(os.path.commonprefix((previous, entry.name)))  # noqa: RUF071 - of text, not of paths
        kind = kinds.setdefault((DTYPES.get(entry.dtype, entry.dtype), entry.shape), len(kinds))
        tensors += (shared, entry.name[shared:], kind)
        previous = entry.name
    payloads = [
        {
            "bytes": payload.payload_bytes,
            "chunk_bytes": payload.chunk_bytes,
            "chunks": base64.b64encode(b"".join(map(bytes.fromhex, payload.chunk_digests))).decode(),
            "digest": payload.digest,
            "encoding": payload.encoding,
            "kind": payload.kind,
            "parent": payload.parent,
        }
        for payload in manifest.payloads
    ]
    tree = {
        "bytes": manifest.full_bytes,
        "digest": manifest.weights_digest,
        "kinds": list(kinds),
        "payloads": payloads,
        **({} if manifest.probe is None else {"probe": _probe_tree(manifest.probe)}),
        "run": manifest.run_id,
        "tensors": tensors,
        "version": manifest.version,
    }
    return json.dumps(tree, separators=(",", ":")).encode()


def decode_manifest(body: bytes, origin: str = "", signature: bytes = b"") -> SnapshotManifest:
    """Decode what `encode_manifest` wrote; `check_manifest` looks whether it is sound.

    Raises:
        IntegrityError: when the bytes are no manifest, or not its canonical encoding.
    """
    return replace(_decode(bytes(body)), origin=origin, signature=bytes(signature))


@lru_cache(maxsize=8)
def _decode(body: bytes) -> SnapshotManifest:
    if len(body) > BODY_LIMIT_BYTES:
        raise IntegrityError(f"a manifest of {len(body)} bytes is refused; {BODY_LIMIT_BYTES} are allowed")
    try:
        tree = json.loads(body)
        manifest = SnapshotManifest(
            run_id=_text(tree["run"]),
            version=_count(tree["version"]),
            weights_digest=_text(tree["digest"]),
            tensors=_tensors(tree["tensors"], tree["kinds"]),
            full_bytes=_count(tree["bytes"]),
            payloads=tuple(map(_payload, tree["payloads"])),
            origin="",
            probe=_probe(tree["probe"]) if "probe" in tree else None,
        )
        canonical = _encode(manifest) == body
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"these {len(body)} bytes are not a snapshot manifest: {error!r}") from error
    if not canonical:
        raise IntegrityError(
            f"the manifest of version {manifest.version} is not in its canonical encoding; fetch it again"
        )
    return manifest


def _tensors(listed: Any, listed_kinds: Any) -> tuple[TensorEntry, ...]:
    kinds = []
    for short, sizes in listed_kinds:
        if len(sizes) > _DIMENSIONS_LIMIT:
            raise ValueError(f"a tensor has {len(sizes)} dimensions; {_DIMENSIONS_LIMIT} are allowed")
        dtype, shape = _LONG.get(_text(short), short), tuple(map(_count, sizes))
        kinds.append((dtype, shape, math.prod(shape) * DTYPE_BYTES.get(dtype, 0)))
    tensors, offset, previous = [], 0, ""
    for shared, rest, kind in zip(listed[::3], listed[1::3], listed[2::3], strict=True):
        previous = previous[: _count(shared)] + _text(rest)
        if len(previous) > _NAME_LIMIT:  # before it takes memory
            raise ValueError(f"tensor {previous[:80]!r} has too long a name")
        dtype, shape, length = kinds[_count(kind)]
        tensors.append(TensorEntry(previous, dtype, shape, offset, length))
        offset += length
    return tuple(tensors)


def _payload(tree: Any) -> Payload:
    digests = base64.b64decode(_text(tree["chunks"]), validate=True)
    return Payload(
        kind=_text(tree["kind"]),  # type: ignore[arg-type]
        parent=None if tree["parent"] is None else _count(tree["parent"]),
        encoding=_text(tree["encoding"]),  # type: ignore[arg-type]
        digest=_text(tree["digest"]),
        payload_bytes=_count(tree["bytes"]),
        chunk_bytes=_count(tree["chunk_bytes"]),
        chunk_digests=tuple(digests[at : at + 32].hex() for at in range(0, len(digests), 32)),
    )


def _probe_tree(probe: Probe) -> dict[str, Any]:
    logprobs = base64.b64encode(struct.pack(f"<{len(probe.logprobs)}f", *probe.logprobs)).decode()
    return {"dtype": probe.dtype, "logprobs": logprobs, "tokens": list(probe.tokens)}


def _probe(tree: Any) -> Probe:
    logprobs = base64.b64decode(_text(tree["logprobs"]), validate=True)
    if len(logprobs) % 4:
        raise ValueError(f"{len(logprobs)} bytes of log-probabilities are no float32 numbers")
    numbers = struct.unpack(f"<{len(logprobs) // 4}f", logprobs)
    return Probe(tuple(map(_count, tree["tokens"])), numbers, _text(tree["dtype"]))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"{str(value)[:40]!r} is no number of 64 bits")
    return value


def manifest_to_bytes(manifest: SnapshotManifest) -> bytes:
    """Return a manifest as a file: a line with origin and signature, then what is signed."""
    head = json.dumps({"origin": manifest.origin, "signature": manifest.signature.hex()})
    return head.encode() + b"\n" + encode_manifest(manifest)


def manifest_from_bytes(data: bytes) -> SnapshotManifest:
    """Read what `manifest_to_bytes` wrote.

    Raises:
        IntegrityError: when the bytes are no manifest.
    """
    head, _, body = data.partition(b"\n")
    try:
        tree = json.loads(head)
        origin, signature = _text(tree["origin"]), bytes.fromhex(tree["signature"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"these {len(data)} bytes are not a snapshot manifest: {error!r}") from error
    return decode_manifest(body, origin, signature)
