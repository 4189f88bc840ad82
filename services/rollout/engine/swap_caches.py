"""Swap caches: what becomes of vLLM's key-value cache when weights are swapped under running requests.

`rollout.swap_cache=recompute` needs no more than vLLM's own reset, which puts every running request back
into the queue. Keeping the cache does, because the blocks of the old weights must serve the requests that
computed them and nobody else (vLLM 0.32):

- a request without a sampled token gives up what it computed of its prompt, so that its first tokens are the
  new policy's alone;
- prefix caching forgets every block, and what a request that runs on fills later is filed under a name of its
  own: a new request with the same prompt finds neither.
"""

import time
from typing import Any


def drop_caches(core: Any) -> None:
    """Let every running request compute its cache anew under the weights that were just loaded."""
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


def _queue_again(scheduler: Any, requests: list[Any]) -> None:
    """Put running requests back into the queue, as vLLM's own reset does with all of them."""
    now = time.monotonic()
    for request in reversed(requests):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        # As if it had not been scheduled in the step before: the model runner forgets its place then.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
