"""vLLM compatibility: guarded fixes of the installed release, and what its reload of weights leaves undone.

vLLM packs linear weights for its CPU kernels. A reload packs them again, except for an output
head tied to the embedding: no tensor of its own arrives for it, so it would keep answering with
the packed copy of the weights before (vLLM 0.32).

Experts are packed for the CPU as well, but only after the first load: a reload puts plain weights where its
kernel expects packed ones, and the same weights then give other log-probabilities by 0.2 nat and more.

When weights are swapped under running requests, `rollout.swap_cache=recompute` needs no more than vLLM's
own reset, which puts every running request back into the queue. Keeping the key-value cache does, because
the blocks of the old weights must serve the requests that computed them and nobody else (vLLM 0.32):

- a request without a sampled token gives up what it computed of its prompt, so that its first tokens are the
  new policy's alone;
- prefix caching forgets every block, and what a request that runs on fills later is filed under a name of its
  own: a new request with the same prompt finds neither.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from antiphon.core.errors import IntegrityError
from antiphon.system.spared import without


class _VllmModules:
    """`sys.modules`, of which a search sees vLLM's own."""

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def values(self) -> Iterable[ModuleType]:
        return [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]


def spare_unused_parts(compiles: bool) -> None:
    """Import vLLM without what no engine of ours uses: a fifth of the CPU seconds that it takes.

    Audio is no business of ours, so its filters are left out (scipy.signal). Where no model is compiled, what
    torch compiles with is left for those who need it: vLLM 0.32 mends it on import, and torch 2.13 asks it at
    each function that is marked to be compiled for its settings, to show them to people.
    """
    if not compiles:
        inductor: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
        if hasattr(inductor, "get_compiler_config"):  # another release may not ask
            inductor.get_compiler_config = lambda self: None
        with without("torch._inductor.lowering"):
            import vllm
    with without("scipy.signal"):
        import vllm.sampling_params  # noqa: F401


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


def name_shared_memory(name: str) -> None:
    """Let the shared memory of an engine of several processes begin with a name of its own.

    On a CPU vLLM 0.32 names it after where the processes meet. For those that somebody else started that is
    always the same, and a killed engine blocks the next. A queue of 24 MiB between the processes, into which
    nothing is put here and whose name says nothing of its owner, is left out.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    plain = ExecutorWithExternalLauncher._distributed_args

    def arguments(executor: Any) -> tuple[str, int, int]:
        return f"file:///{name}", *plain(executor)[1:]

    ExecutorWithExternalLauncher._distributed_args = arguments
    make_group = parallel_state.init_model_parallel_group

    def group(*given: Any, **options: Any) -> Any:
        return make_group(*given, **{**options, "use_message_queue_broadcaster": False})

    parallel_state.init_model_parallel_group = group


def repack_experts() -> None:
    """Have a reload on a CPU pack experts again, as the first load does; calling again does nothing.

    Within the reload and not after it, since packing may widen a tensor and vLLM puts what it made of a layer
    into the tensors that the layer serves with.
    """
    from vllm.platforms import current_platform

    try:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )
    except ImportError:  # another release keeps its experts elsewhere; the probe says whether it packs them
        return
    prepare = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if prepare is None or hasattr(prepare, "__wrapped__") or not current_platform.is_cpu():
        return

    @wraps(prepare)
    def prepared(method: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_reload, plain = method.moe_kernel is not None, layer.w13_weight
        prepare(method, layer, w13, w2)
        if is_reload and layer.w13_weight is plain:  # a release that packs them puts another in its place
            pack_experts(method, layer)

    UnquantizedFusedMoEMethod._setup_kernel = prepared


def pack_experts(method: Any, layer: Any) -> None:
    """Pack the plain weights of a layer's experts for the kernel that computes them."""
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def repack_heads(model: torch.nn.Module) -> None:
    """Pack every output head again from the weights it holds now."""
    for head in _packed_heads(model):
        head.quant_method.process_weights_after_loading(head)


