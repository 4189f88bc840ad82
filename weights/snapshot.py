"""Snapshots: the weights of one version as bytes that anyone can check.

The canonical bytes are every tensor's little-endian contiguous bytes, in the order of the names,
without gaps. The weights digest covers names, dtypes, shapes and bytes; two snapshots with one digest
are the same policy, bit for bit. A snapshot is written in one pass over the weights, through two buffers
of fixed size: while one is filled, the other is digested and written.

An engine takes `VerifiedWeights` alone, whose digest was computed from their own bytes, so it need not digest
what it is given, and nobody can hand it weights that were not checked. A snapshot's tensors are views of its
mapped file: they take no memory of their own.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

from antiphon.api.manifest import DTYPE_BYTES, auto_chunk_bytes, check_manifest, full_payload, header_of
from antiphon.api.policy_file import policy_header, safetensors_header
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.records import Payload, Probe, SnapshotManifest, TensorEntry
from antiphon.weights.payload_store import PayloadStore

BUFFER_BYTES = 64 << 20
"""Of each of the two buffers that weights pass through on their way to digest and file."""
_UNKNOWN = "0" * 64
"""Stands for the weights digest where only the length of a header is wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights that can be read tensor by tensor, wherever they are."""

    entries: tuple[TensorEntry, ...]
    """What they are as published."""
    tensor: Callable[[str], AbstractContextManager[torch.Tensor]]
    """Gives a tensor whole, on any device and of any dtype that the published one is made from."""
    check: Callable[[str, torch.Tensor], None] = lambda name, values: None
    """Gets each tensor's name and values as published, some at a time, and raises if they may not be."""
    reading: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around each reading of them all."""
    probe: Callable[[], Probe | None] = lambda: None
    """Computes what an engine that loads them must compute, where there is a model to do it."""
    adapter: Callable[[], "Adapter | None"] = lambda: None
    """Returns, once they were read, what they were merged from; None for weights that were not."""

    def digest(self, done: Callable[[int], None] = lambda length: None) -> str:
        """Read them once and return their digest; `done` gets the bytes of each part that was read."""
        hasher = weights_hasher(self.entries)
        self.read(done, hasher.update)
        return hasher.hexdigest()

    def read(self, done: Callable[[int], None], *takers: Callable[[memoryview], object]) -> None:
        """Hand the canonical bytes to each of `takers`, in order, on a thread of its own.

        Two buffers take turns: while one is filled, the other is taken.
        """
        if sys.byteorder != "little":
            raise ContractError("snapshots are written on little-endian machines alone; train on one")
        size = min(BUFFER_BYTES, sum(entry.length for entry in self.entries))
        buffers: list[torch.Tensor] = []
        under_way: list[Future[object]] = []
        used = 0
        with self.reading(), ThreadPoolExecutor(1, "snapshot") as thread:
            for entry in self.entries:
                dtype, width = getattr(torch, entry.dtype), DTYPE_BYTES[entry.dtype]
                with self.tensor(entry.name) as tensor:
                    flat = tensor.detach().reshape(-1)
                    if not buffers:  # a GPU copies several times as fast to memory that cannot be moved
                        buffers = [
                            torch.empty(size, dtype=torch.uint8, pin_memory=flat.is_cuda) for _ in range(2)
                        ]
                    place, count = 0, entry.length // width
                    while True:
                        is_full = used % width or size - used < width
                        if used and (is_full if place < count else entry is self.entries[-1]):
                            filled = memoryview(buffers[0].numpy())[:used]
                            before, under_way = under_way, [thread.submit(take, filled) for take in takers]
                            done(used)
                            for work in before:  # its buffer is filled next
                                work.result()
                            buffers.reverse()
                            used = 0
                        if place == count:
                            break
                        fits = min(count - place, (size - used) // width)
                        values = buffers[0][used : used + fits * width].view(dtype)
                        part = flat[place : place + fits]
                        if part.is_cuda:  # and looks at numbers faster than a thread here
                            part = part.to(dtype)
                        values.copy_(part)
                        self.check(entry.name, part if part.is_cuda else values)
                        place, used = place + fits, used + fits * width
            for work in under_way:
                work.result()

    def copies(self) -> dict[str, torch.Tensor]:
        """Return them as tensors on the CPU, as published."""
        copied = {}
        with self.reading():
            for entry in self.entries:
                dtype = getattr(torch, entry.dtype)
                with self.tensor(entry.name) as tensor:
                    copied[entry.name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        return copied


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Low-rank changes of version 0: see weights/adapter.py."""

    scale: float
    """Alpha / rank."""
    tensors: Mapping[str, torch.Tensor]
    """A [R, H] and B [E, R] of each module under peft's names, as published."""


