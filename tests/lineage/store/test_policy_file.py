"""Policy files: the snapshot's tensors, bit for bit, in a file that safetensors reads."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.core.records import ChunkEntry, SnapshotManifest, TensorEntry
from antiphon.lineage.store.policy_file import encode_policy

TENSORS = {
    "model.norm": np.arange(5, dtype=np.float32),
    "lm_head": np.arange(12, dtype=np.float32).reshape(3, 4),
    "bias": np.zeros(0, dtype=np.float32),
}


def snapshot(chunk_bytes: int = 7) -> tuple[SnapshotManifest, dict[str, bytes]]:
    payload, entries, chunks, stored = b"", [], [], {}
    for name, tensor in TENSORS.items():
        body = tensor.tobytes()
        entries.append(TensorEntry(name, "float32", tensor.shape, len(payload), len(body)))
        payload += body
    for offset in range(0, len(payload), chunk_bytes):
        body = payload[offset : offset + chunk_bytes]
        stored[digest_bytes(body)] = body
        chunks.append(ChunkEntry(digest_bytes(body), offset, len(body)))
    digest = digest_bytes(payload)
    return SnapshotManifest("demo-1", 3, digest, tuple(entries), tuple(chunks), len(payload), "h:1"), stored


def test_safetensors_reads_the_same_tensors() -> None:
    manifest, chunks = snapshot()
    payload = encode_policy(manifest, chunks.__getitem__)
    back = load(payload)
    assert set(back) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert back[name].tobytes() == tensor.tobytes() and back[name].shape == tensor.shape
    assert encode_policy(manifest, chunks.__getitem__) == payload


def test_the_file_names_its_version(tmp_path: Path) -> None:
    manifest, chunks = snapshot()
    path = tmp_path / "v.safetensors"
    path.write_bytes(encode_policy(manifest, chunks.__getitem__))
    with safe_open(path, "np") as file:
        facts = json.loads(file.metadata()["antiphon"])
    assert facts == {"run": "demo-1", "version": 3, "weights_digest": manifest.weights_digest}


def test_how_it_was_cut_into_chunks_does_not_matter() -> None:
    manifest, chunks = snapshot(7)
    other, other_chunks = snapshot(64)
    assert encode_policy(manifest, chunks.__getitem__) == encode_policy(other, other_chunks.__getitem__)


def test_missing_bytes_and_unknown_dtypes_are_refused() -> None:
    manifest, chunks = snapshot()
    with pytest.raises(IntegrityError, match="manifest says"):
        encode_policy(replace(manifest, chunks=manifest.chunks[1:]), chunks.__getitem__)
    odd = replace(manifest.tensors[0], dtype="complex64")
    with pytest.raises(IntegrityError, match="complex64"):
        encode_policy(replace(manifest, tensors=(odd,)), chunks.__getitem__)
