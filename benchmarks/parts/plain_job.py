"""Plain job: the main job without Prefect, its stages in plain threads; everything else as shipped.

python -m antiphon.benchmarks.parts.plain_job CONFIG [KEY=VALUE ...] --results FOLDER
"""

import argparse
from pathlib import Path

from antiphon.core.config import load_config
from antiphon.flows.driver import drive
from antiphon.flows.plain_stages import PlainStages
from antiphon.runs.directory import home_directory
from antiphon.runs.launch import RunOptions, Surroundings, open_run, surrounded
from antiphon.tasks.stages import STAGES


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
        run_id = live.context.run_id
        stages = PlainStages(lambda stage, number: STAGES[stage](run_id, number))
        drive(live.context, stages, live.committed)
        live.finish()
        stages.close()


if __name__ == "__main__":
    main()
