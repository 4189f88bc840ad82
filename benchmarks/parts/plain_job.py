"""Plain job: the main job without Prefect, its stages in plain threads; everything else as shipped.

python -m antiphon.benchmarks.parts.plain_job CONFIG [KEY=VALUE ...] --results FOLDER
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from antiphon.core.config import load_config
from antiphon.flows.schedule import PlainStages, drive
from antiphon.runs.directory import home_directory
from antiphon.runs.launch import RunOptions, Surroundings, open_run, surrounded
from antiphon.tasks import broadcast, learner, record, rollout


def main() -> None:
    """Run one configuration to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    options = RunOptions(fresh=True, results=arguments.results)
    with surrounded(Surroundings(options=options)), open_run(config, None, home_directory()) as live:
        run = live.context
        work: dict[str, Callable[[int], object]] = {
            "collect": lambda n: rollout.collect_batch(run, n),
            "reward": lambda n: rollout.await_batch(run, n),
            "step": lambda n: learner.train_step(run, n),
            "broadcast": lambda n: broadcast.broadcast_version(run, n),
            "record": lambda n: record.record_step(run, n),
            "evaluate": lambda n: rollout.evaluate_version(run, n),
        }
        stages = PlainStages(lambda stage, n: run.timed(stage, n, lambda: work[stage](n)))
        started = time.perf_counter()
        drive(run, lambda _: stages, live.committed)
        live.finish(time.perf_counter() - started)
        stages.close()


if __name__ == "__main__":
    main()
