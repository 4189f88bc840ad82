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
"""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from antiphon.api.engine import EngineAbilities, EngineProgress, EngineRequest
from antiphon.core.broadcast.probe import probe_problem
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import FinishReason
from antiphon.core.seeds import derive_seed
from antiphon.core.spans import spans_of_changes
from antiphon.models.directory import HEAD, end_tokens, read_json
from antiphon.services.rollout.engine.environment import ServerSettings
from antiphon.services.rollout.engine.intake import StopTexts, Turn
from antiphon.services.rollout.engine.server_engine import Live, ServerEngine, hang_up
from antiphon.weights.snapshot import VerifiedWeights

GENERATE = "/inference/v1/generate"


@dataclass(slots=True)
class _Live(Live):
    """One request in flight, and what looks for the texts that end it."""

    turn: Turn | None = None


class HttpEngine(ServerEngine[_Live]):
    """The engine of one worker, in a vLLM server."""

    continues = True
    abilities = EngineAbilities(keyed=False, drafts=False)
    path = GENERATE
    speaks = "vLLM 0.32"

    def __init__(self, settings: ServerSettings) -> None:
        """Ask the server what it is, see `ServerEngine`."""
        self._tied = bool(read_json(settings.model_dir / "config.json").get("tie_word_embeddings", False))
        self._stop = end_tokens(settings.model_dir)
        self._stop_texts = StopTexts(settings.model_dir)
        self._counter = 0
        self._held: tuple[int, VerifiedWeights] | None = None
        self._precision = ""
        super().__init__(settings)

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
        taken = self._check_weights(version, tensors, weights_digest)
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

    def _accept(self, request: EngineRequest, version: int) -> _Live:
        return _Live(request, [(version, 0)], turn=self._stop_texts.turn_of(request))

    async def _introduce(self) -> None:
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
        self._precision = str(model["dtype"]).removeprefix("torch.")

    async def _swap(self, version: int, weights: VerifiedWeights) -> None:
        """Let the server hold weights and show it, with nothing in flight there; `_serve` goes on with it."""
        limit_s, folder = self.settings.swap_s, self._folder / f"version-{version}"
        folder.mkdir(exist_ok=True)
        try:
            await asyncio.to_thread(_write, weights, self._tied, folder / "model.safetensors")
            # Tokens on their way are lost, whatever they are, and drawn again behind those that came. Nothing
            # is waited for: a request that reaches the server in its pause stays there until the end of that.
            await hang_up([one for one in self._live.values() if one.reason is None])
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
        self._held = version, weights
        self._serves(version, weights)
        for live in self._live.values():
            if live.reason is not None:
                continue
            done = len(live.tokens)
            if live.changes[-1][1] == done:
                live.changes.pop()
            live.changes.append((version, done))
            self._begin(live)

    def _body(self, live: _Live) -> Mapping[str, Any]:
        request, sampling = live.request, live.request.sampling
        known = [*request.prefix_token_ids, *live.tokens]
        # The server's stream of random numbers starts again, and must not repeat what was drawn before.
        seed = derive_seed("continued", request.seed, len(known)) if known else request.seed
        self._counter += 1
        return {
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

    def _take(self, live: _Live, chunk: Mapping[str, Any]) -> bool:
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
