"""Server: Tinker's wire over HTTP under /api/v1; whatever is not served is answered in words and counted.

Besides, `GET /antiphon/stats` says what was called, and `GET /antiphon/sequences/ID` what is recorded of
a sampled sequence. `Door` decides; here are keys, bodies and statuses.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog
from aiohttp import web
from pydantic import BaseModel

from antiphon.api.client_run import ClientRuns
from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, UnavailableError
from antiphon.core.trust.access_tokens import Denial, Refusal, Scope
from antiphon.lineage.door_keys import BARRED, KEY, PREFIX
from antiphon.net.http_serving import certificate, listening, read_json
from antiphon.net.security.credentials import read_token
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import make_private_folder, write_private
from antiphon.services.door import wire
from antiphon.services.door.door import HERE, Busy, Door, Unknown, open_door
from antiphon.services.door.futures import Future, Gone
from antiphon.system.files import hold
from antiphon.system.ports import free_port

BODY_BYTES = 64 << 20
"""Largest body; clients cut their calls at 5 MB."""
BODY_S = 60.0
"""Longest time that a body may take to arrive."""
API = "/api/v1"
OWNER = web.RequestKey("owner", str)
"""Whose key a request shows."""
SAMPLES = web.RequestKey("samples", int)
"""How many completions a request asks for."""
MOST_UNSERVED = 1000
"""Different calls that are counted and not served."""
_CONFIG = {"use_pyqwest_transport": False}
"""What clients are told of themselves: their other transport was not tried."""
_STATUS: dict[type[AntiphonError], int] = {Unknown: 404, Gone: 410, Busy: 429}
_Handler = Callable[[web.Request], Awaitable[web.Response]]
_B = TypeVar("_B", bound=BaseModel)
_log = structlog.get_logger(__name__)


class DoorServer:
    """Answers clients' calls."""

    def __init__(self, door: Door, admit: Callable[[str], str]) -> None:
        """Begin; `admit` returns whose key it is given, or raises a `Refusal`."""
        self._door, self._admit = door, admit
        self._calls: Counter[str] = Counter()
        self._unserved: Counter[str] = Counter()

    def application(self) -> web.Application:
        """Return what is served."""
        app = web.Application(middlewares=[self._guarded], client_max_size=BODY_BYTES)
        post, get, door = app.router.add_post, app.router.add_get, self._door
        post(f"{API}/client/config", _always(_CONFIG))
        post(f"{API}/client/dynamic_config", _always({}))
        post(f"{API}/telemetry", _always({"status": "accepted"}))
        get(f"{API}/healthz", _always({"status": "ok"}))
        post(f"{API}/create_session", _said(wire.NewSession, door.create_session))
        post(f"{API}/session_heartbeat", _said(wire.OfSession, door.beat))
        post(f"{API}/create_sampling_session", _said(wire.NewSampler, door.create_sampler))
        post(f"{API}/get_info", _said(wire.OfModel, door.info))
        post(f"{API}/unload_model", _said(wire.OfModel, door.unload))
        post(f"{API}/weights_info", _said(wire.WeightsInfo, door.weights_info))
        post(f"{API}/create_model", self._future(self._create_model))
        post(f"{API}/load_weights", self._future(self._load_weights))
        post(f"{API}/forward_backward", self._future(self._forward_backward))
        for call in ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external"):
            post(f"{API}/{call}", self._future(self._in_order))
        post(f"{API}/asample", self._future(self._sample))
        post(f"{API}/retrieve_future", self._retrieve)
        post(f"{API}/sessions/{{id}}/finish", _named(door.finish))
        get(f"{API}/get_server_capabilities", _named(door.capabilities))
        get(f"{API}/sessions", _named(door.list_sessions))
        get(f"{API}/sessions/{{id}}", _named(door.show_session))
        get(f"{API}/samplers/{{id}}", _named(door.show_sampler))
        get(f"{API}/checkpoints", _named(door.checkpoints))
        get(f"{API}/training_runs", _named(door.training_runs))
        get(f"{API}/training_runs/{{id}}", _named(door.training_run))
        get(f"{API}/training_runs/{{id}}/checkpoints", _named(door.checkpoints))
        app.router.add_delete(f"{API}/training_runs/{{id}}/checkpoints/{{checkpoint:.+}}", _named(door.drop))
        get("/antiphon/stats", self._stats)
        get("/antiphon/sequences/{id:.+}", _named(door.sequence))
        return app

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let a request in and answer what is refused in a sentence."""
        resource = request.match_info.route.resource
        name = "" if resource is None else f"{request.method} {resource.canonical}"
        try:
            request[OWNER] = self._admit(request.headers.get("X-API-Key", ""))
            self._calls[name or "unserved"] += 1
            return await handler(request)
        except Refusal as refusal:
            return _error(401 if refusal.denial is Denial.UNKNOWN else 403, str(refusal))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {BODY_BYTES} bytes; send fewer data at a time")
        except web.HTTPException as error:
            path = f"{request.method} {request.path[:200]}"
            if path in self._unserved or len(self._unserved) < MOST_UNSERVED:
                self._unserved[path] += 1
            _log.warning("door.unserved", call=path)
            return _error(error.status, f"{path} is not served here ({error.reason})")
        except UnavailableError as error:
            _log.warning("door.unavailable", reason=str(error))  # clients try again, and say nothing
            return _error(503, str(error), "server")
        except AntiphonError as error:
            return _error(_STATUS.get(type(error), 400), str(error))

    def _future(self, take: Callable[[web.Request, bytes], Awaitable[Future]]) -> _Handler:
        """Return what answers a call with a future; one that cannot be has a future too, which says why."""

        async def handle(request: web.Request) -> web.Response:
            body = await _body(request)
            more: dict[str, Any] = {}
            try:
                future = await take(request, body)
            except (Unknown, Gone, Busy):
                raise
            except ContractError as error:
                future = await self._door.futures.refuse(str(error))
            if take == self._sample:
                count = request.get(SAMPLES, 1)
                more["sample_sequence_ids"] = [f"{future.id}/{place}" for place in range(count)]
            elif future.of:
                more["model_id"] = future.of
            return _json({"request_id": future.id} | more)

        return handle

    async def _create_model(self, request: web.Request, body: bytes) -> Future:
        return await self._door.create_model(request[OWNER], read_json(wire.NewModel, body), body)

    async def _load_weights(self, request: web.Request, body: bytes) -> Future:
        said = read_json(wire.LoadWeights, body)
        if said.session_id is not None:
            return await self._door.load_new(request[OWNER], said, body)
        return await self._in_order(request, body)

    async def _in_order(self, request: web.Request, body: bytes) -> Future:
        said, call = read_json(wire.InOrder, body), request.path.rpartition("/")[2]
        return await self._door.in_order(request[OWNER], said, call, body)

    async def _forward_backward(self, request: web.Request, body: bytes) -> Future:
        if request.content_type != "application/x-protobuf":
            raise ContractError("forward_backward is served in protobuf; use SDK 0.38")
        said = wire.read_call(body)
        numbered = wire.InOrder(model_id=said.model_id, seq_id=max(1, said.seq_id))
        return await self._door.in_order(request[OWNER], numbered, "forward_backward", body)

    async def _sample(self, request: web.Request, body: bytes) -> Future:
        said = read_json(wire.Sample, body)
        request[SAMPLES] = said.num_samples
        return await self._door.sample(request[OWNER], said, body)

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = read_json(wire.Retrieve, await _body(request)).request_id
        found = await self._door.retrieve(request[OWNER], name)
        if isinstance(found, Future):
            reason = {"queue_state_reason": found.waiting_for} if found.waiting_for else {}
            return _json({"type": "try_again", "request_id": name, "queue_state": "active", **reason})
        form, said = found
        kind = "application/x-protobuf" if form == "protobuf" else "application/json"
        return web.Response(body=said, content_type=kind)

    async def _stats(self, request: web.Request) -> web.Response:
        futures = self._door.futures
        said = {"polls": futures.polls, "futures": futures.answered, "cpu_s": time.process_time()}
        return _json({"calls": dict(self._calls), "unserved": dict(self._unserved)} | said)


def admission(home: Path, secret: str, guard: Guard) -> Callable[[str], str]:
    """Return what tells whose key a request shows: the home's own, or an access token for the door."""

    def barred() -> Collection[str]:
        try:
            return (home / BARRED).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return ()

    def admit(key: str) -> str:
        if not key.startswith(PREFIX) or not key.isascii():
            raise Refusal(
                Denial.UNKNOWN,
                f"this call shows no key that begins with {PREFIX} in X-API-Key; set TINKER_API_KEY to "
                f"what is in {KEY} of the home, or to what `antiphon invite NAME --scopes door` prints",
            )
        if hmac.compare_digest(key, secret):
            return HERE
        try:
            return f"key/{guard.check_bearer(f'Bearer {key.removeprefix(PREFIX)}', Scope.DOOR, barred())}"
        except Refusal as refusal:
            more = f"keys are in {KEY} of the door's home, or made by `antiphon invite NAME --scopes door`"
            raise Refusal(refusal.denial, f"{refusal} ({more})") from None

    return admit


