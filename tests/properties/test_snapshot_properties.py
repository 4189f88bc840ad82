"""Snapshots: a digest stands for names, dtypes, shapes and bits; a broken manifest never allocates."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from antiphon.api.manifest import (
    auto_chunk_bytes,
    check_manifest,
    decode_manifest,
    encode_manifest,
    full_payload,
    manifest_from_bytes,
    manifest_to_bytes,
    payload_digest,
)
from antiphon.api.policy_file import policy_header
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import Payload, Probe, SnapshotManifest
from antiphon.weights import snapshot
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import (
    open_snapshot,
    published_entries,
    weights_digest,
    weights_of,
    write_snapshot,
)

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


@contextmanager
def stored(
    weights: dict[str, torch.Tensor], chunk_bytes: int
) -> Iterator[tuple[SnapshotManifest, PayloadStore]]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for flush in ("fsync", "fdatasync"):  # thousands of files, of which none must outlast a power cut
            patch.setattr(os, flush, lambda descriptor: None)
        store = PayloadStore(Path(folder))
        yield write_snapshot(store, "run", 7, weights_of(weights), chunk_bytes), store


@given(weights=WEIGHTS, chunk_bytes=st.integers(1, 64), buffer_bytes=st.integers(8, 40))
def test_opening_gives_the_same_bits(weights, chunk_bytes, buffer_bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, stored(weights, chunk_bytes) as (manifest, store):
        patch.setattr(snapshot, "BUFFER_BYTES", buffer_bytes)
        small = write_snapshot(store, "run", 7, weights_of(weights), chunk_bytes)
        assert small == manifest  # however often the buffers are filled
        check_manifest(manifest)
        assert manifest_from_bytes(manifest_to_bytes(manifest)) == manifest
        assert manifest.weights_digest == weights_digest(weights)
        found = open_snapshot(manifest, store)
        assert found.digest == manifest.weights_digest and set(found) == set(weights)
        for name, value in weights.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert torch.equal(found[name], value)
        read = load_file(store.path(full_payload(manifest).digest))
        assert all(torch.equal(read[name], value) for name, value in weights.items())


@given(weights=WEIGHTS, chunk_bytes=st.integers(1, 64), data=st.data())
def test_one_flipped_bit_is_always_refused(weights, chunk_bytes, data) -> None:
    with stored(weights, chunk_bytes) as (manifest, store):
        path = store.path(full_payload(manifest).digest)
        spoiled = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(spoiled) - 1))
        spoiled[place] ^= 1 << data.draw(st.integers(0, 7))
        path.unlink()
        path.write_bytes(spoiled)
        with pytest.raises(IntegrityError, match="version 7"):
            open_snapshot(manifest, store)
        with pytest.raises(IntegrityError, match=f"chunk {place // chunk_bytes} of version 7 was altered"):
            store.checked(manifest)


@given(weights=WEIGHTS, chunk_bytes=st.integers(1, 64), data=st.data())
def test_chunks_arrive_in_any_order_twice_or_altered_across_kills(weights, chunk_bytes, data) -> None:
    """Whatever comes: only the payload's own chunks stay, and the file becomes the one that was sent."""
    with stored(weights, chunk_bytes) as (manifest, origin), tempfile.TemporaryDirectory() as folder:
        payload = full_payload(manifest)
        store = PayloadStore(Path(folder))
        incoming = store.receive(payload)
        places = list(range(len(payload.chunk_digests)))
        for index in data.draw(st.lists(st.sampled_from(places), max_size=20)):
            chunk = origin.read_chunks(payload, range(index, index + 1))
            what = data.draw(st.sampled_from(["whole", "cut", "longer", "altered", "misplaced", "killed"]))
            if what == "killed":  # another process goes on; marks may say more than there is on the disk
                incoming = PayloadStore(Path(folder)).receive(payload)
            elif what == "whole":
                incoming.write(index, chunk)
                incoming.write(index, chunk)
                assert incoming.held[index]
            else:
                misplaced = (index + 1) % len(places)
                other = {
                    "cut": chunk[:-1],
                    "longer": chunk + b"x",
                    "altered": bytes([chunk[0] ^ 1]) + chunk[1:],
                    "misplaced": origin.read_chunks(payload, range(misplaced, misplaced + 1)),
                }[what]
                if other != chunk and not incoming.held[index]:
                    with pytest.raises(IntegrityError):
                        incoming.write(index, other)
                    assert not incoming.held[index]
        if missing := incoming.missing():
            with pytest.raises(UnavailableError, match="are missing"):
                incoming.finish()
        for index in reversed(missing):
            incoming.write(index, origin.read_chunks(payload, range(index, index + 1)))
        incoming.finish()
        assert store.path(payload.digest).read_bytes() == origin.path(payload.digest).read_bytes()
        assert open_snapshot(manifest, PayloadStore(Path(folder))).digest == manifest.weights_digest
        assert sorted(path.suffix for path in Path(folder).iterdir()) == [".payload"]


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


