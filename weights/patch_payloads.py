"""Patch payloads: which payloads of a new version are worth their bytes, making them, and using them.

The publisher calls `write_payloads` when the raw full payload of a version is at hand. It holds both
versions of each patch, so it counts changes on a sample of elements instead of predicting them from master
weights: that is the same formula, since between snapshots every change is at least one ulp. A worker calls
`restore_full`, and has the policy file that the publisher wrote, to the last byte.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from antiphon.api.manifest import full_payload, header_of
from antiphon.core.broadcast.patch_kernels import Array
from antiphon.core.broadcast.patches import Change, estimated_bytes, is_worth_making, ladder_parents
from antiphon.core.records import Payload, SnapshotManifest, TensorEntry
from antiphon.weights.adapter import merged_weights
from antiphon.weights.patch import (
    NO_PARENT,
    Buffer,
    Span,
    apply_patch,
    elements,
    encode_patch,
    full_bytes,
    runs,
)
from antiphon.weights.payload_store import OutgoingPayload, PayloadStore

_SAMPLES, _SAMPLE_BYTES = 256, 4096
"""Pieces compared, evenly spread, and bytes of each: a share of 1% is found within a few percent."""


@dataclass(frozen=True, slots=True, eq=False)
class FullWeights:
    """A version whose canonical bytes are at hand."""

    version: int
    weights_digest: str
    """64 hex."""
    data: Buffer
    """Bytes of all tensors, such as a mapped file without its header."""


@dataclass(frozen=True, slots=True)
class PayloadChoice:
    """Which payloads are made beside the raw full one."""

    ladder: Sequence[int]
    """How many published versions back patches begin; empty for none."""
    most_share: float
    """A patch is made when it takes less than this share of the full payload."""
    compress_full: bool
    """Write the full payload by byte planes too."""
    threads: int
    """That work on blocks."""


def spare_threads(busy: int) -> int:
    """Return how many threads may work beside this many that are busy, at least one."""
    return max(1, len(os.sched_getaffinity(0)) - busy)


def write_payloads(
    make: Callable[[int], OutgoingPayload],
    new: FullWeights,
    stored: Sequence[FullWeights],
    tensors: Sequence[TensorEntry],
    choice: PayloadChoice,
    *,
    left_out: Callable[[int, int], None] = lambda parent, patch_bytes: None,
    written: Callable[[int], None] = lambda length: None,
) -> Generator[Payload, None, None]:
    """Write the payloads of a version that are worth their bytes, beside the raw full one; yield each.

    A patch is begun where its estimate is small enough, and discarded where the estimate was wrong.

    Args:
        make: begins a payload of about this many bytes.
        new: the version.
        stored: earlier versions at hand, with the same tensors.
        tensors: names, dtypes, shapes and spans of all of them.
        choice: what is made.
        left_out: called with the parent and the bytes of each patch that is not worth them.
        written: called with the bytes of each block.

    Raises:
        ContractError: when a buffer is not as long as the tensors.
        UnavailableError: when `make`, `write` or `finish` finds the disk full; the payload is discarded.
    """
    by_version = {weights.version: weights for weights in stored}
    total = full_bytes(tensors)

    def into(out: OutgoingPayload) -> Callable[[bytes], None]:
        def write(data: bytes) -> None:
            out.write(data)
            written(len(data))

        return write

    for version in ladder_parents(list(by_version), new.version, choice.ladder):
        parent = by_version[version]
        expected = estimated_patch_bytes(parent.data, new.data, tensors)
        if not is_worth_making(expected, total, choice.most_share):
            left_out(version, expected)
            continue
        out = make(expected)
        try:
            length = encode_patch(
                parent.data,
                new.data,
                tensors,
                into(out),
                parent_digest=parent.weights_digest,
                result_digest=new.weights_digest,
                threads=choice.threads,
            )
            if is_worth_making(length, total, choice.most_share):
                yield out.finish(kind="patch", parent=version, encoding="zstd")
            else:
                left_out(version, length)
        finally:
            out.discard()
    if choice.compress_full:
        out = make(total)
        try:
            digest = new.weights_digest
            encode_patch(None, new.data, tensors, into(out), result_digest=digest, threads=choice.threads)
            yield out.finish(kind="full", parent=None, encoding="zstd")
        finally:
            out.discard()


def stored_weights(store: PayloadStore, manifest: SnapshotManifest) -> FullWeights:
    """Return a version whose policy file is in a store, mapped.

    Raises:
        UnavailableError: when it is not held.
    """
    data = store.map(full_payload(manifest).digest)[len(header_of(manifest)) :]
    return FullWeights(manifest.version, manifest.weights_digest, data)


def restore_full(
    store: PayloadStore,
    manifest: SnapshotManifest,
    payload: Payload,
    parent: SnapshotManifest | None,
    threads: int,
) -> None:
    """Make the policy file of a version from a patch, an adapter, or the compressed full payload.

    The file has the digest that the manifest names, so all of it is what the publisher wrote.

    Args:
        store: holds the payload, and the policy file of the parent; gets that of the version.
        manifest: of the version, checked.
        payload: one of the manifest's, not the raw full one.
        parent: of the version that a patch or an adapter changes; None for a full payload.
        threads: that work on blocks.

    Raises:
        IntegrityError: when the payload makes something else, or the parent's file was altered; nothing
            is left of the file then.
        UnavailableError: when the payload or the parent is not held, or the disk is full.
    """
    full, head = full_payload(manifest), header_of(manifest)
    file = store.map(payload.digest)
    out = store.make(full.chunk_bytes, len(head))
    try:
        before = None if parent is None else stored_weights(store, parent)
        if payload.encoding == "lora":
            assert before is not None  # a manifest whose adapter changes nothing was refused
            with closing(merged_weights(before.data, before.weights_digest, file, manifest, threads)) as made:
                for data in made:
                    out.write(data)
        else:
            apply_patch(
                None if before is None else before.data,
                file,
                manifest.tensors,
                out.write,
                result_digest=manifest.weights_digest,
                parent_digest=NO_PARENT if before is None else before.weights_digest,
                threads=threads,
            )
        out.finish(head, digest=full.digest)
    finally:
        out.discard()


def estimated_patch_bytes(parent: Buffer, new: Buffer, tensors: Sequence[TensorEntry]) -> int:
    """Estimate the bytes of a patch from a sample of the elements."""
    by_width: dict[int, list[Array]] = {}
    sizes: dict[int, int] = {}
    stride = max(_SAMPLE_BYTES, full_bytes(tensors) // _SAMPLES // 8 * 8)
    for run in runs(tensors):
        sizes[run.width] = sizes.get(run.width, 0) + run.length
        for start in range(0, run.length, stride):
            piece = Span(run.offset + start, min(_SAMPLE_BYTES, run.length - start), run.width)
            difference = elements(new, piece) - elements(parent, piece)
            by_width.setdefault(run.width, []).append(difference.view(f"<i{run.width}"))
    return sum(
        estimated_bytes(_change(np.concatenate(by_width[width])), size, width)
        for width, size in sizes.items()
    )


def _change(differences: Array) -> Change:
    changed = np.abs(differences[differences != 0].astype(np.float64))
    if not len(changed):
        return Change(0.0, 0.0)
    return Change(len(changed) / len(differences), float(np.log2(changed).mean()))