@asynccontextmanager
async def serve_door(
    config: RunConfig, name: str, runs: ClientRuns, home: Path, guard: Guard
) -> AsyncIterator[str]:
    """Serve clients while the block lasts; yields the address they are given.

    Raises:
        ConfigError: when the port is taken, another door serves this home, or there is no certificate.
        UnavailableError: when the journal cannot be used.
    """
    section, folder = config.door, home / KEY.parent
    context = certificate(section.address, config.services.credentials, "door.address")
    make_private_folder(folder)
    held = hold(folder / "lock")
    if held is None:
        raise ConfigError(f"another door serves {home}; end it, or give ANTIPHON_HOME another folder")
    with held:
        secret = read_token(home / KEY) or PREFIX + secrets.token_urlsafe(24)
        write_private(home / KEY, f"{secret}\n".encode())
        port = section.port or free_port(section.address)
        async with open_door(config, name, runs, folder) as door:
            app = DoorServer(door, admission(home, secret, guard)).application()
            async with listening(app, section.address, port, context, "door.port"):
                reached = section.address if context is None else config.services.reached_at
                yield f"{'http' if context is None else 'https'}://{reached}:{port}"


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise UnavailableError(f"the body did not arrive within {BODY_S:g} s; send it again") from None


def _always(said: dict[str, Any]) -> _Handler:
    async def handle(request: web.Request) -> web.Response:
        await _body(request)
        return _json(said)

    return handle


def _said(kind: type[_B], work: Callable[[str, _B], Awaitable[dict[str, Any]]]) -> _Handler:
    async def handle(request: web.Request) -> web.Response:
        return _json(await work(request[OWNER], read_json(kind, await _body(request))))

    return handle


def _named(work: Callable[..., Awaitable[dict[str, Any]]]) -> _Handler:
    """Return what answers a call whose path has all that it says."""

    async def handle(request: web.Request) -> web.Response:
        return _json(await work(request[OWNER], **request.match_info))

    return handle


def _json(said: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(said).encode(), content_type="application/json")


def _error(status: int, sentence: str, category: str = "user") -> web.Response:
    said = {"error": sentence, "message": sentence, "category": category}
    return web.Response(status=status, body=json.dumps(said).encode(), content_type="application/json")
