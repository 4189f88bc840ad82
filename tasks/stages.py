"""Stages of the loop as Prefect tasks: each runs one stage and says what came of it and when."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.runs.live_run import find_live_run


@task(task_run_name="collect {step}", cache_policy=NO_CACHE, persist_result=False)
def collect(run_id: str, step: int) -> dict[str, Any]:
    """Open one step and wait until all its groups were sampled and handed in."""
    run = find_live_run(run_id)
    run.timed("collect", step, run.stages.collect(step))
    return {"step": step}


@task(task_run_name="reward {step}", cache_policy=NO_CACHE, persist_result=False)
def reward(run_id: str, step: int) -> dict[str, Any]:
    """Wait until the groups of one step are rewarded and its batch is sealed; returns its rewards."""
    run, started = find_live_run(run_id), time.perf_counter()
    batch = run.timed("reward", step, run.stages.reward(step))
    return {
        "step": step,
        "batch": batch.digest,
        "trajectories": batch.trajectories,
        "reward_mean": round(batch.reward_mean, 4),
        "reward_std": round(batch.reward_std, 4),
        "groups_filtered": batch.groups_filtered,
        "trajectories_failed": batch.trajectories_failed,
        "seconds": round(time.perf_counter() - started, 4),
    }


@task(task_run_name="step {number}", cache_policy=NO_CACHE, persist_result=False)
def step(run_id: str, number: int) -> dict[str, Any]:
    """Run one learner step; returns the version it made."""
    run = find_live_run(run_id)
    result = run.timed("step", number, run.stages.step(number))
    return {
        "step": number,
        "version": result.commit.version,
        "weights": result.commit.weights_digest,
        "idle_s": round(result.idle_s, 4),
        "train_s": round(result.train_s, 4),
    }


@task(task_run_name="broadcast v{version}", cache_policy=NO_CACHE, persist_result=False)
def broadcast(run_id: str, version: int) -> dict[str, Any]:
    """Publish one policy version; returns its digest."""
    run = find_live_run(run_id)
    manifest = run.timed("broadcast", version, run.stages.broadcast(version))
    return {"version": version, "weights": manifest.weights_digest, "bytes": manifest.full_bytes}


@task(task_run_name="evaluate v{version}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run_id: str, version: int) -> dict[str, Any]:
    """Score one policy version on held-out prompts while training continues."""
    run = find_live_run(run_id)
    score = run.timed("evaluate", version, run.stages.evaluate(version))
    return {"version": version, "reward_mean": score.reward_mean, "prompts": score.prompts}


TASKS = {stage.fn.__name__: stage for stage in (collect, reward, step, broadcast, evaluate)}
"""Name of a stage -> its task."""
