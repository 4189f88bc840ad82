"""Lattica transport: each chunk of a payload is a block, taken from whichever peer has it.

The manifest names chunks by digests of another kind than blocks have, so the origin says their addresses. A
worker believes neither those nor the network: a chunk is kept when it has the manifest's digest.

Of the package `lattica` only its compiled core is imported. The Python module of that name is not: its value
store and its calls to peers unpickle bytes that any peer may have sent, which would let that peer run code
here. Blocks are plain bytes, asked for by the SHA-256 in their address.
"""

import asyncio
import base64
import hashlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import ceil
from pathlib import Path

from antiphon.api.snapshots import Blocks
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.core.seeds import generator
from antiphon.net.security.credentials import Credentials
from antiphon.system.ports import is_free
from antiphon.system.wakeup import end_tasks
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import BroadcastClient
from antiphon.weights.service import BroadcastService
from antiphon.weights.transport import MeasuredTransport

BLOCKS_AT_ONCE = 4
FOLDER = "blocks"
"""Folder beside a payload store that keeps a peer's blocks."""
VERSION = "1.0.21"


def missing_reason() -> str | None:
    """Return why no node can be started here, as a sentence; None where one can."""
    try:
        import lattica_python_core  # noqa: F401
    except ImportError:
        return (
            f"the package lattica is missing; `pip install --no-deps lattica=={VERSION}` installs it without "
            "the module asyncio of 2013 that it asks for"
        )
    return None


