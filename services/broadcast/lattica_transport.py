"""Lattica transport: each chunk of a payload is a block, taken from whichever peer has it.

The manifest names chunks by digests of another kind than blocks have, so whoever puts them says their
addresses. A worker believes neither those nor the network: a chunk is kept when it has the manifest's digest.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil

from antiphon.core.errors import AntiphonError, IntegrityError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.core.seeds import generator
from antiphon.services.broadcast.lattica import LatticaNode
from antiphon.services.broadcast.payload_files import IncomingPayload
from antiphon.services.broadcast.payload_store import PayloadStore
from antiphon.services.broadcast.transport import Transport

BLOCKS_AT_ONCE = 4

Addresses = Callable[[Payload], Awaitable[Sequence[str]]]
"""Says the address of each chunk's block, in the order of the chunks."""


def put_blocks(store: PayloadStore, payload: Payload, node: LatticaNode) -> list[str]:
    """Have a peer hold the chunks of a payload that lies here whole, and return their addresses.

    Raises:
        UnavailableError: when the payload is not here, or the peer cannot keep a block.
    """
    return [node.put(store.read_chunk(payload, index)) for index in range(len(payload.chunk_digests))]


class LatticaTransport(Transport):
    """Payloads from peers of a Lattica network. What was fetched is served to others, too."""

    def __init__(
        self, store: PayloadStore, node: LatticaNode, addresses: Addresses, timeout_s: float, seed: int = 0
    ) -> None:
        """Fill `store`; give up when a block does not come within `timeout_s`.

        `seed` decides the order in which chunks are asked for: peers that want other chunks first have
        something to give to each other.
        """
        self._store, self._node, self._addresses = store, node, addresses
        self._timeout_s = timeout_s
        self._random = generator("lattica", seed)
        self._threads = ThreadPoolExecutor(BLOCKS_AT_ONCE, "lattica")

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        if self._store.has(payload.digest):
            return
        addresses = await self._addresses(payload)
        if len(addresses) != len(payload.chunk_digests):
            raise IntegrityError(
                f"{len(addresses)} blocks are named for the {len(payload.chunk_digests)} chunks of version "
                f"{manifest.version}"
            )
        incoming = await asyncio.to_thread(self._store.receive, payload)
        order = iter(self._random.permutation(incoming.missing()).tolist())
        failed: list[AntiphonError] = []
        loop = asyncio.get_running_loop()

        async def take() -> None:
            for index in order:
                try:
                    await loop.run_in_executor(
                        self._threads, self._take, manifest, incoming, index, addresses[index]
                    )
                except AntiphonError as error:
                    failed.append(error)
                else:
                    arrived(payload.span(index)[1])
                if failed:
                    return

        async with asyncio.TaskGroup() as tasks:
            for _ in range(BLOCKS_AT_ONCE):
                tasks.create_task(take())
        if failed:
            raise failed[0]
        await asyncio.to_thread(incoming.finish)

    def _take(self, manifest: SnapshotManifest, incoming: IncomingPayload, index: int, address: str) -> None:
        data = self._node.get(address, ceil(self._timeout_s))
        try:
            incoming.write(index, data)
        except IntegrityError as error:
            self._node.remove(address)  # so that it is not handed on
            raise IntegrityError(
                f"chunk {index} of version {manifest.version} from the Lattica network {error}; it was "
                "not kept"
            ) from None

    async def close(self) -> None:
        """Let go of the threads; the peer is its owner's."""
        self._threads.shutdown(wait=False, cancel_futures=True)