def _body(weights: dict[str, torch.Tensor], probe: Probe | None = None) -> bytes:
    with stored(weights, 24) as (manifest, _):
        return encode_manifest(dataclasses.replace(manifest, probe=probe))


PROBE = Probe((3, 0, 1), (-0.5, -1.25), "float32")
BODIES = [
    _body({"a": torch.arange(4.0)}),
    _body({"a": torch.arange(4.0)}, PROBE),
    _body({"layer.0.up": torch.zeros(3), "layer.0.down": torch.ones(2, 3)}),
]
CHANGES = [
    ({"full_bytes": 1 << 62}, "full_bytes"),
    ({"full_bytes": 1}, "end at byte"),
    ({"version": -1}, "version"),
    ({"weights_digest": "../x"}, "weights_digest"),
    ({"payloads": ()}, "0 payloads"),
    ({"tensor": {"name": "../../etc/passwd"}}, "not allowed"),
    ({"tensor": {"name": ""}}, "not allowed"),
    ({"tensor": {"name": "b"}}, "out of order or named twice"),
    ({"tensor": {"dtype": "qint32"}}, "dtype"),
    ({"tensor": {"shape": (1 << 40, 1 << 40)}}, "cannot have"),
    ({"tensor": {"shape": (-2, -2)}}, "impossible shape"),
    ({"tensor": {"offset": 4}}, "starts at byte 4 instead of 0"),
    ({"payload": {"payload_bytes": 1 << 62}}, "payload_bytes"),
    ({"payload": {"payload_bytes": 0}}, "payload_bytes"),
    ({"payload": {"payload_bytes": 8}}, "chunks instead of 1"),
    ({"payload": {"chunk_bytes": 1 << 30}}, "chunk_bytes"),
    ({"payload": {"chunk_bytes": 0}}, "chunk_bytes"),
    ({"payload": {"chunk_digests": ()}}, "has 0 chunks"),
    ({"payload": {"digest": "A" * 64}}, "digest of a payload"),
    ({"payload": {"digest": "a" * 64}}, "another digest than its chunks make"),
    ({"payload": {"kind": "half"}}, "of kind 'half'"),
    ({"payload": {"encoding": "pickle"}}, "'pickle'"),
    ({"payload": {"parent": 3}}, "has the parent 3"),
    ({"payload": {"kind": "patch", "encoding": "zstd", "parent": 7}}, "changes version 7"),
    ({"run_id": "another run"}, "bytes instead of"),
    ({"probe": {"tokens": (3, 0)}}, "2 tokens and 2 log-probabilities"),
    ({"probe": {"tokens": (), "logprobs": ()}}, "0 tokens"),
    ({"probe": {"tokens": (0,) * 2001, "logprobs": (0.0,) * 2000}}, "1024 at most"),
    ({"probe": {"tokens": (3, -1, 1)}}, "something else than tokens"),
    ({"probe": {"logprobs": (0.0, float("nan"))}}, "something else than tokens"),
    ({"probe": {"dtype": "int4"}}, "'int4'"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_manifest_that_contradicts_itself_is_refused_before_anything_is_opened(change, words) -> None:
    with stored({"a": torch.arange(4.0).reshape(2, 2), "b": torch.arange(3.0)}, 8) as (manifest, _):
        pass
    if "tensor" in change:
        entry = dataclasses.replace(manifest.tensors[0], **change["tensor"])
        change = {"tensors": (entry, *manifest.tensors[1:])}
    if "payload" in change:
        change = {"payloads": (dataclasses.replace(manifest.payloads[0], **change["payload"]),)}
    if "probe" in change:
        change = {"probe": dataclasses.replace(PROBE, **change["probe"])}
    with pytest.raises(IntegrityError, match=words):
        open_snapshot(dataclasses.replace(manifest, **change), cast("PayloadStore", None))


@given(data=st.data())
def test_only_the_canonical_encoding_is_a_manifest(data) -> None:
    """Cut, damaged and padded bytes are refused, or are the manifest that they say they are."""
    body = bytearray(data.draw(st.sampled_from(BODIES)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body)))
        cut = place + data.draw(st.integers(0, 4))
        body[place:cut] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b" ", b"-1", b"1.0", b"null", b"[]"])
        )
    try:
        found = decode_manifest(bytes(body))
    except IntegrityError:
        return
    assert encode_manifest(found) == body


