"""Antiphon as a library: start a run and read one, from a program or a notebook.

>>> import antiphon
>>> done = antiphon.run("examples/quickstart.yaml", "run.steps=20")  # doctest: +SKIP
>>> done.metrics[["reward_mean", "wall_s"]].tail()  # doctest: +SKIP

Importing it is cheap; what is heavy is imported by the call that needs it. The commands' other parts are
modules below this name, one for each folder of the source tree.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.core.config import RunConfig
    from antiphon.recorded_run import RecordedRun

    __version__: str

__all__ = ["STOP", "__version__", "load_run", "run"]

STOP = "stop"
"""What `on_event` of `run` returns to have the run end in order."""


def run(
    config: "RunConfig | Mapping[str, Any] | str | Path",
    *overrides: str,
    home: Path | str | None = None,
    fresh: bool = False,
    say: Callable[[str], object] | None = print,
    on_event: "Callable[[Mapping[str, Any]], object] | None" = None,
    **misplaced: object,
) -> "RecordedRun":
    """Post-train a policy and return its run; the same call continues the run it left unfinished.

    The run is a process of its own, as `antiphon run` starts it, so it may be called from a notebook or
    within a running event loop. An interrupt ends it in order and is raised again.

    Args:
        config: a configuration, its tree as a mapping, or the path of a YAML file.
        overrides: key=value pairs, such as `loop.max_staleness=4`; only with a path.
        home: where runs and records lie; by default ANTIPHON_HOME or ./.antiphon.
        fresh: begin a new run even if an unfinished one of this configuration exists.
        say: gets each line that the run prints; None keeps it silent.
        on_event: gets each step (`kind` "step", with every metric) and each evaluation (`kind` "evaluation")
            when it was recorded. When it returns `antiphon.STOP`, the run ends in order and is returned as
            far as it came; the same call continues it.
        misplaced: is refused; a field of the configuration is an override.

    Raises:
        ConfigError: when the configuration or an argument is not possible, before anything starts.
        AntiphonError: with the run's own sentence, when it did not complete.
    """
    from antiphon.child_run import resolve, run_as_process

    resolved, place = resolve(config, overrides, misplaced), _home(home)
    return load_run(run_as_process(resolved, place, fresh, say, on_event), home=home)


def load_run(run_id: str | None = None, *, home: Path | str | None = None) -> "RecordedRun":
    """Return a run that was recorded, or is going on.

    Args:
        run_id: its id; by default the newest run's.
        home: where runs and records lie; by default ANTIPHON_HOME or ./.antiphon.

    Raises:
        ConfigError: when there is no such run.
    """
    from antiphon.recorded_run import RecordedRun
    from antiphon.runs.directory import store_directory
    from antiphon.runs.finding import find_run

    place = _home(home)
    return RecordedRun(find_run(place, run_id), place, store_directory(place))


def _home(home: Path | str | None) -> Path:
    from antiphon.runs.directory import home_directory

    return home_directory() if home is None else Path(home).absolute()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("antiphon")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