def weights_of(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Return tensors in memory as weights to publish.

    Raises:
        ContractError: when a tensor's dtype cannot be published.
    """
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return Weights(published_entries(shapes), lambda name: nullcontext(tensors[name]))


def published_entries(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[TensorEntry, ...]:
    """Return where tensors lie in the canonical bytes, from the dtype and shape of each.

    Raises:
        ContractError: when a tensor's dtype cannot be published.
    """
    entries = []
    offset = 0
    for name in sorted(tensors):
        kind, shape = tensors[name]
        dtype = str(kind).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ContractError(f"tensor {name} has dtype {dtype}, which no snapshot may hold; convert it")
        length = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, shape, offset, length))
        offset += length
    return tuple(entries)


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of a policy: blake3 over names, dtypes, shapes and canonical bytes.

    Raises:
        ContractError: when a tensor's dtype cannot be published.
    """
    return weights_of(tensors).digest()


def weights_hasher(entries: tuple[TensorEntry, ...]) -> blake3:
    """Return the hasher of a weights digest before the first byte of the first tensor, on all threads."""
    listed = [[entry.name, entry.dtype, list(entry.shape)] for entry in entries]
    text = json.dumps(listed, separators=(",", ":")).encode()
    return blake3(len(text).to_bytes(8, "little") + text, max_threads=blake3.AUTO)


def write_snapshot(
    store: PayloadStore,
    run_id: str,
    version: int,
    weights: Weights,
    chunk_bytes: int | None = None,
    done: Callable[[int], None] = lambda length: None,
) -> SnapshotManifest:
    """Write weights as the version's policy file into the store; it is on the disk when this returns.

    Args:
        store: gets the payload; the manifest is listed by the caller.
        run_id: the run the version belongs to.
        version: the policy version.
        weights: read once; a tied head is to be left out by the caller.
        chunk_bytes: bytes of each chunk but the last; None: what suits the payload.
        done: called with the bytes of each part that was read.

    Returns:
        The manifest, without origin and signature.

    Raises:
        UnavailableError: when the disk is full or cannot be written; nothing is left then.
    """
    entries = weights.entries
    full_bytes = entries[-1].offset + entries[-1].length if entries else 0
    head_bytes = len(policy_header(run_id, version, _UNKNOWN, entries))
    hasher = weights_hasher(entries)
    payload = store.make(chunk_bytes or auto_chunk_bytes(head_bytes + full_bytes), head_bytes)
    try:
        weights.read(done, payload.write, hasher.update)  # the disk works while the digest is computed
        digest, probe = hasher.hexdigest(), weights.probe()
        finished = payload.finish(policy_header(run_id, version, digest, entries))
    except BaseException:
        payload.discard()
        raise
    return SnapshotManifest(run_id, version, digest, entries, full_bytes, (finished,), origin="", probe=probe)


def write_adapter(
    store: PayloadStore, manifest: SnapshotManifest, base_digest: str, adapter: Adapter
) -> Payload:
    """Write what makes a version of version 0 into the store, a file that peft opens.

    Args:
        store: gets the payload; the manifest that lists it is the caller's.
        manifest: of the version.
        base_digest: weights digest of version 0.
        adapter: as the version's weights were merged from it.

    Raises:
        UnavailableError: when the disk is full or cannot be written; nothing is left then.
    """
    weights = weights_of(adapter.tensors)
    facts = {"run": manifest.run_id, "version": manifest.version, "scale": adapter.scale}
    facts |= {"base_digest": base_digest, "weights_digest": manifest.weights_digest}
    head = safetensors_header(facts, weights.entries)
    length = len(head) + sum(entry.length for entry in weights.entries)
    out = store.make(auto_chunk_bytes(length), len(head))
    try:
        weights.read(lambda length: None, out.write)
        return out.finish(head, kind="patch", parent=0, encoding="lora")
    finally:
        out.discard()


_SEAL = object()


class VerifiedWeights(Mapping[str, torch.Tensor]):
    """Name -> tensor; made by `verify` and `open_snapshot` alone."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], digest: str, seal: object, probe: Probe | None = None
    ) -> None:
        if seal is not _SEAL:
            raise ContractError("weights are verified by verify or open_snapshot; call one of them")
        self._tensors = tensors
        self.digest = digest
        """Computed from the tensors."""
        self.probe = probe
        """What an engine that loaded them must compute; None where nobody said."""
        self.opened: tuple[PayloadStore, SnapshotManifest] | None = None
        """Of which store and version they are views; None where they were in memory."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def verify(tensors: Mapping[str, torch.Tensor], probe: Probe | None = None) -> VerifiedWeights:
    """Digest tensors in memory; they must not change afterwards."""
    return VerifiedWeights(tensors, weights_digest(tensors), _SEAL, probe)


def open_snapshot(manifest: SnapshotManifest, store: PayloadStore, checked: bool = False) -> VerifiedWeights:
    """Map the policy file of a version and check all of it, with all threads; takes seconds per 10 GB.

    The tensors may not be written to: doing so ends the process. `checked` says that another process of the
    same worker has compared them with their digest.

    Raises:
        IntegrityError: when the file is not the version's; nothing of it may be used then.
        UnavailableError: when it is not held.
    """
    check_manifest(manifest)
    payload, head = full_payload(manifest), header_of(manifest)
    mapping = store.map(payload.digest)
    if len(mapping) != payload.payload_bytes or mapping[: len(head)] != head:
        raise IntegrityError(
            f"the file of version {manifest.version} has {len(mapping)} bytes or another header than its "
            f"manifest says ({payload.payload_bytes} bytes); fetch it again"
        )
    digest = manifest.weights_digest
    if not checked:
        hasher = weights_hasher(manifest.tensors)
        hasher.update(mapping[len(head) :])
        digest = hasher.hexdigest()
    if digest != manifest.weights_digest:
        raise IntegrityError(
            f"the weights of version {manifest.version} have digest {digest}, but the manifest says "
            f"{manifest.weights_digest}; they are not loaded"
        )
    with warnings.catch_warnings():
        # torch warns once that the memory is read-only, which is what it is mapped for.
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        whole = torch.from_numpy(np.frombuffer(mapping, np.uint8))
    tensors = {}
    for entry in manifest.tensors:
        start = len(head) + entry.offset
        flat = whole[start : start + entry.length]
        if start % DTYPE_BYTES[entry.dtype]:
            flat = flat.clone()  # a narrow tensor leaves the next one at an odd address, where no view is
        tensors[entry.name] = flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)
    weights = VerifiedWeights(tensors, digest, _SEAL, manifest.probe)
    weights.opened = store, manifest
    return weights
