"""Peers in virtual time: the product's receiver and server over links with a rate and a delay, and faults.

Stores are in memory; planner, receiver, server and digests are the product's.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from antiphon.api.manifest import payload_digest
from antiphon.api.snapshots import Broadcast, Place
from antiphon.core.dissemination.plan import ORIGIN, Plan
from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import Payload
from antiphon.simulator.virtual.loop import VirtualLoop
from antiphon.weights.service import Arrivals, BroadcastService
from antiphon.weights.transport import Receiver, TransferLimits

NEVER = 1e9


class MemoryIncoming:
    """A payload that arrives, in memory."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.held = np.zeros(len(payload.chunk_digests), np.bool_)
        self.body = bytearray(payload.payload_bytes)
        self.writes = 0

    def missing(self) -> list[int]:
        return [int(index) for index in np.flatnonzero(~self.held)]

    def write(self, index: int, data: bytes) -> None:
        start, length = self.payload.span(index)
        if len(data) != length or blake3(data).hexdigest() != self.payload.chunk_digests[index]:
            raise IntegrityError("was altered")
        if not self.held[index]:
            self.body[start : start + length] = data
            self.held[index] = True
            self.writes += 1


class MemoryStore:
    """Payloads in memory, as `PayloadStore` keeps them."""

    def __init__(self) -> None:
        self.incoming: dict[str, MemoryIncoming] = {}

    def receive(self, payload: Payload) -> MemoryIncoming:
        return self.incoming.setdefault(payload.digest, MemoryIncoming(payload))

    def find(self, digest: str) -> Payload:
        if digest not in self.incoming:
            raise UnavailableError(f"payload {digest} is not held here")
        return self.incoming[digest].payload

    def held(self, payload: Payload) -> npt.NDArray[np.bool_]:
        return self.incoming[payload.digest].held

    def read_chunks(self, payload: Payload, run: range) -> bytes:
        found = self.incoming[payload.digest]
        if not found.held[run.start : run.stop].all():
            raise UnavailableError(f"chunk {run[0]} is not held here")
        last, length = payload.span(run[-1])
        return bytes(found.body[payload.span(run[0])[0] : last + length])


@dataclass
class Faults:
    """What is wrong with a peer, as others see it."""

    kind: str = "none"
    """none, corrupt, truncate, oversize, reorder, repeat, refuse, boast (says nothing)."""
    every: int = 3
    """Every how many-th chunk is sent wrong."""
    cut_bytes: float = NEVER
    """After this many bytes each call breaks."""
    slow: float = 1.0
    """How many times longer everything takes."""
    away: tuple[float, float] = (NEVER, NEVER)
    """From when until when it answers nothing: connections are refused, those open break."""
    hangs: tuple[float, float] = (NEVER, NEVER)
    """From when until when it is silent, as behind a broken cable."""

    drips: tuple[int, ...] = ()
    """Chunks that it sends byte by byte, one a second."""

    @property
    def lies(self) -> bool:
        return self.kind in ("corrupt", "truncate", "oversize", "reorder", "repeat")


@dataclass
class Peer:
    """One party."""

    name: str
    faults: Faults
    store: MemoryStore
    arrivals: Arrivals
    service: BroadcastService
    culprits: dict[str, str] = field(default_factory=dict)
    sent_bytes: int = 0
    sent_wrong: bool = False


