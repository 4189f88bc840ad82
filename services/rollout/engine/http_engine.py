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
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from antiphon.api.engine import EngineAbilities, EngineRequest
from antiphon.core.broadcast.probe import probe_problem
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import FinishReason
from antiphon.core.seeds import derive_seed
from antiphon.models.directory import HEAD, end_tokens, read_json
from antiphon.services.rollout.engine.environment import ServerSettings
from antiphon.services.rollout.engine.intake import StopTexts
from antiphon.services.rollout.engine.server_engine import Live, ServerEngine
from antiphon.weights.snapshot import VerifiedWeights

GENERATE = "/inference/v1/generate"


class HttpEngine(ServerEngine[Live]):
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

    def _accept(self, request: EngineRequest, version: int) -> Live:
        return Live(request, [(version, 0)], turn=self._stop_texts.turn_of(request))

    async def _introduce(self) -> None:
        limit_s = self.settings.silent_s
        paths = (await self._ask("GET", "/openapi.json", limit_s)).get("paths", {})
        for path, option in ((GENERATE, "--tokens-only"), ("/collective_rpc", "VLLM_SERVER_DEV_MODE=1")):
            if path not in paths:
                raise ConfigError(f"{self._server} has no {path}; start it with {option}")
        found = (await self._ask("GET", "/server_info?config_format=json", limit_s))["vllm_config"]
        model, wanted = found["model_config"], self.settings.max_model_len
        on_cpu = found["device_config"]["device"] == "cpu"
        for fits, said in (
            (
                not (on_cpu and self._tied) or model["hf_overrides"].get("tie_word_embeddings") is False,
                "runs on a CPU, where vLLM 0.32 packs an output head that is the embedding once and never "
                "again; start it with --hf-overrides '{\"tie_word_embeddings\": false}'",
            ),
            (
                model["logprobs_mode"] == "processed_logprobs",
                f"gives {model['logprobs_mode']}, not the log-probabilities of what it draws from; start it "
                "with --logprobs-mode processed_logprobs",
            ),
            (
                model["max_model_len"] >= wanted,
                f"takes {model['max_model_len']} tokens, not rollout.max_model_tokens={wanted}; start it "
                f"with --max-model-len {wanted}",
            ),
        ):
            if not fits:
                raise ConfigError(f"{self._server} {said}")
        dtype = str(model["dtype"]).removeprefix("torch.")
        self._precision = "tf32" if dtype == "float32" and not on_cpu else dtype

    async def _swap(self, version: int, weights: VerifiedWeights) -> None:
        """Let the server hold weights and show it, with nothing in flight there."""
        limit_s, folder = self.settings.swap_s, self._folder / f"version-{version}"
        folder.mkdir(exist_ok=True)
        try:
            await asyncio.to_thread(_write, weights, self._tied, folder / "model.safetensors")
            # Tokens on their way are lost, whatever they are, and drawn again behind those that came. Nothing
            # is waited for: a request that reaches the server in its pause stays there until the end of that.
            await self._hang_up()
            await self._ask("POST", "/pause?mode=abort", limit_s)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._ask("POST", "/collective_rpc", limit_s, reload)
            await self._ask("POST", "/update_weight_version", limit_s, {"new_version": str(version)})
            await self._ask("POST", "/resume", limit_s)
            await self._check_probe(weights)
            self._held = version, weights
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _undo(self) -> str:
        """Serve the weights before a swap that failed again, where there are any, and say so."""
        if self._held is None:
            return super()._undo()
        version, weights = self._held
        try:
            self._run(self._swap(version, weights))
        except IntegrityError as again:
            return f", nor version {version} again ({again})"
        self._serve(version, weights)
        return f"; version {version} is served on"

    async def _check_probe(self, weights: VerifiedWeights) -> None:
        if (probe := weights.probe) is None:
            return
        tokens = list(probe.tokens[: self.settings.max_model_len - 1])
        wanted = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": tokens, "sampling_params": wanted}
        said = await self._ask("POST", GENERATE, self.settings.swap_s, body)
        with self._understood("scores no prompt as"):
            rows = zip(said["prompt_logprobs"][1:], tokens[1:], strict=True)
            scores = np.array([float(row[str(token)]["logprob"]) for row, token in rows])
        if problem := probe_problem(probe, scores, self._precision):
            raise IntegrityError(problem)

    def _body(self, live: Live) -> Mapping[str, Any]:
        request, sampling = live.request, live.request.sampling
        known = [*request.prefix_token_ids, *live.tokens]
        # The server's stream of random numbers starts again, and must not repeat what was drawn before.
        seed = derive_seed("continued", request.seed, len(known)) if known else request.seed
        self._counter += 1
        return {
            "request_id": f"{id(self)}-{self._counter}",
            "token_ids": [*request.prompt_token_ids, *known],
            "stream": True,
            "stream_options": {"include_usage": True},
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

    def _take(self, live: Live, chunk: Mapping[str, Any]) -> bool:
        if not chunk["choices"]:  # the last one; caches of pieces behind a swap are no news
            if len(live.changes) == 1 and (details := chunk["usage"].get("prompt_tokens_details")):
                live.cached = int(details["cached_tokens"])
            return False
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
        if (count := len(live.tokens) + len(tokens)) > live.most:
            raise IntegrityError(f"request {name} got {count} tokens, but at most {live.most} were asked for")
        labels = {span["version"] for span in choice.get("weight_versions") or ()}
        if labels - {str(live.changes[-1][0])}:
            raise self._failed(
                f"sampled under weights that it calls {sorted(labels)}, not under version "
                f"{live.changes[-1][0]}: somebody else changes them; give each worker a server"
            )
        live.tokens += tokens
        live.logprobs += logprobs
        live.count = None if live.turn is None else live.turn.end(live.tokens)
        cut_short = live.count is not None
        live.reason = FinishReason.STOP if cut_short else self._reason(live, choice["finish_reason"])
        return cut_short


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
