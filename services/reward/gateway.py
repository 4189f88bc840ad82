"""Gateway: hosts of others' environments ask here for tokens over HTTP, and report what the episodes earned.

It stands in the reward service's place: questions of workers are answered by what hosts ask next. Everything
that a host is told was written to the journal before. `sessions` decides, `chat` makes tokens of messages;
here are sockets, bodies and waits.
"""

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.core.records import SamplingParameters, TurnAnswer, TurnToAnswer
from antiphon.core.status import RunStatus
from antiphon.core.trust.access_tokens import Denial, Refusal, Scope
from antiphon.environments.host import HostEnvironment
from antiphon.lineage.hosts import HOST_TOKEN, GatewayRecord, read_gateway, write_gateway
from antiphon.models.codec import TextCodec
from antiphon.models.rendering import Renderer
from antiphon.net.http_serving import certificate, listening, read_json
from antiphon.net.security.credentials import read_token
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import make_private_folder, write_private
from antiphon.services.reward.chat import ChatMessage, ChatTool, context_of, message_of
from antiphon.services.reward.sessions import Refused, SampledTurn, SeatReport, Sessions, TokenId, Trajectory
from antiphon.services.reward.turns import Hosting
from antiphon.system.clock import wall_clock
from antiphon.system.ports import free_port, is_free
from antiphon.system.wakeup import Wakeup, wait_any

BEARER = web.RequestKey("bearer", str)
"""What the name of a request's host begins with."""
MODEL = "policy"
"""What the policy is called. Other names are refused: a judge that is asked for here would train."""
TAKE_S = 20.0
"""Longest wait for a group."""
TICK_S = 1.0
"""Pause between two looks at deadlines, and at what is to be kept of the hosts."""
BODY_BYTES = 8 << 20
REPORT_BYTES = 64 << 20
"""Of a report, which has all tokens of an episode."""
BODY_S = 60.0
"""Longest time that a body may take to arrive."""
CHARACTERS = 16
"""Most of a text for each token of the context: longer ones need not be made tokens of to be refused."""
_NEUTRAL = {
    "n": 1,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stream": False,
}
"""What requests may say besides, as long as it changes nothing."""

_Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[ -.0-~]+$")]
"""Without a slash: what stands before one is the name in the access token."""
_T = TypeVar("_T")
_B = TypeVar("_B", bound=BaseModel)
_log = structlog.get_logger(__name__)


class SamplingBody(BaseModel):
    """What a request says of sampling; of what stands there besides `_NEUTRAL` is looked at."""

    model_config = ConfigDict(extra="allow")

    antiphon_trajectory: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The same, which counts if it is said."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None


