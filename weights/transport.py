"""Transport: how a payload of a version comes into a worker's store.

What decides which payloads are needed does not know the network, and a transport does not know what a
payload is for: it brings the chunks that are missing, each checked against the manifest. Of whom to ask
next `core.dissemination.requests` decides. A chunk is kept when its digest matches the manifest's, from any
sender, and from then on others may have it.
"""

import asyncio
import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import structlog

from antiphon.api.snapshots import Broadcast, Place
from antiphon.core.dissemination.plan import ORIGIN, Assignment, TransferPlan
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkLog
from antiphon.core.dissemination.requests import Request, Transfer
from antiphon.core.dissemination.transfers import FROM_ORIGIN
from antiphon.core.errors import AntiphonError, IntegrityError, UnavailableError
from antiphon.core.records import Payload, SnapshotManifest
from antiphon.net.rpc.serving import open_channel
from antiphon.net.security.credentials import Credentials
from antiphon.system.wakeup import Wakeup, end_tasks
from antiphon.weights.payload_store import TOKEN, IncomingPayload, PayloadStore
from antiphon.weights.rpc import BroadcastClient
from antiphon.weights.service import Arrivals

ADDRESSES_KEPT = 16
"""Sources whose connections stay open for the next payload."""
REFUSED_S = 2.0
"""A transfer is begun again, with another manifest and plan, after so long without a source that answers."""
_TOKEN_BYTES = 64
"""Longest token that is read."""
Connect = Callable[[str], Sequence[Broadcast]]
"""Returns connections to host:port, beside each other."""
AskPlan = Callable[[SnapshotManifest, Payload], Awaitable[TransferPlan | None]]
"""Returns whom to fetch a payload from; None: from the origin."""

_log = structlog.get_logger(__name__)


class Transport(Protocol):
    """Brings payloads into one store."""

    async def link(self, manifest: SnapshotManifest, payload: Payload) -> bool:
        """Take a payload of a holder on this machine without sending it; False where that cannot be."""
        return False

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        """Bring every chunk of a payload here, verified; continues where an earlier attempt stopped.

        Args:
            manifest: checked, of the version that the payload leads to.
            payload: one of the manifest's.
            arrived: called with the bytes of each part that came.

        Raises:
            UnavailableError: when nothing came in time, or the disk is full; what has arrived stays.
            IntegrityError: when what came is not what the manifest names.
        """

    async def close(self) -> None:
        """Let go of connections."""


