"""Payloads through an object store: a real S3 server, a shared folder, and an origin that does not answer."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.api.manifest import full_payload
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.lineage.store.remote_place import RemotePlace
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.runs.servers.s3_server import S3Server
from antiphon.services.rollout.snapshot_source import (
    OriginOrObjectStore,
    SnapshotSource,
    configured_transport,
)
from antiphon.weights.origin import OriginOrder, serving_origin
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.transport import Connections, RelayTransport
from antiphon.weights.transports import object_store
from antiphon.weights.transports.object_store import (
    SPAN_BYTES,
    ObjectStoreMirror,
    ObjectStoreTransport,
    object_name,
    object_place,
)
from tests.support.s3 import remote_objects, s3_server
from tests.support.snapshots import publish

CHUNK_BYTES = 1024
LIMIT_S = 120.0
RUN = "demo-1"
NOWHERE = "127.0.0.1:9"
"""Nothing listens there."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.fixture(autouse=True)
def quick_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "SPAN_BYTES", 4 * CHUNK_BYTES)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


def make(store: PayloadStore, version: int, origin: str = NOWHERE) -> SnapshotManifest:
    tensors = {"a": torch.full((9000,), float(version)), "b": torch.arange(300, dtype=torch.float32)}
    return publish(store, tensors, version, chunk_bytes=CHUNK_BYTES, origin=origin)


def bucket(server: S3Server, prefix: str) -> RemotePlace:
    return object_place(f"s3://{server.bucket}/{prefix}", server.endpoint_url)


def shared(folder: Path) -> RemotePlace:
    folder.mkdir(exist_ok=True)
    return object_place(str(folder), None)


def copy_all(store: PayloadStore, place: RemotePlace, run_id: str) -> None:
    mirror = ObjectStoreMirror(store, place, run_id)
    while mirror.copy_next():
        pass


class Watched(RemotePlace):
    """A place that counts what is read, and may fail."""

    def __init__(self, folder: Path, reads: int = 1 << 30) -> None:
        super().__init__(str(folder), None, "broadcast.object_store", "broadcast.object_endpoint")
        self.left, self.bytes_read = reads, 0

    def read(self, name: str, start: int, end: int) -> bytes:
        if not self.left:
            raise UnavailableError("the place went away")
        self.left -= 1
        self.bytes_read += end - start
        return super().read(name, start, end)


def test_a_worker_waits_for_what_is_still_uploaded_to_a_real_bucket(server: S3Server, tmp_path: Path) -> None:
    origin, here = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "here")
    manifest = make(origin, 1)
    payload = full_payload(manifest)
    mirror = ObjectStoreMirror(origin, bucket(server, "waits"), manifest.run_id)
    asked, arrived = asyncio.Event(), []

    class Asked(RemotePlace):
        def size(self, name: str) -> int | None:
            loop.call_soon_threadsafe(asked.set)
            return super().size(name)

    place = Asked(f"s3://{server.bucket}/waits", server.endpoint_url, "a", "b")

    async def body() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        transport = ObjectStoreTransport(here, place, LIMIT_S)
        fetching = asyncio.create_task(transport.fetch(manifest, payload, arrived.append))
        await asked.wait()
        mirror.start()
        await fetching
        await transport.close()

    loop: Any = None
    try:
        run(body)
    finally:
        mirror.stop()
    assert here.checked(manifest).read_bytes() == origin.checked(manifest).read_bytes()
    assert sum(arrived) == payload.payload_bytes
    assert remote_objects(server, "waits/") == [f"waits/{object_name(manifest.run_id, payload.digest)}"]


