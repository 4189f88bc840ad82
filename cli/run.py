"""run: the main job, from a configuration to a trained policy."""

from pathlib import Path

from antiphon.cli.arguments import command_line
from antiphon.core.config import RunConfig, load_config
from antiphon.runs.directory import home_directory


def run(
    path: Path,
    /,
    *overrides: str,
    resume: str | None = None,
    fresh: bool = False,
    results: Path | None = None,
) -> int:
    """Post-train a policy; the same command continues the run it left unfinished.

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
            from antiphon.runs.launch import RunOptions

            use_prefect(home)  # where `up` serves one, since one server on the database is better than two
            options = RunOptions(fresh=fresh, results=results, command=command_line())
            outcome = run_post_train(config, resume, home, view, options, interrupt)
    finally:
        view.close()
    return outcome.exit_code