class MeasuredTransport(Transport):
    """Payloads from one other source than workers and origin; notes what came, for others to take it here."""

    def __init__(self, store: PayloadStore, source: str, network: NetworkLog | None = None) -> None:
        """Fill `store`; `network` gets what is measured, under the name `source`."""
        self._store, self._source, self._network = store, source, network or NetworkLog()

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        begun_s, came, first_s = clock(), 0, 0.0

        def note(length: int) -> None:
            nonlocal came, first_s
            first_s = first_s or clock() - begun_s
            came += length
            arrived(length)

        if not self._store.has(payload.digest):
            await self.bring(manifest, payload, note)
            sent = {self._source: came} if came else {}
            record = DeliveryRecord(manifest.version, "", clock() - begun_s, first_s, sent)
            self._network.delivered(record)
        self._store.note(payload)
        self._network.holds(payload.digest, self._store.has)

    @abstractmethod
    async def bring(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        """Do what `fetch` says, for a payload that is not here."""


class Connections:
    """Connections over gRPC, which stay open from one payload to the next."""

    def __init__(self, streams: int, timeout_s: float, credentials: Credentials | None = None) -> None:
        """Open `streams` to each address, wait `timeout_s` for a chunk, show `credentials`."""
        self._streams, self._timeout_s, self._credentials = streams, timeout_s, credentials
        self._open: dict[str, list[BroadcastClient]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __call__(self, address: str) -> Sequence[BroadcastClient]:
        lanes = self._open.pop(address, None)
        if lanes is None:
            lanes = [
                BroadcastClient(
                    address,
                    self._timeout_s,
                    channel=open_channel(address, self._credentials, own_connection=True),
                )
                for _ in range(self._streams)
            ]
        self._open[address] = lanes  # the newest use last
        for old in list(self._open)[:-ADDRESSES_KEPT]:
            task = asyncio.create_task(_close(self._open.pop(old)))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return lanes

    async def close(self) -> None:
        while self._open:
            await _close(self._open.popitem()[1])


async def _close(lanes: Sequence[BroadcastClient]) -> None:
    for lane in lanes:
        await lane.close()


class RelayTransport(Transport):
    """Chunks from those that hold them: workers that hand them on, and the origin; on its machine a link."""

    def __init__(
        self,
        store: PayloadStore,
        connect: Connect,
        timeout_s: float,
        *,
        arrivals: Arrivals | None = None,
        network: NetworkLog | None = None,
        ask_plan: AskPlan | None = None,
        links: bool = True,
    ) -> None:
        """Fill `store`.

        Args:
            store: gets the payloads.
            connect: gives connections to an address.
            timeout_s: a transfer is given up when nothing comes from anyone for so long.
            arrivals: of the service that serves the same store, which hands on what arrives.
            network: gets what is measured.
            ask_plan: says whom to fetch from; None: the origin alone.
            links: on the origin's machine its file is linked.
        """
        self._store, self._connect, self._ask_plan = store, connect, ask_plan
        self._limits = TransferLimits(give_up_s=timeout_s, refused_s=REFUSED_S)
        self._arrivals = arrivals or Arrivals()
        self._network = network or NetworkLog()
        self._links = links
        self._timed = ""
        """Origin to which a connection was open when its round trip was last taken."""

    async def link(self, manifest: SnapshotManifest, payload: Payload) -> bool:
        clock = asyncio.get_running_loop().time
        begun_s = asked_s = clock()
        try:
            origin = self._connect(manifest.origin)[0]
            place = await origin.where()
            if manifest.origin != self._timed:  # that included opening the connection
                asked_s = clock()
                place = await origin.where()
        except UnavailableError as error:  # other holders may do without it
            _log.warning("origin.away", origin=manifest.origin, reason=str(error))
            return False
        self._timed = manifest.origin
        self._network.round_trip(clock() - asked_s)
        if not self._links or not await _adopted(payload, place, self._store):
            return False
        self._network.delivered(DeliveryRecord(manifest.version, "", clock() - begun_s))
        self._network.holds(payload.digest, self._store.has)  # what was linked is handed on
        return True

    async def fetch(
        self, manifest: SnapshotManifest, payload: Payload, arrived: Callable[[int], None]
    ) -> None:
        if not self._store.has(payload.digest):
            if await self.link(manifest, payload):
                return arrived(payload.payload_bytes)
            plan = FROM_ORIGIN
            try:
                if self._ask_plan is not None:
                    plan = await self._ask_plan(manifest, payload) or FROM_ORIGIN
            except AntiphonError as error:  # the origin is enough
                _log.warning("transfer.unplanned", version=manifest.version, reason=str(error))
            sources = {ORIGIN: self._connect(manifest.origin)}
            for name, address in plan.addresses.items():
                try:
                    sources[name] = self._connect(address)
                except AntiphonError as error:
                    _log.warning("relay.unusable", worker=name, reason=str(error))
            incoming = await asyncio.to_thread(self._store.receive, payload)
            self._arrivals.notify(payload.digest)
            delivery = await Receiver(
                incoming,
                sources,
                plan.assignment,
                self._arrivals,
                self._network.culprits,
                self._limits,
                arrived=arrived,
            ).run()
            await asyncio.to_thread(incoming.finish)
            self._network.delivered(replace(delivery, version=manifest.version))
        # So that it is handed on, also after a restart.
        self._store.note(payload)
        self._network.holds(payload.digest, self._store.has)

    async def close(self) -> None:
        if isinstance(self._connect, Connections):
            await self._connect.close()


async def _adopted(payload: Payload, place: Place, store: PayloadStore) -> bool:
    """Link a payload of an origin that shares this machine and may be read; False where there is none."""

    def adopt() -> bool:
        try:
            # A link that stands there is followed by no one, and a pipe is not waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(place.folder / TOKEN, flags)
            try:
                shown = os.read(descriptor, _TOKEN_BYTES)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return False
        found = PayloadStore(place.folder).path(payload.digest)
        return shown == place.token.encode() and store.adopt(payload, found)

    return bool(place.token) and await asyncio.to_thread(adopt)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long a transfer waits."""

    stall_s: float = 5.0
    """Without a byte from a source that was asked."""
    give_up_s: float = 600.0
    """Without a chunk, or more than a drip of bytes, from anyone."""
    refused_s: float = inf
    """Without progress from anyone, while every source is away or refuses: others may be known by now."""


class Receiver:
    """Brings one payload here; whatever happens, what has arrived stays, and another goes on from there."""

    def __init__(
        self,
        incoming: IncomingPayload,
        sources: Mapping[str, Sequence[Broadcast]],
        assignment: Assignment,
        arrivals: Arrivals,
        culprits: MutableMapping[str, str],
        limits: TransferLimits = TransferLimits(),
        *,
        arrived: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Prepare, in a running loop.

        Args:
            incoming: the payload; chunks are verified and written by it, on threads. It is not finished here.
            sources: name -> connections to it, over which requests are spread; those that `assignment` names
                and that are not here are not asked.
            assignment: whom to ask.
            arrivals: notified of each chunk, for those who wait here for it.
            culprits: who sent something wrong in this run, and is not asked; added to.
            limits: how long sources are waited for.
            arrived: called with the bytes of each piece that came.
        """
        self._incoming, self._sources, self._arrivals = incoming, sources, arrivals
        self._payload = incoming.payload
        self._limits, self._arrived = limits, arrived
        self._clock = asyncio.get_running_loop().time
        self._begun_s = self._clock()
        known = Assignment(
            tuple(name for name in assignment.parents if name in sources),
            tuple(name for name in assignment.others if name in sources),
            assignment.depth,
            assignment.bytes_per_s,
        )
        self._transfer = Transfer(
            incoming.held,
            self._payload.chunk_bytes,
            known,
            culprits,
            self._begun_s,
            calls_at_once=max((len(lanes) for lanes in sources.values()), default=1),
            stall_s=limits.stall_s,
        )
        self._change = Wakeup()
        self._calls: dict[asyncio.Task[None], Request] = {}
        self._busy = {name: [0] * len(lanes) for name, lanes in sources.items()}
        self._broken: AntiphonError | None = None
        self._refusals: dict[str, str] = {}
        """Source -> why it did not send, the last time."""
        self._first_chunk_s = 0.0
        self._bytes_from: dict[str, int] = {}
        self._wrong_ones: dict[str, str] = {}

    async def run(self) -> DeliveryRecord:
        """Ask until everything is here, and return what that took, without the version and who fetched it.

        Raises:
            IntegrityError: when every source sent something wrong; names them.
            UnavailableError: when nothing but a drip came for `limits.give_up_s`, or the disk is full.
        """
        transfer = self._transfer
        try:
            while not transfer.complete:
                self._check()
                now = self._clock()
                for name in transfer.stalled(now):
                    self._hang_up(name)
                for request in transfer.next_requests(now):
                    self._calls[asyncio.create_task(self._ask(request))] = request
                await self._change.wait(min(transfer.retry_s(now), self._limits.refused_s))
        finally:
            await end_tasks(*self._calls)
        rates = {name: one.best_bytes_per_s for name, one in transfer.sources.items() if one.bytes_in}
        took_s = self._clock() - self._begun_s
        return DeliveryRecord(0, "", took_s, self._first_chunk_s, self._bytes_from, rates, self._wrong_ones)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        if (found := self._transfer.hopeless()) is not None:
            lacking = len(self._incoming.missing())
            said = "; ".join(f"{name or 'the origin'} {what}" for name, what in found.items())
            raise IntegrityError(
                f"{lacking} chunks of payload {self._payload.digest} have no source left: "
                f"{said or 'none is known'}"
            )
        still_s = self._clock() - self._transfer.last_progress_s
        patience_s = self._limits.give_up_s
        if self._transfer.all_failing():
            patience_s = min(patience_s, self._limits.refused_s)
        if still_s >= patience_s:
            lacking = len(self._incoming.missing())
            asked = ", ".join(
                f"{name or 'the origin'}" + (f" ({self._refusals[name]})" if name in self._refusals else "")
                for name in self._sources
            )
            raise UnavailableError(
                f"{lacking} of {len(self._payload.chunk_digests)} chunks of payload {self._payload.digest} "
                f"are missing, and nothing came for {patience_s:g} s from any of {asked}; "
                "try again, what has arrived is kept"
            )

    async def _ask(self, request: Request) -> None:
        name, busy = request.source, self._busy[request.source]
        lane = busy.index(min(busy))
        busy[lane] += 1
        try:
            await self._take(request, self._sources[name][lane])
        except _WrongError as error:
            self._wrong(name, str(error))
        except UnavailableError as error:
            self._refusals[name] = str(error)
            self._transfer.failed(name, self._clock())
        except AntiphonError as error:
            self._wrong(name, f"answered: {error}")
        finally:
            busy[lane] -= 1
            self._transfer.ended(request)
            self._calls.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            self._change.notify()

    async def _take(self, request: Request, lane: Broadcast) -> None:
        """Take the chunks of one request, each in one or more pieces, or several in one."""
        due, coming, pieces, length = set(request.indices), -1, list[bytes](), 0
        span = self._payload.span
        replies = lane.get_chunks(self._payload.digest, request.indices, request.held_only)
        try:
            async for index, piece in replies:
                if index not in due:
                    raise _WrongError(f"sent chunk {index}, which is not due")
                if pieces and index != coming:
                    raise _WrongError(f"sent chunk {index} before the end of {coming}")
                coming = index
                pieces.append(piece)
                length += len(piece)
                if length < span(index)[1] and piece:
                    self._note(request.source, len(piece), index, length)
                    continue
                last, whole = index, span(index)[1]  # of the chunks that this message completes
                while whole < length and last + 1 in due:
                    last += 1
                    whole += span(last)[1]
                run = range(index, last + 1)
                if length != whole:
                    raise _WrongError(f"sent {length} bytes for chunk {index}, which has {whole}")
                for at in run:
                    came = len(piece) if last == index else span(at)[1]
                    self._note(request.source, came, at, span(at)[1])
                whole_run = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
                try:
                    # Digesting and writing take milliseconds, for which a worker must not stop sampling.
                    await asyncio.to_thread(self._write, run, whole_run)
                except AntiphonError as error:
                    self._broken = error  # the disk's fault, no source's
                    raise UnavailableError(str(error)) from error
                self._first_chunk_s = self._first_chunk_s or self._clock() - self._begun_s
                self._arrivals.notify(self._payload.digest)
                if any([self._transfer.arrived(request, index) for index in run]):
                    self._change.notify()
                due.difference_update(run)
                pieces, length = [], 0
        finally:
            if (close := getattr(replies, "aclose", None)) is not None:
                await close()
        if pieces:  # a source that breaks off says so; this one says that this was all
            raise _WrongError(f"sent {length} bytes for chunk {coming}, which has {span(coming)[1]}")
        if due:
            raise UnavailableError(f"the stream ended before chunk {min(due)}")

    def _write(self, run: range, data: memoryview) -> None:
        begin = self._payload.span(run[0])[0]
        for index in run:
            start, length = self._payload.span(index)
            try:
                self._incoming.write(index, data[start - begin : start - begin + length])
            except IntegrityError as error:
                raise _WrongError(
                    f"sent chunk {index} of payload {self._payload.digest}, which {error}"
                ) from None

    def _note(self, name: str, count: int, index: int, so_far: int) -> None:
        self._transfer.bytes_came(name, count, self._clock(), index, so_far)
        self._bytes_from[name] = self._bytes_from.get(name, 0) + count
        self._arrived(count)

    def _wrong(self, name: str, what: str) -> None:
        _log.warning("source.wrong", source=name or "origin", payload=self._payload.digest[:12], reason=what)
        self._transfer.wrong(name, what)
        self._wrong_ones[name] = what
        self._hang_up(name)

    def _hang_up(self, name: str) -> None:
        for call, request in list(self._calls.items()):
            if request.source == name and call is not asyncio.current_task():
                call.cancel()
                self._transfer.ended(request)  # its chunks are asked of others at once


class _WrongError(Exception):
    """A source sent what it should not have."""
