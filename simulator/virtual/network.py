"""Network: serialized calls between simulated processes, which may be late, lost, doubled or cut off.

Below the production clients and servicers stands this transport. A call is two messages, each with
its own delay, so messages overtake one another; a request may arrive twice and be answered twice;
either message may get lost with its connection, which the caller notices at once, by the keepalive,
or by its deadline. A cut link holds everything in its direction until it is healed, as TCP does, or
until the keepalive gives the connection up. A server that is not there refuses, and one that is
killed breaks the connections it had. As with gRPC, a caller that gives up cancels the server's work.
"""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from antiphon.simulator.virtual.in_process import CallAborted, CallFailed, Identity, InProcessServer
from antiphon.simulator.virtual.loop import Handle, Process, VirtualLoop
from antiphon.simulator.virtual.random_streams import RandomStream

KEEPALIVE_S = 30.0
"""A connection that is dead without notice is found out after this time."""
REFUSED_S = 0.002
"""What it takes to hear that no one listens."""


@dataclass(slots=True)
class NetworkQuality:
    """How the network behaves at the moment."""

    least_s: float = 0.0005
    """Shortest delay of a message, seconds."""
    most_s: float = 0.01
    """Longest delay of an ordinary message, seconds."""
    slow: float = 0.0
    """Share of the messages that take up to `slow_s` instead."""
    slow_s: float = 2.0
    lost: float = 0.0
    """Share of the messages that never arrive."""
    repeated: float = 0.0
    """Share of the requests that arrive a second time."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call: what was asked, by whom, and where it stands."""

    sender: Process
    address: str
    path: str
    body: bytes
    deadline_s: float
    identity: Identity
    reply: asyncio.Future[list[bytes]]
    tasks: list[tuple[Process, asyncio.Task[list[bytes]]]] = field(default_factory=list)


