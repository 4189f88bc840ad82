"""Patches: every bit comes back, and no file from a peer makes anything but an error or what it says."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import IntegrityError
from antiphon.core.records import TensorEntry
from antiphon.weights.patch import apply_patch, encode_patch

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "uint8": 1, "bool": 1}
OLD, NEW = "a" * 64, "b" * 64
SPECIAL = {
    2: [0x0000, 0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0x0001],
    4: [0x00000000, 0x80000000, 0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0x00000001],
}
"""Bits of 0, -0, NaNs with payloads, infinity, the smallest number."""


class Pair(NamedTuple):
    """Two versions of the same tensors."""

    parent: bytes
    new: bytes
    tensors: tuple[TensorEntry, ...]
    block_bytes: int

    def __repr__(self) -> str:
        shapes = [(entry.dtype, entry.shape) for entry in self.tensors]
        return f"Pair({shapes}, {len(self.parent)} bytes in blocks of {self.block_bytes})"


def table(shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    entries, offset = [], 0
    for place, (dtype, shape) in enumerate(shapes):
        length = math.prod(shape) * WIDTHS[dtype]
        entries.append(TensorEntry(f"t{place:02d}", dtype, shape, offset, length))
        offset += length
    return tuple(entries)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    shape = st.lists(st.integers(0, 40), max_size=3).map(tuple).filter(lambda found: math.prod(found) < 700)
    tensors = table(draw(st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), shape), max_size=5)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    parts = []
    for entry in tensors:
        width = WIDTHS[entry.dtype]
        before = rng.integers(0, 256, entry.length, dtype=np.uint8).view(f"<u{width}")
        after = before.copy()
        count = len(before)
        pattern = draw(st.sampled_from(["none", "all", "few", "half", "runs", "special", "one ulp"]))
        if pattern == "all":
            after = ~before
        elif pattern in {"few", "half"}:
            chosen = rng.random(count) < (0.003 if pattern == "few" else 0.5)
            after[chosen] = rng.integers(0, 256, int(chosen.sum()) * width, dtype=np.uint8).view(after.dtype)
        elif pattern == "runs" and count:
            start = int(rng.integers(count))
            after[start : start + int(rng.integers(1, 300))] += 1
        elif pattern == "special" and width in SPECIAL:
            before[:] = rng.choice(np.array(SPECIAL[width], before.dtype), count)
            after[:] = rng.choice(np.array(SPECIAL[width], before.dtype), count)
        elif pattern == "one ulp":
            after += rng.integers(0, 3, count).astype(after.dtype) - after.dtype.type(1)
        parts.append((before.tobytes(), after.tobytes()))
    block_bytes = draw(st.sampled_from([128, 1024, 4 << 20]))
    return Pair(b"".join(a for a, _ in parts), b"".join(b for _, b in parts), tensors, block_bytes)


def patch_of(pair: Pair, threads: int = 1) -> bytes:
    pieces: list[bytes] = []
    length = encode_patch(
        pair.parent,
        pair.new,
        pair.tensors,
        pieces.append,
        parent_digest=OLD,
        result_digest=NEW,
        threads=threads,
        block_bytes=pair.block_bytes,
    )
    patch = b"".join(pieces)
    assert len(patch) == length
    return patch


def full_of(pair: Pair, threads: int = 1) -> bytes:
    pieces: list[bytes] = []
    options = {"result_digest": NEW, "threads": threads, "block_bytes": pair.block_bytes}
    encode_patch(None, pair.new, pair.tensors, pieces.append, **options)
    return b"".join(pieces)


def patched(pair: Pair, patch: bytes, threads: int = 1) -> bytes:
    out = bytearray()
    options = {"parent_digest": OLD, "result_digest": NEW, "threads": threads}
    apply_patch(pair.parent, patch, pair.tensors, out.extend, **options)
    return bytes(out)


@given(pair=pairs(), threads=st.sampled_from([1, 3]))
def test_every_bit_comes_back(pair, threads) -> None:
    patch = patch_of(pair)
    assert patch == patch_of(pair, threads)
    assert patched(pair, patch, threads) == pair.new
    out = bytearray()
    apply_patch(None, full_of(pair, threads), pair.tensors, out.extend, result_digest=NEW, threads=threads)
    assert out == pair.new


@given(pair=pairs(), full=st.booleans(), data=st.data())
def test_a_file_changed_on_the_way_is_refused(pair, full, data) -> None:
    file = bytearray(full_of(pair) if full else patch_of(pair))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    place = data.draw(st.integers(0, len(file) - 1))
    if kind == "flip":
        file[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del file[place:]
    else:
        file += data.draw(st.binary(min_size=1, max_size=40))
    out = bytearray()
    with pytest.raises(IntegrityError):
        if full:
            apply_patch(None, file, pair.tensors, out.extend, result_digest=NEW)
        else:
            apply_patch(pair.parent, file, pair.tensors, out.extend, parent_digest=OLD, result_digest=NEW)
    assert not out  # nothing was written


@given(pair=pairs(), full=st.booleans(), data=st.data())
def test_a_hostile_sender_reaches_nothing_beyond_the_result(pair, full, data) -> None:
    """The checksum fits what was changed: what is left are the parser, and the digest of the result."""
    file = bytearray(full_of(pair) if full else patch_of(pair))[:-32]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(file) - 1))
        value = data.draw(st.sampled_from([0, 1, 0x7F, 0xFE, 0xFF]))
        file[place : place + data.draw(st.sampled_from([1, 4]))] = bytes([value]) * 4
    del file[data.draw(st.integers(0, len(file))) if data.draw(st.booleans()) else len(file) :]
    file += blake3(file).digest()
    out = bytearray()
    try:
        if full:
            apply_patch(None, file, pair.tensors, out.extend, result_digest=NEW)
        else:
            apply_patch(pair.parent, file, pair.tensors, out.extend, parent_digest=OLD, result_digest=NEW)
    except IntegrityError as error:
        assert "\n" not in str(error)
    finally:
        assert len(out) <= len(pair.new)