def test_large_payloads_go_up_in_parts_no_faster_than_the_cap(server: S3Server, tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    manifest = publish(store, {"a": torch.rand(5_000_000)}, 1, chunk_bytes=1 << 20)
    paced: list[int] = []
    mirror = ObjectStoreMirror(store, bucket(server, "parts"), RUN, paced.append)
    assert mirror.copy_next()
    assert sum(paced) == full_payload(manifest).payload_bytes
    assert len([length for length in paced if length]) > 1
    name = object_name(RUN, full_payload(manifest).digest)
    stored = bucket(server, "parts").read(name, 0, full_payload(manifest).payload_bytes)
    assert stored == store.checked(manifest).read_bytes()


def test_what_the_origin_drops_leaves_the_bucket_and_other_runs_stay(
    server: S3Server, tmp_path: Path
) -> None:
    place, other = bucket(server, "prune"), PayloadStore(tmp_path / "other")
    make(other, 9)
    copy_all(other, place, "other-1")
    store = PayloadStore(tmp_path / "store")
    manifests = [make(store, version) for version in range(3)]
    copy_all(store, place, RUN)
    store.prune_announced(2, 1)
    copy_all(store, place, RUN)
    assert list(place.sizes(RUN)) == [object_name(RUN, full_payload(manifests[2]).digest)]
    assert len(place.sizes("other-1")) == 1
    assert place.sizes("never-was") == {}


def test_the_newest_version_is_uploaded_first(tmp_path: Path) -> None:
    store, place = PayloadStore(tmp_path / "store"), shared(tmp_path / "shared")
    manifests = [make(store, version) for version in range(2)]
    mirror = ObjectStoreMirror(store, place, RUN)
    assert mirror.copy_next()
    assert list(place.sizes(RUN)) == [object_name(RUN, full_payload(manifests[1]).digest)]
    assert mirror.copy_next()
    assert not mirror.copy_next()


@settings(max_examples=12)
@given(st.data())
def test_a_transfer_that_breaks_anywhere_reads_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("break")
    origin, here, place = PayloadStore(folder / "origin"), PayloadStore(folder / "here"), folder / "shared"
    manifest = make(origin, 1)
    payload = full_payload(manifest)
    copy_all(origin, shared(place), manifest.run_id)
    source = origin.checked(manifest).read_bytes()
    before = data.draw(st.sets(st.integers(0, len(payload.chunk_digests) - 1)))
    held = 0
    for index in before:
        start, length = payload.span(index)
        here.receive(payload).write(index, source[start : start + length])
        held += length
    watched = Watched(place, data.draw(st.integers(0, 12)))
    arrived: list[int] = []

    async def body() -> None:
        transport = ObjectStoreTransport(here, watched, LIMIT_S)
        try:
            await transport.fetch(manifest, payload, arrived.append)
        except UnavailableError as error:
            assert "went away" in str(error)
            watched.left = 1 << 30
            # The object stays as it is while what it has given is kept.
            again = ObjectStoreTransport(PayloadStore(here.root), watched, LIMIT_S)
            await again.fetch(manifest, payload, arrived.append)
            await again.close()
        await transport.close()

    run(body)
    assert here.checked(manifest).read_bytes() == source
    assert watched.bytes_read == payload.payload_bytes - held


@given(st.sets(st.integers(0, 400)), st.sampled_from([1 << 10, 1 << 20, 16 << 20]))
def test_spans_are_the_missing_chunks_in_order_and_lie_together(chosen: set[int], chunk_bytes: int) -> None:
    payload = Payload("full", None, "raw", "", 401 * chunk_bytes, chunk_bytes, ("",) * 401)
    missing = sorted(chosen)
    spans = [list(span) for span in object_store._spans(payload, missing)]
    assert [index for span in spans for index in span] == missing
    for span in spans:
        assert span == list(range(span[0], span[-1] + 1))
        assert len(span) == 1 or len(span) * chunk_bytes <= SPAN_BYTES


def fetch(store: PayloadStore, place: RemotePlace, manifest: SnapshotManifest, timeout_s: float) -> None:
    async def body() -> None:
        transport = ObjectStoreTransport(store, place, timeout_s)
        try:
            await transport.fetch(manifest, full_payload(manifest), lambda length: None)
        finally:
            await transport.close()

    run(body)


def test_wrong_bytes_are_named_by_their_chunk_and_the_rest_is_kept(server: S3Server, tmp_path: Path) -> None:
    origin, here, place = PayloadStore(tmp_path / "o"), PayloadStore(tmp_path / "h"), bucket(server, "wrong")
    manifest = make(origin, 7)
    payload = full_payload(manifest)
    false = bytearray(origin.checked(manifest).read_bytes())
    false[5 * CHUNK_BYTES] ^= 1
    (tmp_path / "false").write_bytes(false)
    place.put(object_name(manifest.run_id, payload.digest), tmp_path / "false")
    with pytest.raises(IntegrityError, match=r"chunk 5 of version 7 from s3://.*was altered.*not kept"):
        fetch(here, place, manifest, LIMIT_S)
    assert here.receive(payload).missing() == [5]
    place.remove(object_name(manifest.run_id, payload.digest))
    copy_all(origin, place, manifest.run_id)
    fetch(here, place, manifest, LIMIT_S)
    assert here.has(payload.digest)


def test_an_object_of_another_size_is_not_read_and_is_replaced(tmp_path: Path) -> None:
    origin, here, place = PayloadStore(tmp_path / "o"), PayloadStore(tmp_path / "h"), shared(tmp_path / "s")
    manifest = make(origin, 7)
    name = object_name(manifest.run_id, full_payload(manifest).digest)
    (tmp_path / "short").write_bytes(origin.checked(manifest).read_bytes()[:2000])
    place.put(name, tmp_path / "short")
    with pytest.raises(IntegrityError, match=r"has 2000 bytes instead of .*so chunk 1 of version 7 is wrong"):
        fetch(here, place, manifest, LIMIT_S)
    copy_all(origin, place, manifest.run_id)
    fetch(here, place, manifest, LIMIT_S)


def test_what_never_comes_is_given_up_with_a_reason(tmp_path: Path) -> None:
    manifest = make(PayloadStore(tmp_path / "origin"), 3)
    with pytest.raises(UnavailableError, match=r"got no payload of version 3 for 0\.05 s; see the log"):
        fetch(PayloadStore(tmp_path / "here"), shared(tmp_path / "shared"), manifest, 0.05)


@pytest.mark.parametrize(
    ("change", "bucket_name", "endpoint", "error", "said"),
    [
        ({}, "nowhere", None, ConfigError, r"broadcast\.object_store=s3://nowhere/x: there is no bucket"),
        ({"AWS_SECRET_ACCESS_KEY": "hidden"}, "", None, ConfigError, "AWS_ACCESS_KEY_ID"),
        ({"AWS_ACCESS_KEY_ID": None}, "", None, ConfigError, r"broadcast\.object_store=.* needs keys"),
        ({}, "", "http://127.0.0.1:9", UnavailableError, r"check broadcast\.object_endpoint"),
    ],
)
def test_a_store_that_refuses_says_so_in_one_sentence(
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str | None],
    bucket_name: str,
    endpoint: str | None,
    error: type[AntiphonError],
    said: str,
) -> None:
    origin = PayloadStore(tmp_path / "origin")
    manifest = make(origin, 1)
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    place = object_place(f"s3://{bucket_name or server.bucket}/x", endpoint or server.endpoint_url)
    for attempt in (
        lambda: fetch(PayloadStore(tmp_path / "here"), place, manifest, LIMIT_S),
        lambda: copy_all(origin, place, RUN),
    ):
        with pytest.raises(error, match=said) as caught:
            attempt()
        assert "hidden" not in str(caught.value)
        assert "\n" not in str(caught.value)


