"""A stand-in of the token gateway: its HTTP contract, with replies from a function instead of an engine.

Recorded turns answer repeated requests, and a report whose token ids differ from what was given is refused.
"""

import asyncio
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.core.config import build_config
from antiphon.core.messages import Message, Tool
from antiphon.models.rendering import Renderer

MODEL = PROJECT / "examples" / "models" / "turns"
TOKEN = "a-token"
Say = Callable[[str, int, str], str | None]
"""What the model says, of trajectory, number of its turn, and the context as text; None: no more turns."""
LIMIT = {"error": {"message": "the trajectory has its environment.max_turns=1 turns; report it"}}
PAUSE_S = 0.05
"""Before a host hears that there is no group."""


@cache
def renderer() -> Renderer:
    """Return what makes tokens of the messages of chat requests."""
    arguments = {"thinking_retention": "all"}
    model = {"path": str(MODEL), "renderer": "qwen3", "template_arguments": arguments}
    return Renderer.load(build_config({"model": model}), turns=True)


@dataclass
class Row:
    """What one trajectory was given."""

    turns: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    """Context and what was sampled then."""
    asked: list[tuple[list[dict[str, Any]], tuple[int, ...]]] = field(default_factory=list)
    """Messages of chat requests, and the contexts that were made of them."""

    def branches(self) -> list[list[int]]:
        """Return each context with what was sampled in it."""
        found: list[list[int]] = []
        for context, sampled in self.turns:
            whole = [*context, *sampled]
            if found and whole[: len(found[-1])] == found[-1]:
                found[-1] = whole
            else:
                found.append(whole)
        return found


class ScriptedGateway:
    """Serves groups that a test offers; stopped and started again, it was away for a while."""

    def __init__(self, say: Say, deadline_s: float = 60.0) -> None:
        self.renderer = renderer()
        self.say, self.deadline_s = say, deadline_s
        self.rows: defaultdict[str, Row] = defaultdict(Row)
        self.offered: deque[dict[str, Any]] = deque()
        self.reports: list[dict[str, Any]] = []
        self.alive: list[dict[str, Any]] = []
        self.requests = 0
        self.lost: set[str] = set()
        """Groups of which a host is told that it lost them."""
        self.failing: deque[int] = deque()
        """Statuses of the next answers, whatever is asked."""
        self.lock = threading.Lock()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, at the port of before if there was one."""
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                gateway.handle(self, {})

            def do_POST(self) -> None:
                gateway.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Say nothing of hosts that have left."""

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Be away."""
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self) -> "ScriptedGateway":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def offer(
        self, group: str, episodes: int = 1, seats: int = 1, split: str = "train", index: int = 0
    ) -> None:
        """Have the next host that asks take a group."""
        names = [f"{group}/{number}" for number in range(episodes * seats)]
        self.offered.append(
            {
                "group": group,
                "key": f"{split}-0-{index}",
                "split": split,
                "index": index,
                "episodes": [
                    {
                        "episode": at,
                        "seed": 7 * 2**60 + index,
                        "trajectories": names[at * seats : (at + 1) * seats],
                    }
                    for at in range(episodes)
                ],
                "model": "policy",
                "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64},
                "deadline_s": self.deadline_s,
            }
        )

    def handle(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Answer one request."""
        with self.lock:
            self.requests += 1
            if self.failing:
                status, answer = self.failing.popleft(), {"error": {"message": "said by the test"}}
            elif request.headers["Authorization"] != f"Bearer {TOKEN}":
                status, answer = 401, {"error": {"message": "unknown token"}}
            else:
                status, answer = self.answer(request.path, body)
        if answer is None:
            time.sleep(PAUSE_S)
        data = b"" if answer is None else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        request.wfile.write(data)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and body of an answer."""
        match path:
            case "/v1/models":
                return 200, {
                    "object": "list",
                    "data": [{"id": "policy", "max_model_len": 1024}],
                }
            case "/antiphon/v1/take":
                return (200, self.offered.popleft()) if self.offered else (204, None)
            case "/antiphon/v1/alive":
                self.alive.append(body)
                lost = [group for group in body["groups"] if group in self.lost]
                return 200, {"held": [group for group in body["groups"] if group not in lost], "lost": lost}
            case "/antiphon/v1/report":
                self.reports.append(body)
                wrong = [
                    seat["trajectory"]
                    for seat in body["seats"]
                    if "error" not in seat and seat["branches"] != self.rows[seat["trajectory"]].branches()
                ]
                return 200, {"accepted": not wrong, "reason": f"other tokens: {wrong}" if wrong else ""}
            case "/inference/v1/generate":
                return self.generate(body)
            case "/v1/chat/completions":
                return self.chat(body)
        return 404, {"error": {"message": f"there is no {path}"}}

    def sampled(self, name: str, context: tuple[int, ...]) -> list[int] | None:
        """Return a turn: the recorded one, or the next, or None."""
        row = self.rows[name]
        for known, turn in row.turns:
            if known == context:
                return turn
        text = self.renderer.codec.tokenizer.decode(context, skip_special_tokens=False)
        said = self.say(name, len(row.turns), text)
        if said is None:
            return None
        tokens = self.renderer.codec.tokenizer.encode(said).ids
        row.turns.append((context, [*tokens, self.renderer.stop_token_ids[0]]))
        return row.turns[-1][1]

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer tokens with tokens."""
        name = body["sampling_params"]["antiphon_trajectory"]
        turn = self.sampled(name, tuple(body["token_ids"]))
        if turn is None:
            return 400, LIMIT
        content = [{"token": f"token_id:{token}", "token_id": token, "logprob": -0.25} for token in turn]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": turn, "logprobs": {"content": content}}
        return 200, {"request_id": "r", "choices": [choice], "usage": {}}

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer messages with a message and its tokens."""
        name = body["antiphon_trajectory"]
        row, messages = self.rows[name], body["messages"]
        tools = [
            Tool(
                one["function"]["name"], one["function"].get("description", ""), one["function"]["parameters"]
            )
            for one in body.get("tools", [])
        ]
        new = [
            Message(one["role"], one["content"] or "", name=one.get("name", ""))
            for one in messages
            if one["role"] != "assistant"
        ]
        known = next((context for asked, context in row.asked if asked == messages), None)
        if known is not None:
            whole = known
        elif row.turns:
            old = sum(one["role"] != "assistant" for one in row.asked[-1][0])
            context, turn = row.turns[-1]
            whole = (*context, *turn, *self.renderer.following(context, turn, new[old:], tools))
        else:
            whole = self.renderer.opening(new, tools)
        if known is None:
            row.asked.append((messages, whole))
        sampled = self.sampled(name, whole)
        if sampled is None:
            return 400, LIMIT
        reply = self.renderer.reply(whole, sampled, tools)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{at}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for at, call in enumerate(reply.tool_calls)
            ]
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{t}", "logprob": -0.25, "bytes": None, "top_logprobs": []} for t in sampled
        ]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if reply.tool_calls else "stop",
            "token_ids": sampled,
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens": len(whole), "completion_tokens": len(sampled), "total_tokens": 0}
        return 200, {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "prompt_token_ids": list(whole),
            "choices": [choice],
            "usage": usage,
        }


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something that a host does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