class Network:
    """Who listens where, what is under way, and which links are cut."""

    def __init__(self, loop: VirtualLoop, random: RandomStream) -> None:
        """Begin with no one listening and a good network; `random` decides delays and losses."""
        self._loop = loop
        self._random = random
        self._context = copy_context()
        """Of no process: what is on its way does not stop with its sender."""
        self._connections: dict[object, Callable[[Process], None]] = {}
        self.quality = NetworkQuality()
        self._listening: dict[str, tuple[Process, InProcessServer]] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Messages on a link that is cut: what is to happen when it is healed."""
        self._calls: dict[_Call, None] = {}
        self.messages = 0
        """Messages handed over so far."""
        self.broken: list[str] = []
        """Handlers that ended with an error that no contract knows."""

    def listen(self, address: str, process: Process, server: InProcessServer) -> bool:
        """Answer at an address; False where a process that began later does so already."""
        owner = self._listening.get(address)
        if owner is not None and owner[0].alive and owner[0].begun_s > process.begun_s:
            return False
        self._listening[address] = (process, server)
        return True

    def cut(self, source: str, target: str) -> None:
        """Swallow every message from one process name to another until `heal`."""
        self._cuts.add((source, target))

    def heal(self) -> None:
        self._cuts.clear()
        held, self._held = self._held, []
        for on, arguments in held:
            self.later(self.delay_s(), on, *arguments)

    # What connections need as well.

    def now(self) -> float:
        return self._loop.time()

    def later(self, delay_s: float, on: Callable[..., Any], *arguments: Any) -> Handle:
        """Have something happen in the network, whatever becomes of the processes meanwhile."""
        return self._loop.call_later(delay_s, on, *arguments, context=self._context)

    def name_at(self, address: str) -> str:
        """Return the name of the process at an address, or the address itself."""
        owner = self._listening.get(address)
        return address if owner is None else owner[0].name

    def listener(self, address: str) -> tuple[Process, InProcessServer] | None:
        """Return who answers at an address, or None."""
        owner = self._listening.get(address)
        return owner if owner is not None and owner[0].alive else None

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cuts

    def hold(self, on: Callable[[], None]) -> None:
        self._held.append((on, ()))

    def loses(self) -> bool:
        return self._random.happens(self.quality.lost)

    def notice_s(self) -> float:
        """Return how long it takes to notice that a connection broke."""
        return self.delay_s() if self._random.happens(0.5) else self._random.between(0.0, KEEPALIVE_S)

    def watch(self, connection: object, process_ended: Callable[[Process], None]) -> None:
        """Call `process_ended` with every process that ends, until the connection is forgotten."""
        self._connections[connection] = process_ended

    def forget(self, connection: object) -> None:
        self._connections.pop(connection, None)

    def killed(self, process: Process) -> None:
        """Break the connections of a process that is no more."""
        for address in [a for a, (owner, _) in self._listening.items() if owner is process]:
            del self._listening[address]
        for process_ended in list(self._connections.values()):
            process_ended(process)
        for call in list(self._calls):
            if call.sender is process:
                self._calls.pop(call, None)
                self._hang_up(call)
                continue
            for server, task in list(call.tasks):
                if server is process:
                    call.tasks.remove((server, task))
                    if not call.tasks:
                        self._send_back(call, process, self._fail, "UNAVAILABLE", "Connection reset by peer")

    # The caller's side.

    async def call(
        self,
        sender: Process,
        address: str,
        path: str,
        body: bytes,
        timeout_s: float,
        identity: Identity,
    ) -> list[bytes]:
        """Send a serialized request and wait for its serialized replies.

        Raises:
            CallFailed: with the status that the caller is to see.
        """
        if not sender.alive:
            raise asyncio.CancelledError
        loop = self._loop
        call = _Call(sender, address, path, body, loop.time() + timeout_s, identity, loop.create_future())
        self._calls[call] = None
        late = self.later(timeout_s, self._fail, call, "DEADLINE_EXCEEDED", "Deadline Exceeded")
        self._send(call)
        try:
            return await call.reply
        finally:
            late.cancel()
            if self._calls.pop(call, 0) is None and call.tasks:
                self._hang_up(call)

    def _send(self, call: _Call) -> None:
        if self.is_cut(call.sender.name, self.name_at(call.address)):
            self._hold(call, self._arrive, call)
            return
        if self.loses():
            self._lose(call)
            return
        self.later(self.delay_s(), self._arrive, call)
        if self._random.happens(self.quality.repeated):
            self.later(self.delay_s() + self.delay_s(), self._arrive, call, True)

    def _lose(self, call: _Call) -> None:
        """Lose a message and its connection, which is noticed soon half of the time."""
        self.later(self.notice_s(), self._fail, call, "UNAVAILABLE", "Socket closed")

    def _hold(self, call: _Call, on: Callable[..., None], *arguments: Any) -> None:
        """Keep a message on a cut link until it is healed or the connection given up."""
        self._held.append((on, arguments))
        self.later(KEEPALIVE_S, self._fail, call, "UNAVAILABLE", "keepalive watchdog timeout")

    def _fail(self, call: _Call, status: str, details: str) -> None:
        if not call.reply.done():
            call.reply.set_exception(CallFailed(status, details))

    def _hang_up(self, call: _Call) -> None:
        """Cancel the server's work: no one waits any more."""
        for server, task in call.tasks:
            if not task.done() and (call.sender.name, server.name) not in self._cuts:
                self.later(self.delay_s(), self._cancel, task)

    @staticmethod
    def _cancel(task: asyncio.Task[list[bytes]]) -> None:
        task.cancel()

    # The server's side.

    def _arrive(self, call: _Call, again: bool = False) -> None:
        self.messages += 1
        if call.reply.done() and not again:
            return  # its connection was given up before it got through
        owner = self.listener(call.address)
        if owner is None:
            self.later(REFUSED_S, self._fail, call, "UNAVAILABLE", "Connection refused")
            return
        process, server = owner
        task = process.spawn(server.answer(call.path, call.body, call.identity))
        call.tasks.append((process, task))
        task.add_done_callback(lambda done: self._answered(call, process, done))
        left_s = call.deadline_s - self._loop.time()
        if not call.reply.done() and left_s < 1e6:
            self.later(max(0.0, left_s), self._cancel, task)

    def _answered(self, call: _Call, process: Process, task: asyncio.Task[list[bytes]]) -> None:
        if not process.alive or task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send_back(call, process, self._deliver, task.result())
        elif isinstance(error, CallAborted):
            self._send_back(call, process, self._fail, error.code().name, error.details())
        else:
            self.broken.append(f"{process.name} broke in {call.path}: {error!r}")
            self._send_back(call, process, self._fail, "UNKNOWN", f"Unexpected {type(error)}")

    def _send_back(self, call: _Call, process: Process, on: Callable[..., None], *arguments: Any) -> None:
        if self.is_cut(process.name, call.sender.name):
            self._hold(call, on, call, *arguments)
        elif self.loses():
            self._lose(call)
        else:
            self.later(self.delay_s(), on, call, *arguments)

    def _deliver(self, call: _Call, replies: list[bytes]) -> None:
        self.messages += 1
        if not call.reply.done() and call.sender.alive:
            call.reply.set_result(replies)

    def delay_s(self) -> float:
        """Return what the next message takes."""
        quality = self.quality
        if self._random.happens(quality.slow):
            return self._random.between(quality.most_s, quality.slow_s)
        return self._random.between(quality.least_s, quality.most_s)
