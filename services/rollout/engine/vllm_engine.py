"""VllmEngine: vLLM in this process behind the Engine protocol, one policy version at a time.

The engine core is driven directly: requests enter as token ids and leave as arrays, and nothing
is detokenised, logged or copied per token. Weights are swapped between two steps: every request
in flight gives up its cache and is recomputed under the new weights, unless `swap_cache` lets it keep
that, and its next token starts a new version span. With drafting, one step may advance a request by
several tokens; vLLM's speculative path is entered only for the steps that have drafts to verify, so
that others cost nothing.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.api.engine import EngineAbilities, EngineOutput, EngineProgress, EngineRequest
from antiphon.core.broadcast.probe import probe_problem
from antiphon.core.errors import ConfigError, ContractError, IntegrityError
from antiphon.core.records import FinishReason, FloatArray
from antiphon.core.seeds import derive_seed
from antiphon.core.spans import spans_of_changes
from antiphon.cpu.vllm_kernels import attend_by_token, fill_steps, use_cpu_kernels
from antiphon.cpu.vllm_plugin import register
from antiphon.models.directory import end_tokens, expected_tensors, most_positions
from antiphon.models.spared_libraries import spare_unused_libraries
from antiphon.services.rollout.drafting.scheduler import DraftScheduler, Script
from antiphon.services.rollout.engine.environment import SHARED_NAME, EngineSettings, prepare_environment
from antiphon.services.rollout.engine.intake import StopTexts, Turn, check_request, check_weights
from antiphon.services.rollout.engine.sampler_hook import (
    CLASS_PATH,
    HistoryDrafter,
    SamplerHook,
    SamplerTable,
)
from antiphon.services.rollout.engine.vllm_compat import (
    abandon_reload,
    check_readable,
    drop_caches,
    keep_caches,
    name_shared_memory,
    repack_experts,
    repack_heads,
    set_aside,
    spare_foreign_libraries,
    spare_held_blocks,
    spare_unused_parts,
)
from antiphon.weights.snapshot import VerifiedWeights


@dataclass(slots=True)
class _Live:
    """One request in flight."""

    external_id: str
    request: Any
    given: int
    """Tokens that it came with: those of the prompt and of the prefix."""
    prefix: tuple[int, ...]
    spans: list[tuple[int, int]]
    """(version, first token sampled under it), in order; the prefix does not count."""
    kept: list[int] = field(default_factory=list)
    """Those of the first tokens before which its cache was kept over the swap."""
    turn: Turn | None = None
    """What ends it besides its end token."""
    cached: int = 0
    """Of the tokens that it came with: those whose cache was there."""


LAUNCHER = "external_launcher"
"""As vLLM calls an engine that is one of several processes which somebody else started."""
KEPT_LOGITS = 1 << 24
"""That a check keeps for hidden states that come again: 64 MiB in float32."""


class VllmEngine:
    """The rollout engine of one worker process. Not thread-safe: its owner's thread drives it."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start the engine from the model directory; its start-up weights are not served.

        Raises:
            ConfigError: when the model directory or a setting cannot be used.
        """
        self.settings = settings
        self._expected = expected_tensors(settings.model_dir)
        self._stop = settings.stop_token_ids
        if self._stop is None:
            self._stop = end_tokens(settings.model_dir)
        prepare_environment(settings)
        torch.set_num_threads(settings.threads)
        self._core = _start_core(settings)
        spare_held_blocks(self._core)
        # Every reload would warn of layers without tensors of their own; `weight_swap` sees to them.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        runner = self._core.model_executor.driver_worker.worker.model_runner
        self._runner = runner
        self.vocabulary_size: int = int(runner.model_config.get_vocab_size())
        device = torch.device(runner.device)
        if settings.eager and device.type == "cpu":
            fill_steps(runner)
        tensor_cores = device.type != "cpu" and settings.dtype == "float32"
        self._precision = "tf32" if tensor_cores else settings.dtype
        self._table = SamplerTable(
            settings.max_num_seqs, settings.max_model_len + settings.draft_tokens, device
        )
        self._speculative_config = runner.speculative_config
        alone = device.type == "cpu" and settings.threads == 1  # then its own time is known exactly
        self._clock = time.thread_time if alone else time.perf_counter
        self._drafter: HistoryDrafter | None = None
        self.scheduler: DraftScheduler | None = None
        """Decides what is drafted; None in an engine without drafting."""
        if settings.draft_tokens:
            self.scheduler = DraftScheduler(
                settings.drafting,
                settings.draft_tokens,
                settings.max_num_seqs,
                self.vocabulary_size,
                self._clock,
            )
            self._drafter = runner.drafter
            # Else vLLM pads a prompt of one token, or cached but for one, with token ids of -1.
            self._core.scheduler.num_spec_tokens = 0
        self._hook = SamplerHook(
            runner, self._table, settings.sampler, settings.rule, self.vocabulary_size, self.scheduler
        )
        if self._drafter is not None and self.scheduler is not None:
            self._drafter.bind(runner, self._hook, self.scheduler)
        self._live: dict[str, _Live] = {}
        self._internal_ids: dict[str, str] = {}
        self._counter = 0
        self._plain_parameters: dict[int, Any] = {}
        self._stop_texts = StopTexts(settings.model_dir)
        # In parts, or in one go: vLLM draws at the end of each part, and on CPU its own sampler cannot
        # take back what that drew from a request's generator.
        self._core.scheduler.scheduler_config.enable_chunked_prefill = settings.sampler == "keyed"
        self.version: int | None = None
        """Policy version of the weights that sample now; None before the first snapshot."""
        self.weights_digest: str | None = None
        """Digest of the tensors that `load_weights` handed to vLLM, computed by who verified them, or None.

        It describes what was loaded: on CPU vLLM repacks linear weights for its kernels, so not all
        of them can be read back. Before it is set, names and shapes were checked against the
        model directory, every parameter that stayed readable was compared with its tensor, and
        output heads were probed."""
        self._tensors: VerifiedWeights | None = None
        """What was loaded under `version`: a swap that fails is undone with it."""
        self._swaps = 0
        self.before_serving: Callable[[VllmEngine], None] | None = None
        """Called once the first weights are loaded; what it raises keeps the engine from serving."""
        self._rehearsing = False
        self.continues, self.numerics = True, ""
        """Whether prefixes change nothing, and what decides its bits: `build_engine` sets both."""

    @property
    def abilities(self) -> EngineAbilities:
        return EngineAbilities(keyed=self.settings.sampler == "keyed", drafts=self.scheduler is not None)

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Serve these weights from the next `step` on; requests in flight continue under them.

        Args:
            version: policy version of the tensors.
            tensors: checkpoint name -> torch tensor, as `VerifiedWeights`, so that nothing is digested
                here; a tied lm_head.weight may be left out.
            weights_digest: what the digest of the tensors must be.

        Raises:
            ContractError: when nobody verified the tensors.
            IntegrityError: when tensors are missing, unknown, of another shape or digest, or vLLM did not
                take them: the weights before sample on, unless `version` is None then and nothing does until
                the next load; or when `before_serving` speaks against them.
        """
        if version == self.version and weights_digest == self.weights_digest:
            return
        tensors = check_weights(version, tensors, weights_digest, self.settings.model_dir, self._expected)
        before = self.version, self.weights_digest
        # From here to the end the engine holds neither the old policy nor the new one.
        self.version = self.weights_digest = None
        try:
            self._take(tensors)
        except Exception as error:  # vLLM raises whatever its layers do
            raise self._undo(version, before, error) from error
        self._tensors = tensors
        if self.before_serving is not None:
            self.before_serving(self)
            self.before_serving = None
        self.version, self.weights_digest = version, tensors.digest
        self._begin_spans(version)

    def _take(self, tensors: VerifiedWeights) -> None:
        """Hand tensors to vLLM and check that they arrived, and that it computes what the learner did."""
        with self._together():
            self._runner.reload_weights(weights_iterator=((name, tensors[name]) for name in self._expected))
            repack_heads(self._runner.get_model())
            check_readable(self._runner.get_model(), tensors)
        if (probe := tensors.probe) is not None:
            tokens = probe.tokens[: self.settings.max_model_len - 1]
            if max(tokens) >= self.vocabulary_size:
                raise IntegrityError(
                    f"its probe has token {max(tokens)}, but {self.settings.model_dir} has "
                    f"{self.vocabulary_size} tokens; publish the model it was made from"
                )
            places = torch.tensor(tokens[1:], device=self._runner.device).unsqueeze(-1)
            scores = self._scores(tokens).gather(-1, places).squeeze(-1)
            with self._together():
                if problem := probe_problem(probe, scores.cpu().numpy(), self._precision):
                    raise IntegrityError(problem)

    def alike(self) -> AbstractContextManager[None]:
        """Return a block in which every rank of the engine does the same by itself; here there is one."""
        return nullcontext()

    def _together(self) -> AbstractContextManager[None]:
        """Return a block that fails on all ranks of the engine or on none."""
        return nullcontext()

    def _agreed(self, seconds: float) -> float:
        """Return what all ranks of the engine take for the time of a step."""
        return seconds

    def _undo(self, version: int, before: tuple[int | None, str | None], error: Exception) -> IntegrityError:
        """Load the weights before a swap that failed again, and return what to say of it."""
        said = f"vLLM did not take version {version} ({' '.join(f'{type(error).__name__}: {error}'.split())})"
        abandon_reload(self._runner.get_model())
        if before[0] is None or self._tensors is None:
            return IntegrityError(f"{said}; nothing is served until a snapshot is loaded")
        try:
            self._take(self._tensors)
        except Exception as again:  # noqa: BLE001 - said below
            abandon_reload(self._runner.get_model())
            why = " ".join(f"{type(again).__name__}: {again}".split())
            return IntegrityError(
                f"{said}, nor version {before[0]} again ({why}); nothing is served until a snapshot is loaded"
            )
        # The same bits as before: caches that they filled are as good as they were.
        self.version, self.weights_digest = before
        return IntegrityError(f"{said}; version {before[0]} is served on")

    def _begin_spans(self, version: int) -> None:
        """Let caches follow the weights, and begin a span of the new version in every request."""
        self._swaps += 1
        kept: frozenset[str] = frozenset()
        if self.settings.swap_cache == "keep":
            kept = keep_caches(self._core, self._swaps)
        else:
            drop_caches(self._core)
        for internal_id, live in self._live.items():
            done = len(live.request.output_token_ids)
            if live.spans[-1][1] == done:
                live.spans.pop()
            live.spans.append((version, done))
            if internal_id in kept:
                live.kept.append(done)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests; they start with the next `step`.

        Raises:
            ContractError: for a repeated id, an impossible prompt, or before any weights.
            ConfigError: for sampling parameters this engine cannot honour.
        """
        if self.version is None and not self._rehearsing:
            raise ContractError("the engine holds no snapshot yet; load_weights must come before add")
        for request in requests:
            check_request(
                request,
                self._internal_ids,
                self.settings.sampler,
                self.vocabulary_size,
                self.settings.max_model_len,
            )
            self._admit(request, self._vllm_parameters(request))

    def step(self) -> list[EngineOutput]:
        """Advance every running request by one token and return those that finished; none without weights.

        Raises:
            IntegrityError: when the weights in use give NaN.
        """
        if not self._live or (self.version is None and not self._rehearsing):
            return []
        outputs = self._advance()
        if not outputs:
            return []
        finished = []
        for done in outputs[0].outputs:
            live = self._live[done.request_id]
            if done.prefill_stats is not None:  # with its first token
                live.cached = done.prefill_stats.num_cached_tokens
            count = None if live.turn is None else live.turn.end(live.request.output_token_ids)
            if count is not None and done.finish_reason is None:
                self._core.abort_requests([done.request_id])
            if count is not None or done.finish_reason is not None:
                reason = str(done.finish_reason) if count is None else FinishReason.STOP.value
                finished.append(self._finish(done.request_id, reason, count))
        return finished

    def _advance(self) -> Any:
        """Run one step of the engine core and return its outputs, drafts for the next one handed in."""
        drafter, scheduler = self._drafter, self.scheduler
        if drafter is None or scheduler is None:
            outputs, executed = self._core.step_fn()
            self._core.post_step(executed)
            return outputs
        begun = self._clock()
        drafting, verifying = scheduler.begin_step(), drafter.outstanding
        # vLLM lays every step out for verification as soon as it knows of a drafter.
        self._runner.speculative_config = self._speculative_config if verifying else None
        drafter.outstanding = False
        outputs, executed = self._core.step_fn()
        if executed and verifying:
            self._core.post_step(executed)
        elif executed and drafting and any(drafts := drafter.propose_now()):
            from vllm.v1.outputs import DraftTokenIds

            ids = self._runner.input_batch.req_ids
            self._core.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
        if executed and self._hook.decoded_only:
            requests, rows = len(self._hook.slots), self._hook.rows
            scheduler.end_step(
                requests, rows, requests + self._hook.accepted, self._agreed(self._clock() - begun)
            )
        return outputs

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        """Return what requests in flight have sampled, from the token that `since` names on.

        Raises:
            IntegrityError: when the weights in use gave NaN.
        """
        found = []
        for request_id, known in since.items():
            internal_id = self._internal_ids.get(request_id)
            if internal_id is None:
                continue
            live = self._live[internal_id]
            tokens = live.request.output_token_ids
            if len(tokens) > known:
                found.append(
                    EngineProgress(
                        np.array(tokens[known:], dtype=np.int32),
                        self._logprobs(internal_id, live, known, len(tokens)),
                        spans_of_changes(live.spans, known, len(tokens), live.kept),
                        request_id=request_id,
                    )
                )
        return found

    def abort(self, request_ids: Sequence[str]) -> None:
        internal = [self._internal_ids.pop(i) for i in request_ids if i in self._internal_ids]
        if internal:
            self._core.abort_requests(internal)
        for internal_id in internal:
            del self._live[internal_id]
            slot = self._table.release(internal_id)
            if self.scheduler is not None:
                self.scheduler.release(slot, None)

    def close(self) -> None:
        self.abort(list(self._internal_ids))
        self._core.shutdown()

    @property
    def drafts(self) -> bool:
        return self.scheduler is not None and self.scheduler.on

    def use_drafts(self, on: bool) -> None:
        """Switch drafting on or off while no request is in flight.

        Raises:
            ConfigError: while requests are in flight, or to switch it on in an engine without it.
        """
        if self._live:
            raise ConfigError(f"drafting cannot change while {len(self._live)} requests are in flight")
        if self.scheduler is None:
            if on:
                raise ConfigError(
                    "drafting.enabled needs an engine started with room for drafts; start it again"
                )
            return
        if on and self.scheduler.closed:
            self.scheduler.open()
        self.scheduler.on = on

    @contextmanager
    def scripted_drafts(self, script: Script) -> Iterator[None]:
        """Draft from `script` inside the block, whatever it says and whether it pays or not.

        Args:
            script: (request id, completion so far) -> tokens; they must be in the vocabulary.

        Raises:
            ConfigError: in an engine without drafting.
        """
        if self.scheduler is None:
            raise ConfigError("drafts need an engine started with draft_tokens > 0; start it again")
        self.scheduler.script = script
        try:
            yield
        finally:
            self.scheduler.script = None

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Let the start-up weights answer inside the block; what they sample must be thrown away."""
        before, self._rehearsing = self._rehearsing, True
        try:
            yield
        finally:
            self._rehearsing = before

    @contextmanager
    def equal_rows_once(self) -> Iterator[None]:
        """Multiply equal hidden states with the head once inside the block, on a CPU.

        For requests that ask after few prompts, of which there the head takes nearly all the time. That a row
        of a product is the same beside any number of others is for the caller to check.
        """
        model = self._runner.get_model()
        whole = model.compute_logits
        known: dict[bytes, torch.Tensor] = {}  # the one that was asked for longest ago is the first

        def computed(hidden: torch.Tensor, *more: Any) -> torch.Tensor:
            keys = [row.tobytes() for row in hidden.contiguous().view(torch.uint8).numpy()]
            new = {key: place for place, key in enumerate(keys) if key not in known}
            if new:
                logits = whole(hidden[list(new.values())], *more)
                known.update(zip(new, map(torch.clone, logits), strict=True))
            for key in keys:
                known[key] = known.pop(key)
            found = torch.stack([known[key] for key in keys])
            for key in list(known)[: -KEPT_LOGITS // found.shape[-1]]:
                del known[key]
            return found

        model.compute_logits = computed if self._runner.device.type == "cpu" else whole
        try:
            yield
        finally:
            del model.compute_logits

    def drop_prefixes(self) -> None:
        """Forget the caches that are kept for later requests."""
        drop_caches(self._core)

    def distribution(self, prompt_token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return vLLM's own log-probabilities of the token after a prompt, [V], temperature 1.

        They come from the engine's scoring of prompts, which the sampler has no part in.
        """
        # Scoring covers all tokens but the first.
        scores = self._scores((*prompt_token_ids, prompt_token_ids[0]))
        return np.asarray(scores[-1].cpu().numpy(), dtype=np.float64)

    def _scores(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return vLLM's log-probabilities [T, V] at each of a prompt's tokens [T + 1] but the last, nats.

        They are made in a step without the requests in flight, which takes in no more tokens than any.
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._counter += 1
        core, name = self._core, str(self._counter)
        wanted = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0)
        request = EngineCoreRequest(name, list(tokens), None, wanted, None, 0.0, None, None, None)
        self._runner.speculative_config = None  # as in every step without drafts
        room = len(tokens) + 1 + self.settings.draft_tokens
        # Else the ranks, which nobody asked for, are compiled: seconds, and processes of their own.
        with set_aside(core, room), self._hook.away() as scores, torch.compiler.set_stance("force_eager"):
            try:
                core.add_request(*core.preprocess_add_request(request))
                core.step_fn()
            finally:
                core.abort_requests([name])
        if len(scores) != 1 or len(scores[0]) != len(tokens) - 1:
            raise IntegrityError(
                f"vLLM did not score {len(tokens)} tokens in one step; raise rollout.kv_cache_mib"
            )
        return scores[0]

    def products(self) -> list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
        """Return the model's matrix products on a CPU, one of each shape, each with the width of its rows."""
        found = {}
        for layer in self._runner.get_model().modules():
            width = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", 0))
            if width and hasattr(layer, "cpu_linear"):
                product = partial(layer.cpu_linear, weight=layer.weight, bias=None)
                row = torch.zeros((1, width), dtype=self._runner.model_config.dtype)
                found[width, product(row).shape[-1]] = width, product
        return list(found.values())

    def _vllm_parameters(self, request: EngineRequest) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling, known = request.sampling, len(request.prefix_token_ids)
        most, stops = sampling.max_tokens - known, sampling.stop_token_ids
        common: dict[str, Any] = {
            "max_tokens": most,
            "stop_token_ids": [*(self._stop or ()), *stops],
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "skip_clone": True,
        }
        if self.settings.sampler == "native":
            # Its stream starts again, and must not repeat what the prefix was drawn with.
            seed = derive_seed("continued", request.seed, known) if known else request.seed
            return SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=seed >> 1,  # torch generators take signed 64-bit seeds
                logprobs=0,
                **common,
            )
        # The table holds everything else, so one object serves all requests of this length and these ends.
        if stops:
            return SamplingParams(**common)
        if most not in self._plain_parameters:
            self._plain_parameters[most] = SamplingParams(**common)
        return self._plain_parameters[most]

    def _admit(self, request: EngineRequest, parameters: Any) -> str:
        from vllm.v1.engine import EngineCoreRequest

        # Ids of our own: a caller may reuse one in the very step in which vLLM forgets it.
        self._counter += 1
        internal_id = str(self._counter)
        core_request, wave = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=internal_id,
                prompt_token_ids=[*request.prompt_token_ids, *request.prefix_token_ids],
                mm_features=None,
                sampling_params=parameters,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        slot = self._table.admit(internal_id, request.seed, request.sampling)
        if self.scheduler is not None:
            self.scheduler.admit(slot, request)
        self._core.add_request(core_request, wave)
        self._internal_ids[request.request_id] = internal_id
        live = self._live[internal_id] = _Live(
            external_id=request.request_id,
            request=core_request,
            given=len(request.prompt_token_ids) + len(request.prefix_token_ids),
            prefix=request.prefix_token_ids,
            spans=[(self.version or 0, 0)],
        )
        live.turn = self._stop_texts.turn_of(request)
        return internal_id

    def _finish(self, internal_id: str, reason: str, count: int | None) -> EngineOutput:
        """Return a request that ended, with its first `count` tokens; None: all of them."""
        live = self._live.pop(internal_id)
        del self._internal_ids[live.external_id]
        token_ids = np.array(live.request.output_token_ids[:count], dtype=np.int32)
        count = len(token_ids)
        logprobs = self._logprobs(internal_id, live, 0, count)
        slot = self._table.release(internal_id)
        drafting = None
        if self.scheduler is not None:
            # Siblings draft from all of it; the statistics are about what was sampled here.
            whole = np.concatenate([live.prefix, token_ids]).astype(np.int32) if live.prefix else token_ids
            drafting = self.scheduler.release(slot, whole, len(live.prefix))
        if reason not in ("stop", "length"):
            raise IntegrityError(f"the engine ended request {live.external_id} with reason {reason}")
        spans = spans_of_changes(live.spans, 0, count, live.kept)
        return EngineOutput(
            token_ids,
            logprobs,
            spans,
            FinishReason(reason),
            request_id=live.external_id,
            drafting=drafting,
            cached_tokens=live.cached,
        )

    def _logprobs(self, internal_id: str, live: _Live, start: int, stop: int) -> FloatArray:
        """Return the log-probabilities [T] of a request's sampled tokens [start, stop)."""
        logprobs = self._table.logprobs(internal_id, live.given + start, live.given + stop)
        if not np.isfinite(logprobs).all():
            raise IntegrityError(
                f"the weights of version {self.version} gave a log-probability that is not finite in "
                f"request {live.external_id}; the snapshot is damaged or training diverged"
            )
        return logprobs


def device_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return what vLLM is told of memory, compilation and graphs."""
    found: dict[str, Any] = {"enforce_eager": settings.eager and settings.graphs == "none"}
    if settings.memory_share is None:
        found["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    else:
        found["gpu_memory_utilization"] = settings.memory_share
    if settings.graphs != "none":
        mode = {"mode": 0} if settings.eager else {}  # 0: vLLM's own passes and torch.compile stay out
        found["compilation_config"] = {"cudagraph_mode": settings.graphs.upper(), **mode}
    if settings.float32_head:
        found["hf_overrides"] = {"head_dtype": "float32"}
    return found


def _start_core(settings: EngineSettings) -> Any:
    spare_unused_libraries()
    spare_unused_parts(compiles=not settings.eager)
    # Imported late: vLLM reads the environment on import and takes seconds.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    spare_foreign_libraries()
    if settings.tensor_parallel > 1:
        name_shared_memory(os.environ[SHARED_NAME])
    repack_experts()
    if current_platform.is_cpu():
        if settings.eager and settings.tensor_parallel > 1:
            # vLLM marks the look-up in a part of the embedding to be compiled, which needs a compiler.
            torch.compiler.set_stance("force_eager")
        attend_by_token()
        if settings.eager:
            use_cpu_kernels()
    register()  # as an entry point it is seen only once the package was installed again
    drafts, parts = settings.draft_tokens, settings.tensor_parallel
    positions = most_positions(settings.model_dir) or settings.max_model_len + drafts
    arguments = EngineArgs(
        model=str(settings.model_dir),
        skip_tokenizer_init=True,
        load_format="dummy" if settings.dummy_weights else "safetensors",
        config_format="hf",  # also beside files in another publisher's names
        dtype=settings.dtype,
        # vLLM drafts for no request once one sequence comes within a draft of the end, or of the model's end.
        max_model_len=min(settings.max_model_len + drafts, max(settings.max_model_len, positions)),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(2048, settings.max_model_len, settings.max_num_seqs * (1 + drafts)),
        **device_arguments(settings),
        block_size=settings.block_size,
        enable_prefix_caching=settings.prefix_caching,
        async_scheduling=False,  # tokens must be on the host before the next step is laid out
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # sampling defaults of the model directory play no part
        seed=0,
        speculative_config={"method": "custom_class", "model": CLASS_PATH, "num_speculative_tokens": drafts}
        if drafts
        else None,
        **({"tensor_parallel_size": parts, "distributed_executor_backend": LAUNCHER} if parts > 1 else {}),
    )
    try:
        config = arguments.create_engine_config()
        # vLLM collects garbage three times while it starts. What was imported is none: a second and a half.
        import_module(config.parallel_config.worker_cls.rpartition(".")[0])
        gc.freeze()
        return EngineCore(config, Executor.get_class(config), log_stats=False)
    except ValueError as error:  # what vLLM raises for settings it cannot take
        raise ConfigError(
            f"vLLM cannot serve {settings.model_dir}: {' '.join(str(error).split())}"
        ) from error
