"""Adapter: a version as a low-rank change of the run's first one, merged to the same bits on every machine.

    merged = W - (sum over k of (-s b_k) a_k)     W [E, H], B = [b_k] [E, R], A = [a_k] [R, H], s = alpha / R

A matrix product sums in an order that differs by machine and number of threads. Here each of R rank-one
updates is added to the last in float32, product and sum rounded apart, so that numpy, torch, a CPU and a
GPU come to the same bits. Subtracting the negated change leaves W as it is where the change is zero, -0 too.

The payload is the file that peft calls adapter_model.safetensors; it also names the weights that it changes
and those that it makes. A worker merges it into version 0, and has the policy file that the learner wrote, to
the last byte.
"""

import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from antiphon.api.policy_file import copy_policy, policy_facts, policy_header, tensors_of
from antiphon.core.errors import IntegrityError
from antiphon.core.records import SnapshotManifest, TensorEntry
from antiphon.models.adapters import DOWN, PREFIX, UP
from antiphon.weights.patch import BLOCK_BYTES, Buffer, full_bytes, in_order

CACHED_ROWS = 64
"""Rows that are merged at a time, so that they stay in a cache for all R updates."""
_NAMES = {"F32": "float32", "BF16": "bfloat16"}
_BYTES = {"float32": 4, "bfloat16": 2}
_Array = np.ndarray[Any, Any]
_Matrix = TypeVar("_Matrix", bound=Any)
"""A float32 matrix of numpy or torch."""


def merge_into(weight: _Matrix, down: _Matrix, up: _Matrix, scale: float, rows: int = CACHED_ROWS) -> None:
    """Change rows of W by those of B and all of A, in place.

    Args:
        weight: float32 [E, H].
        down: A, float32 [R, H].
        up: B, float32 [E, R].
        scale: s.
        rows: merged at a time, which changes no bit.
    """
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        left = up[start : start + rows] * -scale
        change = part - part  # zeros
        for k in range(len(down)):
            change += left[:, k : k + 1] * down[k]
        part -= change


def merged_weights(
    base: Buffer, base_digest: str, adapter: Buffer, manifest: SnapshotManifest, threads: int
) -> Generator[Buffer, None, None]:
    """Yield the canonical bytes of a version, in order, from those that its adapter changes.

    Whether they have the version's digest is for the caller to check.

    Args:
        base: canonical bytes of the version that is changed.
        base_digest: its weights digest.
        adapter: the file's bytes, from a peer.
        manifest: of the version, checked.
        threads: that merge.

    Raises:
        IntegrityError: when the file is none, or is for other weights or tensors; nothing was yielded then.
    """
    scale, pairs = _parse(memoryview(adapter), base_digest, manifest)
    yield from in_order(partial(_merged, memoryview(base), scale, pairs), _blocks(manifest.tensors), threads)


def write_merged(base: Path, adapter: Path, version: int, weights_digest: str, into: Path) -> None:
    """Write the policy file of a version from that of version 0 and the adapter that makes it.

    Args:
        base: policy file of version 0, checked.
        adapter: file of the version's adapter.
        version: that it makes.
        weights_digest: of the version, 64 hex.
        into: the file that is written.

    Raises:
        IntegrityError: when the adapter is none, is for other weights, or makes others.
    """
    tensors, facts = tensors_of(base), policy_facts(base)
    run_id, base_digest = str(facts.get("run")), str(facts.get("weights_digest"))
    data = np.memmap(base, np.uint8, mode="r").data[-full_bytes(tensors) :]
    manifest = SnapshotManifest(run_id, version, weights_digest, tensors, len(data), (), origin="")
    threads = len(os.sched_getaffinity(0))
    with into.open("wb") as file:
        file.write(policy_header(run_id, version, weights_digest, tensors))
        for block in merged_weights(data, base_digest, adapter.read_bytes(), manifest, threads):
            file.write(block)
    if (found := copy_policy(into)) != weights_digest:
        raise IntegrityError(
            f"{adapter} makes weights {found[:12]}, but version {version} was recorded with "
            f"{weights_digest[:12]}; remove the file, then `dvc checkout` or `dvc pull` brings it back"
        )


