"""Patches of a version are made once, before it is announced, and a version never fails for want of them."""

import os
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from antiphon.api.manifest import check_manifest
from antiphon.core.broadcast.config import BroadcastSection
from antiphon.core.broadcast.patches import MOST_SHARE
from antiphon.core.errors import BlockedError, UnavailableError
from antiphon.net.security.keys import signing_key
from antiphon.services.learner.publish import SnapshotPublisher, payload_choice
from antiphon.system.free_space import SpaceFloor
from antiphon.weights.patch_payloads import PayloadChoice
from antiphon.weights.payload_store import OutgoingPayload, PayloadStore
from antiphon.weights.signature import check_signature
from antiphon.weights.snapshot import weights_of
from tests.support.small_changes import LADDER, publisher, write


def test_patches_are_made_where_workers_may_be_elsewhere() -> None:
    auto = BroadcastSection()
    assert payload_choice(auto, remote=False, busy_threads=1) is None
    made = payload_choice(auto, remote=True, busy_threads=1)
    assert made is not None and made.most_share == MOST_SHARE and made.ladder == (1, 2, 4, 8)
    forced = payload_choice(BroadcastSection(patches="on"), remote=False, busy_threads=10_000)
    assert forced is not None and (forced.most_share, forced.threads) == (1.0, 1)
    assert payload_choice(BroadcastSection(patches="off", compress_full=True), True, 1) is None


def test_each_rung_that_is_stored_begins_a_patch(tmp_path: Path) -> None:
    store, key = PayloadStore(tmp_path), signing_key(bytes(32))
    made = SnapshotPublisher("run", store, None, 4, key, choice=LADDER)
    parents = {}
    for version in range(6):
        write(made, version)
        manifest = made.manifest(version, "host:1")
        check_manifest(manifest)
        check_signature(manifest, key.public)
        parents[version] = [payload.parent for payload in manifest.payloads]
        assert all(payload.payload_bytes < 5_000 for payload in manifest.payloads[1:])
        assert made.manifest(version, "host:2").payloads == manifest.payloads  # not made a second time
    assert parents == {
        0: [None],
        1: [None, 0],
        2: [None, 1, 0],
        3: [None, 2, 1],
        4: [None, 3, 2, 0],  # the longest rung's parent goes only now
        5: [None, 4, 3, 1],
    }
    assert store.versions() == [2, 3, 4, 5]
    wanted = {payload.digest for v in store.versions() for payload in store.manifest(v).payloads}
    assert {path.stem for path in tmp_path.glob("*.payload")} == wanted


def test_a_learner_killed_before_it_listed_its_patches_makes_the_same_again(tmp_path: Path) -> None:
    made = publisher(PayloadStore(tmp_path))
    for version in range(2):
        write(made, version)
        manifest = made.manifest(version, "host:1")
    for payload in PayloadStore(tmp_path).manifest(1).payloads[1:]:
        assert (tmp_path / f"{payload.digest}.payload").exists()
    write(made, 1)  # as it was before the patches were listed
    again = PayloadStore(tmp_path)
    again.remove_leftovers()
    assert publisher(again).manifest(1, "host:1") == manifest


def test_weights_that_change_everywhere_have_no_patches_and_that_is_said_once(tmp_path: Path) -> None:
    made = publisher(PayloadStore(tmp_path))
    with capture_logs() as logs:
        for version in range(3):
            tensors = {"w": torch.randn(5_000, generator=torch.Generator().manual_seed(version))}
            made.write(version, weights_of(tensors), lambda length: None)
            assert len(made.manifest(version, "host:1").payloads) == 1
    assert [entry["event"] for entry in logs] == ["patches.left_out"]


def test_without_space_the_version_is_announced_without_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 40]
    space = SpaceFloor(tmp_path, 1 << 20, lambda folder: free[0])
    made = SnapshotPublisher("run", PayloadStore(tmp_path), None, 8, space=space, choice=LADDER)
    for version in range(3):
        write(made, version)
    assert len(made.manifest(0, "host:1").payloads) == 1
    free[0] = 0
    with capture_logs() as logs:
        assert len(made.manifest(1, "host:1").payloads) == 1
    assert logs[0]["event"] == "patches.unmade" and "waiting for space" in logs[0]["reason"]
    free[0] = 1 << 40

    def full(self: OutgoingPayload, data: object) -> None:
        raise UnavailableError("no space left")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(OutgoingPayload, "write", full)
        assert len(made.manifest(2, "host:1").payloads) == 1
    assert logs[0]["reason"] == "no space left"
    assert len(list(tmp_path.glob("*.payload"))) == 3
    assert len(made.manifest(2, "host:1").payloads) == 3


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.payload"))