def config(**section: Any) -> RunConfig:
    return build_config({"broadcast": section})


def test_a_worker_uses_the_store_while_the_origin_is_away_and_returns_to_it(tmp_path: Path) -> None:
    async def body() -> None:
        origin, folder = PayloadStore(tmp_path / "origin"), tmp_path / "shared"
        server, port = await start_server(
            "127.0.0.1", 0, lambda s: register_broadcast(s, BroadcastService(origin)), [SERVICE_NAME]
        )
        away, there = make(origin, 1), make(origin, 2, f"127.0.0.1:{port}")
        copy_all(origin, shared(folder), away.run_id)
        source = SnapshotSource(PayloadStore(tmp_path / "worker"), config(object_store=str(folder)))
        await source.fetch(away)
        assert source.bytes_fetched == full_payload(away).payload_bytes
        source.network.loaded(1, 0.0, 0.0)
        report = source.network.report()
        assert report is not None
        assert report.held_payloads == (full_payload(away).digest,)
        assert report.deliveries[0].bytes_from == {"object store": full_payload(away).payload_bytes}
        assert source.open(away)["a"][0] == 1.0
        # Here only the origin has it: asked beside that transfer, it answers for the next but one at most.
        (folder / object_name(there.run_id, full_payload(there).digest)).unlink()
        transport = source._transport
        assert isinstance(transport, OriginOrObjectStore)
        assert not await transport._is_reached(there.origin)
        assert transport._asking is not None
        assert await transport._asking
        await source.fetch(there)
        assert source.open(there)["a"][0] == 2.0
        await transport.close()
        await stop_server(server)

    run(body)


def test_a_question_that_was_broken_off_counts_as_no_answer(tmp_path: Path) -> None:
    direct = RelayTransport(PayloadStore(tmp_path), Connections(1, 1.0), 1.0)
    transport = OriginOrObjectStore(direct, direct)

    async def body() -> None:
        transport._asking = asyncio.create_task(asyncio.Event().wait())
        transport._asking.cancel()
        await asyncio.wait([transport._asking])
        assert not await transport._is_reached("127.0.0.1:1")
        await transport.close()

    run(body)


def test_a_run_may_have_all_workers_use_the_store_and_none_without_one(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    direct = RelayTransport(store, Connections(1, 1.0), 1.0)
    assert configured_transport(direct, store, config()) is direct
    first = config(object_store=str(tmp_path), object_store_first=True)
    assert isinstance(configured_transport(direct, store, first), ObjectStoreTransport)
    with pytest.raises(ConfigError, match=r"broadcast\.object_store_first is set, but"):
        config(object_store_first=True)
    with pytest.raises(ConfigError, match=r"broadcast\.object_store is neither s3://"):
        config(object_store="http://key:secret@somewhere")
    with pytest.raises(
        ConfigError, match=r"broadcast\.object_endpoint=http://a:1 is for a broadcast\.object"
    ):
        config(object_endpoint="http://a:1")


def test_the_origin_process_keeps_the_copies(tmp_path: Path) -> None:
    origin, folder = PayloadStore(tmp_path / "origin"), tmp_path / "shared"
    shared(folder)
    manifest = make(origin, 1)
    order = OriginOrder(
        str(origin.root), manifest.run_id, "127.0.0.1", 0, 1e9, LIMIT_S, object_store=str(folder)
    )
    here = PayloadStore(tmp_path / "here")

    async def body() -> None:
        async with serving_origin(order, None):
            transport = ObjectStoreTransport(here, shared(folder), LIMIT_S)
            await transport.fetch(manifest, full_payload(manifest), lambda length: None)
            await transport.close()

    run(body)
    assert here.checked(manifest).is_file()
