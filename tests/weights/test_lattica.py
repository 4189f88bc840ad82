"""Payloads as blocks of a real Lattica network on this machine's loopback."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from antiphon.api.manifest import full_payload
from antiphon.api.snapshots import Blocks
from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.services.rollout.snapshot_source import SnapshotSource
from antiphon.system.ports import free_port
from antiphon.weights.origin import OriginOrder, serving_origin
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, BroadcastClient, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.transports.lattica import (
    FOLDER,
    LatticaNode,
    LatticaService,
    LatticaTransport,
    missing_reason,
)
from tests.support.snapshots import publish

LIMIT_S = 120.0
HOST = "127.0.0.1"
needs_lattica = pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")


def make(store: PayloadStore, origin: str = "") -> tuple[SnapshotManifest, Payload]:
    manifest = publish(store, {"a": torch.rand(20_000)}, 4, chunk_bytes=8192, origin=origin)
    return manifest, full_payload(manifest)


@asynccontextmanager
async def serving(service: BroadcastService) -> AsyncIterator[str]:
    server, port = await start_server(HOST, 0, lambda s: register_broadcast(s, service), [SERVICE_NAME])
    try:
        yield f"{HOST}:{port}"
    finally:
        await stop_server(server, 0.1)


def transport(store: PayloadStore, timeout_s: float = LIMIT_S) -> LatticaTransport:
    return LatticaTransport(store, store.root / FOLDER, timeout_s, listen=(HOST, free_port(HOST)))


class FalseBlocks(LatticaService):
    """Names another block for one chunk, or too few."""

    kept: int | None = None

    async def get_blocks(self, payload_digest: str) -> Blocks:
        found = await super().get_blocks(payload_digest)
        false = self._node.put(b"\0" * 8192)
        addresses = (*found.addresses[:3], false, *found.addresses[4:])[: self.kept]
        return Blocks(found.peer_id, found.port, addresses)


@needs_lattica
def test_workers_take_blocks_from_the_origins_process_and_what_is_dropped_leaves(tmp_path: Path) -> None:
    origin, port = PayloadStore(tmp_path / "origin"), free_port(HOST)
    order = OriginOrder(str(origin.root), "run", HOST, 0, None, LIMIT_S, lattica_port=port)

    async def body() -> None:
        async with serving_origin(order, None) as served, AsyncExitStack() as stack:
            manifest, payload = make(origin, f"{HOST}:{served}")
            source = SnapshotSource(
                PayloadStore(tmp_path / "w0"), build_config({"broadcast": {"lattica_port": port}})
            )
            assert isinstance(source._transport, LatticaTransport)
            stack.push_async_callback(source.close)
            await source.fetch(manifest)
            assert source.bytes_fetched == payload.payload_bytes
            assert (source.open(manifest)["a"] < 1).all()
            client = BroadcastClient(manifest.origin)
            stack.push_async_callback(client.close)
            assert len((await client.get_blocks(payload.digest)).addresses) == len(payload.chunk_digests)
            origin.prune([])
            with pytest.raises(UnavailableError, match="not held"):
                await client.get_blocks(payload.digest)

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


@needs_lattica
def test_a_block_that_is_not_the_manifests_chunk_is_named_and_not_kept(tmp_path: Path) -> None:
    origin, here, port = PayloadStore(tmp_path / "o"), PayloadStore(tmp_path / "h"), free_port(HOST)

    async def body() -> None:
        node = LatticaNode(tmp_path / FOLDER, HOST, port)
        service = FalseBlocks(origin, None, node, port)
        worker = transport(here)
        async with serving(service) as address:
            manifest, payload = make(origin, address)
            with pytest.raises(
                IntegrityError, match=r"chunk 3 of version 4 from the Lattica network was alt"
            ):
                await worker.fetch(manifest, payload, lambda length: None)
            assert 3 in here.receive(payload).missing()
            service.kept = 2
            with pytest.raises(IntegrityError, match=r"names 2 blocks of version 4 for \d+ chunks"):
                await worker.fetch(manifest, payload, lambda length: None)
        await worker.close()
        node.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


@needs_lattica
def test_a_block_has_one_address_and_one_that_nobody_has_is_given_up(tmp_path: Path) -> None:
    port = free_port(HOST)
    node = LatticaNode(tmp_path, HOST, port)
    address = node.put(b"bytes")
    assert node.put(b"bytes") == address and node.get(address, 1) == b"bytes"
    node.remove(address)
    with pytest.raises(UnavailableError, match=f"no Lattica peer gave block {address}"):
        node.get(address, 1)
    with pytest.raises(ConfigError, match=rf"no Lattica peer can listen on {HOST}:{port}: another process"):
        LatticaNode(tmp_path / "other", HOST, port)
    node.close()


@needs_lattica
def test_the_part_of_the_package_that_unpickles_is_never_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from antiphon.weights.transports.lattica import LatticaNode; "
        f"node = LatticaNode(Path({str(tmp_path)!r}), {HOST!r}, {free_port(HOST)}); "
        "node.get(node.put(b'x'), 1); node.close(); "
        "print([name for name in sys.modules if name.partition('.')[0] == 'lattica'])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "[]\n"


def test_without_the_package_one_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lattica_python_core", None)
    with pytest.raises(
        ConfigError, match=r"package lattica is missing; `pip install --no-deps lattica=="
    ) as e:
        LatticaNode(tmp_path, HOST, 1)
    assert "\n" not in str(e.value)


def test_a_worker_that_asks_an_origin_without_blocks_is_told_so(tmp_path: Path) -> None:
    origin = PayloadStore(tmp_path / "origin")

    async def body() -> None:
        worker = transport(PayloadStore(tmp_path / "here"))
        async with serving(BroadcastService(origin)) as address:
            manifest, payload = make(origin, address)
            with pytest.raises(UnavailableError, match="is no peer of a Lattica network"):
                await worker.fetch(manifest, payload, lambda length: None)
        await worker.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
