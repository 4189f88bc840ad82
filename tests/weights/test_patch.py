"""Patch files: refused for the wrong parent, bounded in memory, and made only where they are worth it."""

import io
import struct
import tracemalloc

import numpy as np
import pytest
from blake3 import blake3

from antiphon.core.broadcast.patches import MOST_SHARE
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.records import TensorEntry
from antiphon.weights.patch import apply_patch, encode_patch
from antiphon.weights.patch_payloads import (
    FullWeights,
    PayloadChoice,
    estimated_patch_bytes,
    write_payloads,
)

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64
COUNT = 100_000
TENSORS = (TensorEntry("w", "bfloat16", (COUNT,), 0, 2 * COUNT),)


def weights(seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0.0, 0.02, COUNT).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def changed(before: np.ndarray, share: float, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return before + (rng.random(len(before)) < share) * rng.choice(np.array([1, 65535], np.uint16), COUNT)


def patch_of(before: np.ndarray, after: np.ndarray) -> bytes:
    pieces: list[bytes] = []
    encode_patch(
        before.tobytes(), after.tobytes(), TENSORS, pieces.append, parent_digest=OLD, result_digest=NEW
    )
    return b"".join(pieces)


@pytest.fixture(scope="module")
def patch() -> bytes:
    return patch_of(weights(), changed(weights(), 0.01))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parent_digest": OTHER}, f"but {OTHER} is held"),
        ({"result_digest": OTHER}, f"but {OTHER} is wanted"),
        ({"tensors": (TensorEntry("w", "float16", (COUNT,), 0, 2 * COUNT),)}, "other names, dtypes"),
        ({"tensors": (TensorEntry("w", "bfloat16", (2, COUNT // 2), 0, 2 * COUNT),)}, "other names, dtypes"),
    ],
)
def test_a_patch_for_something_else_is_refused(patch, change, words) -> None:
    options = {"parent_digest": OLD, "result_digest": NEW, "tensors": TENSORS} | change
    out = bytearray()
    with pytest.raises(IntegrityError, match=words):
        apply_patch(weights().tobytes(), patch, write=out.extend, **options)
    assert not out


def test_each_kind_of_payload_is_read_by_its_own_function(patch) -> None:
    pieces: list[bytes] = []
    encode_patch(None, weights().tobytes(), TENSORS, pieces.append, result_digest=NEW)
    out = bytearray()
    full, options = b"".join(pieces), {"parent_digest": OLD, "result_digest": NEW}
    with pytest.raises(IntegrityError, match="not a full one"):
        apply_patch(None, patch, TENSORS, out.extend, result_digest=NEW)
    with pytest.raises(IntegrityError, match="it is a full one"):
        apply_patch(weights().tobytes(), full, TENSORS, out.extend, **options)


def test_a_parent_of_another_size_is_refused(patch) -> None:
    options = {"parent_digest": OLD, "result_digest": NEW}
    with pytest.raises(IntegrityError, match="has 2 bytes, the tensors 200000"):
        apply_patch(bytes(2), patch, TENSORS, bytearray().extend, **options)
    with pytest.raises(ContractError, match="has 2 bytes, the tensors 200000"):
        encode_patch(bytes(2), weights().tobytes(), TENSORS, bytearray().extend, **options)


def sealed(content: bytes) -> bytes:
    return content + blake3(content).digest()


@pytest.mark.parametrize(
    ("offset", "number", "words"),
    [
        (12, 32 << 20, "block_bytes="),
        (12, 0, "block_bytes="),
        (12, 12, "block_bytes="),
        (16, 1 << 31, "is for 2147483648 bytes"),
        (120, COUNT + 1, "has 100001 of 100000 elements"),
        (124, 1, "gap bytes"),
        (124, 1 << 31, "gap bytes"),
        (128, 1 << 31, "ends within block 0"),
        (132, 1, "zstd frame|follow its last block"),
    ],
)
def test_stated_sizes_are_checked_before_anything_is_allocated(patch, offset, number, words) -> None:
    content = bytearray(patch[:-32])
    struct.pack_into("<I", content, offset, number)
    out = bytearray()
    before = weights().tobytes()
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match=words):
            apply_patch(before, sealed(content), TENSORS, out.extend, parent_digest=OLD, result_digest=NEW)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_memory_is_a_few_blocks_whatever_the_model() -> None:
    block = 1 << 16
    before, after = weights().tobytes(), changed(weights(), 0.5).tobytes()
    tensors = (TensorEntry("w", "bfloat16", (COUNT * 40,), 0, 2 * COUNT * 40),)
    before, after, out = before * 40, after * 40, io.BytesIO(bytes(2 * COUNT * 40))
    pieces: list[bytes] = []
    options = {"parent_digest": OLD, "result_digest": NEW}
    encode_patch(before, after, tensors, lambda piece: None, **options, block_bytes=block)
    tracemalloc.start()
    try:
        encode_patch(before, after, tensors, lambda piece: None, **options, threads=2, block_bytes=block)
        assert tracemalloc.get_traced_memory()[1] < 16 * block
        encode_patch(before, after, tensors, pieces.append, **options, block_bytes=block)
        patch = b"".join(pieces)
        del pieces
        apply_patch(before, patch, tensors, out.write, **options, threads=2)  # compiles what it needs
        out.seek(0)
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        apply_patch(before, patch, tensors, out.write, **options, threads=2)
        assert tracemalloc.get_traced_memory()[1] - start < 20 * block
    finally:
        tracemalloc.stop()
    assert out.getvalue() == after


def version(number: int, data: np.ndarray) -> FullWeights:
    return FullWeights(number, f"{number:064x}", memoryview(data.tobytes()))


class Outgoing:
    """A payload in memory: what was written, how it was finished, whether it was given up."""

    def __init__(self, made: list["Outgoing"], room: int = 1 << 30) -> None:
        self.data, self.room = bytearray(), room
        self.kind = self.encoding = ""
        self.parent: int | None = None
        self.discarded = False
        made.append(self)

    def write(self, data: bytes) -> None:
        if len(self.data) + len(data) > self.room:
            raise UnavailableError("no space left")
        self.data += data

    def finish(self, *, kind: str, parent: int | None, encoding: str) -> "Outgoing":
        self.kind, self.parent, self.encoding = kind, parent, encoding
        return self

    def discard(self) -> None:
        self.discarded = not self.kind


def test_payloads_of_the_ladder_are_written_where_they_are_worth_it() -> None:
    one, three = weights(), changed(weights(), 0.02)
    new = version(4, changed(three, 0.02, seed=2))
    elsewhere = version(2, weights(7))  # as after another training: everything differs
    stored = {1: version(1, one), 2: elsewhere, 3: version(3, three)}
    begun: list[Outgoing] = []
    left_out: list[int] = []
    choice = PayloadChoice(ladder=[1, 2, 3], most_share=MOST_SHARE, compress_full=True, threads=2)
    made = list(
        write_payloads(
            lambda expected: Outgoing(begun),
            new,
            list(stored.values()),
            TENSORS,
            choice,
            left_out=lambda parent, patch_bytes: left_out.append(parent),
        )
    )
    assert made == begun and left_out == [2]
    kinds = [(payload.kind, payload.parent, payload.encoding) for payload in made]
    assert kinds == [("patch", 3, "zstd"), ("patch", 1, "zstd"), ("full", None, "zstd")]
    for payload in made:
        assert len(payload.data) < len(new.data)
        out = bytearray()
        if payload.parent is None:
            apply_patch(None, payload.data, TENSORS, out.extend, result_digest=new.weights_digest)
        else:
            parent = stored[payload.parent]
            digests = {"parent_digest": parent.weights_digest, "result_digest": new.weights_digest}
            apply_patch(parent.data, payload.data, TENSORS, out.extend, **digests)
        assert out == new.data


def test_a_disk_that_is_full_leaves_no_payload() -> None:
    begun: list[Outgoing] = []
    before, after = version(1, weights()), version(2, changed(weights(), 0.01))
    choice = PayloadChoice(ladder=[1], most_share=MOST_SHARE, compress_full=False, threads=1)
    with pytest.raises(UnavailableError, match="no space left"):
        list(write_payloads(lambda expected: Outgoing(begun, 500), after, [before], TENSORS, choice))
    assert [payload.discarded for payload in begun] == [True]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.4])
def test_the_estimate_is_near_what_a_patch_takes(share) -> None:
    before, after = weights(), changed(weights(), share)
    estimate = estimated_patch_bytes(before.tobytes(), after.tobytes(), TENSORS)
    assert estimate == pytest.approx(len(patch_of(before, after)), rel=0.3, abs=400)