class Line(Broadcast):
    """A connection to a peer: its faults happen here."""

    def __init__(self, target: Peer, delay_s: float) -> None:
        self._target, self._delay_s = target, delay_s

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        target, faults = self._target, self._target.faults
        await self._pass(2 * self._delay_s)
        sent, broken_off = 0, False
        asked = list(indices)
        if faults.kind == "refuse":
            raise UnavailableError(f"{target.name} refuses")
        if faults.kind == "boast":
            await asyncio.sleep(NEVER)
        if faults.kind == "reorder" and len(asked) > 1:
            asked[0], asked[1] = asked[1], asked[0]
        due = iter(indices)
        async for index, piece in self._pieces(payload_digest, asked, held_only):
            await self._pass(0.0)
            if faults.slow > 1.0:
                await asyncio.sleep((faults.slow - 1.0) * len(piece) / 1000.0)
            if index in faults.drips:
                for at in range(len(piece)):
                    await asyncio.sleep(1.0)
                    target.sent_bytes += 1
                    yield index, piece[at : at + 1]
                continue
            if sent + len(piece) > faults.cut_bytes:
                raise UnavailableError("Socket closed")
            sent += len(piece)
            target.sent_bytes += len(piece)
            spoiled = index % faults.every == 0 and faults.lies
            # What comes in one by one is sent in the order in which it came, whatever was asked for.
            target.sent_wrong |= broken_off or (
                index != next(due) if faults.kind == "reorder" else spoiled and faults.kind != "truncate"
            )
            # Seen with what follows; who has the chunk of another by then does not wait for that.
            broken_off = spoiled and faults.kind == "truncate"
            if spoiled and faults.kind == "corrupt":
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            if spoiled and faults.kind == "oversize":
                piece += b"x"
            if spoiled and faults.kind == "truncate":
                piece = piece[:-1]
            yield index, piece
            if spoiled and faults.kind == "repeat":
                yield index, piece
        target.sent_wrong |= broken_off

    async def _pieces(
        self, payload_digest: str, asked: Sequence[int], held_only: bool
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield what the peer sends: chunks that come together one by one where one of them is spoiled."""
        async for index, piece in self._target.service.get_chunks(payload_digest, asked, held_only):
            whole = self._target.store.find(payload_digest).span(index)[1]
            if not (self._target.faults.lies or self._target.faults.drips):
                whole = len(piece)
            for at in range(0, len(piece), whole):
                yield index + at // whole, piece[at : at + whole]

    async def where(self) -> Place:
        raise UnavailableError("it is on another machine")

    async def _pass(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        now, faults = asyncio.get_running_loop().time(), self._target.faults
        if faults.away[0] <= now < faults.away[1]:
            raise UnavailableError("Connection refused")
        if faults.hangs[0] <= now < faults.hangs[1]:
            await asyncio.sleep(faults.hangs[1] - now)


@dataclass
class Swarm:
    """An origin and workers that broadcast payloads to each other."""

    peers: dict[str, Peer]
    delay_s: float

    async def fetch(
        self, worker: str, payload: Payload, plan: Plan, give_up_s: float = 300.0
    ) -> DeliveryRecord:
        """Bring a payload to one worker."""
        peer, assignment = self.peers[worker], plan.assignments[worker]
        incoming = peer.store.receive(payload)
        peer.arrivals.notify(payload.digest)
        return await Receiver(
            incoming,  # type: ignore[arg-type]
            {
                name: [Line(self.peers[name], self.delay_s)]
                for name in (*assignment.parents, *assignment.others)
            },
            assignment,
            peer.arrivals,
            peer.culprits,
            TransferLimits(stall_s=2.0, give_up_s=give_up_s),
        ).run()


def make_swarm(
    uplinks: Mapping[str, float], faults: Mapping[str, Faults], delay_s: float = 0.01, stall_s: float = 30.0
) -> Swarm:
    """Make parties by name, with uplinks in bytes per second; without faults unless some are given."""
    peers = {}
    for name, uplink in uplinks.items():
        store, arrivals = MemoryStore(), Arrivals()
        service = BroadcastService(store, uplink, arrivals, stall_s)  # type: ignore[arg-type]
        peers[name] = Peer(name, faults.get(name, Faults()), store, arrivals, service)
    return Swarm(peers, delay_s)


def publish(swarm: Swarm, body: bytes, chunk_bytes: int) -> Payload:
    """Put a payload into the origin's store."""
    pieces = [body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes)]
    digests = tuple(blake3(piece).hexdigest() for piece in pieces)
    digest = payload_digest(len(body), chunk_bytes, digests)
    payload = Payload("full", None, "raw", digest, len(body), chunk_bytes, digests)
    incoming = swarm.peers[ORIGIN].store.receive(payload)
    for index, piece in enumerate(pieces):
        incoming.write(index, piece)
    return payload


def virtual_loop(limit_s: float = 100_000.0) -> VirtualLoop:
    """Return a loop whose threads take no time."""
    return VirtualLoop(lambda: (0.0, 0.0), limit_s)