class GenerateBody(BaseModel):
    """`POST /inference/v1/generate`."""

    model: str = MODEL
    token_ids: list[TokenId]
    sampling_params: SamplingBody = SamplingBody()


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    model: str = MODEL
    messages: list[ChatMessage]
    tools: list[ChatTool] | None = None


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a text, or messages."""

    model: str = MODEL
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: bool = True


class HostBody(BaseModel):
    """`POST /antiphon/v1/take`, and with the groups that it has `/antiphon/v1/alive`."""

    host: _Name
    groups: list[str] = Field([], max_length=4096)


class ReportBody(BaseModel):
    """`POST /antiphon/v1/report`."""

    host: _Name
    group: str
    episode: int
    seats: list[SeatReport] = Field(max_length=4096)


class Gateway(Hosting):
    """Answers hosts' requests, and with them the questions of workers."""

    def __init__(
        self,
        config: RunConfig,
        sessions: Sessions,
        codec: TextCodec,
        renderer: Renderer | str,
        clock: Callable[[], float],
        admit: Callable[[str, Collection[str]], str] = lambda authorization, barred: "",
    ) -> None:
        """Begin with no question.

        `renderer` makes tokens of messages, or is the sentence that says why there is none; `admit` returns
        what names of the bearer's hosts begin with, or raises a `Refusal` for a header that lets no one in,
        such as one of a token, or of a name, that is barred.
        """
        self._config, self._codec, self._renderer, self._clock = config, codec, renderer, clock
        self._admit, self._barred = admit, frozenset[str]()
        self.keep: Callable[[], None] = lambda: None
        """Writes what is known of the hosts."""
        self.sessions = sessions
        self._sampling = {
            "train": config.sampling.parameters(),
            "heldout": config.evaluation.parameters(config.sampling),
        }
        self._room = config.rollout.max_model_tokens
        self.answered: asyncio.Queue[TurnAnswer] = asyncio.Queue()
        self._sending: dict[str, str] = {}
        """Trajectory -> digest of the row whose answer is under way to the coordinator."""
        self._changes: WeakValueDictionary[str, Wakeup] = WeakValueDictionary()
        """By group; held by those who wait."""
        self._offered = Wakeup()

    def asked(self, turn: TurnToAnswer) -> None:
        """Take a question of a worker, which is answered once a host has said something."""
        self.sessions.asked(turn, self._clock())
        self._settle()
        self._change(turn.group_id)
        self._offered.notify()

    def sent(self, answers: Sequence[TurnAnswer]) -> None:
        """Hear that the coordinator has journalled answers: their hosts may hear so."""
        for said in answers:
            name = f"{said.group_id}/{said.sample_index}"
            if self._sending.get(name) == said.row_digest:
                del self._sending[name]
            self.sessions.journalled(said)
            self._change(said.group_id)

    def heard(self, status: RunStatus, unfinished: Sequence[str]) -> None:
        """Hear whose tokens count no more, and which groups go on."""
        self._barred = frozenset(status.barred)
        self.sessions.unfinished(unfinished, self._clock())

    async def look(self) -> None:
        """Look at deadlines and keep what is known of the hosts, for ever."""
        while True:
            self._tick()
            self.keep()
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        self.sessions.tick(self._clock())
        self._settle()
        for change in list(self._changes.values()):
            change.notify()
        self._offered.notify()

    def application(self) -> web.Application:
        """Return what is served."""
        app = web.Application(middlewares=[self._guarded], client_max_size=REPORT_BYTES)
        app.router.add_get("/v1/models", self._models)
        post = app.router.add_post
        post("/inference/v1/generate", partial(_handle, GenerateBody, self._generate))
        post("/v1/chat/completions", partial(_handle, ChatBody, self._chat))
        post("/tokenize", partial(_handle, TokenizeBody, self._tokenize))
        post("/antiphon/v1/take", partial(_handle, HostBody, self._take))
        post("/antiphon/v1/alive", partial(_handle, HostBody, self._alive))
        post("/antiphon/v1/report", partial(_handle, ReportBody, self._report))
        return app

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let a request in and answer what is refused in a sentence."""
        try:
            request[BEARER] = self._admitted(request)
            return await handler(request)
        except Refusal as refusal:
            return _error(401 if refusal.denial is Denial.UNKNOWN else 403, str(refusal))
        except Refused as refused:
            return _error(refused.status, str(refused))
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path[:200]}: {error.reason}")
        except AntiphonError as error:
            return _error(400, str(error))

    def _admitted(self, request: web.Request) -> str:
        """Return what names of the bearer's hosts begin with.

        Raises:
            Refusal: when it is not let in, or no more: who waits is looked at again.
        """
        return self._admit(request.headers.get("Authorization", ""), self._barred)

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "antiphon"}
        return web.json_response({"object": "list", "data": [entry | {"max_model_len": self._room}]})

    async def _generate(self, body: GenerateBody, request: web.Request) -> dict[str, Any]:
        name = _named(body.sampling_params, request)
        if "/" not in name:
            raise Refused(400, "name the trajectory in sampling_params.antiphon_trajectory, as take gave it")
        self._check_holder(name, request)
        turn = await self._sampled(name, body.token_ids, body.sampling_params, request)
        return {"request_id": name, **self._told(len(body.token_ids), turn)}

    async def _chat(self, body: ChatBody, request: web.Request) -> dict[str, Any]:
        renderer, messages = self._rendering(), [one.plain() for one in body.messages]
        tools = [one.function for one in body.tools or ()]
        make_context = partial(context_of, renderer, messages, tools)
        name = _named(body, request)
        self._check_holder(name, request)
        self._check_length((message.content for message in messages), name)
        name = name if "/" in name else self._matching(make_context, request)
        known = await self._until(name, lambda: self._known(name), request)
        context = make_context(known.recorded)
        turn = await self._sampled(name, context, body, request)
        reply = renderer.reply(context, turn.token_ids.tolist(), tools)
        message = message_of(reply, f"call-{known.name}-{len(context)}")
        called = {"finish_reason": "tool_calls"} if reply.tool_calls else {}
        head = {"id": name, "object": "chat.completion", "created": int(wall_clock()), "model": MODEL}
        told = self._told(len(context), turn, message=message, **called)
        return {**head, "prompt_token_ids": context, **told}

    async def _tokenize(self, body: TokenizeBody, request: web.Request) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "give either prompt or messages")
        if body.prompt is not None:
            self._check_length([body.prompt])
            ids = list(self._codec.encode(body.prompt, body.add_special_tokens))
        else:
            messages = [one.plain() for one in body.messages or ()]
            self._check_length(message.content for message in messages)
            tools = [one.function for one in body.tools or ()]
            ids = context_of(self._rendering(), messages, tools, lambda context: None)
        return {"count": len(ids), "max_model_len": self._room, "tokens": ids}

    async def _take(self, body: HostBody, request: web.Request) -> dict[str, Any] | None:
        deadline = self._clock() + TAKE_S
        host = _host(body, request)
        while (found := self.sessions.take(host, self._clock())) is None:
            self._settle()
            if not await self._offered.wait(deadline - self._clock()):
                return None
            self._admitted(request)
        _log.debug("group.taken", host=host, group=found.group)
        run = self._sampling[found.split]
        sampling = {"temperature": run.temperature, "top_p": run.top_p, "max_tokens": run.max_tokens}
        deadline_s = self._config.gateway.host_timeout_s
        return asdict(found) | {"model": MODEL, "sampling": sampling, "deadline_s": deadline_s}

    async def _alive(self, body: HostBody, request: web.Request) -> dict[str, Any]:
        held, lost = self.sessions.alive(_host(body, request), body.groups, self._clock())
        for group_id in held:
            self._change(group_id)
        return {"held": held, "lost": lost}

    async def _report(self, body: ReportBody, request: web.Request) -> dict[str, Any]:
        host = _host(body, request)
        reporting = partial(self.sessions.report, host, body.group, body.episode, body.seats)
        reason = await self._until(f"{body.group}/", lambda: reporting(self._clock()), request)
        names = {seat.trajectory.partition("@")[0] for seat in body.seats}
        await self._until(f"{body.group}/", lambda: self._sending.keys().isdisjoint(names) or None, request)
        level = _log.warning if reason else _log.debug
        level("episode.reported", host=host, group=body.group, episode=body.episode, refused=reason)
        return {"accepted": not reason, "reason": reason}

    async def _sampled(
        self, name: str, context: Sequence[int], asked: SamplingBody, bearer: web.Request
    ) -> SampledTurn:
        """Wait for the turn that is sampled after a context."""
        tokens = np.asarray(context, dtype=np.int32)

        def request() -> SampledTurn | None:
            found = self.sessions.find(name, self._clock())
            if found is not None:
                self._check_sampling(asked, self._sampling[found.split], tokens.size)
            return self.sessions.request(name, tokens, self._clock())

        return await self._until(name, request, bearer)

    def _known(self, name: str) -> Trajectory | None:
        """Return a trajectory once its row is known."""
        found = self.sessions.find(name, self._clock())
        return found if found is not None and found.known is not None else None

    def _told(self, before: int, turn: SampledTurn, **choice: Any) -> dict[str, Any]:
        """Say a turn after `before` tokens, each log-probability under both names that clients look for."""
        rest: dict[str, Any] = {"bytes": None, "top_logprobs": []}
        ids = turn.token_ids.tolist()
        stops = self._config.sampling.stop
        ended = ids[-1] in self._codec.end_tokens or any(one in self._codec.decode(ids) for one in stops)
        choice = {"index": 0, "finish_reason": "stop" if ended else "length", "token_ids": ids, **choice}
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, **rest}
                for token, logprob in zip(ids, turn.logprobs.tolist(), strict=True)
            ]
        }
        spans = [{"version": one.version, "start": one.start, "end": one.stop} for one in turn.spans]
        choice["weight_versions"] = spans
        total = {"prompt_tokens": before, "completion_tokens": len(ids), "total_tokens": before + len(ids)}
        return {"choices": [choice], "usage": total}

    async def _until(self, name: str, attempt: Callable[[], _T | None], request: web.Request) -> _T:
        """Return what an attempt finds in a trajectory, or in its group, once there is something.

        Raises:
            Refused: what the attempt raises, or that nothing came for services.stall_timeout_s.
            Refusal: when the bearer's token was revoked meanwhile.
        """
        patience_s, group_id = self._config.services.stall_timeout_s, name.rpartition("/")[0]
        change, deadline = self._changes.setdefault(group_id, Wakeup()), self._clock() + patience_s
        while True:
            self._admitted(request)
            try:
                found = attempt()
            finally:
                self._settle()
            if found is not None:
                return found
            if not await wait_any(deadline - self._clock(), change):
                raise Refused(503, f"nothing came of group {group_id[:80]} for {patience_s:g} s; ask again")

    def _change(self, group_id: str) -> None:
        if (change := self._changes.get(group_id)) is not None:
            change.notify()

    def _settle(self) -> None:
        """Give the coordinator what was decided."""
        answers, self.sessions.outbox = self.sessions.outbox, []
        for said in answers:
            self._sending[f"{said.group_id}/{said.sample_index}"] = said.row_digest
            self.answered.put_nowait(said)

    def _check_holder(self, name: str, request: web.Request) -> None:
        """Refuse turns of a group that a host with another token has."""
        if self.sessions.holder(name) and not self._holds(name, request):
            raise Refused(403, f"trajectory {name[:80]} belongs to a host with another token; take a group")

    def _holds(self, name: str, request: web.Request) -> bool:
        """Return whether a host with the bearer's token has a trajectory."""
        holder = self.sessions.holder(name)
        return holder[: holder.rfind("/") + 1] == request[BEARER]

    def _matching(self, make_context: Callable[..., list[int]], request: web.Request) -> str:
        """Return the one trajectory whose turns the messages without a name repeat; else one without turns.

        Raises:
            Refused: when there is none, or more than one.
        """
        found: dict[bool, list[str]] = {True: [], False: []}
        for one in self.sessions.held():
            if not self._holds(one.name, request):
                continue
            begun = one.known is not None and one.known.token_ids.size > 0
            context = make_context(one.recorded)
            if not begun or one.recorded(context) is not None or one.followed_by(context):
                found[begun].append(one.name)
        names = found[True] or found[False]
        if len(names) == 1:
            return names[0]
        raise Refused(
            400,
            f"these messages may belong to {len(names)} trajectories; name one by antiphon_trajectory in the "
            "body or by the header X-Session-ID, as take gave it",
        )

    def _check_sampling(self, asked: SamplingBody, run: SamplingParameters, size: int) -> None:
        fixed = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k, **_NEUTRAL}
        for name, value in fixed.items():
            given = (asked.model_extra or {}).get(name)
            if given is not None and given != value and (name, given, value) != ("top_k", -1, 0):
                raise Refused(400, f"{name}={given} differs from the run's {value}; leave it out")
        least = min(run.max_tokens, self._room - size)
        wanted = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        if wanted is not None and wanted < least:
            raise Refused(
                400,
                f"max_tokens={wanted} is less than the run's sampling.max_tokens={run.max_tokens}, "
                "which every turn has; leave it out",
            )
        stops = {asked.stop} if isinstance(asked.stop, str) else {*(asked.stop or ())}
        if unknown := sorted(stops - {*self._config.sampling.stop}):
            raise Refused(400, f"stop has {unknown[0]!r}, which is not in sampling.stop; leave it out")
        if foreign := {*(asked.stop_token_ids or ())} - self._codec.end_tokens:
            raise Refused(
                400,
                f"stop_token_ids has {min(foreign)}, which is no end token of the policy "
                f"({', '.join(map(str, sorted(self._codec.end_tokens)))}); leave it out",
            )

    def _check_length(self, texts: Iterable[str], name: str = "") -> None:
        if (size := sum(map(len, texts))) > CHARACTERS * self._room:
            self.sessions.too_long(name)
            raise Refused(
                400,
                f"{size} characters are too many: the maximum context length is {self._room} tokens; "
                "report it",
            )

    def _rendering(self) -> Renderer:
        if isinstance(self._renderer, str):
            raise Refused(400, f"chat completions need a renderer: {self._renderer}")
        return self._renderer


