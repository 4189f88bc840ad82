"""The relay over gRPC with TLS, on files: pieces, chunks that are on their way, and who is to blame."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.api.snapshots import Broadcast
from antiphon.core.dissemination import requests
from antiphon.core.dissemination.plan import ORIGIN, Assignment
from antiphon.core.dissemination.requests import BUFFERED_BYTES, LEAST_PIECE_BYTES, PIECE_BYTES
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import Payload
from antiphon.net.rpc.serving import Security, open_channel, start_server, stop_server
from antiphon.net.security.credentials import Credentials, needed_token_key
from antiphon.net.security.guard import Guard
from antiphon.system.clock import wall_clock
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, BroadcastClient, register_broadcast
from antiphon.weights.service import Arrivals, BroadcastService
from antiphon.weights.transport import Receiver, TransferLimits
from tests.support.loop_model import RUN_ID
from tests.support.secured import House, make_house

FROM_ORIGIN = Assignment((ORIGIN,), (), 1, 1e8)
FROM_RELAY = Assignment(("relay", ORIGIN), (), 2, 1e8)


def _in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Holder:
    """A store that is served."""

    def __init__(self, folder: Path) -> None:
        self.store = PayloadStore(folder)
        self.arrivals = Arrivals()
        self.service = BroadcastService(self.store, arrivals=self.arrivals, stall_s=20.0)

    async def fetch(
        self, payload: Payload, assignment: Assignment, **sources: list[BroadcastClient]
    ) -> object:
        named = {name.removeprefix("origin"): lanes for name, lanes in sources.items()}
        incoming = self.store.receive(payload)
        self.arrivals.notify(payload.digest)
        found = await Receiver(
            incoming, named, assignment, self.arrivals, {}, TransferLimits(10.0, give_up_s=20.0)
        ).run()
        incoming.finish()
        return found


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(tmp_path_factory.mktemp("keys"))


@asynccontextmanager
async def _served(holder: Holder, house: House, lanes: int) -> AsyncIterator[list[BroadcastClient]]:
    """Serve a holder; yield a worker's connections to it."""
    credentials = house.services
    guard = Guard(needed_token_key(credentials), RUN_ID, wall_clock, asyncio.get_running_loop().time)
    server, port = await start_server(
        "127.0.0.1",
        0,
        lambda server: register_broadcast(server, holder.service),
        [SERVICE_NAME],
        Security(credentials, guard),
    )
    mine: Credentials = house.worker("w")
    channels = [open_channel(f"127.0.0.1:{port}", mine, own_connection=True) for _ in range(lanes)]
    clients = [BroadcastClient("", channel=channel) for channel in channels]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()
        await stop_server(server, grace_s=0.1)


def _publish(holder: Holder, size: int, chunk_bytes: int) -> tuple[Payload, bytes]:
    body = np.random.default_rng(size).bytes(size)
    outgoing = holder.store.make(chunk_bytes)
    outgoing.write(body)
    return outgoing.finish(), body


@_in_loop
async def test_a_relay_hands_on_what_it_is_still_receiving_in_pieces_over_several_streams(
    tmp_path: Path, house: House
) -> None:
    origin, relay, leaf = (Holder(tmp_path / name) for name in ("origin", "relay", "leaf"))
    payload, body = _publish(origin, 3 * PIECE_BYTES * 5 + 11, 3 * PIECE_BYTES)
    async with _served(origin, house, 3) as to_origin, _served(relay, house, 3) as to_relay:
        last = asyncio.create_task(leaf.fetch(payload, FROM_RELAY, origin=to_origin, relay=to_relay))
        await relay.fetch(payload, FROM_ORIGIN, origin=to_origin)
        delivery = await last
    assert bytes(leaf.store.map(payload.digest)) == body
    assert delivery.bytes_from == {"relay": len(body)}


@_in_loop
async def test_a_chunk_that_is_late_keeps_no_other_back(tmp_path: Path) -> None:
    origin, relay = Holder(tmp_path / "origin"), Holder(tmp_path / "relay")
    payload, body = _publish(origin, 3 * 1024, 1024)
    incoming = relay.store.receive(payload)
    for index in (1, 2):
        incoming.write(index, body[index * 1024 : (index + 1) * 1024])
    chunks = relay.service.get_chunks(payload.digest, [0, 1, 2])
    assert await anext(chunks) == (1, body[1024:2048])  # the first message tries the link with one
    assert await anext(chunks) == (2, body[2048:])
    incoming.write(0, body[:1024])
    relay.arrivals.notify(payload.digest)
    assert await anext(chunks) == (0, body[:1024])
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)


