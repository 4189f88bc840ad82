"""A worker comes to a version by the fewest bytes, and never to other weights than the manifest names."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from antiphon.api.manifest import full_payload
from antiphon.core.broadcast.patches import MOST_SHARE
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.services.rollout.snapshot_source import SnapshotSource
from antiphon.simulator.virtual.loop import VirtualLoop
from antiphon.weights.patch import encode_patch
from antiphon.weights.patch_payloads import PayloadChoice, stored_weights
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.snapshot import weights_digest
from antiphon.weights.transport import RelayTransport, Transport
from antiphon.weights.transports.object_store import object_name, object_place
from tests.support.adapted import adapted
from tests.support.small_changes import LADDER, publisher, weights, write
from tests.support.snapshots import FarService

VERSIONS = 8


class Copies(Transport):
    """Brings payloads out of another store, and counts what was asked for."""

    def __init__(self, origin: PayloadStore, store: PayloadStore) -> None:
        self._files, self._store = origin, store
        self._transport = RelayTransport(store, lambda address: [FarService(origin)], 30.0)
        self.away: set[str] = set()
        self.taken: list[tuple[int, int | None]] = []
        self.near = False

    async def link(self, manifest: SnapshotManifest, payload: Payload) -> bool:
        return self.near and self._store.adopt(payload, self._files.path(payload.digest))

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        if payload.digest in self.away:
            raise UnavailableError("nobody holds it")
        await self._transport.fetch(manifest, payload, arrived)
        self.taken.append((manifest.version, payload.parent))


class Fleet:
    """An origin with some versions, and one worker that reaches it."""

    def __init__(self, folder: Path, versions: int, choice: PayloadChoice = LADDER) -> None:
        self.origin, self.folder = PayloadStore(folder / "origin"), folder / "worker"
        made = publisher(self.origin, choice)
        self.manifests = []
        for version in range(versions):
            write(made, version)
            self.manifests.append(made.manifest(version, "origin:1"))
        self.start()

    def start(self) -> None:
        """Begin the worker, again over what it has."""
        self.store = PayloadStore(self.folder)
        self.transport = Copies(self.origin, self.store)
        self.source = SnapshotSource(self.store, RunConfig(), transport=self.transport)

    def fetch(
        self,
        manifest: SnapshotManifest,
        find: Callable[[int], Awaitable[SnapshotManifest | None]] | None = None,
    ) -> int:
        """Fetch a version, compare its weights bit by bit, and return the bytes that came."""
        before = self.source.bytes_fetched
        asyncio.run(self.source.fetch(manifest, *([] if find is None else [find])))
        opened, meant = self.source.open(manifest), weights(manifest.version)
        assert opened.keys() == meant.keys()
        assert all(torch.equal(opened[name], meant[name]) for name in meant)
        return self.source.bytes_fetched - before

    async def find(self, version: int) -> SnapshotManifest | None:
        return self.manifests[version]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, 6)


def forged(fleet: Fleet, version: int, parent: int, basis: int, wrong: bool) -> SnapshotManifest:
    """Return a manifest whose patch claims a parent, but was made over another, or makes other bytes."""
    manifest = fleet.manifests[version]
    new, old = (stored_weights(fleet.origin, fleet.manifests[v]) for v in (version, basis))
    data = bytearray(new.data)
    if wrong:
        data[1000] ^= 1
    out = fleet.origin.make(1 << 15)
    digests = {"parent_digest": old.weights_digest, "result_digest": new.weights_digest}
    encode_patch(old.data, data, manifest.tensors, out.write, **digests)
    patch = out.finish(kind="patch", parent=parent, encoding="zstd")
    return dataclasses.replace(manifest, payloads=(manifest.payloads[0], patch))


def test_the_next_version_comes_as_a_patch_and_is_served_whole(fleet: Fleet) -> None:
    full = fleet.fetch(fleet.manifests[0])
    assert full == full_payload(fleet.manifests[0]).payload_bytes
    assert fleet.fetch(fleet.manifests[1]) < full / 20
    assert fleet.store.checked(fleet.manifests[1]).stat().st_size == full
    fleet.source.prune(fleet.manifests[1:2])
    assert {path.stem for path in fleet.folder.glob("*.payload")} <= {
        payload.digest for payload in fleet.manifests[1].payloads
    }


def test_a_late_worker_takes_one_rung_also_after_a_restart(fleet: Fleet) -> None:
    fleet.fetch(fleet.manifests[1])
    fleet.start()
    assert fleet.fetch(fleet.manifests[5]) < 5_000
    assert fleet.transport.taken == [(5, 1)]


def test_manifests_between_make_a_chain(fleet: Fleet) -> None:
    fleet.fetch(fleet.manifests[0])
    assert fleet.fetch(fleet.manifests[5], fleet.find) < 10_000
    assert fleet.transport.taken[1:] == [(1, 0), (5, 1)]


def test_on_the_holders_own_machine_no_patch_is_taken(fleet: Fleet) -> None:
    fleet.fetch(fleet.manifests[0])
    fleet.transport.near = True
    fleet.fetch(fleet.manifests[1])
    assert fleet.transport.taken == [(0, None)]


@pytest.mark.parametrize(
    ("basis", "wrong", "reason"), [(0, False, "is held; choose"), (1, True, "instead of")]
)
def test_a_patch_that_is_not_what_it_says_is_named_and_the_full_payload_taken(
    fleet: Fleet, basis: int, wrong: bool, reason: str
) -> None:
    manifest = forged(fleet, version=2, parent=1, basis=basis, wrong=wrong)
    fleet.fetch(fleet.manifests[1])
    with capture_logs() as logs:
        fleet.fetch(manifest)
    (said,) = logs
    assert (said["event"], said["payload"]) == ("payload.refused", manifest.payloads[1].digest)
    assert reason in said["reason"]
    assert [parent for _, parent in fleet.transport.taken[1:]] == [1, None]
    fleet.store.drop(full_payload(manifest).digest)
    fleet.fetch(manifest)
    assert [parent for _, parent in fleet.transport.taken[3:]] == [None]  # not asked for again


def test_a_parent_that_was_altered_is_dropped_and_the_patch_is_not_blamed(fleet: Fleet) -> None:
    fleet.fetch(fleet.manifests[1])
    path = fleet.store.path(full_payload(fleet.manifests[1]).digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    with capture_logs() as logs:
        fleet.fetch(fleet.manifests[2])
    assert [entry["event"] for entry in logs] == ["snapshot.damaged"] and not path.exists()
    assert not fleet.source._refused


@pytest.mark.parametrize("length", [0, 1000])
@pytest.mark.parametrize("version", [1, 2])
def test_a_file_that_was_cut_short_is_dropped_and_the_full_payload_taken(
    fleet: Fleet, length: int, version: int
) -> None:
    """Be it the parent's, or that of the very version which is wanted."""
    full = fleet.fetch(fleet.manifests[1])
    path = fleet.store.path(full_payload(fleet.manifests[1]).digest)
    path.unlink()
    path.write_bytes(bytes(length))
    fleet.start()
    with capture_logs() as logs:
        assert fleet.fetch(fleet.manifests[version]) == full
    assert [entry["event"] for entry in logs] == ["snapshot.damaged"]
    assert path.exists() == (version == 1) and not fleet.source._refused


