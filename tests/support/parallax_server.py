"""A stand-in for Parallax: the wire of its scheduler, and two nodes of one model that swap in turn.

It speaks what Parallax's repository of 1 July 2026 serves, and refuses what that refuses. The nodes' weights
are the parameters of one model of transformers: while one node has swapped and the other has not, the model
is the mixture that Parallax would sample from. One node swaps at each look at the time stamp, of those that
`lazy` does not name.
"""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from antiphon.models.codec import TextCodec
from antiphon.weights.transports.lattica import content_id
from tests.support.judge_server import apart

KNOWN = {
    "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "stop", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "model",
}  # fmt: skip
LETTERS = " \n0123456789+-*/=()?.,:;<>xabcdefghijklmnopqrstuvwyzABCDEFGHIJKLM"


def lettered(model: Path, folder: Path) -> Path:
    """Copy a model of 64 tokens with a tokenizer that has a letter for each but the end token."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    words = {letter: place if place < 1 else place + 1 for place, letter in enumerate(LETTERS[:63])}
    tokenizer = Tokenizer(models.WordLevel(words | {"<eos>": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class MemoryPeer:
    """Holds blocks for nodes in the same process."""

    def __init__(self) -> None:
        self.blocks: dict[str, bytes] = {}
        self.closed = False

    def put(self, data: bytes) -> str:
        self.blocks[content_id(data)] = data
        return content_id(data)

    def remove(self, address: str) -> None:
        del self.blocks[address]

    def close(self) -> None:
        self.closed = True


class ParallaxServer:
    """The scheduler and its nodes."""

    def __init__(self, model: Path, get: Callable[[str], bytes]) -> None:
        """Start on the folder's own weights; `get` gives a block of a content id."""
        self.url, self._get = "", get
        self.script: list[Any] = []
        """What the next completions are: a status, or (text, tokens that are counted)."""
        self.template: Callable[[str], str] = lambda content: content
        self.lazy: set[int] = set()
        """Nodes that do not swap."""
        self.answers: list[set[tuple[int, ...]]] = []
        """Of each completion that was sampled to its end: the nodes' versions at its tokens."""
        self.orders: list[dict[str, Any]] = []
        self.away = False
        """Whether the scheduler runs no model."""
        self.stamps = [0.0, 0.0]
        self._versions = [-1, -1]
        self._codec = TextCodec.load(str(model))
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._layers = self._model.config.num_hidden_layers

    def needs(self, node: int, name: str) -> bool:
        """Whether a node has this tensor, as `is_block_needed` says."""
        if layer := re.search(r"layers\.(\d+)\.", name):
            return (int(layer[1]) >= self._layers // 2) == bool(node)
        return "embed_tokens" in name or node == 1

    def swap(self, node: int) -> None:
        """Let a node take the weights of the last order."""
        order = self.orders[-1]
        index, parameters = order["index_map"], dict(self._model.named_parameters())
        assert set(order["cid"]) == set(index.values())
        taken: set[str] = set()
        for address in {index[name] for name in index if self.needs(node, name)}:
            data = self._get(address)
            assert content_id(data) == address
            for name, tensor in load(data).items():
                assert index[name] == address and self.needs(node, name), f"{name} is no part of node {node}"
                taken.add(name)
                if not (name.startswith("model.embed_tokens") and node == 0 and self._tied):
                    with torch.no_grad():
                        parameters[name].copy_(tensor)
        assert taken == {name for name in parameters if self.needs(node, name)} & set(index)
        self.stamps[node], self._versions[node] = float(order["time_stamp"]), order["version"]

    @property
    def _tied(self) -> bool:
        return bool(self._model.config.tie_word_embeddings)

    async def _refit(self, request: web.Request) -> web.Response:
        order = json.loads(await request.read())
        assert set(order) == {"time_stamp", "cid", "index_map", "version"}
        self.orders.append(order)
        return web.json_response({"type": "weight_refit", "data": None})

    async def _stamp(self, request: web.Request) -> web.Response:
        if self.away:
            return web.Response(status=500, text="'NoneType' object has no attribute 'update'")
        waiting = [
            node
            for node in (0, 1)
            if self.orders and self.stamps[node] < self.orders[-1]["time_stamp"] and node not in self.lazy
        ]
        said = min(self.stamps)
        if waiting:  # in turn, and known at the next look
            self.swap(waiting[0])
        return web.json_response({"latest_timestamp": said})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        (message,) = body["messages"]
        if set(body) - KNOWN or set(message) != {"role", "content"}:
            return web.Response(status=400, text=f"{sorted(set(body) - KNOWN)} is not supported")
        told = self.script.pop(0) if self.script and body.get("stream") else None
        if isinstance(told, int):
            return web.Response(status=told, headers={"Location": "/elsewhere"}, text="busy")
        prompt = list(self._codec.encode(self.template(message["content"]), add_special_tokens=False))
        if not body.get("stream"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
            choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage})
        assert body["stream_options"] == {"include_usage": True}
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)

        async def say(choices: list[Any], usage: Any = None) -> None:
            await answer.write(f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n".encode())

        tokens, reason, versions = list[int](), "length", set[tuple[int, ...]]()
        await say([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        if told is not None:
            text, count = told
            await say([{"index": 0, "delta": {"content": text}, "finish_reason": None}])
            tokens = [0] * count
        while told is None and len(tokens) < body["max_tokens"]:
            tokens.append(self._draw([*prompt, *tokens], body))
            versions.add(tuple(self._versions))
            if tokens[-1] in self._codec.end_tokens:
                reason = "stop"
                break
            piece = self._codec.tokenizer.decode(tokens[-1:])
            await say([{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
            await asyncio.sleep(0)
        self.answers.append(versions)
        await say([{"index": 0, "delta": {}, "finish_reason": reason}])
        await say([], {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    @torch.no_grad()
    def _draw(self, tokens: list[int], body: dict[str, Any]) -> int:
        logits = self._model(torch.tensor([tokens])).logits[0, -1]
        if body["temperature"] == 0.0:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(logits / body["temperature"], -1), 1))

    async def serve(self, over: asyncio.Event, ready: threading.Event) -> None:
        """Serve until `over`."""
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_post("/weight/refit", self._refit)
        application.router.add_get("/weight/refit/timestamp", self._stamp)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await over.wait()
        await runner.cleanup()


@contextmanager
def parallax(model: Path, get: Callable[[str], bytes]) -> Iterator[ParallaxServer]:
    """Serve a model's folder in a thread."""
    server = ParallaxServer(model, get)
    with apart(server.serve):
        yield server