def check_readable(model: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
    """Compare what can be read back of `model` with the tensors that were loaded.

    Parameters that kept their checkpoint name and shape are compared value by value; packed
    output heads are probed with one vector.

    Raises:
        IntegrityError: naming the first parameter that differs.
    """
    for name, parameter in model.named_parameters():
        tensor = tensors.get(name)
        if tensor is None or parameter.shape != tensor.shape or parameter.device.type != "cpu":
            continue
        if not torch.equal(_bits(parameter.data), _bits(tensor.to(parameter.dtype))):
            raise IntegrityError(
                f"parameter {name} differs from its tensor; the engine did not take the snapshot"
            )
    for head in _packed_heads(model):
        weight = head.weight.data
        probe = torch.linspace(-1.0, 1.0, weight.shape[1], dtype=weight.dtype).unsqueeze(0)
        served = head.quant_method.apply(head, probe).float()
        wanted = probe.float() @ weight.float().T
        tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
        scale = float(wanted.nan_to_num().abs().max())
        if not torch.allclose(served, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            raise IntegrityError(
                "the output head still answers with earlier weights; the engine did not take the snapshot"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)  # so that NaN equals itself


def _packed_heads(model: torch.nn.Module) -> list[Any]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return [
        module
        for module in model.modules()
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and module.weight.numel() > 0
    ]


def abandon_reload(model: torch.nn.Module) -> None:
    """Undo what a reload that failed half-way left prepared, so that another one can begin.

    vLLM reloads layer by layer: while one waits for its tensors its parameters are empty, and what was
    collected for it would be taken for part of the next reload. Such layers get back what they served with.
    Layers that were complete keep their new weights: the caller has to load again before anything is served.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


def drop_caches(core: Any) -> None:
    """Let every running request compute its cache again under the weights that were just loaded."""
    core.reset_prefix_cache(reset_running_requests=True)


def keep_caches(core: Any, swap: int) -> frozenset[str]:
    """Let running requests go on with their cache, and return the ids of those that do.

    Args:
        core: vLLM's engine core, between two steps.
        swap: number of the swap, different for each.
    """
    scheduler = core.scheduler
    _queue_again(scheduler, [request for request in scheduler.running if not request.output_token_ids])
    pool = scheduler.kv_cache_manager.block_pool
    if pool.enable_caching:
        pool.evict_blocks(set(range(pool.num_gpu_blocks)))
    for request in scheduler.running:
        # Hashes chain from the first block, which includes the salt: what is filed from here on is found by
        # this request alone. Without prefix caching there are no hashes, and this does nothing.
        request.cache_salt = f"{request.request_id} over swap {swap}"
        request.block_hashes.clear()
        request.update_block_hashes()
    return frozenset(request.request_id for request in scheduler.running)


@contextmanager
def set_aside(core: Any, tokens: int) -> Iterator[None]:
    """Have vLLM plan a step without its requests inside the block, with cache blocks for `tokens` others.

    They run on where they were afterwards. Where too few blocks are free, the last of those that run are
    queued again, as vLLM itself does.
    """
    from vllm.v1.core.sched.request_queue import create_request_queue

    scheduler = core.scheduler
    pool, groups = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_config.kv_cache_groups
    blocks = len(groups) * -(-tokens // scheduler.block_size)
    while scheduler.running and pool.get_num_free_blocks() < blocks:
        _queue_again(scheduler, scheduler.running[-1:])
    kept = scheduler.running, scheduler.waiting
    scheduler.running, scheduler.waiting = [], create_request_queue(scheduler.policy)
    try:
        yield
    finally:
        scheduler.running, scheduler.waiting = kept


def _queue_again(scheduler: Any, requests: list[Any]) -> None:
    """Put running requests back into the queue, as vLLM's own reset does with all of them."""
    now = time.monotonic()
    for request in reversed(requests):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        # As if it had not been scheduled in the step before: the model runner forgets its place then.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
