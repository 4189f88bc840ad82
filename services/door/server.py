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
from typing import Any

import structlog
from aiohttp import web

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
from antiphon.services.door.door import Busy, Door, Future, Gone, Unknown, open_door
from antiphon.system.files import hold
from antiphon.system.ports import free_port

BODY_BYTES = 64 << 20
"""Largest body; clients cut their calls at 5 MB."""
BODY_S = 60.0
"""Longest time that a body may take to arrive."""
API = "/api/v1"
OWNER = web.RequestKey("owner", str)
"""Whose key a request shows."""
HERE = "local"
"""Owner of what is made with the key of the home."""
_CONFIG = {"use_pyqwest_transport": False}
"""What clients are told of themselves: their other transport was not tried."""
_STATUS: dict[type[AntiphonError], int] = {Unknown: 404, Gone: 410, Busy: 429}
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
        post, get = app.router.add_post, app.router.add_get
        post(f"{API}/client/config", _always(_CONFIG))
        post(f"{API}/client/dynamic_config", _always({}))
        post(f"{API}/telemetry", _always({"status": "accepted"}))
        get(f"{API}/healthz", _always({"status": "ok"}))
        get(f"{API}/get_server_capabilities", self._capabilities)
        post(f"{API}/create_session", self._create_session)
        post(f"{API}/session_heartbeat", self._heartbeat)
        post(f"{API}/sessions/{{id}}/finish", self._finish)
        get(f"{API}/sessions", self._sessions)
        get(f"{API}/sessions/{{id}}", self._session)
        post(f"{API}/create_model", self._future(self._create_model))
        post(f"{API}/load_weights", self._future(self._load_weights))
        post(f"{API}/forward_backward", self._future(self._forward_backward))
        for call in ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external"):
            post(f"{API}/{call}", self._future(self._in_order))
        post(f"{API}/asample", self._sample)
        post(f"{API}/retrieve_future", self._retrieve)
        post(f"{API}/get_info", self._get_info)
        post(f"{API}/unload_model", self._unload)
        post(f"{API}/weights_info", self._weights_info)
        post(f"{API}/create_sampling_session", self._create_sampler)
        get(f"{API}/samplers/{{id}}", self._sampler)
        get(f"{API}/training_runs", self._training_runs)
        get(f"{API}/training_runs/{{id}}", self._training_run)
        get(f"{API}/training_runs/{{id}}/checkpoints", self._checkpoints)
        get(f"{API}/checkpoints", self._checkpoints)
        app.router.add_delete(f"{API}/training_runs/{{id}}/checkpoints/{{checkpoint:.+}}", self._drop)
        get("/antiphon/stats", self._stats)
        get("/antiphon/sequences/{id:.+}", self._sequence)
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
        except web.HTTPException as error:
            path = f"{request.method} {request.path[:200]}"
            self._unserved[path] += 1
            _log.warning("door.unserved", call=path)
            return _error(error.status, f"{path} is not served here ({error.reason})")
        except UnavailableError as error:
            return _error(503, str(error), "server")
        except AntiphonError as error:
            return _error(_STATUS.get(type(error), 400), str(error))

    def _future(
        self, take: Callable[[web.Request, bytes], Awaitable[Future]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return what answers a call with a future; one that cannot be has a future too, which says why."""

        async def handle(request: web.Request) -> web.Response:
            body = await _body(request)
            try:
                future = await take(request, body)
            except (Unknown, Gone, Busy):
                raise
            except ContractError as error:
                future = await self._door.refuse(str(error))
            model = {"model_id": future.of} if future.of else {}
            return _json({"request_id": future.id, **model})

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

    async def _sample(self, request: web.Request) -> web.Response:
        body, count = await _body(request), 1
        try:
            said = read_json(wire.Sample, body)
            count = said.num_samples
            future = await self._door.sample(request[OWNER], said, body)
        except (Unknown, Gone, Busy):
            raise
        except ContractError as error:
            future = await self._door.refuse(str(error))
        ids = [f"{future.id}/{place}" for place in range(count)]
        return _json({"request_id": future.id, "sample_sequence_ids": ids})

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = read_json(wire.Retrieve, await _body(request)).request_id
        found = await self._door.retrieve(name)
        if isinstance(found, Future):
            reason = {"queue_state_reason": found.waiting_for} if found.waiting_for else {}
            return _json({"type": "try_again", "request_id": name, "queue_state": "active", **reason})
        form, said = found
        kind = "application/x-protobuf" if form == "protobuf" else "application/json"
        return web.Response(body=said, content_type=kind)

    async def _create_session(self, request: web.Request) -> web.Response:
        return await _said(
            self._door.create_session(request[OWNER], read_json(wire.NewSession, await _body(request)))
        )

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._door.beat(request[OWNER], read_json(wire.OfSession, await _body(request)).session_id)
        return _json({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        await self._door.finish(request[OWNER], request.match_info["id"])
        return _json({})

    async def _sessions(self, request: web.Request) -> web.Response:
        mine = [one.id for one in self._door.sessions.values() if one.owner == request[OWNER]]
        return _json({"sessions": mine})

    async def _session(self, request: web.Request) -> web.Response:
        found = self._door.session(request[OWNER], request.match_info["id"])
        models = [one.run_id for one in self._door.models.values() if one.session == found.id]
        samplers = [one.id for one in self._door.samplers.values() if one.session == found.id]
        return _json(
            {"training_run_ids": models, "sampler_ids": samplers, "user_metadata": wire.text(found.metadata)}
        )

    async def _get_info(self, request: web.Request) -> web.Response:
        said = read_json(wire.OfModel, await _body(request))
        return await _said(self._door.info(self._door.model(request[OWNER], said.model_id)))

    async def _unload(self, request: web.Request) -> web.Response:
        said = read_json(wire.OfModel, await _body(request))
        model = self._door.model(request[OWNER], said.model_id)
        await self._door.close_model(model)
        return _json({"type": "unload_model", "model_id": model.id})

    async def _weights_info(self, request: web.Request) -> web.Response:
        return _json(self._door.weights_info(read_json(wire.WeightsInfo, await _body(request)).tinker_path))

    async def _create_sampler(self, request: web.Request) -> web.Response:
        said = read_json(wire.NewSampler, await _body(request))
        return await _said(self._door.create_sampler(request[OWNER], said))

    async def _sampler(self, request: web.Request) -> web.Response:
        found = self._door.sampler(request[OWNER], request.match_info["id"])
        path = {} if found.path is None else {"model_path": found.path}
        return _json({"sampler_id": found.id, "base_model": found.base_model, **path})

    async def _training_runs(self, request: web.Request) -> web.Response:
        return _json({"training_runs": (found := self._door.training_runs(request[OWNER])), **_all(found)})

    async def _training_run(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        model = self._door.models.get(name)
        wanted = name if model is None else model.run_id
        for one in self._door.training_runs(request[OWNER]):
            if one["training_run_id"] == wanted:
                return _json(one)
        raise Unknown(f"there is no training run {name[:80]} of yours here; list those that are")

    async def _checkpoints(self, request: web.Request) -> web.Response:
        found = self._door.checkpoints(request.match_info.get("id"))
        return _json({"checkpoints": found, **_all(found)})

    async def _drop(self, request: web.Request) -> web.Response:
        await self._door.drop(request[OWNER], request.match_info["id"], request.match_info["checkpoint"])
        return _json({})

    async def _capabilities(self, request: web.Request) -> web.Response:
        most = self._door.max_tokens
        names = [{"model_name": name, "max_context_length": most} for name in self._door.base_models]
        return _json({"supported_models": names})

    async def _sequence(self, request: web.Request) -> web.Response:
        return await _said(self._door.sequence(request[OWNER], request.match_info["id"]))

    async def _stats(self, request: web.Request) -> web.Response:
        said = {
            "calls": dict(self._calls),
            "unserved": dict(self._unserved),
            "polls": self._door.polls,
            "futures": self._door.answered,
            "cpu_s": time.process_time(),
        }
        return _json(said)


def admission(home: Path, secret: str, guard: Guard | None) -> Callable[[str], str]:
    """Return what tells whose key a request shows: the home's own, or an access token for the door."""
    read: tuple[int, Collection[str]] = (0, ())

    def barred() -> Collection[str]:
        nonlocal read
        try:
            at = (home / BARRED).stat().st_mtime_ns
            if at != read[0]:
                read = (at, frozenset((home / BARRED).read_text(encoding="utf-8").split()))
        except FileNotFoundError:
            read = (0, ())
        return read[1]

    def admit(key: str) -> str:
        if not key.startswith(PREFIX) or not key.isascii():
            raise Refusal(
                Denial.UNKNOWN,
                f"this call shows no key that begins with {PREFIX} in X-API-Key; set TINKER_API_KEY to "
                f"what is in {KEY} of the home, or to what `antiphon invite NAME --scopes door` prints",
            )
        if hmac.compare_digest(key, secret):
            return HERE
        if guard is None:
            raise Refusal(
                Denial.UNKNOWN, f"this is not the key in {KEY} of the home, and no others were made"
            )
        return f"key/{guard.check_bearer(f'Bearer {key.removeprefix(PREFIX)}', Scope.DOOR, barred())}"

    return admit


@asynccontextmanager
async def serve_door(
    config: RunConfig, name: str, runs: ClientRuns, home: Path, guard: Guard | None
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


def _all(found: list[Any]) -> dict[str, Any]:
    return {"cursor": {"offset": 0, "limit": len(found), "total_count": len(found)}}


def _always(said: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        await _body(request)
        return _json(said)

    return handle


async def _said(work: Awaitable[dict[str, Any]]) -> web.Response:
    return _json(await work)


def _json(said: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(said).encode(), content_type="application/json")


def _error(status: int, sentence: str, category: str = "user") -> web.Response:
    said = {"error": sentence, "message": sentence, "category": category}
    return web.Response(status=status, body=json.dumps(said).encode(), content_type="application/json")
