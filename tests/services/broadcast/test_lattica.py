"""Payloads as blocks of a real Lattica network on this machine's loopback."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.services.broadcast.lattica import LatticaNode, block_address, missing_reason
from antiphon.services.broadcast.lattica_transport import LatticaTransport, put_blocks
from antiphon.services.broadcast.manifest import full_payload
from antiphon.services.broadcast.payload_store import PayloadStore
from antiphon.system.ports import free_port
from tests.support.snapshots import publish

LIMIT_S = 120.0
needs_lattica = pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or "")


def start(folder: Path, *bootstraps: str) -> LatticaNode:
    return LatticaNode(folder, f"/ip4/127.0.0.1/tcp/{free_port('127.0.0.1')}", bootstraps)


def make(store: PayloadStore) -> tuple[SnapshotManifest, Payload]:
    manifest = publish(store, {"a": torch.rand(20_000)}, 4, chunk_bytes=8192)
    return manifest, full_payload(manifest)


def fetch(
    store: PayloadStore,
    node: LatticaNode,
    manifest: SnapshotManifest,
    addresses: Sequence[str],
    timeout_s: float = LIMIT_S,
    arrived: Callable[[int], None] = lambda length: None,
) -> None:
    async def named(payload: Payload) -> Sequence[str]:
        return addresses

    async def body() -> None:
        transport = LatticaTransport(store, node, named, timeout_s)
        try:
            await transport.fetch(manifest, full_payload(manifest), arrived)
        finally:
            await transport.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


@needs_lattica
def test_what_one_worker_fetched_the_next_one_has_from_it(tmp_path: Path) -> None:
    origin, stores = PayloadStore(tmp_path / "origin"), [PayloadStore(tmp_path / f"w{n}") for n in range(2)]
    manifest, payload = make(origin)
    source = start(tmp_path / "blocks")
    addresses = put_blocks(origin, payload, source)
    first = start(tmp_path / "blocks0", source.address)
    arrived: list[int] = []
    fetch(stores[0], first, manifest, addresses, arrived=arrived.append)
    source.close()
    second = start(tmp_path / "blocks1", first.address)
    fetch(stores[1], second, manifest, addresses)
    for store in stores:
        assert store.checked(manifest).read_bytes() == origin.checked(manifest).read_bytes()
    assert sum(arrived) == payload.payload_bytes
    first.close()
    second.close()


@needs_lattica
def test_a_block_that_is_not_the_manifests_chunk_is_named_and_not_handed_on(tmp_path: Path) -> None:
    origin, here = PayloadStore(tmp_path / "origin"), PayloadStore(tmp_path / "here")
    manifest, payload = make(origin)
    source = start(tmp_path / "blocks")
    addresses = put_blocks(origin, payload, source)
    addresses[3] = source.put(b"\0" * 8192)
    worker = start(tmp_path / "blocks0", source.address)
    with pytest.raises(IntegrityError, match=r"chunk 3 of version 4 from the Lattica network was altered"):
        fetch(here, worker, manifest, addresses)
    assert 3 in here.receive(payload).missing()
    source.close()
    with pytest.raises(UnavailableError, match="no Lattica peer gave block"):
        worker.get(addresses[3], 1)
    with pytest.raises(IntegrityError, match="1 blocks are named for the"):
        fetch(PayloadStore(tmp_path / "other"), worker, manifest, addresses[:1])
    worker.close()


@needs_lattica
def test_blocks_that_no_one_has_are_given_up(tmp_path: Path) -> None:
    manifest, payload = make(PayloadStore(tmp_path / "origin"))
    node = start(tmp_path / "blocks")
    addresses = [block_address(b"%d" % index) for index in range(len(payload.chunk_digests))]
    with pytest.raises(UnavailableError, match="no Lattica peer gave block"):
        fetch(PayloadStore(tmp_path / "here"), node, manifest, addresses, timeout_s=1.0)
    assert node.put(b"0") == addresses[0]
    node.close()


@needs_lattica
def test_the_part_of_the_package_that_unpickles_is_never_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from antiphon.services.broadcast.lattica import LatticaNode; "
        f"node = LatticaNode(Path({str(tmp_path)!r}), '/ip4/127.0.0.1/tcp/{free_port('127.0.0.1')}'); "
        "node.get(node.put(b'x'), 1); node.close(); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('lattica', 'pickle')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "[]\n"


def test_without_the_package_one_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lattica_python_core", None)
    with pytest.raises(
        ConfigError, match=r"package lattica is missing; `pip install --no-deps lattica=="
    ) as e:
        LatticaNode(tmp_path, "/ip4/127.0.0.1/tcp/0")
    assert "\n" not in str(e.value)
