"""A cap on what is sent holds for all together, in turns, and nobody pays for what was not sent."""

import asyncio
from pathlib import Path

import pytest

from antiphon.core.dissemination.requests import (
    BUFFERED_BYTES,
    LEAST_PIECE_BYTES,
    MOST_PIECE_BYTES,
    PIECE_BYTES,
    QUICK_PIECE_S,
    PiecePace,
)
from antiphon.lineage.store import remote_place
from antiphon.simulator.virtual.loop import VirtualLoop
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.service import BroadcastService, Uplink
from antiphon.weights.transports.object_store import object_place

RATE = 1e6
"""Bytes per second."""


def virtual() -> VirtualLoop:
    return VirtualLoop(lambda: (0.0, 0.0), 1e6)  # type: ignore[abstract]


def test_those_who_leave_before_their_turn_leave_no_debt() -> None:
    loop = virtual()

    async def body() -> None:
        uplink = Uplink(RATE)
        waiting = [asyncio.create_task(uplink.take(PIECE_BYTES)) for _ in range(100)]
        await asyncio.sleep(0.0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        before_s = loop.time()
        await uplink.take(1000)
        assert loop.time() - before_s < 0.5

    loop.run(body())


def test_a_large_part_lets_others_in_between_and_the_cap_holds() -> None:
    loop = virtual()

    async def body() -> None:
        uplink = Uplink(RATE)
        before_s = loop.time()
        part = asyncio.create_task(uplink.take(32 * PIECE_BYTES))
        await asyncio.sleep(0.0)
        await uplink.take(1000)
        assert loop.time() - before_s < 3 * PIECE_BYTES / RATE
        await part
        assert loop.time() - before_s >= 31 * PIECE_BYTES / RATE

    loop.run(body())


def test_what_is_put_into_a_shared_folder_is_paced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_place, "PART_BYTES", 1000)
    (tmp_path / "file").write_bytes(bytes(range(250)) * 10)
    (tmp_path / "shared").mkdir()
    paced: list[int] = []
    place = object_place(str(tmp_path / "shared"), None)
    place.put("run/object", tmp_path / "file", paced.append)
    assert paced == [1000, 1000, 500]
    assert (tmp_path / "shared/run/object").read_bytes() == (tmp_path / "file").read_bytes()
    assert place.sizes("run") == {"run/object": 2500}


def test_messages_grow_on_a_fast_link_and_stay_small_on_a_slow_one() -> None:
    pace = PiecePace()
    pace.sent(BUFFERED_BYTES - 1, 0.0)
    assert pace.piece_bytes == LEAST_PIECE_BYTES  # that went into buffers, and says nothing of the link
    for _ in range(10):
        pace.sent(1, QUICK_PIECE_S / 2)
    assert pace.piece_bytes == MOST_PIECE_BYTES
    for _ in range(10):
        pace.sent(1, QUICK_PIECE_S)
    assert pace.piece_bytes == LEAST_PIECE_BYTES


def test_under_a_cap_a_slow_link_still_shows_that_it_moves(tmp_path: Path) -> None:
    async def body() -> list[int]:
        store = PayloadStore(tmp_path)
        outgoing = store.make(32 * PIECE_BYTES)
        outgoing.write(bytes(32 * PIECE_BYTES))
        digest = outgoing.finish().digest
        service = BroadcastService(store, uplink_bytes_per_s=4 * PIECE_BYTES / QUICK_PIECE_S)
        return [len(piece) async for _, piece in service.get_chunks(digest, [0])]

    lengths = asyncio.run(body())
    assert sum(lengths) == 32 * PIECE_BYTES and max(lengths) <= 8 * PIECE_BYTES