def test_patches_leave_the_space_that_the_next_version_needs(tmp_path: Path) -> None:
    """There is space for two versions above the floor, and for one patch."""
    key, floor = signing_key(bytes(32)), 1 << 20
    store = PayloadStore(tmp_path)
    for version in range(2):
        write(publisher(store), version)
    before = used(tmp_path)
    publisher(store).manifest(1, "host:1")
    patch = used(tmp_path) - before
    disk = used(tmp_path) + before // 2 + patch * 3 // 2 + floor
    space = SpaceFloor(tmp_path, floor, lambda folder: disk - used(folder))
    made = SnapshotPublisher("run", store, None, 8, key, space, LADDER)
    write(made, 2)
    with capture_logs() as logs:
        assert [payload.parent for payload in made.manifest(2, "host:1").payloads] == [None, 1]
    assert [entry["event"] for entry in logs] == ["patches.unmade", "patches.made"]
    assert disk - used(tmp_path) >= floor
    write(made, 3)


def test_patches_go_oldest_first_where_the_next_version_would_wait(tmp_path: Path) -> None:
    free, key = 1 << 40, signing_key(bytes(32))
    store = PayloadStore(tmp_path)
    full = SnapshotPublisher("run", store, None, 8, key, choice=LADDER)
    for version in range(3):
        write(full, version)
        full.manifest(version, "host:1")
    first, second = (
        sum(payload.payload_bytes for payload in store.manifest(version).payloads[1:]) for version in (1, 2)
    )
    start = used(tmp_path)
    space = SpaceFloor(tmp_path, 1 << 20, lambda folder: free + start - used(folder))
    made = SnapshotPublisher("run", store, None, 8, key, space, LADDER)
    free = (1 << 20) - first
    write(made, 3)
    assert [len(store.manifest(version).payloads) for version in range(4)] == [1, 1, 3, 1]
    for version in range(4):
        check_manifest(store.manifest(version))
        check_signature(store.manifest(version), key.public)
    free = (1 << 20) - 1 - second + used(tmp_path) - start
    with pytest.raises(BlockedError):
        write(made, 4)
    assert len(list(tmp_path.glob("*.payload"))) == 4  # nothing but the versions themselves is left
    assert store.versions() == [0, 1, 2, 3]


def test_a_parent_whose_file_was_cut_short_begins_no_patch(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    made = publisher(store)
    for version in range(3):
        write(made, version)
    path = store.path(store.manifest(1).payloads[0].digest)
    path.chmod(0o644)
    os.truncate(path, 1000)
    assert [payload.parent for payload in made.manifest(2, "host:1").payloads] == [None, 0]


def test_a_full_payload_is_compressed_where_that_is_asked_for(tmp_path: Path) -> None:
    choice = PayloadChoice(ladder=(), most_share=MOST_SHARE, compress_full=True, threads=1)
    made = publisher(PayloadStore(tmp_path), choice)
    write(made, 0)
    raw, packed = made.manifest(0, "host:1").payloads
    assert (packed.kind, packed.encoding) == ("full", "zstd")
    assert packed.payload_bytes < 0.8 * raw.payload_bytes


def test_a_disk_that_fills_up_at_the_second_patch_leaves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = publisher(PayloadStore(tmp_path))
    for version in range(3):
        write(made, version)
    finish, finished = OutgoingPayload.finish, list[object]()

    def finish_one(self: OutgoingPayload, **options: object) -> object:
        if finished:
            raise UnavailableError("no space left")
        finished.append(finish(self, **options))  # type: ignore[arg-type]
        return finished[0]

    monkeypatch.setattr(OutgoingPayload, "finish", finish_one)
    assert [payload.parent for payload in made.manifest(2, "host:1").payloads] == [None, 1]
    assert len(list(tmp_path.glob("*.payload"))) == 4 and not list(tmp_path.glob(".*"))
