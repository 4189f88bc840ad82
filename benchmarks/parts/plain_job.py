"""Plain job: the main job without Prefect, its stages in plain threads; everything else as shipped.

python -m antiphon.benchmarks.parts.plain_job CONFIG [KEY=VALUE ...] --results FOLDER
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

from antiphon.core.config import load_config
from antiphon.flows.driver import drive
from antiphon.runs.directory import home_directory
from antiphon.runs.live_run import RunOptions, claim_run
from antiphon.tasks.stages import TASKS


class PlainStages:
    """Runs stages in threads."""

    def __init__(self, work: Callable[[str, int], None], threads: int = 32) -> None:
        """Prepare to run stages.

        Args:
            work: called with the stage's name and number.
            threads: most stages waiting or running at once; one runs them in the order of their submission.
        """
        self._work = work
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stage")

    def submit(self, stage: str, number: int, after: Sequence[Future[None]]) -> Future[None]:
        """Run a stage once every stage in `after` has ended well."""

        def run() -> None:
            for before in after:
                before.result()
            self._work(stage, number)

        return self._pool.submit(copy_context().run, run)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def main() -> None:
    """Run one configuration to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    options = RunOptions(fresh=True, results=arguments.results)
    with claim_run(config, None, home_directory(), options=options) as run:
        stages = PlainStages(lambda stage, number: TASKS[stage].fn(run.run_id, number))
        drive(run, stages.submit, run.committed)
        run.finish()
        stages.close()


if __name__ == "__main__":
    main()
