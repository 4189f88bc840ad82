"""Snapshots: a digest stands for names, dtypes, shapes and bits; a broken manifest never allocates."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import IntegrityError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.manifest import check_manifest, manifest_from_json, manifest_to_json
from antiphon.services.broadcast.snapshot import build_snapshot, rebuild, weights_digest

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
NAMES = st.text("abcxyz._0", min_size=1, max_size=8).filter(lambda name: name[0] not in ".-")


@st.composite
def tensor(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(DTYPES)
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    found = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
    return found.t() if found.ndim == 2 and draw(st.booleans()) else found


WEIGHTS = st.dictionaries(NAMES, tensor(), min_size=1, max_size=6).filter(
    lambda weights: sum(value.numel() for value in weights.values()) > 0
)


def snapshot(weights: dict[str, torch.Tensor], chunk_bytes: int) -> tuple[SnapshotManifest, dict[str, bytes]]:
    chunks: dict[str, bytes] = {}
    return build_snapshot("run", 7, weights, chunk_bytes, "host:1", chunks.__setitem__), chunks


@given(weights=WEIGHTS, chunk_bytes=st.integers(1, 64))
def test_rebuilding_gives_the_same_bits(weights, chunk_bytes) -> None:
    manifest, chunks = snapshot(weights, chunk_bytes)
    check_manifest(manifest)
    assert manifest_from_json(manifest_to_json(manifest)) == manifest
    assert manifest.weights_digest == weights_digest(weights)
    found = rebuild(manifest, chunks.__getitem__)
    assert set(found) == set(weights)
    for name, value in weights.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert torch.equal(found[name], value)


@given(weights=WEIGHTS, chunk_bytes=st.integers(1, 64), data=st.data())
def test_one_flipped_bit_is_always_refused(weights, chunk_bytes, data) -> None:
    manifest, chunks = snapshot(weights, chunk_bytes)
    victim = data.draw(st.sampled_from(sorted(chunks)))
    spoiled = bytearray(chunks[victim])
    spoiled[data.draw(st.integers(0, len(spoiled) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(IntegrityError, match=victim):
        rebuild(manifest, {**chunks, victim: bytes(spoiled)}.__getitem__)


@given(weights=WEIGHTS)
def test_the_digest_covers_names_shapes_and_dtypes(weights) -> None:
    name, value = next(iter(weights.items()))
    others = {key: kept for key, kept in weights.items() if key != name}
    digest = weights_digest(weights)
    assert weights_digest({**others, name + "2": value}) != digest
    assert weights_digest({**others, name: value.reshape(1, *value.shape)}) != digest
    if value.dtype is torch.float16:
        assert weights_digest({**others, name: value.contiguous().view(torch.bfloat16)}) != digest
    assert weights_digest(dict(reversed(weights.items()))) == digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"payload_bytes": 1 << 62}, "payload_bytes"),
        ({"payload_bytes": 0}, "payload_bytes"),
        ({"payload_bytes": 1}, "end at byte"),
        ({"version": -1}, "version"),
        ({"weights_digest": "../x"}, "weights_digest"),
        ({"tensor": {"name": "../../etc/passwd"}}, "not allowed"),
        ({"tensor": {"name": ""}}, "not allowed"),
        ({"tensor": {"name": "b"}}, "out of order or named twice"),
        ({"tensor": {"dtype": "qint32"}}, "dtype"),
        ({"tensor": {"shape": (1 << 40, 1 << 40)}}, "cannot have"),
        ({"tensor": {"shape": (-2, -2)}}, "impossible shape"),
        ({"tensor": {"offset": 4}}, "starts at byte 4 instead of 0"),
        ({"chunk": {"digest": "A" * 64}}, "digest of chunk 0"),
        ({"chunk": {"length": 1 << 30}}, "chunk 0 has"),
        ({"chunk": {"length": 0}}, "chunk 0 has 0 bytes"),
        ({"chunk": {"offset": 8}}, "chunk 0 starts at byte 8"),
        ({"chunks": ()}, "chunks end at byte 0"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_before_anything_is_fetched(change, words) -> None:
    manifest, _ = snapshot({"a": torch.arange(4.0).reshape(2, 2), "b": torch.arange(3.0)}, 8)
    if "tensor" in change:
        entry = dataclasses.replace(manifest.tensors[0], **change["tensor"])
        change = {"tensors": (entry, *manifest.tensors[1:])}
    if "chunk" in change:
        chunk = dataclasses.replace(manifest.chunks[0], **change["chunk"])
        change = {"chunks": (chunk, *manifest.chunks[1:])}

    def never(digest: str) -> bytes:
        raise AssertionError(f"chunk {digest} was asked for")

    with pytest.raises(IntegrityError, match=words):
        rebuild(dataclasses.replace(manifest, **change), never)
