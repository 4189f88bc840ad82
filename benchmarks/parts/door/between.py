"""Between: a network between client and door, where requests come out of order, or all of them twice."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import numpy as np
from aiohttp import web

from antiphon.system.ports import free_ports

HOST = "127.0.0.1"
LATE_S = 0.5
"""Longest delay of a call that trains."""
ANSWER_S = 120.0
BODY_BYTES = 1 << 28
HOPS = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
"""Headers that are of one connection."""


@contextmanager
def between(url: str, late: bool = False, twice: bool = False, seed: int = 0) -> Iterator[str]:
    """Pass requests on to `url` until the end of the block, and give the address to call instead.

    Args:
        url: of the door.
        late: hold each call that trains for up to `LATE_S`, drawn from `seed`.
        twice: send each POST a second time once it was answered, and give the client that second answer.
        seed: of the delays.
    """
    (port,) = free_ports(1)
    random, loop = np.random.default_rng(seed), asyncio.new_event_loop()
    ready, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with aiohttp.ClientSession(auto_decompress=True) as session:

            async def once(request: web.Request, body: bytes) -> web.Response:
                headers = {name: value for name, value in request.headers.items() if name.lower() not in HOPS}
                timeout = aiohttp.ClientTimeout(total=ANSWER_S)
                path = url + request.path_qs
                asking = session.request(request.method, path, data=body, headers=headers, timeout=timeout)
                async with asking as answer:
                    kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOPS}
                    return web.Response(status=answer.status, headers=kept, body=await answer.read())

            async def handle(request: web.Request) -> web.Response:
                body = await request.read()
                if late and request.path.endswith("/forward_backward"):
                    await asyncio.sleep(float(random.random()) * LATE_S)
                answer = await once(request, body)
                again = twice and request.method == "POST" and answer.status == 200
                return await once(request, body) if again else answer

            application = web.Application(client_max_size=BODY_BYTES)
            application.router.add_route("*", "/{tail:.*}", handle)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, HOST, port).start()
            ready.set()
            await over.wait()
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    if not ready.wait(30.0):
        raise SystemExit("what stands between client and door did not start")
    try:
        yield f"http://{HOST}:{port}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30.0)
