"""Origin: the process that serves a learner's payloads, beside the learner and apart from its training.

Training holds the interpreter for long stretches, and sending needs it for each chunk; in two processes
neither waits for the other. The learner starts it and starts it again when it dies; it dies with
the learner.
"""

import asyncio
import contextlib
import json
import os
import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from antiphon.core.errors import UnavailableError
from antiphon.net.rpc.serving import Security, start_server, stop_server
from antiphon.net.security.credentials import Credentials, needed_token_key
from antiphon.net.security.guard import Guard
from antiphon.system.clock import wall_clock
from antiphon.system.ports import is_free
from antiphon.system.processes import PARENT_VARIABLE, run_service, write_ready_file
from antiphon.system.wakeup import end_tasks
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.transports.lattica import FOLDER, LatticaNode, LatticaService
from antiphon.weights.transports.object_store import ObjectStoreMirror, object_place

PORT_FILE = "origin.json"
"""In the payload store: JSON {pid, port}, the learner's process and the port of its origin."""
AGAIN_S, MOST_AGAIN_S = 1.0, 30.0
"""Pause before a process that died is started again: it doubles while starts fail or do not last."""
LASTED_S = 60.0
"""A process that lived so long did not die of its start."""
LEAVE_S = 5.0
"""Longest wait for it to end when it is asked to."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OriginOrder:
    """What the process serves, and where."""

    root: str
    """Folder of the payload store."""
    run_id: str
    host: str
    port: int
    """0 picks a free one."""
    uplink_bytes_per_s: float | None
    start_timeout_s: float
    object_store: str | None = None
    """Where copies of the payloads are kept, as `broadcast.object_store` says."""
    object_endpoint: str | None = None
    lattica_port: int | None = None
    """Where it is a peer of a Lattica network, too."""


@asynccontextmanager
async def serving_origin(order: OriginOrder, credentials: Credentials | None) -> AsyncIterator[int]:
    """Have a process serve for as long as the block lasts; gives its port, that of the last time if it may.

    Raises:
        UnavailableError: when it does not come up in time, or the folder cannot be written.
    """
    known = Path(order.root) / PORT_FILE
    if not order.port:
        order = replace(order, port=_last_port(known, order.host))
    process, port = await _start(order, credentials)
    write_ready_file(known, port)

    async def keep() -> None:
        nonlocal process
        clock = asyncio.get_running_loop().time
        started_s, pause_s = clock(), 0.0
        while True:
            status = await process.wait()
            pause_s = next_pause_s(pause_s, clock() - started_s)
            _log.warning("origin.died", status=status, port=port, again_s=pause_s)
            while True:
                await asyncio.sleep(pause_s)
                try:
                    process, _ = await _start(replace(order, port=port), credentials)
                    started_s = clock()
                    break
                except UnavailableError as error:
                    pause_s = next_pause_s(pause_s, 0.0)
                    _log.warning("origin.not_back", reason=str(error), again_s=pause_s)

    keeping = asyncio.create_task(keep())
    try:
        yield port
    finally:
        try:
            await end_tasks(keeping)
        finally:
            await _end(process)


def next_pause_s(before_s: float, lived_s: float) -> float:
    """Return the pause before the next start, from the pause before the last one and how long that lived."""
    return AGAIN_S if lived_s >= LASTED_S else min(max(AGAIN_S, 2 * before_s), MOST_AGAIN_S)


def _last_port(known: Path, host: str) -> int:
    """Return the port of the last time while it is free, or 0: forwarded ports should not change."""
    try:
        port = int(json.loads(known.read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return port if 0 < port < 1 << 16 and is_free(port, host) else 0


async def _start(
    order: OriginOrder, credentials: Credentials | None
) -> tuple[asyncio.subprocess.Process, int]:
    """Start the process and return it with its port. Secrets go through a pipe, where no one else looks."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __spec__.name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(order.start_timeout_s):
            process.stdin.write(pickle.dumps((order, credentials)))
            await process.stdin.drain()
            line = await process.stdout.readline()
        return process, int(line)
    except (TimeoutError, ValueError, OSError) as error:
        await _end(process)
        raise UnavailableError(
            f"the process that serves {order.root} on {order.host}:{order.port} did not come up "
            f"(status {process.returncode}); see the learner's log"
        ) from error
    except asyncio.CancelledError:
        await _end(process)
        raise


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(LEAVE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _serve(order: OriginOrder, credentials: Credentials | None) -> None:
    security = None
    if credentials is not None:
        clock = asyncio.get_running_loop().time
        guard = Guard(needed_token_key(credentials), order.run_id, wall_clock, clock)
        security = Security(credentials, guard)
    store = PayloadStore(Path(order.root))
    service = BroadcastService(store, order.uplink_bytes_per_s)
    if order.lattica_port is not None:
        node = LatticaNode(store.root / FOLDER, order.host, order.lattica_port)
        service = LatticaService(store, order.uplink_bytes_per_s, node, order.lattica_port)
    server, port = await start_server(
        order.host, order.port, lambda s: register_broadcast(s, service), [SERVICE_NAME], security
    )
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()

    def pace(length: int) -> None:
        # The cap holds for copies and receivers together.
        asyncio.run_coroutine_threadsafe(service.uplink.take(length), loop).result()

    try:
        with contextlib.ExitStack() as stack:
            if order.object_store is not None:
                place = object_place(order.object_store, order.object_endpoint)
                capped = order.uplink_bytes_per_s is not None
                mirror = ObjectStoreMirror(
                    PayloadStore(store.root), place, order.run_id, pace if capped else None
                )
                mirror.start()
                stack.callback(mirror.stop)
            await asyncio.Event().wait()  # until the learner ends it, or ends
    finally:
        await stop_server(server)


def _main() -> int:
    order, credentials = pickle.load(sys.stdin.buffer)  # from the process that started this one
    return run_service(lambda stop: _serve(order, credentials))


if __name__ == "__main__":
    sys.exit(_main())
