"""Stages of the loop as Prefect tasks: each runs one stage and notes when it did.

They return nothing: Prefect keeps for each value that a task returns a state until its flow ends, and what a
stage did stands in the run's records.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from antiphon.runs.live_run import find_live_run


@task(task_run_name="collect {step}", cache_policy=NO_CACHE, persist_result=False)
def collect(run_id: str, step: int) -> None:
    """Open one step and wait until all its groups were sampled and handed in."""
    run = find_live_run(run_id)
    run.timed("collect", step, run.stages.collect(step))


@task(task_run_name="reward {step}", cache_policy=NO_CACHE, persist_result=False)
def reward(run_id: str, step: int) -> None:
    """Wait until the groups of one step are rewarded and its batch is sealed."""
    run = find_live_run(run_id)
    run.timed("reward", step, run.stages.reward(step))


@task(task_run_name="step {number}", cache_policy=NO_CACHE, persist_result=False)
def step(run_id: str, number: int) -> None:
    """Run one learner step."""
    run = find_live_run(run_id)
    run.timed("step", number, run.stages.step(number))


@task(task_run_name="broadcast v{version}", cache_policy=NO_CACHE, persist_result=False)
def broadcast(run_id: str, version: int) -> None:
    """Publish one policy version."""
    run = find_live_run(run_id)
    run.timed("broadcast", version, run.stages.broadcast(version))


@task(task_run_name="evaluate v{version}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(run_id: str, version: int) -> None:
    """Score one policy version on held-out prompts while training continues."""
    run = find_live_run(run_id)
    run.timed("evaluate", version, run.stages.evaluate(version))


TASKS = {stage.fn.__name__: stage for stage in (collect, reward, step, broadcast, evaluate)}
"""Name of a stage -> its task."""
