"""Overhead: pairs of steps with recording and orchestration on and off, in one run.

One synchronous run; even steps go through Prefect tasks and are recorded in MLflow and the
ledger, odd steps run in plain threads and leave no record. The share is
1 - median(off) / median(on) over the pairs, with the work held the same.

    .venv/bin/python benchmarks/overhead.py
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from antiphon.benchmarks.overlap import SAME_WORK
from antiphon.benchmarks.parts.measure import PROJECT, end_on_sigterm, print_result, scratch_home

WARM_UP_PAIRS = 3


def main() -> None:
    """Run one job whose steps alternate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=25)
    arguments = parser.parse_args()
    end_on_sigterm()
    with scratch_home() as home:
        os.environ["ANTIPHON_HOME"] = str(home)
        result = measure(home, 2 * (arguments.pairs + WARM_UP_PAIRS))
    print_result(result)


def measure(home: Path, steps: int) -> dict[str, Any]:
    """Run `steps` alternating steps and compare."""
    from antiphon.core.config import load_config
    from antiphon.runs.prefect_server import client_environment, start_prefect_server

    config = load_config(
        PROJECT / "benchmarks" / "overlap.yaml",
        [*SAME_WORK, f"run.steps={steps}", "loop.max_staleness=0"],
    )
    server = start_prefect_server(home, 0, home / "prefect.log", 180.0)
    os.environ.update(client_environment(server.url, home))
    try:
        return alternate(config, home, server.pid, steps)
    finally:
        server.stop()


def alternate(config: Any, home: Path, server_pid: int, steps: int) -> dict[str, Any]:
    """Drive one run whose even steps are orchestrated and recorded and whose odd ones are not."""
    from prefect import flow
    from prefect.task_runners import ThreadPoolTaskRunner

    from antiphon.benchmarks.parts.plain_stages import PlainStages
    from antiphon.flows.driver import drive
    from antiphon.flows.post_train import PrefectStages
    from antiphon.runs.launch import open_run
    from antiphon.tasks.stages import TASKS

    family = psutil.Process(server_pid)
    found: dict[str, Any] = {}

    @flow(name="overhead", task_runner=ThreadPoolTaskRunner(max_workers=64))
    def overhead() -> None:
        with open_run(config, None, home) as live:
            run = live.context
            run.recorded = lambda step: step % 2 == 0
            plain = PlainStages(lambda stage, number: TASKS[stage].fn(run.run_id, number))
            orchestrated = PrefectStages(run.run_id)
            before = cpu_seconds(family)
            started = time.perf_counter()
            drive(run, lambda t: orchestrated if t % 2 == 0 else plain, live.committed)
            found["loop_s"] = time.perf_counter() - started
            found["prefect_server_cpu_s"] = cpu_seconds(family) - before
            plain.close()
            records = run.recorder.flush(120.0) if run.recorder else None
            found["records"] = records
            found["spans"] = list(run.spans)

    overhead()
    return compare(found, steps)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its living children."""
    family = [process, *process.children(recursive=True)]
    return sum(p.cpu_times().user + p.cpu_times().system for p in family)


def compare(found: dict[str, Any], steps: int) -> dict[str, Any]:
    """Turn the spans into seconds per step, on and off."""
    ends = {s.number: s.ended_s for s in found["spans"] if s.stage == "broadcast"}
    length = {t: ends[t + 1] - ends[t] for t in range(2 * WARM_UP_PAIRS, steps)}
    on = [seconds for t, seconds in length.items() if t % 2 == 0]
    off = [seconds for t, seconds in length.items() if t % 2 == 1]
    recorded = steps / 2
    records = found["records"]
    return {
        "overhead_share": round(1.0 - median(off) / median(on), 4),
        "record_ms_per_batch": round(records.enqueue_ms_total / recorded, 3),
        "seconds_per_step_on": round(median(on), 4),
        "seconds_per_step_off": round(median(off), 4),
        "prefect_server_cpu_s_per_step": round(found["prefect_server_cpu_s"] / recorded, 4),
        "writer_cpu_s_per_step": round(records.writer_cpu_s / recorded, 4),
        "pairs": len(on),
    }


if __name__ == "__main__":
    main()
