"""A server of a real model that answers `prompt_logprobs` as vLLM does, or what it is told to."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from antiphon.models.codec import TextCodec
from tests.support.judge_server import apart


class LogprobServer:
    """Behaves as its script says, request by request, then honestly."""

    def __init__(self, model: Path, *script: str) -> None:
        self.script = list(script)
        self.asked: list[dict[str, Any]] = []
        """Bodies of requests, with their paths and keys."""
        self.url = ""
        self._codec = TextCodec.load(str(model))
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.asked.append({**body, "path": request.path, "key": request.headers.get("Authorization", "")})
        told = self.script.pop(0) if self.script else "honest"
        if told.isdecimal():
            return web.Response(status=int(told), text=f"no, {request.headers.get('Authorization')}")
        if told == "redirect":
            place = f"http://a/{request.headers.get('Authorization')}?{'y' * 999}"
            return web.Response(status=307, headers={"Location": place})
        if told == "no HTTP" and request.transport is not None:
            request.transport.write(f"HTTP/9 {request.headers.get('Authorization')}\r\n\r\n".encode())
            request.transport.close()
        if told == "0.6 s":
            await asyncio.sleep(0.6)
        if told == "slow":
            await asyncio.Event().wait()
        if told == "plain":
            return web.json_response({"choices": [{"index": 0, "text": "3"}]})
        prompts = body["prompt"]
        if isinstance(prompts, str):
            prompts = [self._codec.encode(prompts, add_special_tokens=body["add_special_tokens"])]
        choices = [
            {"index": at, "text": "", "prompt_logprobs": self._said(row)} for at, row in enumerate(prompts)
        ]
        if told == "other tokens":
            for choice in choices:
                choice["prompt_logprobs"] = [
                    one and {"-1": {"logprob": -1.0}} for one in choice["prompt_logprobs"]
                ]
        if told in ("NaN", "0.5", "-Infinity", "-" + "1" * 400):
            choices[0]["prompt_logprobs"][-1] = {
                str(token): {"logprob": json.loads(told)} for token in range(99)
            }
        if told == "one short":
            choices.pop()
        return web.json_response({"choices": choices[::-1]})

    def _said(self, row: Sequence[int]) -> list[dict[str, Any] | None]:
        with torch.no_grad():
            every = self._model(torch.tensor([row])).logits[0].log_softmax(1)
        found: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(row[1:]):
            likeliest = int(every[place].argmax())
            found.append(
                {
                    str(one): {"logprob": float(every[place, one]), "decoded_token": "?"}
                    for one in (token, likeliest)
                }
            )
        return found

    async def serve(self, over: asyncio.Event, ready: threading.Event) -> None:
        """Serve until `over`."""
        application = web.Application()
        application.router.add_post("/{any:.*}", self._answer)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await over.wait()
        await runner.cleanup()


@contextmanager
def logprobs_of(model: Path, *script: str) -> Iterator[LogprobServer]:
    """Serve a model's folder in a thread."""
    server = LogprobServer(model, *script)
    with apart(server.serve):
        yield server
