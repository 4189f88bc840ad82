"""Peer: one process of a broadcast benchmark, which receives and serves with the product's own code.

    python -m antiphon.benchmarks.parts.network.peer FOLDER CREDENTIALS HOST:PORT

It reads one JSON object a line from its standard input and answers each with one, until the input ends.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.core.dissemination.plan import Assignment
from antiphon.core.records import Payload
from antiphon.net.rpc.serving import Security, start_server
from antiphon.net.security.credentials import load_credentials, needed_token_key
from antiphon.net.security.guard import Guard
from antiphon.system.clock import wall_clock
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.service import Arrivals, BroadcastService
from antiphon.weights.transport import Connections, Receiver, TransferLimits

RUN_ID = "benchmark"
REPLY_S = 30.0
"""Without a byte of a source that was asked, or without a chunk that was waited for."""


class Peer:
    """A payload store that receives and serves."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.credentials = load_credentials(bundle)
        self.store = PayloadStore(folder)
        self.arrivals = Arrivals()
        self.culprits: dict[str, str] = {}
        self.connections: Connections | None = None
        """Stay open from one payload to the next, as a worker's do."""

    async def serve(self, address: str) -> Any:
        """Start to answer; the server is to be kept."""
        host, _, port = address.rpartition(":")
        guard = Guard(needed_token_key(self.credentials), RUN_ID, wall_clock, time.monotonic)
        service = BroadcastService(self.store, None, self.arrivals, REPLY_S)
        server, _ = await start_server(
            host,
            int(port),
            lambda server: register_broadcast(server, service),
            [SERVICE_NAME],
            Security(self.credentials, guard),
        )
        return server

    def make(self, payload_bytes: int, chunk_bytes: int, seed: int) -> dict[str, Any]:
        """Make a payload of random bytes."""
        outgoing = self.store.make(chunk_bytes)
        random, left = np.random.default_rng(seed), payload_bytes
        while left:
            outgoing.write(random.bytes(min(left, 8 << 20)))
            left -= min(left, 8 << 20)
        return asdict(outgoing.finish())

    async def fetch(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Bring a payload here, and answer what that took."""
        fields = asked["payload"]
        payload = Payload(**{**fields, "chunk_digests": tuple(fields["chunk_digests"])})
        assignment = Assignment(**{**asked["assignment"]})
        if self.connections is None:
            self.connections = Connections(asked["streams"], REPLY_S, self.credentials)
        clients = {
            name: self.connections(address)
            for name, address in asked["addresses"].items()
            if name in (*assignment.parents, *assignment.others)
        }
        cpu_s = time.process_time()
        incoming = await asyncio.to_thread(self.store.receive, payload)
        self.arrivals.notify(payload.digest)
        delivery = await Receiver(
            incoming,
            clients,
            assignment,
            self.arrivals,
            self.culprits,
            TransferLimits(asked["stall_s"], 60.0),
        ).run()
        await asyncio.to_thread(incoming.finish)
        ended_s = time.monotonic()
        return {"ended_s": ended_s, "cpu_s": time.process_time() - cpu_s, **asdict(delivery)}


async def _main() -> None:
    folder, bundle, address = sys.argv[1:]
    peer = Peer(Path(folder), Path(bundle))
    server = await peer.serve(address)
    print("{}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if asked["do"] == "make":
            answer = peer.make(asked["payload_bytes"], asked["chunk_bytes"], asked["seed"])
        elif asked["do"] == "drop":
            peer.store.drop(asked["digest"])
            answer = {}
        else:
            answer = await peer.fetch(asked)
        print(json.dumps(answer), flush=True)
    await server.stop(0.0)


if __name__ == "__main__":
    asyncio.run(_main())
