"""Lattica transport: each chunk of a payload is a block, taken from whichever peer has it.

The manifest names chunks by digests of another kind than blocks have, so the origin says their addresses. A
worker believes neither those nor the network: a chunk is kept when it has the manifest's digest.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path

from antiphon.api.snapshots import Blocks
from antiphon.core.errors import IntegrityError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.core.seeds import generator
from antiphon.net.security.credentials import Credentials
from antiphon.system.wakeup import end_tasks
from antiphon.weights.client import BroadcastClient
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.service import BroadcastService
from antiphon.weights.transport import Transport
from antiphon.weights.transports.lattica_node import LatticaNode, multiaddress

BLOCKS_AT_ONCE = 4
FOLDER = "blocks"
"""Folder beside a payload store that keeps a peer's blocks."""


class LatticaService(BroadcastService):
    """Serves one payload store, also as blocks. They are put when the first worker asks for them."""

    def __init__(
        self, store: PayloadStore, uplink_bytes_per_s: float | None, node: LatticaNode, port: int
    ) -> None:
        super().__init__(store, uplink_bytes_per_s)
        self._node, self._port = node, port
        self._put: dict[str, tuple[str, ...]] = {}
        """Payload -> addresses of its blocks."""
        self._guard = threading.Lock()

    async def blocks(self, payload_digest: str) -> Blocks:
        return Blocks(self._node.peer_id, self._port, await asyncio.to_thread(self._blocks, payload_digest))

    def _blocks(self, digest: str) -> tuple[str, ...]:
        with self._guard:
            for dropped in [one for one in self._put if not self._store.has(one)]:
                for address in self._put.pop(dropped):
                    self._node.remove(address)
            if digest not in self._put:
                payload = self._store.find(digest)
                self._put[digest] = tuple(
                    self._node.put(self._store.read_chunks(payload, range(index, index + 1)))
                    for index in range(len(payload.chunk_digests))
                )
            return self._put[digest]


class LatticaTransport(Transport):
    """Payloads from peers of a Lattica network. What was fetched is served to others, too."""

    def __init__(
        self,
        store: PayloadStore,
        folder: Path,
        timeout_s: float,
        credentials: Credentials | None = None,
        listen: tuple[str, int] = ("0.0.0.0", 0),
    ) -> None:
        """Fill `store`; join the network when the first payload is wanted.

        Args:
            store: gets the payloads.
            folder: keeps the blocks of this peer.
            timeout_s: a transfer is given up when a block does not come for so long.
            credentials: shown to origins.
            listen: address and port of this peer; port 0 picks a free one.
        """
        self._store, self._folder, self._timeout_s = store, folder, timeout_s
        self._credentials, self._listen = credentials, listen
        self._threads = ThreadPoolExecutor(BLOCKS_AT_ONCE, "lattica")
        self._node: LatticaNode | None = None
        self._held: dict[str, tuple[str, ...]] = {}
        """Payload -> addresses of its blocks, which this peer holds."""

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        if self._store.has(payload.digest):
            return
        client = BroadcastClient(manifest.origin, self._timeout_s, credentials=self._credentials)
        try:
            blocks = await client.blocks(payload.digest)
        finally:
            await client.close()
        if len(blocks.addresses) != len(payload.chunk_digests):
            raise IntegrityError(
                f"{manifest.origin} names {len(blocks.addresses)} blocks of version {manifest.version} for "
                f"{len(payload.chunk_digests)} chunks"
            )
        node = await asyncio.to_thread(self._join, manifest.origin, blocks)
        self._held[payload.digest] = blocks.addresses
        incoming = await asyncio.to_thread(self._store.receive, payload)
        # Peers that want other chunks first have something to give to each other.
        order = iter(generator("lattica", node.peer_id).permutation(incoming.missing()).tolist())
        loop = asyncio.get_running_loop()

        def take(index: int) -> None:
            address = blocks.addresses[index]
            data = node.get(address, ceil(self._timeout_s))
            try:
                incoming.write(index, data)
            except IntegrityError as error:
                node.remove(address)  # so that it is not handed on
                raise IntegrityError(
                    f"chunk {index} of version {manifest.version} from the Lattica network {error}; it was "
                    "not kept"
                ) from None

        async def take_in_turn() -> None:
            for index in order:
                await loop.run_in_executor(self._threads, take, index)
                arrived(payload.span(index)[1])

        tasks = [asyncio.create_task(take_in_turn()) for _ in range(BLOCKS_AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)
        await asyncio.to_thread(incoming.finish)

    def _join(self, origin: str, blocks: Blocks) -> LatticaNode:
        if self._node is None:
            host = origin.rpartition(":")[0].strip("[]")
            bootstrap = f"{multiaddress(host, blocks.port)}/p2p/{blocks.peer_id}"
            self._node = LatticaNode(self._folder, *self._listen, [bootstrap])
        for dropped in [one for one in self._held if not self._store.has(one)]:
            for address in self._held.pop(dropped):
                self._node.remove(address)
        return self._node

    async def close(self) -> None:
        """Leave the network."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._node is not None:
            await asyncio.to_thread(self._node.close)
            self._node = None
