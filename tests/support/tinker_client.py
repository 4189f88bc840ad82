"""A client of the door that speaks its wire itself, as the SDK does, over a real socket."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from antiphon.core.config import build_config
from antiphon.core.trust.access_tokens import ANY_RUN
from antiphon.lineage.door_keys import KEY
from antiphon.net.security.credentials import KEYS
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import TOKEN_KEY, ensure_key
from antiphon.protos import tinker_pb2 as pb
from antiphon.services.door.server import serve_door
from antiphon.system.clock import wall_clock
from tests.support.client_runs import MemoryRuns

BASE = "Qwen/Qwen3-8B-Base"


class TinkerClient:
    """One client, with one model and one sampling session unless a test makes more."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, runs: MemoryRuns) -> None:
        self.http, self.url, self.key, self.runs = http, url, key, runs

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Return status and body: JSON, or bytes where it is protobuf."""
        raw = isinstance(body, bytes)
        kind = "application/x-protobuf" if raw else "application/json"
        data = body if raw or body is None else json.dumps(body).encode()
        path = path if path.startswith("/") else f"/api/v1/{path}"
        headers = {"X-API-Key": self.key if key is None else key, "Content-Type": kind}
        async with self.http.request(method, self.url + path, data=data, headers=headers) as reply:
            said = await reply.read()
            return reply.status, said if reply.content_type == "application/x-protobuf" else json.loads(said)

    async def post(self, path: str, body: Any) -> Any:
        """Return the body of a call that is answered with 200."""
        status, said = await self.ask("POST", path, body)
        assert status == 200, said
        return said

    async def result(self, future: Mapping[str, Any]) -> Any:
        """Return what comes of a future."""
        while True:
            said = await self.post("retrieve_future", {"request_id": future["request_id"]})
            if isinstance(said, bytes) or said.get("type") != "try_again":
                return said

    async def done(self, path: str, body: Any) -> Any:
        """Return what comes of a call, which is no error."""
        said = await self.result(await self.post(path, body))
        assert isinstance(said, bytes) or "error" not in said, said
        return said

    async def refused(self, path: str, body: Any) -> str:
        """Return the sentence of a future that is the user's error."""
        said = await self.result(await self.post(path, body))
        assert not isinstance(said, bytes) and said["category"] == "user", said
        return str(said["error"])

    async def session(self) -> str:
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"}
        return str((await self.post("create_session", body))["session_id"])

    async def model(self, session: str, number: int = 0, **more: Any) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": BASE} | more
        return str((await self.done("create_model", body))["model_id"])

    async def sampler(self, model: str, seq_id: int, number: int = 0, kind: str = "snapshot") -> str:
        body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number, "kind": kind}
        return str((await self.done("save_weights_for_sampler", body))["sampling_session_id"])


def sampling(sampler: str, seq_id: int, prompt: Sequence[int] = (1, 2, 3), **more: Any) -> dict[str, Any]:
    """Return the body of a request for samples."""
    parameters = {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0} | more.pop("params", {})
    chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "num_samples": 1, "prompt": {"chunks": chunks}}
    return body | {"sampling_params": parameters} | more


def datum(tokens: Sequence[int] = (1, 2, 3), targets: Sequence[int] = (2, 3, 4), **inputs: Any) -> pb.Datum:
    """Return a datum whose inputs are float32 arrays."""
    made = pb.Datum()
    made.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
    for name, values in {"target_tokens": targets, **inputs}.items():
        array = np.asarray(values, "<i8" if name == "target_tokens" else "<f4")
        made.loss_fn_inputs[name].dense = array.tobytes()
        made.loss_fn_inputs[name].dtype = pb.DTYPE_INT64 if name == "target_tokens" else pb.DTYPE_FLOAT32
        made.loss_fn_inputs[name].shape.extend(array.shape)
    return made


def training(model: str, seq_id: int, *data: pb.Datum, loss: str = "cross_entropy", **more: Any) -> bytes:
    """Return the body of a call for a loss."""
    made = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss, **more)
    made.data.extend(data or [datum(weights=[1, 1, 1])])
    return made.SerializeToString()


def step(model: str, seq_id: int, **adam: float) -> dict[str, Any]:
    """Return the body of a step."""
    return {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-4, **adam}}


def home_guard(home: Path) -> Guard:
    """Return what checks the keys of a home, as the command does."""
    return Guard(ensure_key(home / KEYS, TOKEN_KEY).public, ANY_RUN, wall_clock, wall_clock)


@asynccontextmanager
async def served(
    home: Path, runs: MemoryRuns, guard: Guard | None = None, **door: Any
) -> AsyncIterator[TinkerClient]:
    """Serve a door before runs in memory, and yield a client of it."""
    services = {"stall_timeout_s": door.pop("stall_timeout_s", 300.0)}
    tree = {"model": {"path": "tiny"}, "services": services, "door": {"base_models": [BASE], **door}}
    config = build_config(tree)
    async with (
        serve_door(config, "probe", runs, home, guard or home_guard(home)) as url,
        aiohttp.ClientSession() as http,
    ):
        yield TinkerClient(http, url, (home / KEY).read_text().strip(), runs)
