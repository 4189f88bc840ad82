"""Reward stage: shows the rewarding of one batch, which streams while rollouts still run."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.core.records import BatchRef
from antiphon.runs.context import RunContext, find
from antiphon.tasks.rollout import await_batch


def follow_rewards(run: RunContext, step: int) -> tuple[BatchRef, float]:
    """Wait until every group of `step` is rewarded; returns the batch and the seconds it took."""
    started = time.perf_counter()
    batch = await_batch(run, step)
    return batch, time.perf_counter() - started


@task(task_run_name="reward {step}", cache_policy=NO_CACHE, persist_result=False)
def reward(run_id: str, step: int) -> dict[str, Any]:
    """Follow the rewarding of one batch; returns its mean reward."""
    run = find(run_id)
    batch, _ = run.timed("reward", step, lambda: follow_rewards(run, step))
    return {"step": step, "reward_mean": batch.reward_mean, "groups_filtered": batch.groups_filtered}