def _blocks(tensors: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, int, int]]:
    """Yield a tensor and a range of its rows, of about BLOCK_BYTES each; one that has no rows has one."""
    for entry in tensors:
        rows = entry.shape[0] if len(entry.shape) == 2 else 1
        each = max(1, BLOCK_BYTES * rows // max(1, entry.length))
        for start in range(0, rows, each):
            yield entry, start, min(rows, start + each)


def _merged(
    base: memoryview,
    scale: float,
    pairs: Mapping[str, tuple[_Array, _Array]],
    block: tuple[TensorEntry, int, int],
) -> Buffer:
    entry, start, stop = block
    width = entry.length // (entry.shape[0] or 1) if len(entry.shape) == 2 else entry.length
    data = base[entry.offset + start * width : entry.offset + stop * width]
    pair = pairs.get(entry.name)
    if pair is None:
        return data
    rows = as_float32(data, entry.dtype).reshape(stop - start, -1)
    down, up = pair
    merge_into(rows, down, up[start:stop], scale)
    return as_bytes(rows, entry.dtype)


def as_float32(data: Buffer, dtype: str) -> _Array:
    """Return a copy of numbers of `dtype`, float32 or bfloat16, in float32: exactly."""
    if dtype == "float32":
        return np.frombuffer(data, "<f4").copy()
    wide = np.frombuffer(data, "<u2").astype("<u4")
    wide <<= np.uint32(16)
    return wide.view("<f4")


def as_bytes(values: _Array, dtype: str) -> Buffer:
    """Return finite float32 numbers as bytes of `dtype`, rounded to nearest, ties to even, as torch does."""
    if dtype == "float32":
        return values.reshape(-1).view(np.uint8).data
    bits = values.reshape(-1).view("<u4")
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits >> np.uint32(16)).astype("<u2").view(np.uint8).data


def _parse(
    file: memoryview, base_digest: str, manifest: SnapshotManifest
) -> tuple[float, dict[str, tuple[_Array, _Array]]]:
    """Return s, and A and B by the name of their weight, all of it checked against the manifest."""
    try:
        size = int.from_bytes(file[:8], "little")
        tree = json.loads(bytes(file[8 : 8 + size]))
        facts = json.loads(tree.pop("__metadata__")["antiphon"])
        found = {name: _tensor(file[8 + size :], entry) for name, entry in tree.items()}
        scale, digests = float(facts["scale"]), (facts["base_digest"], facts["weights_digest"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise IntegrityError(f"the adapter of version {manifest.version} is not sound: {error!r}") from error
    if digests != (base_digest, manifest.weights_digest):
        raise IntegrityError(
            f"this adapter makes {digests[1]} of {digests[0]}, but {manifest.weights_digest} is wanted, of "
            f"{base_digest}, which is held"
        )
    tensors, pairs = {entry.name: entry for entry in manifest.tensors}, {}
    for name, down in found.items():
        if not name.endswith(DOWN):
            continue
        module = name.removeprefix(PREFIX).removesuffix(DOWN)
        entry, up = tensors.get(f"{module}.weight"), found.get(f"{PREFIX}{module}{UP}")
        if (
            entry is None
            or up is None
            or entry.dtype not in _BYTES
            or (entry.shape, len(down)) != ((len(up), down.shape[1]), up.shape[1])
        ):
            raise IntegrityError(
                f"the adapter of version {manifest.version} does not fit the weight of {module[:80]}"
            )
        pairs[entry.name] = down, up
    if 2 * len(pairs) != len(found):
        raise IntegrityError(f"the adapter of version {manifest.version} has tensors without a place")
    return scale, pairs


def _tensor(data: memoryview, entry: Any) -> _Array:
    """Return a matrix of an adapter's file in float32.

    Raises:
        ValueError: when its entry does not describe one.
    """
    dtype, (start, stop) = _NAMES[entry["dtype"]], entry["data_offsets"]
    rows, columns = entry["shape"]
    if not 0 <= start <= stop <= len(data) or rows * columns * _BYTES[dtype] != stop - start:
        raise ValueError(f"a tensor of shape {entry['shape']} has bytes {start} to {stop}")
    return as_float32(data[start:stop], dtype).reshape(rows, columns)