@_in_loop
async def test_chunks_that_come_together_are_checked_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "QUICK_PIECE_S", 60.0)
    origin, leaf = Holder(tmp_path / "origin"), Holder(tmp_path / "leaf")
    chunk = LEAST_PIECE_BYTES
    payload, body = _publish(origin, 12 * chunk + 7, chunk)
    sent = [
        (index, len(piece)) async for index, piece in origin.service.get_chunks(payload.digest, range(13))
    ]
    alone = [(index, chunk) for index in range(BUFFERED_BYTES // chunk)]
    assert sent[: len(alone)] == alone and sent[len(alone)] == (len(alone), 2 * chunk)
    assert sum(length for _, length in sent) == len(body)

    class Spoiler(BroadcastService):
        async def get_chunks(
            self, payload_digest: str, indices: Sequence[int], held_only: bool = False
        ) -> AsyncIterator[tuple[int, bytes]]:
            yield 0, body[: 4 * chunk] + bytes(chunk) + body[5 * chunk :]

    spoiler = Spoiler(origin.store)
    incoming = leaf.store.receive(payload)
    with pytest.raises(IntegrityError, match="the origin sent chunk 4 of payload"):
        await Receiver(incoming, {ORIGIN: [spoiler]}, FROM_ORIGIN, leaf.arrivals, {}).run()
    assert np.flatnonzero(incoming.held).tolist() == [0, 1, 2, 3]
    await Receiver(incoming, {ORIGIN: [origin.service]}, FROM_ORIGIN, leaf.arrivals, {}).run()
    incoming.finish()
    assert bytes(leaf.store.map(payload.digest)) == body


@_in_loop
async def test_who_is_told_to_leave_as_the_last_chunk_comes_leaves(tmp_path: Path) -> None:
    """What is still asked is hung up then, which takes a moment, and that moment is not ours alone."""
    origin, leaf = Holder(tmp_path / "origin"), Holder(tmp_path / "leaf")
    payload, _ = _publish(origin, 3 * 1024, 1024)
    hung_up, gone = asyncio.Event(), asyncio.Event()

    class Lingering(BroadcastService):
        async def get_chunks(
            self, payload_digest: str, indices: Sequence[int], held_only: bool = False
        ) -> AsyncIterator[tuple[int, bytes]]:
            async for piece in super().get_chunks(payload_digest, indices):
                yield piece
            try:
                await asyncio.Event().wait()  # the end of the stream is on its way
            finally:
                hung_up.set()
                await gone.wait()

    incoming = leaf.store.receive(payload)
    sources = {ORIGIN: [Lingering(origin.store)]}
    fetching = asyncio.create_task(Receiver(incoming, sources, FROM_ORIGIN, leaf.arrivals, {}).run())
    await hung_up.wait()
    assert not incoming.missing()
    fetching.cancel()
    gone.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching


@_in_loop
async def test_a_message_of_many_chunks_is_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, leaf = Holder(tmp_path / "origin"), Holder(tmp_path / "leaf")
    count = 1024
    payload, body = _publish(origin, 4 * count, 4)

    class Together(BroadcastService):
        async def get_chunks(
            self, payload_digest: str, indices: Sequence[int], held_only: bool = False
        ) -> AsyncIterator[tuple[int, bytes]]:
            yield indices[0], body[4 * indices[0] : 4 * indices[-1] + 4]

    asked, span = 0, Payload.span

    def counted(self: Payload, index: int) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return span(self, index)

    incoming = leaf.store.receive(payload)
    monkeypatch.setattr(Payload, "span", counted)
    together = Together(origin.store)
    await Receiver(incoming, {ORIGIN: [together]}, FROM_ORIGIN, leaf.arrivals, {}).run()
    assert incoming.held.all() and asked < 16 * count


@_in_loop
async def test_chunks_that_are_asked_for_in_any_order_are_each_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "QUICK_PIECE_S", 60.0)
    origin, relay, chunk, count = (
        Holder(tmp_path / "origin"),
        Holder(tmp_path / "relay"),
        LEAST_PIECE_BYTES,
        12,
    )
    payload, body = _publish(origin, count * chunk, chunk)
    incoming, late = relay.store.receive(payload), 8
    bodies = [body[index * chunk : (index + 1) * chunk] for index in range(count)]
    for index in {*range(count)} - {late}:
        incoming.write(index, bodies[index])
    sent: list[int] = []
    async for index, piece in relay.service.get_chunks(
        payload.digest, [0, 1, 2, 3, 4, 5, 6, late, 7, 9, 10, 11]
    ):
        sent += range(index, index + len(piece) // chunk)
        assert piece == b"".join(bodies[index : index + len(piece) // chunk])
        if len(sent) >= count - 1 and not incoming.held[late]:
            incoming.write(late, bodies[late])
            relay.arrivals.notify(payload.digest)
    assert sorted(sent) == list(range(count))


@_in_loop
async def test_who_is_asked_for_what_it_holds_waits_for_nothing(tmp_path: Path, house: House) -> None:
    origin, part = Holder(tmp_path / "origin"), Holder(tmp_path / "part")
    payload, body = _publish(origin, 1100, 100)
    incoming = part.store.receive(payload)
    for index in (0, 3, 10):
        incoming.write(index, body[index * 100 : index * 100 + 100])
    async with _served(part, house, 1) as to_part:
        sent = []
        with pytest.raises(UnavailableError, match=r"chunk 1 of payload .* is not held here; take it"):
            async for index, _ in to_part[0].get_chunks(payload.digest, range(11), held_only=True):
                sent.append(index)
        assert sent == [0, 3, 10]
        with pytest.raises(UnavailableError, match="is not held here"):
            await anext(to_part[0].get_chunks("0" * 64, [0], held_only=True))


@_in_loop
async def test_others_give_what_they_hold_while_no_parent_answers(tmp_path: Path) -> None:
    origin, part, leaf = (Holder(tmp_path / name) for name in ("origin", "part", "leaf"))
    payload, body = _publish(origin, 1000, 100)
    incoming = part.store.receive(payload)
    for index in (0, 1, 2, 6):
        incoming.write(index, body[index * 100 : index * 100 + 100])
    nobody = BroadcastClient("127.0.0.1:9")
    assignment = Assignment((ORIGIN,), ("part",), 1, 1e8)
    sources: dict[str, list[Broadcast]] = {ORIGIN: [nobody], "part": [part.service]}
    with pytest.raises(UnavailableError, match="6 of 10 chunks"):
        await Receiver(
            leaf.store.receive(payload), sources, assignment, leaf.arrivals, {}, TransferLimits(1.0, 2.0)
        ).run()
    await nobody.close()
    assert leaf.store.receive(payload).missing() == [3, 4, 5, 7, 8, 9]


@_in_loop
async def test_a_holder_whose_file_was_altered_is_named_and_another_one_is_asked(
    tmp_path: Path, house: House
) -> None:
    origin, relay, leaf = (Holder(tmp_path / name) for name in ("origin", "relay", "leaf"))
    payload, body = _publish(origin, 5000, 500)
    bad, _ = _publish(relay, 5000, 500)
    spoiled = bytearray(body)
    spoiled[2600] ^= 1
    path = relay.store.path(bad.digest)
    path.chmod(0o644)
    path.write_bytes(spoiled)
    async with _served(origin, house, 1) as to_origin, _served(relay, house, 1) as to_relay:
        delivery = await leaf.fetch(payload, FROM_RELAY, origin=to_origin, relay=to_relay)
        assert list(delivery.culprits) == ["relay"]
        assert "chunk 5" in delivery.culprits["relay"] and "altered" in delivery.culprits["relay"]
        assert bytes(leaf.store.map(payload.digest)) == body
        only = Holder(tmp_path / "only")
        with pytest.raises(
            IntegrityError, match=r"5 chunks of payload .* have no source left: the origin sent"
        ):
            alone = Assignment((ORIGIN,), (), 1, 1e8)
            await only.fetch(payload, alone, origin=to_relay)


@_in_loop
async def test_nobody_there_is_said_after_the_patience_and_what_came_stays(tmp_path: Path) -> None:
    holder = Holder(tmp_path / "worker")
    payload, body = _publish(Holder(tmp_path / "origin"), 1000, 100)
    incoming = holder.store.receive(payload)
    incoming.write(4, body[400:500])
    nobody = BroadcastClient("127.0.0.1:9")
    with pytest.raises(
        UnavailableError, match=r"9 of 10 chunks .* nothing came for 0.3 s from any of the origin"
    ):
        await Receiver(
            incoming, {ORIGIN: [nobody]}, FROM_ORIGIN, holder.arrivals, {}, TransferLimits(0.1, give_up_s=0.3)
        ).run()
    await nobody.close()
    assert holder.store.receive(payload).missing() == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_payloads_that_peers_only_ask_for_take_no_memory() -> None:
    arrivals = Arrivals()

    async def body() -> None:
        asked = [arrivals.wait(f"{number:064x}", 0.01) for number in range(100)]
        assert not any(await asyncio.gather(*asked))
        late = asyncio.create_task(arrivals.wait("a" * 64, 60.0))
        await asyncio.sleep(0)
        arrivals.notify("a" * 64)
        assert await late

    asyncio.run(body())
    assert not vars(arrivals)["_waiting"] and not vars(arrivals)["_count"]
