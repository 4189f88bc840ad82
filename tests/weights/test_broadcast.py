"""Broadcast over real gRPC: what arrives is what was published, or it is refused by name."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.api.manifest import full_payload
from antiphon.api.snapshots import Broadcast, Place
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.simulator.virtual.loop import VirtualLoop
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, BroadcastClient, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.snapshot import VerifiedWeights, open_snapshot, verify, weights_of, write_snapshot
from tests.support import snapshots
from tests.support.snapshots import FarService, fetch_snapshot

CHUNK_BYTES = 4096


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(64, 32),
        "model.norm.weight": torch.randn(33).to(torch.bfloat16),
        "model.head.weight": torch.randn(64, 32),
        "model.flag": torch.tensor([True]),
    }


def publish(store: PayloadStore, version: int = 1, seed: int = 0) -> SnapshotManifest:
    return snapshots.publish(store, make_weights(seed), version, chunk_bytes=CHUNK_BYTES)


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
        self, honest: Broadcast, alter: Callable[[int, int, bytes], tuple[int, bytes] | None]
    ) -> None:
        self.honest, self.alter, self.asked = honest, alter, []

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        self.asked.append(list(indices))
        for one in indices:  # so that none comes together with others
            async for index, data in self.honest.get_chunks(payload_digest, [one]):
                altered = self.alter(len(self.asked), index, data)
                if altered is None:
                    return
                yield altered

    async def where(self) -> Place:
        return Place(Path(), "")


def holds(store: PayloadStore, manifest: SnapshotManifest) -> bool:
    return store.has(full_payload(manifest).digest)


def test_a_snapshot_arrives_bit_for_bit(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
        published = publish(origin)
        async with serving(FarService(origin)) as client:
            await fetch_snapshot(published, client, mine, 20.0)
        path = mine.path(full_payload(published).digest)
        assert path.stat().st_nlink == 1
        for name, tensor in open_snapshot(published, mine).items():
            assert tensor.dtype == make_weights()[name].dtype
            assert torch.equal(tensor, make_weights()[name])

    run(body)


def test_on_the_origins_machine_its_file_is_linked_and_checked(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
        published = publish(origin)
        async with serving(Meddler(BroadcastService(origin), lambda *_: None)) as client:
            with pytest.raises(UnavailableError, match="the stream ended"):
                await fetch_snapshot(published, client, mine, 20.0)
        async with serving(BroadcastService(origin)) as client:
            place = await client.where()
            assert place.folder == (tmp_path / "origin").absolute()
            await fetch_snapshot(published, client, mine, 20.0)
        path = mine.path(full_payload(published).digest)
        assert path.samefile(origin.path(full_payload(published).digest))
        origin.prune([])
        assert torch.equal(
            open_snapshot(published, mine)["model.head.weight"], make_weights()["model.head.weight"]
        )

    run(body)


def test_without_links_it_is_sent_as_from_elsewhere(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
        published = publish(origin)
        arrived: list[int] = []
        async with serving(BroadcastService(origin)) as client:
            await fetch_snapshot(published, client, mine, 20.0, arrived.append, links=False)
        payload = full_payload(published)
        assert len(arrived) > 1 and sum(arrived) == payload.payload_bytes
        assert not mine.path(payload.digest).samefile(origin.path(payload.digest))

    run(body)


def test_another_machines_folder_of_the_same_name_is_not_believed(tmp_path: Path) -> None:
    class Liar(BroadcastService):
        async def where(self) -> Place:
            return replace(await super().where(), token="0" * 32)

    async def body() -> None:
        origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
        published = publish(origin)
        async with serving(Liar(origin)) as client:
            await fetch_snapshot(published, client, mine, 20.0)
        assert mine.path(full_payload(published).digest).stat().st_nlink == 1

    run(body)


def test_only_missing_chunks_are_fetched_and_a_broken_transfer_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        origin = PayloadStore(tmp_path / "origin")
        manifest = publish(origin)

        def hang_up(attempt: int, index: int, data: bytes) -> tuple[int, bytes] | None:
            if index == 2:
                raise UnavailableError("the link broke")
            return index, data

        async with serving(Meddler(BroadcastService(origin), hang_up)) as client:
            with pytest.raises(UnavailableError, match="the link broke"):
                await fetch_snapshot(manifest, client, PayloadStore(tmp_path / "mine"), 20.0)
        mine = PayloadStore(tmp_path / "mine")  # another process goes on
        assert not holds(mine, manifest)
        whole = Meddler(BroadcastService(origin), lambda _, index, data: (index, data))
        async with serving(whole) as client:
            await fetch_snapshot(manifest, client, mine, 20.0)
            await fetch_snapshot(manifest, client, mine, 20.0)
        assert whole.asked == [[2]]
        assert holds(mine, manifest)

    run(body)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda payload: bytes([payload[0] ^ 1]) + payload[1:], "was altered"),
        (lambda payload: payload[:-1], "sent chunk 2 before the end of 1"),
        (lambda payload: payload + b"x", "sent 4097 bytes for chunk 1"),
        (lambda payload: b"", "sent 0 bytes for chunk 1"),
    ],
)
@pytest.mark.parametrize("always", [True, False])
def test_a_spoiled_chunk_is_named_and_refused_and_its_sender_forgiven_with_the_next_transfer(
    tmp_path: Path, spoil: Callable[[bytes], bytes], words: str, always: bool
) -> None:
    async def body() -> None:
        origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
        manifest = publish(origin)

        def alter(attempt: int, index: int, data: bytes) -> tuple[int, bytes]:
            return index, spoil(data) if index == 1 and (always or attempt == 1) else data

        source = Meddler(BroadcastService(origin), alter)
        async with serving(source) as client:
            with pytest.raises(IntegrityError, match=rf"the origin .*{words}"):
                await fetch_snapshot(manifest, client, mine, 20.0)
            missing = mine.receive(full_payload(manifest)).missing()
            assert 0 not in missing and 1 in missing
            if always:
                with pytest.raises(IntegrityError, match=r"the origin .*sent"):
                    await fetch_snapshot(manifest, client, mine, 20.0)
                with pytest.raises(UnavailableError, match=full_payload(manifest).digest):
                    open_snapshot(manifest, mine)
            else:
                await fetch_snapshot(manifest, client, mine, 20.0)
                assert holds(mine, manifest)

    run(body)


def test_a_sender_of_what_nobody_asked_for_or_of_too_few_chunks_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
        manifest = publish(origin)
        for place in (1 << 40, -1):
            async with serving(Meddler(BroadcastService(origin), lambda *_, p=place: (p, b"x"))) as client:
                with pytest.raises(IntegrityError, match=f"sent chunk {place}, which is not due"):
                    await fetch_snapshot(manifest, client, mine, 20.0)
        stingy = Meddler(
            BroadcastService(origin), lambda _, index, data: (index, data) if index == 0 else None
        )
        async with serving(stingy) as client:
            with pytest.raises(UnavailableError, match="the stream ended before chunk"):
                await fetch_snapshot(manifest, client, mine, 20.0)

    run(body)


def test_a_slow_link_takes_its_time_and_one_that_sends_nothing_is_given_up(tmp_path: Path) -> None:
    origin = PayloadStore(tmp_path / "origin")
    manifest = publish(origin)
    chunk_s = 50.0  # a hundredth of a link on which a chunk takes half a second
    slow = FarService(origin, uplink_bytes_per_s=CHUNK_BYTES / chunk_s)
    arrived: list[int] = []
    loop = VirtualLoop(lambda: (0.0, 0.0), 1e6)  # type: ignore[abstract]

    async def body() -> None:
        mine = PayloadStore(tmp_path / "mine")
        await fetch_snapshot(manifest, slow, mine, 60.0, arrived.append)
        assert holds(mine, manifest)
        with pytest.raises(UnavailableError, match="nothing came for 40 s"):
            await fetch_snapshot(manifest, slow, PayloadStore(tmp_path / "other"), 40.0)

    loop.run(body())
    assert sum(arrived) == full_payload(manifest).payload_bytes and loop.time() > 3 * 60.0


def test_over_grpc_each_chunk_has_the_deadline_for_itself(tmp_path: Path) -> None:
    async def body() -> None:
        origin = PayloadStore(tmp_path / "origin")
        payload = full_payload(publish(origin))
        sent = 0

        def stop_after_three(_: int, index: int, data: bytes) -> tuple[int, bytes] | None:
            nonlocal sent
            sent += 1
            return (index, data) if sent <= 3 else None

        class Hanging(Meddler):
            async def get_chunks(
                self, payload_digest: str, indices: Sequence[int], held_only: bool = False
            ) -> AsyncIterator[tuple[int, bytes]]:
                async for chunk in super().get_chunks(payload_digest, indices):
                    yield chunk
                await asyncio.Event().wait()

        received = []
        async with serving(Hanging(BroadcastService(origin), stop_after_three), 2.0) as client:
            with pytest.raises(UnavailableError, match=r"GetChunks sent nothing for 2 s"):
                async for index, _ in client.get_chunks(payload.digest, range(len(payload.chunk_digests))):
                    received.append(index)
        assert received == [0, 1, 2]

    run(body)


def test_the_uplink_cap_is_shared_by_all_receivers(tmp_path: Path) -> None:
    async def body() -> None:
        origin = PayloadStore(tmp_path / "origin")
        manifest = publish(origin)
        size = full_payload(manifest).payload_bytes
        service = FarService(origin, uplink_bytes_per_s=size * 10.0)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stores = [PayloadStore(tmp_path / f"mine{place}") for place in range(3)]
        await asyncio.gather(*(fetch_snapshot(manifest, service, store, 20.0) for store in stores))
        # A lower bound: three copies cannot pass faster than the cap, however slow the machine.
        assert loop.time() - begun >= 3 / 10.0 * 0.999

    run(body)


def test_missing_versions_payloads_and_chunks_are_named(tmp_path: Path) -> None:
    async def body() -> None:
        origin = PayloadStore(tmp_path / "origin")
        async with serving(BroadcastService(origin)) as client:
            with pytest.raises(UnavailableError, match="no snapshot is held"):
                origin.manifest(None)
            payload = full_payload(publish(origin, 4))
            with pytest.raises(UnavailableError, match="version 3 is not held here; there is 4"):
                origin.manifest(3)
            for digest, indices, error, words in (
                ("0" * 64, [0], UnavailableError, "not held"),
                ("../../etc/passwd", [0], UnavailableError, "not held"),
                (payload.digest, [99], ContractError, "no chunk 99"),
                (payload.digest, [-1], ContractError, "no chunk -1"),
                (payload.digest, [0, 1, 0], ContractError, "ask for each chunk once"),
            ):
                with pytest.raises(error, match=words):
                    async for _ in client.get_chunks(digest, indices):
                        pass

    run(body)


def test_two_versions_arrive_at_the_same_time(tmp_path: Path) -> None:
    async def body() -> None:
        origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
        manifests = [publish(origin, version, seed=version) for version in (1, 2)]
        async with serving(FarService(origin)) as client:
            await asyncio.gather(*(fetch_snapshot(one, client, mine, 20.0) for one in manifests))
        for manifest in manifests:
            assert open_snapshot(manifest, mine).digest == manifest.weights_digest

    run(body)


def test_a_full_disk_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, mine = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "mine")
    first = publish(origin)
    incoming = mine.receive(full_payload(first))
    chunk = origin.read_chunks(full_payload(first), range(1))
    for flush in ("pwrite", "fdatasync"):

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, flush, full)
            with pytest.raises(UnavailableError, match="no space is left"):
                write_snapshot(origin, "run", 2, weights_of(make_weights(1)), CHUNK_BYTES)
            if flush == "pwrite":
                with pytest.raises(UnavailableError, match="no space is left"):
                    incoming.write(0, chunk)
    assert not incoming.held.any()
    assert [path.suffix for path in sorted((tmp_path / "origin").iterdir())] == [".manifest", ".payload"]
    incoming.write(0, chunk)
    assert incoming.held[0] and origin.versions() == [1]


def test_only_a_verifier_makes_verified_weights(tmp_path: Path) -> None:
    weights = make_weights()
    with pytest.raises(ContractError, match="verified by verify or open_snapshot"):
        VerifiedWeights(weights, "0" * 64, object())
    assert verify(weights).digest == publish(PayloadStore(tmp_path)).weights_digest


def test_pruning_keeps_what_waits_and_the_newest_announced(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    manifests = [publish(store, version, seed=version) for version in range(6)]
    going = store.receive(replace_digest(full_payload(manifests[0])))
    making = store.make(CHUNK_BYTES)  # as the learner does while another version is announced
    making.write(b"weights")
    made = store.make(CHUNK_BYTES, 4).finish(b"head")
    store.prune_announced(3, 2)
    assert store.has(made.digest) and store.has(making.finish().digest)
    assert store.versions() == [2, 3, 4, 5]
    assert [holds(store, manifest) for manifest in manifests] == [False] * 2 + [True] * 4
    assert not going.path.exists()


def replace_digest(payload: Payload) -> Payload:
    """Return a payload that no manifest names."""
    return replace(payload, digest="f" * 64)


def test_what_a_killed_process_was_making_is_removed_and_what_it_received_is_not(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    manifest = publish(store)
    payload = full_payload(publish(PayloadStore(tmp_path / "elsewhere"), 2, seed=2))
    chunk = PayloadStore(tmp_path / "elsewhere").read_chunks(payload, range(1, 2))
    store.receive(payload).write(1, chunk)
    store.make(CHUNK_BYTES).write(b"half")
    store.remove_leftovers()
    assert not list(tmp_path.glob(".*"))
    assert store.manifest(1) == manifest and holds(store, manifest)
    assert list(PayloadStore(tmp_path).receive(payload).held.nonzero()[0]) == [1]


def test_chunks_are_read_and_written_beside_the_loop(tmp_path: Path) -> None:
    """Writing a chunk takes milliseconds, in which a worker must answer its engine and its coordinator."""
    threads: set[str] = set()
    pread, pwrite = os.pread, os.pwrite

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            threads.add(threading.current_thread().name)
            return call(*arguments)

        return noted

    async def body() -> None:
        origin = PayloadStore(tmp_path / "origin")
        manifest = publish(origin)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pread", noting(pread))
            patch.setattr(os, "pwrite", noting(pwrite))
            async with serving(FarService(origin)) as client:
                await fetch_snapshot(manifest, client, PayloadStore(tmp_path / "mine"), 20.0)

    run(body)
    assert threads and threading.main_thread().name not in threads