@given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(-1e6, 0.0, width=32)), min_size=1, max_size=80),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_a_probe_goes_through_the_manifest_and_leaves_no_trace_where_there_is_none(pairs, dtype) -> None:
    manifest = decode_manifest(BODIES[0])
    assert manifest.probe is None and b"probe" not in BODIES[0]
    probe = Probe((0, *(token for token, _ in pairs)), tuple(logprob for _, logprob in pairs), dtype)
    signed = dataclasses.replace(manifest, probe=probe)
    check_manifest(signed)
    assert decode_manifest(encode_manifest(signed)) == signed
    assert encode_manifest(dataclasses.replace(signed, probe=None)) == BODIES[0]


def test_names_cannot_grow_beyond_their_limit_while_they_are_read() -> None:
    rows = [0, "a" * 400, 0, *(value for k in range(1, 1000) for value in (500 * k, "b" * 400, 0))]
    tree = {
        "bytes": 4,
        "digest": "0" * 64,
        "kinds": [["F32", [1]]],
        "payloads": [],
        "run": "r",
        "tensors": rows,
        "version": 0,
    }
    with pytest.raises(IntegrityError, match="too long a name"):
        decode_manifest(json.dumps(tree, separators=(",", ":")).encode())


def large_model() -> SnapshotManifest:
    """Return what a model of 140 GB is described by: 80 layers of a dense one, 25,000 experts' tensors."""
    shapes = {
        **{f"model.layers.{i}.self_attn.{x}_proj.weight": (8192, 8192) for i in range(80) for x in "qko"},
        **{
            f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight": (2048, 1088)
            for i in range(80)
            for e in range(104)
            for x in ("up", "gate", "down")
        },
    }
    entries = published_entries({name: (torch.bfloat16, shape) for name, shape in shapes.items()})
    full_bytes = entries[-1].offset + entries[-1].length
    payload_bytes = len(policy_header("run", 7, "0" * 64, entries)) + full_bytes
    chunk_bytes = auto_chunk_bytes(payload_bytes)
    digests = tuple(f"{i:064x}" for i in range(-(-payload_bytes // chunk_bytes)))
    address = payload_digest(payload_bytes, chunk_bytes, digests)
    payload = Payload("full", None, "raw", address, payload_bytes, chunk_bytes, digests)
    return SnapshotManifest("run", 7, "0" * 64, entries, full_bytes, (payload,), "host:1")


def test_the_manifest_of_a_model_of_140_gb_takes_a_megabyte() -> None:
    manifest = large_model()
    assert manifest.full_bytes > 140e9
    check_manifest(manifest)
    body = encode_manifest(manifest)
    assert len(body) <= 1_000_000 and decode_manifest(body, "host:1") == manifest
    assert encode_manifest(dataclasses.replace(manifest, origin="other:2")) is body  # encoded once
