"""run, demo, config: the main job, from a configuration to a trained policy; and what it resolves to."""

import json
import sys
from pathlib import Path

from antiphon.cli.arguments import Json, command_line, shipped
from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.runs.directory import home_directory


def run(
    path: Path,
    /,
    *overrides: str,
    resume: str | None = None,
    fresh: bool = False,
    results: Path | None = None,
) -> int:
    """Post-train a policy as a configuration says.

    The same command continues the run that it left unfinished.

    Args:
        path: the YAML file.
        overrides: key=value pairs, such as loop.max_staleness=4.
        resume: id of the run to continue.
        fresh: begin a new run even if an unfinished one of this configuration exists.
        results: folder that gets metrics.json, timings.json and final.json.
    """
    return run_config(load_config(path, list(overrides)), resume=resume, fresh=fresh, results=results)


def run_config(config: RunConfig, *, resume: str | None, fresh: bool, results: Path | None) -> int:
    """Run one configuration with a view for people; return the exit code."""
    from antiphon.cli.up import use_prefect
    from antiphon.cli.view import make_view
    from antiphon.runs.interrupt import Interrupt
    from antiphon.system.collecting import collect_seldom
    from antiphon.system.logs import configure_logs

    collect_seldom()
    configure_logs("warning")
    home = home_directory()
    view = make_view()
    view.message(f"{config.run.name}: {config.run.steps} steps, seed {config.run.seed}; loading")
    try:
        with Interrupt(view) as interrupt:
            from antiphon.flows.local_run import run_post_train
            from antiphon.runs.live_run import RunOptions

            use_prefect(home)  # where `up` serves one, since one server on the database is better than two
            options = RunOptions(fresh=fresh, results=results, command=command_line())
            outcome = run_post_train(config, resume, home, view, options, interrupt)
    finally:
        view.close()
    return outcome.exit_code


def demo(
    *overrides: str,
    seed: int = 0,
    fresh: bool = False,
    results: Path | None = None,
) -> int:
    """Train the shipped small model and show what came of it.

    Args:
        overrides: key=value pairs, such as run.steps=20.
        seed: seed of the run.
        fresh: begin a new run even if an unfinished one exists.
        results: folder that gets metrics.json, timings.json and final.json.
    """
    config = load_config(shipped("quickstart.yaml"), [f"run.seed={seed}", *overrides])
    return run_config(config, resume=None, fresh=fresh, results=results)


def config(path: Path, /, *overrides: str, as_json: Json = False) -> None:
    """Print the tree that a configuration resolves to.

    Every default is filled in and nothing is started. The environment's name and parameters are checked too.
    A learning rate that is not given is that of the model's size, or null where the model is not on this
    machine.

    A note on the error output names each key that was set and cannot act with the others.

    Args:
        path: the YAML file.
        overrides: key=value pairs, such as loop.max_staleness=4.
        as_json: print JSON instead of YAML.
    """
    from antiphon.environments.registry import environment_of, with_sizes  # slow to import

    resolved = with_sizes(load_config(path, list(overrides)))
    if not resolved.client_driven:  # whose clients bring the prompts
        environment_of(resolved.environment)
    if resolved.learner.learning_rate is None:
        from antiphon.models.learning_rate import with_learning_rate

        resolved = with_learning_rate(resolved)
        print("note: learner.learning_rate is chosen by the size of model.path", file=sys.stderr)
    for sentence in resolved.idle_keys():
        print(f"note: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps(resolved.model_dump(mode="json"), indent=2))
    else:
        print(dump_config(resolved), end="")
