"""An adapter merges to the same bits everywhere, and only into the weights that it names."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.api.manifest import check_manifest, decode_manifest, encode_manifest, full_payload
from antiphon.core.errors import IntegrityError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.services.learner.publish import SnapshotPublisher
from antiphon.weights.adapter import as_bytes, as_float32, merge_into, merged_weights
from antiphon.weights.patch_payloads import restore_full, stored_weights
from antiphon.weights.payload_store import PayloadStore
from tests.support.adapted import MODULE, adapted, base_tensors, pair


@given(
    st.integers(1, 150), st.integers(1, 40), st.integers(1, 5), st.sampled_from([0.5, 1 / 3, 2.0]), st.data()
)
def test_numpy_and_torch_merge_to_the_same_bits_with_any_threads_and_rows(
    height: int, width: int, rank: int, scale: float, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weight, down, up = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((height, width), (rank, width), (height, rank))
    )
    wanted = weight.copy()
    merge_into(wanted, down, up, scale)
    near = weight + scale * up.astype(np.float64) @ down
    assert np.abs(wanted - near).max() <= 1e-5 * (1 + np.abs(near).max())
    before = torch.get_num_threads()
    try:
        for threads, rows in ((1, 64), (2, 7), (2, 1000)):
            torch.set_num_threads(threads)
            merged = torch.from_numpy(weight.copy())
            merge_into(merged, torch.from_numpy(down), torch.from_numpy(up), scale, rows)
            assert merged.numpy().tobytes() == wanted.tobytes()
    finally:
        torch.set_num_threads(before)


def test_an_adapter_of_zeros_leaves_every_bit_the_sign_of_zero_too() -> None:
    weight = np.array([[-0.0, 0.0, 1.5], [-1e-45, 3.0, -0.0]], dtype=np.float32)
    merged = weight.copy()
    merge_into(merged, np.array([[1.0, -2.0, 0.5]], np.float32), np.zeros((2, 1), np.float32), 2.0)
    assert merged.tobytes() == weight.tobytes()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_is_rounded_as_torch_does_it(numbers: list[float]) -> None:
    values = np.array(numbers, dtype=np.float32)
    rounded = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert bytes(as_bytes(values, "bfloat16")) == rounded.view(torch.uint8).numpy().tobytes()
    back = as_float32(rounded.view(torch.uint8).numpy().tobytes(), "bfloat16")
    assert back.tobytes() == rounded.float().numpy().tobytes()


def published(folder: Path, dtype: torch.dtype) -> tuple[PayloadStore, SnapshotManifest]:
    """Return a store with the base and versions 1 to 3, two of them kept, and the last one's manifest."""
    store = PayloadStore(folder)
    made = SnapshotPublisher("run", store, None, 2)
    for version in range(4):
        made.write(version, adapted(version, dtype), lambda length: None)
        made.manifest(version, "origin:1")
    return store, store.manifest(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_file_that_a_worker_merges_is_the_learners_to_the_last_byte(
    tmp_path: Path, dtype: torch.dtype, threads: int
) -> None:
    store, manifest = published(tmp_path, dtype)
    check_manifest(manifest)
    assert decode_manifest(encode_manifest(manifest), manifest.origin) == manifest
    assert store.versions() == [0, 2, 3]  # the base stays for as long as others are made of it
    full, adapter = manifest.payloads
    assert (adapter.kind, adapter.encoding, adapter.parent) == ("patch", "lora", 0)
    assert adapter.payload_bytes < full.payload_bytes / 4
    original = store.path(full.digest).read_bytes()
    os.unlink(store.path(full.digest))
    restore_full(store, manifest, adapter, store.manifest(0), threads)
    assert store.path(full.digest).read_bytes() == original


def test_peft_reads_the_payload_and_finds_the_pairs(tmp_path: Path) -> None:
    from peft.utils.save_and_load import load_peft_weights

    store, manifest = published(tmp_path / "store", torch.float32)
    (tmp_path / "adapter_model.safetensors").write_bytes(store.path(manifest.payloads[1].digest).read_bytes())
    found = load_peft_weights(str(tmp_path), device="cpu")
    down, up = pair(3)
    assert torch.equal(found[f"base_model.model.{MODULE}.lora_A.weight"], down)
    assert torch.equal(found[f"base_model.model.{MODULE}.lora_B.weight"], up)


def test_an_adapter_of_other_weights_or_tensors_is_refused_before_a_byte_is_merged(tmp_path: Path) -> None:
    store, manifest = published(tmp_path, torch.float32)
    base, adapter = stored_weights(store, store.manifest(0)), manifest.payloads[1]
    file = store.path(adapter.digest).read_bytes()

    def refused(
        data: bytes, digest: str = base.weights_digest, of: SnapshotManifest = manifest
    ) -> pytest.ExceptionInfo[IntegrityError]:
        with pytest.raises(IntegrityError) as info:
            next(merged_weights(base.data, digest, data, of, 1))
        return info

    assert "is wanted, of" in str(refused(file, "0" * 64).value)
    other = dataclasses.replace(manifest, weights_digest="1" * 64)
    assert "is wanted, of" in str(refused(file, of=other).value)
    narrow = tuple(
        dataclasses.replace(one, shape=(one.shape[0] // 2, one.shape[1] * 2))
        if one.name.startswith(MODULE)
        else one
        for one in manifest.tensors
    )
    assert "does not fit" in str(refused(file, of=dataclasses.replace(manifest, tensors=narrow)).value)
    size = int.from_bytes(file[:8], "little")
    tree = json.loads(file[8 : 8 + size])
    down, up = (f"base_model.model.{MODULE}.lora_{letter}.weight" for letter in "AB")
    for changed in (
        {**tree, "__metadata__": {}},
        {**tree, down: {**tree[down], "data_offsets": [0, 1 << 40]}},
        {**tree, down: {**tree[down], "dtype": "I64"}},
        {**tree, "stranger": tree[down]},
        {name: entry for name, entry in tree.items() if name != up},
    ):
        text = json.dumps(changed).encode()
        refused(len(text).to_bytes(8, "little") + text + file[8 + size :])
    refused(file[: 8 + size])
    refused(b"")


def test_a_manifest_whose_adapter_changes_nothing_is_not_sound(tmp_path: Path) -> None:
    _, manifest = published(tmp_path, torch.float32)
    full, adapter = manifest.payloads

    def unsound(payload: Payload) -> None:
        with pytest.raises(IntegrityError, match="is not sound"):
            check_manifest(dataclasses.replace(manifest, payloads=(full, payload)))

    unsound(dataclasses.replace(adapter, parent=None))
    unsound(dataclasses.replace(adapter, parent=3))
    unsound(dataclasses.replace(adapter, kind="full", parent=None))
    assert full == full_payload(manifest)


def test_the_base_has_no_adapter_and_holds_its_own_bits(tmp_path: Path) -> None:
    store, _ = published(tmp_path, torch.float32)
    base = store.manifest(0)
    assert [payload.encoding for payload in base.payloads] == ["raw"]
    wanted = base_tensors(torch.float32)[f"{MODULE}.weight"]
    assert wanted.numpy().tobytes() in bytes(stored_weights(store, base).data)
