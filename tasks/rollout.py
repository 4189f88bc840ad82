"""Rollout stage: open a step's groups at the coordinator and wait until its batch is sealed."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.records import BatchRef
from antiphon.core.status import EvaluationRecord, RunStatus
from antiphon.runs.context import POLL_S, RunContext, find

PAUSED_WAIT_S = 5.0
"""How long a stage that finds the run paused leaves the word to the stage that caused it."""


def collect_batch(run: RunContext, step: int) -> BatchRef:
    """Open `step` and return its sealed batch.

    Raises:
        UnavailableError: when nothing moved for services.stall_timeout_s; it names whom the
            step waits for.
    """
    run.call(lambda: run.coordinator.open_step(step))
    return await_batch(run, step)


def await_batch(run: RunContext, step: int) -> BatchRef:
    """Wait for the sealed batch of an opened step.

    Raises:
        IntegrityError: when the run is paused; it goes on when it is started again.
        UnavailableError: when nothing moved for services.stall_timeout_s.
    """
    patience_s = run.config.services.stall_timeout_s
    best, since = -1.0, time.perf_counter()
    while True:
        reply = run.call(lambda: run.coordinator.pull_batch(step, POLL_S))
        if reply.batch is not None:
            return reply.batch
        check_going_on(run, run.call(lambda: run.coordinator.status()))
        if reply.progress > best:
            best, since = reply.progress, time.perf_counter()
        elif time.perf_counter() - since > patience_s:
            raise UnavailableError(
                f"step {step} made no progress for {patience_s:g} s; it waits for {reply.waiting_for}"
            )


def check_going_on(run: RunContext, status: RunStatus) -> None:
    """Leave a paused run: nothing in it moves before it is started again.

    Raises:
        RunStopped: when the stage that paused it has stopped the run meanwhile.
        IntegrityError: with the reason of the pause.
    """
    if status.paused_reason:
        run.wait_stopped(PAUSED_WAIT_S)  # the stage that met the cause tells it best
        run.check()
        raise IntegrityError(f"the run is paused: {status.paused_reason}")


def evaluate_version(run: RunContext, version: int) -> EvaluationRecord:
    """Queue the held-out prompts for `version` and wait for the score.

    Raises:
        UnavailableError: when nothing moved for services.stall_timeout_s.
    """
    run.call(lambda: run.coordinator.open_evaluation(version))
    patience_s = run.config.services.stall_timeout_s
    best, since = -1, time.perf_counter()
    while True:
        status = run.call(lambda: run.coordinator.status())
        check_going_on(run, status)
        record = next((e for e in status.evaluations if e.version == version), None)
        if record is not None and record.complete:
            return record
        rewarded = -1 if record is None else record.rewarded
        if rewarded > best:
            best, since = rewarded, time.perf_counter()
        elif time.perf_counter() - since > patience_s:
            raise UnavailableError(
                f"the evaluation of version {version} made no progress for {patience_s:g} s; "
                f"it waits for {status.waiting or 'a worker'}"
            )
        run.wait_stopped(0.5)


@task(task_run_name="collect {step}", cache_policy=NO_CACHE, persist_result=False)
def collect(run_id: str, step: int) -> dict[str, Any]:
    """Collect the batch of one step; returns its handle."""
    run = find(run_id)
    batch = run.timed("collect", step, lambda: collect_batch(run, step))
    return {"step": step, "batch": batch.digest, "trajectories": batch.trajectories}


@task(task_run_name="evaluate v{version}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run_id: str, version: int) -> dict[str, Any]:
    """Score one policy version on held-out prompts while training goes on."""
    run = find(run_id)
    record = run.timed("evaluate", version, lambda: evaluate_version(run, version))
    if run.recorder is not None:
        run.recorder.record_evaluation(record)
    return {"version": version, "reward_mean": record.reward_mean, "prompts": record.prompts}
