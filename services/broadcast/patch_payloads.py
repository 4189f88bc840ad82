"""Patch payloads: which payloads of a new version are worth their bytes, and making them.

The publisher calls `write_payloads` when the raw full payload of a version is at hand. It holds both
versions of each patch, so it counts changes on a sample of elements instead of predicting them from master
weights: that is the same formula, since between snapshots every change is at least one ulp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from antiphon.core.broadcast.patches import Change, estimated_bytes, is_worth_making, ladder_parents
from antiphon.core.records import TensorEntry
from antiphon.services.broadcast.patch import Array, Buffer, elements, encode_full, encode_patch
from antiphon.services.broadcast.patch_format import Span, full_bytes, runs

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


_P = TypeVar("_P", covariant=True)


class Outgoing(Protocol[_P]):
    """A payload that is being written: the payload store's file without a name."""

    def write(self, data: bytes, /) -> object:
        """Append bytes."""

    def finish(self, *, kind: str, parent: int | None, encoding: str) -> _P:
        """Keep what was written, and return the payload."""

    def discard(self) -> None:
        """Leave nothing of it, unless it is finished."""


def write_payloads(
    make: Callable[[int], Outgoing[_P]],
    new: FullWeights,
    stored: Sequence[FullWeights],
    tensors: Sequence[TensorEntry],
    *,
    ladder: Sequence[int],
    compress_full: bool,
    threads: int,
) -> list[_P]:
    """Write the payloads of a version that are worth their bytes, beside the raw full one.

    A patch is begun where its estimate is small enough, and discarded where the estimate was wrong.

    Args:
        make: begins a payload of about so many bytes.
        new: the version.
        stored: earlier versions at hand, with the same tensors.
        tensors: names, dtypes, shapes and spans of all of them.
        ladder: how many published versions back the patches begin; empty for none.
        compress_full: write the full payload by byte planes too.
        threads: that work on blocks.

    Raises:
        ContractError: when a buffer is not as long as the tensors.
        UnavailableError: when `make`, `write` or `finish` finds the disk full; the payload is discarded.
    """
    by_version = {weights.version: weights for weights in stored}
    total = full_bytes(tensors)
    found: list[_P] = []
    for version in ladder_parents(list(by_version), new.version, ladder):
        parent = by_version[version]
        expected = estimated_patch_bytes(parent.data, new.data, tensors)
        if not is_worth_making(expected, total):
            continue
        out = make(expected)
        try:
            length = encode_patch(
                parent.data,
                new.data,
                tensors,
                out.write,
                parent_digest=parent.weights_digest,
                result_digest=new.weights_digest,
                threads=threads,
            )
            if is_worth_making(length, total):
                found.append(out.finish(kind="patch", parent=version, encoding="zstd"))
        finally:
            out.discard()
    if compress_full:
        out = make(total)
        try:
            encode_full(new.data, tensors, out.write, result_digest=new.weights_digest, threads=threads)
            found.append(out.finish(kind="full", parent=None, encoding="zstd"))
        finally:
            out.discard()
    return found


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