def multiaddress(host: str, port: int) -> str:
    """Return where a peer listens, by the address of the host or by its name.

    >>> multiaddress("127.0.0.1", 7801), multiaddress("::1", 7801)
    ('/ip4/127.0.0.1/tcp/7801', '/ip6/::1/tcp/7801')

    Raises:
        UnavailableError: when the host's name is not known.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnavailableError(f"the name {host} is not known here: {error}") from None
    address = ipaddress.ip_address(min(found)[4][0])
    return f"/ip{address.version}/{address}/tcp/{port}"


def content_id(data: bytes) -> str:
    """Return the address of a block: a CID of version 1 for raw bytes, by SHA-256, in lower base32.

    The form is that of github.com/multiformats/cid: version 1, codec 0x55, multihash 0x12 of 32 bytes.

    >>> content_id(b"")
    'bafkreihdwdcefgh4dqkjv67uzcmw7ojee6xedzdetojuzjevtenxquvyku'
    """
    raw = bytes([1, 0x55, 0x12, 32]) + hashlib.sha256(data).digest()
    return "b" + base64.b32encode(raw).decode().rstrip("=").lower()


class LatticaNode:
    """A peer. It serves the blocks that it holds to all that ask. Methods block; any thread may call them."""

    def __init__(self, folder: Path, host: str, port: int, bootstraps: Sequence[str] = ()) -> None:
        """Start the peer.

        Args:
            folder: keeps its blocks.
            host: address of this machine, or a name of it, to listen on.
            port: 0 picks a free one.
            bootstraps: multiaddresses of peers to begin with, ``.../p2p/<peer id>``.

        Raises:
            ConfigError: when the package is missing, or the port cannot be listened on.
            UnavailableError: when the host's name is not known.
        """
        if (reason := missing_reason()) is not None:
            raise ConfigError(reason)
        if port and not is_free(port, host):  # the core would go on without listening
            raise ConfigError(
                f"no Lattica peer can listen on {host}:{port}: another process has that port, or the host is "
                "not this machine's; set another broadcast.lattica_port"
            )
        from lattica_python_core import LatticaSDK

        folder.mkdir(parents=True, exist_ok=True)
        # Workers are told of each other by the run; no one else on the network is asked.
        settings = {
            "listen_addrs": [multiaddress(host, port)],
            "storage_path": str(folder),
            "with_mdns": False,
            "with_upnp": False,
            **({"bootstrap_nodes": list(bootstraps)} if bootstraps else {}),
        }
        try:
            self._core = LatticaSDK(settings)
        except Exception as error:  # the core raises whatever came up
            raise ConfigError(f"no Lattica peer can listen on {host}:{port}: {error}") from error
        self.peer_id = str(self._core.peer_id())
        self.held: dict[str, tuple[str, ...]] = {}
        """Payload -> addresses of its blocks, of those that are kept here."""

    def put(self, data: bytes) -> str:
        """Hold a block and return its address; UnavailableError when the peer cannot keep it."""
        with _unavailable("the Lattica peer cannot keep a block"):
            return str(self._core.put_block(data))

    def get(self, address: str, timeout_s: int) -> bytes:
        """Return a block from a peer that has it; from then on this peer has it too.

        Raises:
            UnavailableError: when none comes within `timeout_s` whole seconds.
        """
        with _unavailable(f"no Lattica peer gave block {address}"):
            return bytes(self._core.get_block(address, timeout_secs=timeout_s)[1])

    def remove(self, address: str) -> None:
        """Hold a block no more; one that is not held is no error. UnavailableError when that fails."""
        with _unavailable(f"the Lattica peer cannot drop block {address}"):
            self._core.remove_block(address)

    def follow(self, store: PayloadStore) -> None:
        """Hold no blocks of payloads that a store has dropped."""
        for dropped in [one for one in self.held if not store.has(one)]:
            for address in self.held.pop(dropped):
                self.remove(address)

    def close(self) -> None:
        """Leave the network."""
        self._core.close()


@contextmanager
def _unavailable(what: str) -> Iterator[None]:
    """Translate whatever the core raises."""
    try:
        yield
    except Exception as error:
        raise UnavailableError(f"{what}: {error}") from error


class LatticaService(BroadcastService):
    """Serves one payload store, also as blocks. They are put when the first worker asks for them."""

    def __init__(
        self, store: PayloadStore, uplink_bytes_per_s: float | None, node: LatticaNode, port: int
    ) -> None:
        super().__init__(store, uplink_bytes_per_s)
        self._node, self._port, self._guard = node, port, threading.Lock()

    async def get_blocks(self, payload_digest: str) -> Blocks:
        return Blocks(self._node.peer_id, self._port, await asyncio.to_thread(self._blocks, payload_digest))

    def _blocks(self, digest: str) -> tuple[str, ...]:
        with self._guard:
            self._node.follow(self._store)
            if digest not in self._node.held:
                payload = self._store.find(digest)
                self._node.held[digest] = tuple(
                    self._node.put(self._store.read_chunks(payload, range(index, index + 1)))
                    for index in range(len(payload.chunk_digests))
                )
            return self._node.held[digest]


class LatticaTransport(MeasuredTransport):
    """Payloads from peers of a Lattica network. What was fetched is served to others, too."""

    def __init__(
        self,
        store: PayloadStore,
        folder: Path,
        timeout_s: float,
        credentials: Credentials | None = None,
        listen: tuple[str, int] = ("0.0.0.0", 0),
        network: NetworkLog | None = None,
    ) -> None:
        """Fill `store`; join the network when the first payload is wanted.

        Args:
            store: gets the payloads.
            folder: keeps the blocks of this peer.
            timeout_s: a transfer is given up when a block does not come for so long.
            credentials: shown to origins.
            listen: address and port of this peer; port 0 picks a free one.
            network: gets what is measured.
        """
        super().__init__(store, "Lattica", network)
        self._folder, self._timeout_s = folder, timeout_s
        self._credentials, self._listen = credentials, listen
        self._threads = ThreadPoolExecutor(BLOCKS_AT_ONCE, "lattica")
        self._node: LatticaNode | None = None

    async def bring(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        client = BroadcastClient(manifest.origin, self._timeout_s, credentials=self._credentials)
        try:
            blocks = await client.get_blocks(payload.digest)
        finally:
            await client.close()
        if len(blocks.addresses) != len(payload.chunk_digests):
            raise IntegrityError(
                f"{manifest.origin} names {len(blocks.addresses)} blocks of version {manifest.version} for "
                f"{len(payload.chunk_digests)} chunks"
            )
        node = await asyncio.to_thread(self._join, manifest.origin, blocks)
        node.held[payload.digest] = blocks.addresses
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
        self._node.follow(self._store)
        return self._node

    async def close(self) -> None:
        """Leave the network."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._node is not None:
            await asyncio.to_thread(self._node.close)
            self._node = None
