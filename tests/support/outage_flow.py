"""A flow of many short tasks in a process of its own, whose server goes away meanwhile.

Speaks line by line to the test that drives it: one JSON object each. Reads one line when the
test has taken the server down, and one when it is back.
"""

import json
import sys
import time

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from antiphon.flows.post_train import StageThreads, await_server, flush_events, hold_events
from antiphon.system.logs import configure_logs


@task(task_run_name="stage {number}", cache_policy=NO_CACHE, persist_result=False)
def stage(number: int) -> int:
    """Do nothing, as a stage of the loop would."""
    return number


def say(**fields: object) -> None:
    """Tell the test something."""
    print(json.dumps(fields), flush=True)


def kept_tasks() -> int:
    """Count the tasks that Prefect keeps something of."""
    context = FlowRunContext.get()
    assert context is not None and isinstance(context.task_runner, StageThreads)
    return max(len(context.task_runner._cancel_events), len(context.task_run_assets))


@flow(name="outage", task_runner=StageThreads(max_workers=4), persist_result=False)
def outage(each: int) -> int:
    """Run `each` tasks before, during and after the outage."""
    hold_events()
    done = 0
    for part in ("before", "during", "after"):
        started = time.perf_counter()
        futures = [stage.submit(done + n) for n in range(each)]
        kept = kept_tasks()
        done += sum(1 for future in futures if future.result() is not None)
        seconds = time.perf_counter() - started
        say(part=part, done=done, kept=kept, seconds=seconds, flow_run=str(flow_run.get_id()))
        if part != "after":
            sys.stdin.readline()
    await_server()
    return done


if __name__ == "__main__":
    configure_logs("error")  # to standard error; standard output is for the test
    outage(int(sys.argv[1]))
    flush_events()
    say(part="ended")
