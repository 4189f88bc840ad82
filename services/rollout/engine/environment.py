"""Engine settings and the process environment the engine needs; imports nothing heavy.

The OpenMP library, its settings and those of the C library are fixed when a process starts, so the
supervisor of a worker starts it with `child_environment`; everything else `prepare_environment` sets in
the worker itself, before vLLM is imported.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from antiphon.core.drafting.config import DraftingSection
from antiphon.core.errors import ConfigError
from antiphon.core.sampling_config import Rule
from antiphon.system.memory import keep_memory
from antiphon.system.processes import SAME_ORDER

OVERRULING = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN")
"""Variables against rollout.kv_cache_mib, and against the positions that a model has."""
SHARED_NAME = "ANTIPHON_SHARED_NAME"
"""Says how the shared memory of an engine of several processes begins."""
PLUGIN = "antiphon"
"""Name of our own entry point among vLLM's general plugins; the only one that may load."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the rollout engine depends on; part of the numerics, so all of it is recorded."""

    model_dir: Path
    """Hugging Face model directory: architecture, and start-up weights that are never served."""
    dummy_weights: bool = False
    """Start on random weights: the directory has none."""
    max_model_len: int = 512
    """Longest prompt plus completion, tokens."""
    max_num_seqs: int = 128
    """Requests that run at the same time; further ones queue."""
    kv_cache_bytes: int = 512 << 20
    """Memory of the key-value cache, bytes."""
    memory_share: float | None = None
    """Share of a GPU's memory that weights and cache take instead, if any."""
    graphs: Literal["none", "piecewise", "full"] = "none"
    """CUDA graphs that are captured at the start."""
    float32_head: bool = False
    """Whether states meet the output embedding in float32, whatever `dtype` is."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and activations."""
    block_size: int = 32
    """Tokens of one block of the key-value cache."""
    threads: int = 1
    """CPU threads of the engine."""
    tensor_parallel: int = 1
    """Processes that hold a part of each layer and compute it together; threads and memory are each one's."""
    sampler: Literal["keyed", "native"] = "keyed"
    """keyed: tokens depend on weights, prompt and seed alone; native: vLLM's own sampler."""
    rule: Rule = "inverse_cdf"
    """How the keyed sampler's random numbers choose a token."""
    batch_invariant: bool = False
    """Ask vLLM for kernels whose bits do not depend on the batch, where the device has them."""
    eager: bool = True
    """Run the model as it is instead of compiling it; compiling costs half a minute at start."""
    prefix_caching: bool = False
    """Share the cache blocks of equal prompt beginnings; pays once prompts exceed a block."""
    swap_cache: Literal["recompute", "keep"] = "recompute"
    """What running requests do with their key-value cache when weights are swapped."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; None takes the end tokens of the model directory."""
    draft_tokens: int = 0
    """Most drafted tokens that one pass verifies for a request; 0 builds an engine without drafting."""
    drafting: DraftingSection = field(default_factory=DraftingSection)
    """How drafts are made where draft_tokens allows any."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where a server is, and what it must be able to do."""

    url: str
    """http://HOST:PORT."""
    model_dir: Path
    """The model that it was started with, as this machine has it."""
    folder: Path | None
    """Through which weights go, named alike on both sides; None: a temporary one."""
    max_model_len: int
    """Longest prompt plus completion, tokens."""
    silent_s: float
    """Longest time without a token while requests run, and for an answer about itself."""
    swap_s: float
    """Longest time for each part of a swap."""


def child_environment(threads: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment with which a process that will hold an engine must be started.

    Args:
        threads: CPU threads of the engine.
        base: environment to start from; this process's own by default.
    """
    environment = dict(os.environ if base is None else base)
    environment.update(_process_settings(threads) | SAME_ORDER)  # ranks of one engine take sets in one order
    environment = keep_memory(environment)
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    preloaded = environment.get("LD_PRELOAD", "")
    if library.exists() and "libiomp5" not in preloaded:
        name = str(library)
        if " " in name:  # LD_PRELOAD is split at blanks, LD_LIBRARY_PATH is not
            folders = environment.get("LD_LIBRARY_PATH")
            name, found = library.name, str(library.parent)
            environment["LD_LIBRARY_PATH"] = f"{found}:{folders}" if folders else found
        environment["LD_PRELOAD"] = f"{name}:{preloaded}" if preloaded else name
    return environment


def prepare_environment(settings: EngineSettings) -> None:
    """Set what vLLM reads from the environment; call before anything imports vLLM.

    Raises:
        ConfigError: when vLLM was already imported under other settings.
    """
    wanted = {
        **_process_settings(settings.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core in this process: one import, direct calls
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler hooks into the V1 runner
        "VLLM_PLUGINS": PLUGIN,  # no third-party plugin may change how tokens are drawn
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.batch_invariant and has_batch_invariance(_compute_capability()):
        wanted["VLLM_BATCH_INVARIANT"] = "1"
    for name in OVERRULING:
        os.environ.pop(name, None)
    if "vllm" in sys.modules:
        late = sorted(name for name, value in wanted.items() if os.environ.get(name) != value)
        if late:
            raise ConfigError(
                f"vLLM was imported before {', '.join(late)} could be set; "
                "call prepare_environment before importing vLLM"
            )
    os.environ.update(wanted)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def has_batch_invariance(capability: tuple[int, int] | None) -> bool:
    """Return whether vLLM 0.32 has its batch-invariant mode on a device.

    Args:
        capability: CUDA compute capability; None without an NVIDIA GPU.

    >>> has_batch_invariance((9, 0)), has_batch_invariance((8, 6)), has_batch_invariance(None)
    (True, False, False)
    """
    return capability is not None and capability >= (9, 0)  # vllm/envs.py, VLLM_BATCH_INVARIANT


def device() -> Literal["cpu", "gpu"]:
    """Return what engines on this machine sample on, by the build of vLLM, as vLLM itself decides."""
    try:
        return "cpu" if "cpu" in version("vllm") else "gpu"
    except PackageNotFoundError:
        return "cpu"


def _compute_capability() -> tuple[int, int] | None:
    if device() == "cpu":
        return None
    import torch  # the caller holds it already; a supervisor, which needs no engine, does not

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _process_settings(threads: int) -> dict[str, str]:
    if threads < 1:
        raise ConfigError(f"threads={threads} is not possible; an engine needs at least one CPU thread")
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "0",  # idle threads sleep instead of spinning on shared cores
    }
