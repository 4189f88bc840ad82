"""A stand-in for the server of a model that judges: it does what it is told to, request by request."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

BLOCK = r"<{0} ([0-9a-f]{{16}})>\n(.*?)\n</{0} \1>"


class JudgeServer:
    """Judges as its script says, then honestly: the whole scale for a response that holds the reference."""

    def __init__(self, *script: str | dict[str, Any]) -> None:
        """Begin with what the first requests get: the name of a behaviour, a reply, or an answer's JSON."""
        self.script = list(script)
        self.asked: list[dict[str, Any]] = []
        """Bodies of requests, with their paths and keys."""
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            body = json.loads(await request.read())
            key = request.headers.get("Authorization", "")
            self.asked.append({**body, "path": request.path, "key": key})
            told = self.script.pop(0) if self.script else "honest"
            return await self._behave(told, body, request)
        finally:
            self.at_once -= 1

    async def _behave(
        self, told: str | dict[str, Any], body: Any, request: web.Request
    ) -> web.StreamResponse:
        if isinstance(told, dict):
            return web.json_response(told)
        if told == "slow":
            await asyncio.Event().wait()
        if told == "hang up":
            assert request.transport is not None
            request.transport.abort()
        if told.isdecimal():
            return web.Response(status=int(told), text=f"no, {request.headers.get('Authorization')}")
        if told == "redirect":
            return web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"})
        if told == "garbage":
            return web.Response(text="<html>\x1b[31m", content_type="application/json")
        if told == "deep":
            return web.Response(text="[" * 500_000, content_type="application/json")
        if told == "huge":
            return web.Response(body=b" " * (1 << 20) + b"{}", content_type="application/json")
        if request.path == "/pooling":
            right = "right" in body["messages"][-1]["content"]
            usage = {"prompt_tokens": 50, "total_tokens": 50}
            return web.json_response({"data": [{"index": 0, "data": [float(right)]}], "usage": usage})
        prompt = body["messages"][0]["content"]
        if told == "honest":
            found = [re.search(BLOCK.format(name), prompt, re.DOTALL) for name in ("reference", "response")]
            reference, response = (one[2] if one else "" for one in found)
            told = f"I read {response!r}.\nScore: {10 if f'<answer>{reference}</answer>' in response else 0}"
        return web.json_response(reply(told))

    async def _serve(self) -> web.AppRunner:
        application = web.Application()
        application.router.add_post("/{any:.*}", self._answer)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner


def reply(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    """Return a chat completion as vLLM answers it."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}


@asynccontextmanager
async def judging(*script: str | dict[str, Any]) -> AsyncIterator[JudgeServer]:
    """Serve in this event loop."""
    server = JudgeServer(*script)
    runner = await server._serve()
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def apart(serve: Callable[[asyncio.Event, threading.Event], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run a server in a thread: `serve` sets the second event when it listens, and ends after the first."""
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(over, ready),))
    thread.start()
    try:
        assert ready.wait(30.0)
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30.0)
        loop.close()


@contextmanager
def judging_apart(*script: str | dict[str, Any]) -> Iterator[JudgeServer]:
    """Serve in a thread, for programs that run meanwhile."""
    server = JudgeServer(*script)

    async def serve(over: asyncio.Event, ready: threading.Event) -> None:
        runner = await server._serve()
        ready.set()
        await over.wait()
        await runner.cleanup()

    with apart(serve):
        yield server
