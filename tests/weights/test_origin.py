"""The origin is a process of its own: it serves while its learner computes, and comes back where it was."""

import asyncio
from pathlib import Path

import psutil
import torch

from antiphon.api.manifest import full_payload
from antiphon.core.errors import UnavailableError
from antiphon.weights.origin import LASTED_S, OriginOrder, next_pause_s, serving_origin
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import BroadcastClient
from tests.support.processes import children_that_run
from tests.support.snapshots import publish

DEADLINE_S = 240.0


def origins() -> list[psutil.Process]:
    return children_that_run("antiphon.weights.origin")


async def chunks(client: BroadcastClient, store: PayloadStore) -> list[bytes]:
    """Fetch the newest version, asking again while nobody answers."""
    payload = full_payload(store.manifest(None))
    while True:
        try:
            found = client.get_chunks(payload.digest, range(len(payload.chunk_digests)))
            return [data async for _, data in found]
        except UnavailableError:
            await asyncio.sleep(0.05)


def test_a_killed_origin_comes_back_on_its_port_and_ends_with_its_learner(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    publish(store, {"a": torch.arange(1000.0)}, 1, chunk_bytes=1024)
    order = OriginOrder(str(store.root), "run", "127.0.0.1", 0, None, DEADLINE_S)

    async def body() -> None:
        async with serving_origin(order, None) as port:
            client = BroadcastClient(f"127.0.0.1:{port}")
            file = store.path(full_payload(store.manifest(None)).digest)
            assert b"".join(await chunks(client, store)) == file.read_bytes()
            (process,) = origins()
            process.kill()
            # Versions that are written and dropped meanwhile are served and forgotten.
            publish(store, {"a": torch.ones(1000)}, 2, chunk_bytes=1024)
            store.prune_announced(2, 1)
            file = store.path(full_payload(store.manifest(None)).digest)
            assert b"".join(await chunks(client, store)) == file.read_bytes()
            assert (await client.where()).token == store.token()
            await client.close()
        assert not origins()
        async with serving_origin(order, None) as again:
            assert again == port

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


def test_an_origin_that_keeps_dying_is_started_less_and_less_often() -> None:
    pauses = [0.0]
    for _ in range(7):
        pauses.append(next_pause_s(pauses[-1], 0.5))
    assert pauses[1:] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert next_pause_s(30.0, LASTED_S) == 1.0
