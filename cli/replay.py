"""replay: execute recorded steps again, from a run's artifacts alone, and compare every bit."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.reporting.replay_checks import choose_steps
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_artifacts, find_sft
from antiphon.system.files import write_atomically
from antiphon.system.logs import configure_logs


def replay(
    run: str | None = None,
    /,
    *,
    step: int | None = None,
    first: Annotated[int | None, Parameter(name="--from")] = None,
    last: Annotated[int | None, Parameter(name="--to")] = None,
    rollouts: bool = False,
    copy: Path | None = None,
    model: Path | None = None,
    threads: int | None = None,
    ranks: int | None = None,
    results: Path | None = None,
) -> None:
    """Execute recorded steps again and compare every bit of weights and loss.

    The first difference is named.

    Args:
        run: the run's id; by default the newest finished one, or the only one of the copy. Or the name of a
            supervised training's folder, which repeats with the rows' files, and takes --from alone.
        step: the one step to replay; by default all.
        first: the first step to replay.
        last: the last step to replay.
        rollouts: also score the recorded trajectories again and compare their logprobs.
        copy: folder with a copy of the run's ledger; by default the project's own ledger.
        model: folder of the base model, where the copy does not hold it.
        threads: CPU threads of the learner, when not the recorded number.
        ranks: processes of the learner, when not the recorded number; steps then repeat within a tolerance.
        results: JSON file to write the outcome to.
    """
    configure_logs("warning")
    if step is not None and (first is not None or last is not None):
        raise ConfigError("--step means one step, --from and --to a range; give one or the other")
    home = home_directory()
    if (folder := find_sft(home, run)) is not None:
        if rollouts or any(one is not None for one in (step, last, copy, model, threads, ranks, results)):
            raise ConfigError(f"{run} is a supervised training, whose replay takes --from alone")
        from antiphon.runs.sft_replay import replay_sft

        return replay_sft(folder, home, 1 if first is None else first, partial(print, flush=True))
    artifacts, own = find_artifacts(home, run, copy)
    begin, end = (step, step) if step is not None else (first, last)
    steps = choose_steps(len(artifacts.steps), artifacts.config.planned_steps, begin, end)
    artifacts.require(steps)
    print(f"{artifacts.run_id}: steps {steps[0]} to {steps[-1]} from {artifacts.root}; loading", flush=True)

    from antiphon.services.learner.replay.steps import Replayer, replay_run

    replayer = Replayer(
        artifacts, model=model, threads=threads, ranks=ranks, own_checkpoints=own, rollouts=rollouts
    )
    try:
        summary = replay_run(replayer, steps, rollouts, lambda said: print(said, flush=True))
    finally:
        replayer.close()
    for line in summary.lines():
        print(line)
    if results is not None:
        write_atomically(results, (json.dumps(summary.plain(), indent=2, sort_keys=True) + "\n").encode())
    difference = summary.first_difference()
    if difference is not None:
        raise IntegrityError(difference)
