"""vLLM compatibility: small guarded fixes of the installed release, each with its reason."""

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any


class _VllmModules:
    """`sys.modules`, of which a search sees vLLM's own."""

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def values(self) -> Iterable[ModuleType]:
        return [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]


def spare_foreign_libraries() -> None:
    """Keep vLLM's search for kernels, which are its own, from what other libraries put into modules.

    On CPU vLLM 0.32 looks through the attributes of every imported module, a third of a second, and takes
    whatever answers to `__dict__` for an instance dictionary. The wrapper of llvmlite's shared library
    answers to any name (a second engine in one process, or numba imported before the first, ended in an
    AttributeError); flask's stand-ins for the current request refuse to answer outside of one (an engine
    after MLflow in one process ended in a RuntimeError).
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # another release keeps its kernels elsewhere
        return
    dispatcher.__dict__["sys"] = SimpleNamespace(modules=_VllmModules())


def spare_held_blocks(core: Any) -> None:
    """Answer at once where a running request asks for cache blocks and those that it has are enough.

    So it is in all but one step of a block, and vLLM 0.32 goes through its whole allocation: a quarter of the
    time in which it plans a step. Models whose layers all look at the whole text need nothing else of it, as
    long as no blocks are filed for other requests.
    """
    manager = core.scheduler.kv_cache_manager
    layers = manager.coordinator.single_type_managers
    if len(layers) != 1 or type(layers[0]).__name__ != "FullAttentionManager" or manager.enable_caching:
        return
    held, block_size = layers[0].req_to_blocks, layers[0].block_size
    allocate, nothing, most = manager.allocate_slots, manager.empty_kv_cache_blocks, manager.max_model_len

    def allocate_slots(request: Any, num_new_tokens: int, **options: Any) -> Any:
        if len(options) == 1 and num_new_tokens > 0:  # else the request does not run yet
            needed = request.num_computed_tokens + num_new_tokens + options.get("num_lookahead_tokens", most)
            if needed <= most and needed <= block_size * len(held.get(request.request_id, ())):
                return nothing
        return allocate(request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots
