"""simulate: whole runs under virtual time, with faults from a seed, and what they broke."""

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError
from antiphon.environments.registry import with_sizes
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_run

if TYPE_CHECKING:
    from antiphon.simulator.modelled.calibration import Calibration

DEFAULT_SEEDS = 20
"""Seeds simulated when none are named."""


def simulate(
    scenario: Path | None = None,
    /,
    *overrides: str,
    seed: int | None = None,
    seeds: str | None = None,
    results: Path | None = None,
    trace: Path | None = None,
    journal: Path | None = None,
    from_run: str | None = None,
    workers: int = 0,
    crowded_run: str | None = None,
    keep: Path | None = None,
    calibration: Path | None = None,
) -> int:
    """Simulate whole runs with faults and check every event.

    There are no GPUs, sockets or waiting. Coordinator, workers, reward services and learner are the
    production ones; engines are stand-ins. The same seed always gives the same run. The exit code is 1 when a
    promise was broken.

    With --from-run a recorded run is the scenario, with the key=value pairs that follow. What it measured of
    engines, lengths, learner and broadcasts predicts seconds per step, staleness and dollars of it.
    With --calibration a file that --keep wrote takes that run's place, and the scenario is a configuration.

    Args:
        scenario: a YAML file as in examples/; by default each seed draws its own.
        overrides: with --from-run or --calibration: key=value pairs, such as loop.max_staleness=4.
        seed: the one seed to simulate, with all its faults listed.
        seeds: a range of seeds, FIRST..LAST; by default the first 20.
        results: JSON file to write the totals to.
        trace: file to write the journal of the last simulated run to.
        journal: a folder; each journal then lies there as a real SQLite file, which is slower.
        from_run: a run of this home that is not under way, by its name.
        workers: with --from-run or --calibration: how many; by default as many as the configuration says.
        crowded_run: with --from-run, if all of it ran on one machine: another run there, with more workers.
            Both tell how many cores workers and learner have; the first is best one with one
            worker and loop.max_staleness=0.
        keep: with --from-run: file to write the calibration to.
        calibration: file of a calibration; the recorded run itself is not needed.
    """
    from antiphon.simulator.campaign import Campaign, mute_logs

    mute_logs()
    words = [*([] if scenario is None else [str(scenario)]), *overrides]
    if calibration is not None:
        if from_run is not None or keep is not None or crowded_run is not None:
            raise ConfigError(
                "--calibration is what a run measured already; leave out --from-run and its options"
            )
        if scenario is None:
            raise ConfigError("--calibration predicts a run; name its configuration, such as run.yaml")
        from antiphon.simulator.modelled.calibration import load_calibration

        config = with_sizes(load_config(scenario, list(overrides)))
        return _predict(config, load_calibration(calibration), workers, seed)
    if from_run is not None:
        directory, measured = _calibrated(from_run, crowded_run, keep)
        return _predict(load_config(directory / "config.yaml", words), measured, workers, seed)
    if crowded_run is not None:
        raise ConfigError("--crowded-run says more of a machine that --from-run has measured; name that too")
    if overrides:
        raise ConfigError(f"{overrides[0]} changes a run; name a recorded one with --from-run")
    from antiphon.simulator.report import Summary, failure_lines, outcome_lines
    from antiphon.simulator.scenario import load_scenario

    chosen = _range(seed, seeds)
    campaign = Campaign(None if scenario is None else load_scenario(scenario), journal)
    name, summary = "" if scenario is None else str(scenario), Summary()
    for outcome in campaign.seeds(chosen):
        summary.add(outcome)
        if outcome.violations:
            print("\n".join(failure_lines(outcome, name)), flush=True)
        elif seed is not None:
            print("\n".join(outcome_lines(outcome)))
    if trace is not None:
        trace.write_text(campaign.text(), encoding="utf-8")
    for line in summary.lines():
        print(line)
    if results is not None:
        results.write_text(json.dumps(summary.plain(), indent=2) + "\n", encoding="utf-8")
    return 1 if summary.failing else 0


def _calibrated(name: str, crowded: str | None, keep: Path | None) -> "tuple[Path, Calibration]":
    """Return the folder of a recorded run and what it measured, which is kept in a file if one is named."""
    from antiphon.simulator.modelled.calibration import calibrate, read_journal, save_calibration
    from antiphon.simulator.modelled.run import Recorded, calibrate_machine

    def recorded(directory: Path) -> Recorded:
        config = load_config(directory / "config.yaml")
        return Recorded(config, asyncio.run(read_journal(directory, config)), config.rollout.workers)

    directory = find_run(home_directory(), name)
    first = recorded(directory)
    if crowded is None:
        calibration = calibrate(first.config, first.events, directory.name)
    else:
        other = find_run(home_directory(), crowded)
        calibration = calibrate_machine(first, recorded(other), f"{directory.name} {other.name}")
    if keep is not None:
        save_calibration(calibration, keep)
    return directory, calibration


def _predict(config: RunConfig, calibration: "Calibration", workers: int, seed: int | None) -> int:
    from antiphon.simulator.modelled.run import ModelledRun, figure_lines

    run = ModelledRun(config, calibration, workers or config.rollout.workers, seed or 0)
    print("\n".join(figure_lines(run.run())))
    return 0


def _range(seed: int | None, seeds: str | None) -> range:
    if seed is not None and seeds is not None:
        raise ConfigError("--seed means one seed, --seeds a range; give one or the other")
    if seed is not None:
        return range(seed, seed + 1)
    if seeds is None:
        return range(DEFAULT_SEEDS)
    found = re.fullmatch(r"(\d+)\.\.(\d+)", seeds)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--seeds {seeds} is no range; write FIRST..LAST, such as 0..99")
    return range(int(found[1]), int(found[2]) + 1)
