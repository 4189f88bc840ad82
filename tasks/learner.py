"""Learner stage: ask the learner for one optimizer step and remember what it committed."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.runs.context import RunContext, find
from antiphon.services.learner.api import StepResult


def train_step(run: RunContext, step: int) -> StepResult:
    """Train on the sealed batch of `step`; version step + 1 is committed when this returns."""
    timeout_s = run.config.services.stall_timeout_s
    result = run.call(lambda: run.learner.step(step), timeout_s=timeout_s)
    run.step_results[step] = result
    return result


@task(task_run_name="step {number}", cache_policy=NO_CACHE, persist_result=False)
def step(run_id: str, number: int) -> dict[str, Any]:
    """Run one learner step; returns the version it made."""
    run = find(run_id)
    result = run.timed("step", number, lambda: train_step(run, number))
    return {
        "step": number,
        "version": result.commit.version,
        "weights": result.commit.weights_digest,
        "idle_s": round(result.idle_s, 4),
        "train_s": round(result.train_s, 4),
    }
