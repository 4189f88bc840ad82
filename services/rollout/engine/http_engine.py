"""HttpEngine: a vLLM 0.32 server that somebody else started, behind the Engine protocol.

The server speaks token ids at `/inference/v1/generate` (`--tokens-only`, or `--enable-scale-out`) and takes
weights by vLLM's development endpoints (`VLLM_SERVER_DEV_MODE=1`). A swap hangs up on what runs; then
`/pause?mode=abort` drops every cache, `/collective_rpc` has `reload_weights` read a folder, and after
`/update_weight_version` and `/resume` the version's probe is scored. Only then do the requests go on, each
behind the tokens it has: each piece of a completion was sampled by one request under one version, so spans
are exact.

vLLM's own `/update_weights` is not used: each of its backends needs a GPU (`nccl`, `sparse_nccl`, `nccl_m2n`
and `sharded_rdt` a NCCL or RDMA group; `ipc` asks `torch.cuda` for the device in
vllm/distributed/weight_transfer/ipc_engine.py, lines 222 and 280).

Its own event loop runs inside each call, in the thread that owns the engine; between calls nothing moves.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
from safetensors.torch import save_file

from antiphon.api.engine import EngineAbilities, EngineOutput, EngineProgress, EngineRequest
from antiphon.core.broadcast.probe import probe_problem
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.records import FinishReason
from antiphon.core.seeds import derive_seed
from antiphon.core.spans import spans_of_changes
from antiphon.models.codec import TextCodec
from antiphon.models.directory import HEAD, end_tokens, expected_tensors, read_json
from antiphon.services.rollout.engine.environment import ServerSettings
from antiphon.services.rollout.engine.intake import StopTexts, Turn, check_request, check_weights
from antiphon.weights.snapshot import VerifiedWeights

STEP_S = 0.05
"""Longest time that one `step` waits for tokens: messages to the engine wait as long."""
LINE_BYTES = 1 << 20
"""Longest line of a stream that is read."""
SAID_CHARS = 300
"""Characters of a refusal that are repeated."""
GENERATE = "/inference/v1/generate"

_T = TypeVar("_T")


@dataclass(slots=True)
class _Live:
    """One request in flight."""

    request: EngineRequest
    turn: Turn | None
    changes: list[tuple[int, int]]
    """(version, first token sampled under it), in order."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    """Why it ended, once it has."""
    count: int | None = None
    """How many tokens it has then; None: all."""
    task: "asyncio.Task[None] | None" = None


class HttpEngine:
    """The engine of one worker, in a server of its own. Not thread-safe: its owner's thread drives it."""

    drafts = False
    continues = True
    numerics = ""  # nobody says that another server's bits are the same
    abilities = EngineAbilities(keyed=False, drafts=False)

    def __init__(self, settings: ServerSettings) -> None:
        """Ask the server what it is; the weights it was started with are not served.

        Raises:
            ConfigError: when it cannot do what it must, in a sentence that names the option to add.
            UnavailableError: when it does not answer.
        """
        self.settings = settings
        self.version: int | None = None
        self.weights_digest: str | None = None
        self._expected = expected_tensors(settings.model_dir)
        self._tied = bool(read_json(settings.model_dir / "config.json").get("tie_word_embeddings", False))
        self._stop = end_tokens(settings.model_dir)
        self._stop_texts = StopTexts(settings.model_dir)
        self.vocabulary_size = TextCodec.load(str(settings.model_dir)).vocabulary_size
        self._live: dict[str, _Live] = {}
        self._counter = 0
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="antiphon-", dir=settings.folder))
            self._folder.chmod(0o755)  # the server may be somebody else's process
        except OSError as error:
            raise ConfigError(
                f"rollout.engine_folder={settings.folder} cannot be written ({error}); name a folder that "
                "worker and server both reach"
            ) from error
        self._held: tuple[int, VerifiedWeights] | None = None
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._heard_s = self._loop.time()
        self._session = self._run(self._open())
        try:
            self._precision: str = self._run(self._introduce())
        except (KeyError, TypeError, AttributeError) as error:
            self.close()
            raise ConfigError(
                f"the server at rollout.engine_url={settings.url} says of itself what no vLLM 0.32 does "
                f"({type(error).__name__}: {error}); start that release"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Serve these weights from the next `step` on; requests in flight continue under them.

        Args:
            version: policy version of the tensors.
            tensors: checkpoint name -> torch tensor, as `VerifiedWeights`.
            weights_digest: what the digest of the tensors must be.

        Raises:
            ContractError: when nobody verified the tensors.
            IntegrityError: when the server did not take them, or computes something else than the learner;
                the weights before sample on, or `version` is None then and nothing does.
            UnavailableError: when it does not answer.
        """
        if version == self.version and weights_digest == self.weights_digest:
            return
        taken = check_weights(version, tensors, weights_digest, self.settings.model_dir, self._expected)
        self.version = self.weights_digest = None
        try:
            self._run(self._swap(version, taken))
        except IntegrityError as error:
            if self._held is None:
                raise IntegrityError(f"{error}; nothing is served until a snapshot is loaded") from error
            try:
                self._run(self._swap(*self._held))
            except IntegrityError as again:
                raise IntegrityError(f"{error}, nor version {self._held[0]} again ({again})") from error
            self._serve(*self._held)
            raise IntegrityError(f"{error}; version {self._held[0]} is served on") from error
        self._serve(version, taken)

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
            live = _Live(request, self._stop_texts.turn_of(request), [(self.version, 0)])
            self._live[request.request_id] = live
            self._begin(live)

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
        found = []
        for name, known in since.items():
            live = self._live.get(name)
            if live is not None and (stop := len(live.tokens)) > known:
                found.append(
                    EngineProgress(
                        np.array(live.tokens[known:], dtype=np.int32),
                        np.array(live.logprobs[known:], dtype=np.float32),
                        spans_of_changes(live.changes, known, stop),
                        request_id=name,
                    )
                )
        return found

    def abort(self, request_ids: Sequence[str]) -> None:
        gone = [self._live.pop(name) for name in request_ids if name in self._live]
        self._run(_cancelled([live.task for live in gone if live.task is not None]))

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

    async def _introduce(self) -> str:
        """Return the precision of the server's model, when it is one that can be worked with."""
        limit_s = self.settings.silent_s
        paths = (await self._ask("GET", "/openapi.json", limit_s)).get("paths", {})
        for path, option in ((GENERATE, "--tokens-only"), ("/collective_rpc", "VLLM_SERVER_DEV_MODE=1")):
            if path not in paths:
                raise ConfigError(
                    f"the server at rollout.engine_url={self.settings.url} has no {path}; start it with "
                    f"{option}"
                )
        found = (await self._ask("GET", "/server_info?config_format=json", limit_s))["vllm_config"]
        model = found["model_config"]
        device = found["device_config"]["device"]
        if device == "cpu" and self._tied and model["hf_overrides"].get("tie_word_embeddings") is not False:
            raise ConfigError(
                f"the server at rollout.engine_url={self.settings.url} runs on a CPU, where vLLM 0.32 packs "
                "an output head that is the embedding once and never again; start it with --hf-overrides "
                "'{\"tie_word_embeddings\": false}'"
            )
        if model["logprobs_mode"] != "processed_logprobs":
            raise ConfigError(
                f"the server at rollout.engine_url={self.settings.url} gives {model['logprobs_mode']}, not "
                "the log-probabilities of what it draws from; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if model["max_model_len"] < self.settings.max_model_len:
            raise ConfigError(
                f"rollout.max_model_tokens={self.settings.max_model_len} is more than the server at "
                f"rollout.engine_url={self.settings.url} takes, {model['max_model_len']}; start it with "
                f"--max-model-len {self.settings.max_model_len}"
            )
        return str(model["dtype"]).removeprefix("torch.")

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
                    raise IntegrityError(
                        f"the server at {self.settings.url} answered {path} with status {answer.status}: "
                        f"{' '.join(said.split())[:SAID_CHARS]}"
                    )
                return json.loads(said)
        except TimeoutError:
            raise UnavailableError(
                f"the server at {self.settings.url} did not answer {path} within {limit_s:g} s; look at "
                "its log"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._away(error) from error

    def _away(self, error: Exception) -> UnavailableError:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:SAID_CHARS]
        return UnavailableError(
            f"the server at rollout.engine_url={self.settings.url} cannot be asked ({said}); start it, and "
            "this worker again"
        )

    async def _swap(self, version: int, weights: VerifiedWeights) -> None:
        """Let the server hold weights and show it, with nothing in flight there; `_serve` goes on with it."""
        limit_s, folder = self.settings.swap_s, self._folder / f"version-{version}"
        folder.mkdir(exist_ok=True)
        try:
            await asyncio.to_thread(_write, weights, self._tied, folder / "model.safetensors")
            # Tokens on their way are lost, whatever they are, and drawn again behind those that came. Nothing
            # is waited for: a request that reaches the server in its pause stays there until the end of that.
            await _cancelled([one.task for one in self._live.values() if one.reason is None and one.task])
            await self._ask("POST", "/pause?mode=abort", limit_s)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._ask("POST", "/collective_rpc", limit_s, reload)
            await self._ask("POST", "/update_weight_version", limit_s, {"new_version": str(version)})
            await self._ask("POST", "/resume", limit_s)
            await self._check_probe(weights)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _check_probe(self, weights: VerifiedWeights) -> None:
        if (probe := weights.probe) is None:
            return
        tokens = list(probe.tokens[: self.settings.max_model_len - 1])
        wanted = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": tokens, "sampling_params": wanted}
        said = await self._ask("POST", GENERATE, self.settings.swap_s, body)
        try:
            rows = said["prompt_logprobs"][1:]
            scores = np.array(
                [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(
                f"the server at {self.settings.url} scores no prompt as vLLM 0.32 does "
                f"({type(error).__name__}: {error}); start that release"
            ) from error
        if problem := probe_problem(probe, scores, self._precision):
            raise IntegrityError(problem)

    def _serve(self, version: int, weights: VerifiedWeights) -> None:
        """Go on under the weights that the server holds: each request behind the tokens it has."""
        self._held, self.version, self.weights_digest = (version, weights), version, weights.digest
        self._heard_s = self._loop.time()
        for live in self._live.values():
            if live.reason is not None:
                continue
            done = len(live.tokens)
            if live.changes[-1][1] == done:
                live.changes.pop()
            live.changes.append((version, done))
            self._begin(live)

    def _begin(self, live: _Live) -> None:
        """Send what is left of a request."""
        request, sampling = live.request, live.request.sampling
        known = [*request.prefix_token_ids, *live.tokens]
        # The server's stream of random numbers starts again, and must not repeat what was drawn before.
        seed = derive_seed("continued", request.seed, len(known)) if known else request.seed
        self._counter += 1
        body = {
            "request_id": f"{id(self)}-{self._counter}",
            "token_ids": [*request.prompt_token_ids, *known],
            "stream": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "seed": seed >> 1,  # torch generators take signed 64-bit seeds
                "max_tokens": sampling.max_tokens - len(known),
                "stop_token_ids": [*self._stop, *sampling.stop_token_ids],
                "logprobs": 0,
                "detokenize": False,
            },
        }
        live.task = self._loop.create_task(self._sample(live, body))

    async def _sample(self, live: _Live, body: Mapping[str, Any]) -> None:
        """Take the tokens of one stream as they come, until it ends."""
        try:
            async with self._session.post(GENERATE, json=body, allow_redirects=False) as answer:
                if answer.status != 200:
                    said = " ".join((await answer.text()).split())[:SAID_CHARS]
                    raise IntegrityError(
                        f"the server at {self.settings.url} refused request {live.request.request_id} with "
                        f"status {answer.status}: {said}"
                    )
                async for line in answer.content:
                    if line.startswith(b"data: {") and self._take(live, json.loads(line[6:])):
                        return
            raise IntegrityError(f"the stream of request {live.request.request_id} ended without a reason")
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise IntegrityError(
                f"the server at {self.settings.url} answered what no vLLM 0.32 does "
                f"({type(error).__name__}: {error}); start that release"
            ) from error
        finally:
            self._news.set()

    def _take(self, live: _Live, chunk: Mapping[str, Any]) -> bool:
        """Take one chunk of a stream; True when it is the last one that is of use."""
        if "error" in chunk:
            raise IntegrityError(f"the server at {self.settings.url} failed: {chunk['error']}")
        self._heard_s = self._loop.time()
        self._news.set()
        choice = chunk["choices"][0]
        tokens, name = list(choice["token_ids"] or ()), live.request.request_id
        given = choice["logprobs"]["content"] or () if tokens else ()
        if [one["token_id"] for one in given] != tokens or not all(
            0 <= token < self.vocabulary_size for token in tokens
        ):
            raise IntegrityError(f"request {name} got tokens that are none, or no log-probability for each")
        logprobs = [float(one["logprob"]) for one in given]
        if not np.isfinite(logprobs).all():
            raise IntegrityError(
                f"request {name} got a log-probability that is not finite; the model diverged"
            )
        live.tokens += tokens
        live.logprobs += logprobs
        most = live.request.sampling.max_tokens - len(live.request.prefix_token_ids)
        if len(live.tokens) > most:
            raise IntegrityError(
                f"request {name} got {len(live.tokens)} tokens, but at most {most} were asked for"
            )
        labels = {span["version"] for span in choice.get("weight_versions") or ()}
        if labels - {str(live.changes[-1][0])}:
            raise IntegrityError(
                f"the server at {self.settings.url} sampled under weights that it calls {sorted(labels)}, "
                f"not under version {live.changes[-1][0]}: somebody else changes them; give each "
                "worker a server"
            )
        live.count = None if live.turn is None else live.turn.end(live.tokens)
        reason = choice["finish_reason"]
        if live.count is not None:
            live.reason = FinishReason.STOP
        elif reason in (FinishReason.STOP, FinishReason.LENGTH):
            live.reason = FinishReason(reason)
        elif reason is not None:  # an abort that is not ours is somebody else's
            raise IntegrityError(
                f"the server at {self.settings.url} ended request {name} with {reason!r}; give each worker a "
                "server of its own"
            )
        return live.reason is not None

    async def _listen(self) -> None:
        try:
            async with asyncio.timeout(STEP_S):
                await self._news.wait()
        except TimeoutError:
            silent_s = self._loop.time() - self._heard_s
            if silent_s > self.settings.silent_s:
                raise UnavailableError(
                    f"the server at rollout.engine_url={self.settings.url} brought no token for "
                    f"{silent_s:.0f} s while {len(self._live)} requests run; look at its log"
                ) from None
        self._news.clear()

    def _ended(self, live: _Live) -> bool:
        """Return whether a request has all its tokens; what went wrong with it is raised here."""
        if live.task is not None and live.task.done() and not live.task.cancelled():
            live.task.result()
        return live.reason is not None

    def _finish(self, name: str) -> EngineOutput:
        live = self._live.pop(name)
        assert live.reason is not None, "it has ended"
        count = len(live.tokens) if live.count is None else live.count
        return EngineOutput(
            np.array(live.tokens[:count], dtype=np.int32),
            np.array(live.logprobs[:count], dtype=np.float32),
            spans_of_changes(live.changes, 0, count),
            live.reason,
            request_id=name,
        )


async def _cancelled(tasks: "Sequence[asyncio.Task[None]]") -> None:
    """End streams; a server that loses a reader aborts the request."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _write(weights: VerifiedWeights, tied: bool, path: Path) -> None:
    """Write weights as a file that vLLM loads, with a head of its own beside the embedding it is tied to."""
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    if tied:
        (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors[HEAD] = tensors[embedding].clone()  # the format has no two names for one tensor
    try:
        save_file(tensors, path, {"format": "pt"})
    except OSError as error:
        raise UnavailableError(
            f"the weights cannot be written to {path} ({error}); free some space"
        ) from error
