"""Broadcast over real gRPC: what arrives is what was published, or it is refused by name."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import SnapshotManifest
from antiphon.services.broadcast.api import Broadcast
from antiphon.services.broadcast.chunk_store import ChunkStore
from antiphon.services.broadcast.client import BroadcastClient
from antiphon.services.broadcast.server import SERVICE_NAME, register_broadcast
from antiphon.services.broadcast.service import BroadcastService, fetch_snapshot
from antiphon.services.broadcast.snapshot import build_snapshot, rebuild
from antiphon.services.rpc.serving import start_server, stop_server
from antiphon.simulator.virtual.loop import VirtualLoop

CHUNK_BYTES = 4096


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(64, 32),
        "model.norm.weight": torch.randn(33).to(torch.bfloat16),
        "model.head.weight": torch.randn(64, 32),
        "model.flag": torch.tensor([True]),
    }


def publish(store: ChunkStore, version: int = 1, seed: int = 0) -> SnapshotManifest:
    manifest = build_snapshot("run", version, make_weights(seed), CHUNK_BYTES, "127.0.0.1:1", store.put)
    store.put_manifest(manifest)
    return manifest


@asynccontextmanager
async def serving(service: Broadcast, timeout_s: float = 20.0) -> AsyncIterator[BroadcastClient]:
    server, port = await start_server(
        "127.0.0.1", 0, lambda server: register_broadcast(server, service), [SERVICE_NAME]
    )
    client = BroadcastClient(f"127.0.0.1:{port}", transfer_timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()
        await stop_server(server, 0.1)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


class Meddler(Broadcast):
    """An honest holder until it alters what it sends; counts what it was asked for."""

    def __init__(
        self, honest: Broadcast, alter: Callable[[int, str, bytes], tuple[str, bytes] | None]
    ) -> None:
        self.honest, self.alter, self.asked = honest, alter, []

    async def get_chunks(self, digests: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        self.asked.append(list(digests))
        async for digest, payload in self.honest.get_chunks(digests):
            altered = self.alter(len(self.asked), digest, payload)
            if altered is None:
                return
            yield altered


def test_a_snapshot_arrives_bit_for_bit(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = ChunkStore(tmp_path / "origin"), ChunkStore(tmp_path / "mine")
        published = publish(origin)
        async with serving(BroadcastService(origin)) as client:
            await fetch_snapshot(published, client, mine, 20.0)
        assert mine.versions() == [1] and mine.manifest(1) == published
        for name, tensor in rebuild(published, mine.get).items():
            assert tensor.dtype == make_weights()[name].dtype
            assert torch.equal(tensor, make_weights()[name])

    run(body)


def test_only_missing_chunks_are_fetched_and_a_broken_transfer_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = ChunkStore(tmp_path / "origin"), ChunkStore(tmp_path / "mine")
        manifest = publish(origin)
        third = manifest.chunks[2].digest

        def hang_up(attempt: int, digest: str, payload: bytes) -> tuple[str, bytes] | None:
            if digest == third and attempt == 1:
                raise UnavailableError("the link broke")
            return digest, payload

        source = Meddler(BroadcastService(origin), hang_up)
        async with serving(source) as client:
            with pytest.raises(UnavailableError, match="the link broke"):
                await fetch_snapshot(manifest, client, mine, 20.0)
            assert mine.versions() == []
            await fetch_snapshot(manifest, client, mine, 20.0)
            await fetch_snapshot(manifest, client, mine, 20.0)
        everything = [chunk.digest for chunk in manifest.chunks]
        assert source.asked == [everything, everything[2:]]
        assert mine.versions() == [1]

    run(body)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda payload: bytes([payload[0] ^ 1]) + payload[1:], "was altered"),
        (lambda payload: payload[:-1], "truncated"),
        (lambda payload: payload + b"x", "oversized"),
        (lambda payload: b"", "truncated"),
    ],
)
@pytest.mark.parametrize("always", [True, False])
def test_a_spoiled_chunk_is_named_refused_and_asked_for_once_more(
    tmp_path: Path, spoil: Callable[[bytes], bytes], words: str, always: bool
) -> None:
    async def body() -> None:
        origin, mine = ChunkStore(tmp_path / "origin"), ChunkStore(tmp_path / "mine")
        manifest = publish(origin)
        victim = manifest.chunks[1].digest

        def alter(attempt: int, digest: str, payload: bytes) -> tuple[str, bytes]:
            spoiled = digest == victim and (always or attempt == 1)
            return digest, spoil(payload) if spoiled else payload

        source = Meddler(BroadcastService(origin), alter)
        async with serving(source) as client:
            if always:
                with pytest.raises(IntegrityError, match=rf"chunk 1 \({victim}\).*{words}"):
                    await fetch_snapshot(manifest, client, mine, 20.0)
                assert mine.versions() == [] and not mine.has(victim)
                with pytest.raises(UnavailableError, match=victim):
                    rebuild(manifest, mine.get)
            else:
                await fetch_snapshot(manifest, client, mine, 20.0)
                assert mine.versions() == [1]
        assert source.asked[1:] == [[victim]]

    run(body)


def test_a_sender_out_of_turn_or_out_of_chunks_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = ChunkStore(tmp_path / "origin"), ChunkStore(tmp_path / "mine")
        manifest = publish(origin)
        first = manifest.chunks[0].digest
        async with serving(Meddler(BroadcastService(origin), lambda *_: ("../../etc", b"x"))) as client:
            with pytest.raises(IntegrityError, match="out of turn"):
                await fetch_snapshot(manifest, client, mine, 20.0)
        stingy = Meddler(
            BroadcastService(origin),
            lambda _, digest, payload: (digest, payload) if digest == first else None,
        )
        async with serving(stingy) as client:
            with pytest.raises(IntegrityError, match="ended the stream before chunk"):
                await fetch_snapshot(manifest, client, mine, 20.0)

    run(body)


def test_a_slow_link_takes_its_time_and_one_that_sends_nothing_is_given_up(tmp_path: Path) -> None:
    origin = ChunkStore(tmp_path / "origin")
    manifest = publish(origin)
    chunk_s = 50.0  # a hundredth of a link on which a chunk takes half a second
    slow = BroadcastService(origin, uplink_bytes_per_s=CHUNK_BYTES / chunk_s)
    arrived: list[int] = []
    loop = VirtualLoop(lambda: (0.0, 0.0), 1e6)  # type: ignore[abstract]

    async def body() -> None:
        mine = ChunkStore(tmp_path / "mine")
        await fetch_snapshot(manifest, slow, mine, 60.0, arrived.append)
        assert mine.versions() == [manifest.version]
        with pytest.raises(UnavailableError, match=r"did not arrive.*nothing came for 40 s"):
            await fetch_snapshot(manifest, slow, ChunkStore(tmp_path / "other"), 40.0)

    loop.run(body())
    assert sum(arrived) == manifest.payload_bytes and loop.time() > 3 * 60.0


def test_over_grpc_each_chunk_has_the_deadline_for_itself(tmp_path: Path) -> None:
    async def body() -> None:
        origin = ChunkStore(tmp_path / "origin")
        manifest = publish(origin)
        sent = 0

        def stop_after_three(_: int, digest: str, payload: bytes) -> tuple[str, bytes] | None:
            nonlocal sent
            sent += 1
            return (digest, payload) if sent <= 3 else None

        class Hanging(Meddler):
            async def get_chunks(self, digests: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
                async for chunk in super().get_chunks(digests):
                    yield chunk
                await asyncio.Event().wait()

        received = []
        async with serving(Hanging(BroadcastService(origin), stop_after_three), 2.0) as client:
            with pytest.raises(UnavailableError, match=r"GetChunks sent nothing for 2 s"):
                async for digest, _ in client.get_chunks([chunk.digest for chunk in manifest.chunks]):
                    received.append(digest)
        assert len(received) == 3

    run(body)


def test_the_uplink_cap_is_shared_by_all_receivers(tmp_path: Path) -> None:
    async def body() -> None:
        origin = ChunkStore(tmp_path / "origin")
        manifest = publish(origin)
        rate = manifest.payload_bytes * 10.0
        service = BroadcastService(origin, uplink_bytes_per_s=rate)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stores = [ChunkStore(tmp_path / f"mine{place}") for place in range(3)]
        await asyncio.gather(*(fetch_snapshot(manifest, service, store, 20.0) for store in stores))
        # A lower bound: three copies cannot pass faster than the cap, however slow the machine.
        assert loop.time() - begun >= 3 * manifest.payload_bytes / rate * 0.999

    run(body)


def test_missing_versions_and_chunks_are_unavailable(tmp_path: Path) -> None:
    async def body() -> None:
        origin = ChunkStore(tmp_path / "origin")
        async with serving(BroadcastService(origin)) as client:
            with pytest.raises(UnavailableError, match="no snapshot is held"):
                origin.manifest(None)
            publish(origin, 4)
            with pytest.raises(UnavailableError, match="version 3 is not held here; there is 4"):
                origin.manifest(3)
            with pytest.raises(UnavailableError, match="not held"):
                async for _ in client.get_chunks(["0" * 64]):
                    pass

    run(body)


def test_a_chunk_altered_on_disk_is_dropped_and_fetched_again(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = ChunkStore(tmp_path / "origin"), ChunkStore(tmp_path / "mine")
        manifest = publish(origin)
        source = BroadcastService(origin)
        await fetch_snapshot(manifest, source, mine, 20.0)
        digest = manifest.chunks[0].digest
        path = next((tmp_path / "mine").rglob(digest))
        path.write_bytes(b"rot")
        with pytest.raises(IntegrityError, match=digest):
            rebuild(manifest, mine.get)
        await fetch_snapshot(manifest, source, mine, 20.0)
        assert torch.equal(
            rebuild(manifest, mine.get)["model.norm.weight"], make_weights()["model.norm.weight"]
        )

    run(body)


def test_pruning_keeps_shared_chunks_and_drops_the_rest(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    first, second = publish(store, 1, seed=0), publish(store, 2, seed=1)
    third = dataclasses.replace(first, version=3)
    store.put_manifest(third)
    store.prune([third])
    assert store.versions() == [3]
    assert all(store.has(chunk.digest) for chunk in third.chunks)
    shared = {chunk.digest for chunk in third.chunks}
    assert not any(store.has(chunk.digest) for chunk in second.chunks if chunk.digest not in shared)


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest = publish(store)
    chunk = next((tmp_path / "chunks").glob("*/*"))
    left = [chunk.with_name(".incoming-k2"), tmp_path / "manifests" / ".incoming-x"]
    for path in left:
        path.write_bytes(b"half")
    store.remove_leftovers()
    assert not any(path.exists() for path in left)
    assert store.manifest(1) == manifest and all(store.has(entry.digest) for entry in manifest.chunks)


def test_chunks_are_read_and_written_beside_the_loop(tmp_path: Path) -> None:
    """Flushing a chunk takes milliseconds, in which a worker must answer its engine and its coordinator."""
    threads: set[str] = set()

    class Noting(ChunkStore):
        def get(self, digest: str) -> bytes:
            threads.add(threading.current_thread().name)
            return super().get(digest)

        def put(self, digest: str, payload: bytes) -> None:
            threads.add(threading.current_thread().name)
            super().put(digest, payload)

    async def body() -> None:
        origin = Noting(tmp_path / "origin")
        manifest = publish(origin)
        threads.clear()
        async with serving(BroadcastService(origin)) as client:
            await fetch_snapshot(manifest, client, Noting(tmp_path / "mine"), 20.0)

    run(body)
    assert threads and threading.main_thread().name not in threads