async def _handle(
    kind: type[_B],
    work: Callable[[_B, web.Request], Awaitable[dict[str, Any] | None]],
    request: web.Request,
) -> web.Response:
    try:
        limited = request if kind is ReportBody else request.clone(client_max_size=BODY_BYTES)
        async with asyncio.timeout(BODY_S):
            read = await limited.read()
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:g} s; send it again") from None
    body = read_json(kind, read)
    if (name := getattr(body, "model", MODEL)) != MODEL:
        raise Refused(404, f"there is no model {name[:80]!r} here; the policy is called {MODEL}")
    found = await work(body, request)
    return web.Response(status=204) if found is None else web.json_response(found)


def _named(body: SamplingBody, request: web.Request) -> str:
    """Return how a request names its trajectory; other clients' session ids have no slash."""
    return body.antiphon_trajectory or str(request.headers.get("X-Session-ID", ""))


def _host(body: HostBody | ReportBody, request: web.Request) -> str:
    """Return how a host is called here: two with one name and tokens of different names are two hosts."""
    return f"{request[BEARER]}{body.host}"


def _error(status: int, sentence: str) -> web.Response:
    said = {"message": sentence, "type": "invalid_request_error", "code": status}
    return web.json_response({"error": said}, status=status)


def _renderer_of(config: RunConfig) -> Renderer | str:
    try:
        return Renderer.load(config, turns=True)
    except ConfigError as error:
        return str(error)


