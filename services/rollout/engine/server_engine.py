"""ServerEngine: what engines have in common that are servers which somebody else started, asked over HTTP.

Each request is one stream. The engine's own event loop runs inside each call, in the thread that owns the
engine; between calls nothing moves. Redirects are not followed, and each answer has a deadline.
"""

import asyncio
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import numpy as np

from antiphon.api.engine import EngineAbilities, EngineOutput, EngineProgress, EngineRequest
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.records import FinishReason, FloatArray, IntArray, VersionSpan
from antiphon.core.spans import spans_of_changes
from antiphon.models.codec import TextCodec
from antiphon.models.directory import expected_tensors
from antiphon.services.rollout.engine.environment import ServerSettings
from antiphon.services.rollout.engine.intake import Turn, check_request, check_weights
from antiphon.weights.snapshot import VerifiedWeights

STEP_S = 0.05
"""Longest time that one `step` waits for tokens: messages to the engine wait as long."""
BUSY_S = 1.0
"""Wait before a request that found the server full is sent again."""
LINE_BYTES = 1 << 20
"""Longest line of a stream that is read."""
SAID_CHARS = 300
"""Characters of a refusal that are repeated."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Live:
    """One request in flight."""

    request: EngineRequest
    changes: list[tuple[int, int]]
    """(version, first token sampled under it), in order."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    """Why it ended, once it has."""
    count: int | None = None
    """How many tokens it has then; None: all."""
    cached: int = 0
    """Tokens whose cache the server had at the beginning."""
    turn: Turn | None = None
    """What looks for the texts that end it, where the server cannot."""
    task: "asyncio.Task[None]" = field(init=False)
    """Its stream."""

    @property
    def most(self) -> int:
        """Return the most tokens that may be sampled."""
        return self.request.sampling.max_tokens - len(self.request.prefix_token_ids)

    @property
    def stop(self) -> int:
        """Return how many tokens are there; those behind a text that ends it are none of it."""
        return len(self.tokens) if self.count is None else self.count


LiveT = TypeVar("LiveT", bound=Live)


class ServerEngine(ABC, Generic[LiveT]):
    """The engine of one worker, in a server of its own. Not thread-safe: its owner's thread drives it.

    A subclass says what is asked, and takes the chunks of the answers.
    """

    abilities: EngineAbilities
    drafts = False
    numerics = ""  # nobody says that another server's bits are the same
    path = ""
    """Where completions are asked for."""
    speaks = ""
    """The release whose wire it speaks, for the words of errors."""
    full: Collection[int] = ()
    """HTTP statuses with which the server says that it is full; a request is sent again then."""

    def __init__(self, settings: ServerSettings) -> None:
        """Ask the server what it is; the weights it was started with are not served.

        Raises:
            ConfigError: when it cannot do what it must, in a sentence that names the option to add.
            UnavailableError: when it does not answer.
        """
        self.settings = settings
        self._server = f"the server at rollout.engine_url={settings.url}"
        self.version: int | None = None
        self.weights_digest: str | None = None
        self.vocabulary_size = TextCodec.load(str(settings.model_dir)).vocabulary_size
        self._expected = expected_tensors(settings.model_dir)
        self._live: dict[str, LiveT] = {}
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="antiphon-", dir=settings.folder))
            self._folder.chmod(0o755)  # the server may be somebody else's process
        except OSError as error:
            raise ConfigError(
                f"rollout.engine_folder={settings.folder} cannot be written ({error}); name a folder that "
                "worker and server both reach"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._heard_s = self._loop.time()
        self._session = self._run(self._open())
        try:
            with self._understood("says of itself what no", ConfigError):
                self._run(self._introduce())
        except BaseException:
            self.close()
            raise

    @abstractmethod
    async def _introduce(self) -> None:
        """Refuse a server that cannot be worked with; a KeyError or TypeError is what it says otherwise."""

    @abstractmethod
    async def _swap(self, version: int, weights: VerifiedWeights) -> None:
        """Let the server hold weights, with nothing in flight there."""

    @abstractmethod
    def _accept(self, request: EngineRequest, version: int) -> LiveT:
        """Return what is kept of a request that was checked, whose first token this version samples."""

    @abstractmethod
    def _body(self, live: LiveT) -> Mapping[str, Any]:
        """Return what is sent for what is left of a request."""

    @abstractmethod
    def _take(self, live: LiveT, chunk: Mapping[str, Any]) -> bool:
        """Take one chunk of a stream; True when it is the last one that is of use."""

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Serve these weights from the next `step` on, see `Engine`; tensors are `VerifiedWeights` of torch.

        Raises:
            ContractError: when nobody verified the tensors.
            IntegrityError: when they are others, or the server did not take them: the weights before sample
                on, or `version` is None then and nothing does.
            UnavailableError: when the server does not answer.
        """
        if version == self.version and weights_digest == self.weights_digest:
            return
        taken = check_weights(version, tensors, weights_digest, self.settings.model_dir, self._expected)
        self.version = self.weights_digest = None
        try:
            self._run(self._swap(version, taken))
        except IntegrityError as error:
            raise IntegrityError(f"{error}{self._undo()}") from error
        self._serve(version, taken)

    def _undo(self) -> str:
        """Say what is served after a swap that failed."""
        return "; nothing is served until a snapshot is loaded"

    def _serve(self, version: int, weights: VerifiedWeights) -> None:
        """Go on under the weights that the server holds, each request behind the tokens it has."""
        self.version, self.weights_digest = version, weights.digest
        self._heard_s = self._loop.time()
        for live in self._live.values():
            if live.reason is None and _failure(live) is None:  # what went wrong with one, `step` says
                if live.changes[-1][1] == len(live.tokens):
                    live.changes.pop()
                live.changes.append((version, len(live.tokens)))
                self._begin(live)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Send requests; they start with the next `step`.

        Raises:
            ContractError: for a repeated id, an impossible prompt, or before any weights.
            ConfigError: for sampling parameters this engine cannot honour.
        """
        if self.version is None:
            raise ContractError("the engine holds no snapshot yet; load_weights must come before add")
        if not self._live:
            self._heard_s = self._loop.time()
        for request in requests:
            check_request(request, self._live, "native", self.vocabulary_size, self.settings.max_model_len)
            live = self._accept(request, self.version)
            self._begin(live)
            self._live[request.request_id] = live

    def step(self) -> list[EngineOutput]:
        """Wait up to `STEP_S` for tokens and return the requests that finished; none without weights.

        Raises:
            UnavailableError: when the server went away, or brought no token for `silent_s` seconds.
            IntegrityError: when what it says cannot be.
        """
        if not self._live or self.version is None:
            return []
        self._run(self._listen())
        return [self._finish(name) for name, live in list(self._live.items()) if self._ended(live)]

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        live = {name: self._live[name] for name in since if name in self._live and self.abilities.progress}
        return [
            EngineProgress(*_piece(one, since[name]), request_id=name)
            for name, one in live.items()
            if one.stop > since[name]
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        gone = [self._live.pop(name) for name in request_ids if name in self._live]
        self._run(_hang_up(gone))

    def close(self) -> None:
        self.abort(list(self._live))
        self._run(self._session.close())
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            self.settings.url,
            # One that is kept would be closed by the server while nobody looks.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.silent_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=LINE_BYTES,
        )

    async def _ask(self, method: str, path: str, limit_s: float, body: object = None) -> Any:
        """Return the JSON of an answer.

        Raises:
            IntegrityError: when the server answers that it failed or refuses.
            UnavailableError: when it does not answer within `limit_s` seconds.
        """
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(method, path, json=body, allow_redirects=False) as answer,
            ):
                said = await answer.text()
                if answer.status != 200:
                    raise self._failed(f"answered {path} with status {answer.status}: {_short(said)}")
                return json.loads(said)
        except TimeoutError:
            raise UnavailableError(
                f"{self._server} did not answer {path} within {limit_s:g} s; look at its log"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._away(error) from error

    def _away(self, error: Exception) -> UnavailableError:
        said = _short(f"{type(error).__name__}: {error}")
        return UnavailableError(f"{self._server} cannot be asked ({said}); start it, and this worker again")

    def _failed(self, said: str) -> IntegrityError:
        return IntegrityError(f"{self._server} {said}")

    @contextmanager
    def _understood(self, said: str, kind: type[AntiphonError] = IntegrityError) -> Iterator[None]:
        """Raise an error of this kind where what the server says inside the block has another form."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise kind(
                f"{self._server} {said} {self.speaks} does ({type(error).__name__}: {error}); start that "
                "release"
            ) from error

    async def _hang_up(self) -> None:
        """End the streams of all requests that have not ended."""
        await _hang_up([live for live in self._live.values() if live.reason is None])

    def _begin(self, live: LiveT) -> None:
        """Send what is left of a request."""
        live.task = self._loop.create_task(self._sample(live, self._body(live)))

    async def _sample(self, live: LiveT, body: Mapping[str, Any]) -> None:
        """Take the tokens of one stream as they come, until it ends."""
        try:
            with self._understood("answered what no"):
                while not await self._stream(live, live.request.request_id, body):
                    await asyncio.sleep(BUSY_S)
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from error
        finally:
            self._news.set()

    async def _stream(self, live: LiveT, name: str, body: Mapping[str, Any]) -> bool:
        """Take one stream to its end; False when the server is full."""
        async with self._session.post(self.path, json=body, allow_redirects=False) as answer:
            if answer.status in self.full:
                return False
            if answer.status != 200:
                said = _short(await answer.text())
                raise self._failed(f"refused request {name} with status {answer.status}: {said}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise self._failed(f"failed: {chunk['error']}")
                self._heard_s = self._loop.time()
                self._news.set()
                if self._take(live, chunk):
                    return True
        if live.reason is None:
            raise IntegrityError(f"the stream of request {name} ended without a reason")
        return True

    def _reason(self, live: LiveT, said: str | None) -> FinishReason | None:
        """Return why the server says that a request ended; an abort that is not ours is somebody else's."""
        if said is None or said in (FinishReason.STOP, FinishReason.LENGTH):
            return None if said is None else FinishReason(said)
        raise self._failed(
            f"ended request {live.request.request_id} with {said!r}; give each worker a server of its own"
        )

    async def _listen(self) -> None:
        try:
            async with asyncio.timeout(STEP_S):
                await self._news.wait()
        except TimeoutError:
            silent_s = self._loop.time() - self._heard_s
            if silent_s > self.settings.silent_s:
                raise UnavailableError(
                    f"{self._server} brought no token for {silent_s:.0f} s while {len(self._live)} requests "
                    "run; look at its log"
                ) from None
        self._news.clear()

    def _ended(self, live: LiveT) -> bool:
        """Return whether a request's stream is over; what went wrong with it is raised here."""
        if (error := _failure(live)) is not None:
            raise error
        return live.reason is not None and live.task.done()

    def _finish(self, name: str) -> EngineOutput:
        live = self._live.pop(name)
        assert live.reason is not None, "it has ended"
        return EngineOutput(*_piece(live, 0), live.reason, request_id=name, cached_tokens=live.cached)


def _failure(live: Live) -> BaseException | None:
    """Return what went wrong with a request's stream."""
    return live.task.exception() if live.task.done() and not live.task.cancelled() else None


def _piece(live: Live, start: int) -> tuple[IntArray, FloatArray, tuple[VersionSpan, ...]]:
    """Return a request's tokens from `start` on with their log-probabilities and version spans."""
    tokens = np.array(live.tokens[start : live.stop], dtype=np.int32)
    logprobs = np.array(live.logprobs[start : live.stop], dtype=np.float32)
    return tokens, logprobs, spans_of_changes(live.changes, start, live.stop)


async def _hang_up(many: Sequence[Live]) -> None:
    """End streams; a server that loses a reader aborts the request."""
    for live in many:
        live.task.cancel()
    await asyncio.gather(*(live.task for live in many), return_exceptions=True)


def _short(said: str) -> str:
    return " ".join(said.split())[:SAID_CHARS]