def test_a_patch_that_nobody_holds_is_left_aside(fleet: Fleet) -> None:
    fleet.fetch(fleet.manifests[1])
    fleet.transport.away = {payload.digest for payload in fleet.manifests[2].payloads if payload.parent == 1}
    fleet.fetch(fleet.manifests[2])
    assert fleet.transport.taken[1:] == [(2, None)]


def test_a_new_worker_takes_the_compressed_full_payload(tmp_path: Path) -> None:
    choice = PayloadChoice(ladder=(1,), most_share=MOST_SHARE, compress_full=True, threads=1)
    fleet = Fleet(tmp_path, 1, choice)
    assert fleet.fetch(fleet.manifests[0]) == fleet.manifests[0].payloads[1].payload_bytes


def test_patches_come_over_grpc(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, 2)
        service: BroadcastService = FarService(fleet.origin)
        server, port = await start_server(
            "127.0.0.1", 0, lambda s: register_broadcast(s, service), [SERVICE_NAME]
        )
        source = SnapshotSource(PayloadStore(tmp_path / "other"), RunConfig())
        for manifest in fleet.manifests:
            before = source.bytes_fetched
            await source.fetch(dataclasses.replace(manifest, origin=f"127.0.0.1:{port}"))
            assert torch.equal(source.open(manifest)["matrix"], weights(manifest.version)["matrix"])
        assert source.bytes_fetched - before == fleet.manifests[1].payloads[1].payload_bytes
        await stop_server(server)

    asyncio.run(story())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("shared"), VERSIONS)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_whatever_is_held_the_weights_come_and_never_by_more_than_a_direct_way(shared: Fleet, data) -> None:
    target = data.draw(st.integers(1, VERSIONS - 1))
    held = data.draw(st.sets(st.integers(0, VERSIONS - 1), max_size=3))
    shared.source.prune([])
    for version in sorted(held):
        shared.fetch(shared.manifests[version])
    manifest = shared.manifests[target]
    if target in held:
        direct = 0
    else:
        parents = {None, *held}
        direct = min(p.payload_bytes for p in manifest.payloads if p.parent in parents)
    asks = data.draw(st.booleans())
    assert shared.fetch(manifest, shared.find if asks else None) <= direct