def _admission(secret: str, guard: Guard | None) -> Callable[[str, Collection[str]], str]:
    """Return what lets requests in: the run's own hosts by `secret`, others by access tokens."""

    def admit(authorization: str, barred: Collection[str]) -> str:
        if authorization.isascii() and hmac.compare_digest(authorization, f"Bearer {secret}"):
            return ""
        if guard is None or not authorization.isascii():
            raise Refusal(Denial.UNKNOWN, f"this call does not carry the token in {HOST_TOKEN} of the run")
        return f"{guard.check_bearer(authorization, Scope.SAMPLE, barred)}/"

    return admit


@asynccontextmanager
async def open_gateway(
    config: RunConfig,
    environment: HostEnvironment,
    codec: TextCodec,
    run_dir: Path,
    guard: Guard | None,
) -> AsyncIterator[Gateway]:
    """Serve hosts while the block lasts; where they reach it stands in the run's folder.

    Raises:
        ConfigError: when the port is taken, or there is no certificate for the address.
    """
    section, clock = config.gateway, asyncio.get_running_loop().time
    record, patience_s = read_gateway(run_dir), config.services.stall_timeout_s
    sessions = Sessions(
        environment,
        {"train": config.loop.group_size, "heldout": config.evaluation.samples},
        vocabulary=codec.vocabulary_size,
        max_tokens=config.sampling.max_tokens,
        host_timeout_s=section.host_timeout_s,
        forget_s=2.0 * patience_s,
        now=clock(),
    )
    sessions.hosts.update(record.hosts)
    make_private_folder(run_dir / HOST_TOKEN.parent)
    # A host that was started before this process goes on with what it was given.
    secret = read_token(run_dir / HOST_TOKEN) or secrets.token_urlsafe(24)
    write_private(run_dir / HOST_TOKEN, f"{secret}\n".encode())
    renderer = await asyncio.to_thread(_renderer_of, config)
    gateway = Gateway(config, sessions, codec, renderer, clock, _admission(secret, guard))
    before = int(record.url.rpartition(":")[2] or 0)
    port = section.port or (before if before and is_free(before, section.address) else 0)
    port = port or free_port(section.address)
    context = certificate(section.address, config.services.credentials, "gateway.address")
    reached = section.address if context is None else config.services.reached_at
    url = f"{'http' if context is None else 'https'}://{reached}:{port}"

    kept: dict[str, Any] = {}

    def keep() -> None:
        """Write what is known of the hosts where that has changed."""
        nonlocal kept
        while sessions.heard:
            if (counts := sessions.hosts.get(sessions.heard.pop())) is not None:
                counts.seen_at = round(wall_clock())
        record = GatewayRecord(url, sessions.hosts, sessions.untaken)
        if (found := asdict(record)) == kept:
            return
        try:
            write_gateway(run_dir, record)
            kept = found
        except UnavailableError as error:  # the next look tries again
            _log.warning("gateway.unkept", error=str(error))

    gateway.keep = keep
    try:
        async with listening(gateway.application(), section.address, port, context, "gateway.port"):
            keep()
            yield gateway
    finally:
        keep()
