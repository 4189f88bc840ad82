"""vLLM on its own: the same engine core without any of our hooks, for comparison.

Requests enter as token ids and leave as arrays, as in `services.rollout.engine.vllm_engine`; nothing is
detokenised. Log-probabilities are not asked for and requests carry no seeds. It runs as our engines
do, eager, on one thread and without async scheduling; compiled and on all cores vLLM is faster, which
nothing here measures. Methods: none, `ngram` (drafts from the request's own text), and `suffix` where the
package arctic-inference is installed.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from antiphon.api.engine import EngineOutput, EngineProgress, EngineRequest
from antiphon.core.errors import ConfigError
from antiphon.core.records import FinishReason
from antiphon.services.rollout.engine.environment import EngineSettings, prepare_environment

Method = Literal["none", "ngram", "suffix"]

SPECULATIVE: Mapping[Method, dict[str, Any] | None] = {
    "none": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}


def suffix_installed() -> bool:
    """Tell whether vLLM's `suffix` method can be measured here."""
    try:
        return importlib.util.find_spec("arctic_inference.suffix_decoding") is not None
    except ModuleNotFoundError:
        return False


class PlainVllm:
    """An engine core of vLLM behind the Engine protocol, with the directory's weights and no end tokens."""

    version = 0
    weights_digest = None
    drafts = False
    continues = False
    numerics = ""
    vocabulary_size = 0
    """No request comes with a prefix to check."""

    def __init__(self, model_dir: Path, method: Method, max_model_len: int, max_num_seqs: int = 64) -> None:
        """Start it; other engines of this process may live beside it."""
        prepare_environment(EngineSettings(model_dir=model_dir))
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        speculative = SPECULATIVE[method]
        room = int(speculative["num_speculative_tokens"]) if speculative else 0
        config = EngineArgs(
            model=str(model_dir),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_model_len + room,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(2048, max_model_len, max_num_seqs * (1 + room)),
            kv_cache_memory_bytes=256 << 20,
            block_size=32,
            enable_prefix_caching=False,
            enforce_eager=True,
            async_scheduling=False,
            disable_log_stats=True,
            generation_config="vllm",
            seed=0,
            speculative_config=speculative,
        ).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._live: dict[str, tuple[str, Any]] = {}
        self._counter = 0

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Refuse: this engine keeps the weights it started with."""
        raise ConfigError("the plain engine keeps its weights; start it from another model directory")

    @property
    def unfinished(self) -> int:
        """Number of requests queued or running."""
        return len(self._live)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests; seeds, groups and history are left aside."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest

        for request in requests:
            sampling = request.sampling
            self._counter += 1
            core_request, wave = self._core.preprocess_add_request(
                EngineCoreRequest(
                    request_id=str(self._counter),
                    prompt_token_ids=list(request.prompt_token_ids),
                    mm_features=None,
                    sampling_params=SamplingParams(
                        temperature=sampling.temperature,
                        top_k=sampling.top_k,
                        top_p=sampling.top_p,
                        max_tokens=sampling.max_tokens,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    ),
                    pooling_params=None,
                    arrival_time=0.0,
                    lora_request=None,
                    cache_salt=None,
                    data_parallel_rank=None,
                )
            )
            self._core.add_request(core_request, wave)
            self._live[core_request.request_id] = (request.request_id, core_request)

    def step(self) -> list[EngineOutput]:
        """Advance every running request and return those that finished, without log-probabilities."""
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        finished = []
        for done in outputs[0].outputs if outputs else ():
            if done.finish_reason is None:
                continue
            name, request = self._live.pop(done.request_id)
            tokens = np.array(request.output_token_ids, dtype=np.int32)
            none = np.empty(0, dtype=np.float32)
            reason = FinishReason(str(done.finish_reason))
            finished.append(EngineOutput(tokens, none, (), reason, request_id=name))
        return finished

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        """Tell nothing: this engine keeps no log-probabilities."""
        return []

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        gone = [internal for internal, (name, _) in self._live.items() if name in set(request_ids)]
        self._core.abort_requests(gone)
        for internal in gone:
            del self._live[internal]

    def close(self) -> None:
        """Free the engine; it is not used again."""
        self._core.shutdown()