def test_a_patch_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    fleet, folder = Fleet(tmp_path, 2), tmp_path / "shared"
    folder.mkdir()
    place = object_place(str(folder), None)
    for manifest in fleet.manifests:
        name = object_name(manifest.run_id, full_payload(manifest).digest)
        place.put(name, fleet.origin.path(full_payload(manifest).digest))
    section = {"object_store": str(folder), "object_store_first": True, "transfer_timeout_s": 600.0}
    fleet.source = SnapshotSource(fleet.store, build_config({"broadcast": section}))
    loop = VirtualLoop(lambda: (0.0, 0.0), 1e6)  # type: ignore[abstract]

    async def body() -> None:
        await fleet.source.fetch(fleet.manifests[0])
        target = fleet.manifests[1]
        assert [payload for payload in target.payloads if payload.kind == "patch"]
        before_s, before = loop.time(), fleet.source.bytes_fetched
        await fleet.source.fetch(target)
        assert fleet.source.bytes_fetched - before == full_payload(target).payload_bytes
        assert loop.time() - before_s < 1.0
        transport = fleet.source._transport
        with pytest.raises(UnavailableError, match=r"holds no patch of version 1 .*; another payload"):
            patch = next(payload for payload in target.payloads if payload.kind == "patch")
            await transport.fetch(target, patch, lambda length: None)

    loop.run(body())
    assert fleet.store.has(full_payload(fleet.manifests[1]).digest)


def test_a_snapshot_that_does_not_come_is_given_up_well_before_the_worker_is(tmp_path: Path) -> None:
    fleet, folder = Fleet(tmp_path, 1), tmp_path / "shared"
    folder.mkdir()
    section = {"object_store": str(folder), "object_store_first": True, "transfer_timeout_s": 600.0}
    fleet.source = SnapshotSource(fleet.store, build_config({"broadcast": section}))
    loop = VirtualLoop(lambda: (0.0, 0.0), 1e6)  # type: ignore[abstract]

    async def body() -> None:
        before_s = loop.time()
        with pytest.raises(UnavailableError, match="got no payload of version 0 for 30 s"):
            await fleet.source.fetch(fleet.manifests[0])
        assert loop.time() - before_s < RunConfig().services.stall_timeout_s / 5

    loop.run(body())


def test_a_late_worker_takes_a_whole_version_where_nobody_holds_the_base(tmp_path: Path) -> None:
    made, manifests = publisher(PayloadStore(tmp_path / "origin")), []
    for version in range(2):
        made.write(version, adapted(version, torch.bfloat16), lambda length: None)
        manifests.append(made.manifest(version, "origin:1"))
    store = PayloadStore(tmp_path / "worker")
    transport = Copies(PayloadStore(tmp_path / "origin"), store)
    transport.away = {full_payload(manifests[0]).digest}
    source = SnapshotSource(store, RunConfig(), transport=transport)

    async def find(version: int) -> SnapshotManifest | None:
        return manifests[version]

    with capture_logs() as logs:
        asyncio.run(source.fetch(manifests[1], find))
    assert transport.taken == [(1, None)] and [said["version"] for said in logs] == [0]
    assert weights_digest(source.open(manifests[1])) == manifests[1].weights_digest


def test_a_late_worker_takes_the_base_once_and_then_adapters_alone(tmp_path: Path) -> None:
    origin, store = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "worker")
    made, manifests = publisher(origin), []
    for version in range(5):
        made.write(version, adapted(version, torch.bfloat16), lambda length: None)
        manifests.append(made.manifest(version, "origin:1"))
    transport = Copies(origin, store)
    source = SnapshotSource(store, RunConfig(), transport=transport)

    async def find(version: int) -> SnapshotManifest | None:
        return manifests[version]

    for version in (2, 3, 4):
        asyncio.run(source.fetch(manifests[version], find))
        assert weights_digest(source.open(manifests[version])) == manifests[version].weights_digest
        source.prune([manifests[version]])
    assert transport.taken == [(0, None), (2, 0), (3, 0), (4, 0)]
    assert store.versions() == [0, 4]
    # Where the base cannot be had, whole versions come.
    bare = SnapshotSource(PayloadStore(tmp_path / "bare"), RunConfig(), transport=None)
    bare._transport = alone = Copies(origin, bare._store)
    asyncio.run(bare.fetch(manifests[4]))
    assert alone.taken == [(4, None)]
