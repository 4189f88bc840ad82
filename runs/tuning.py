"""Tuning: tries settings of rollout engine and learner, one process after the other, for a run."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from antiphon.core.capacity.engine_tuning import Settings, Trial, Unit, choose, describe, overrides
from antiphon.core.capacity.model import shape_of
from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.core.errors import AntiphonError
from antiphon.cpu.compiler import why_not_compiling
from antiphon.runs.supervisor import learner_environment
from antiphon.services.rollout.engine.environment import child_environment, device
from antiphon.system.collecting import LOADING
from antiphon.system.files import write_atomically
from antiphon.system.processes import ChildProcess, quote, tie_to_parent

SLACK_S = 120.0
"""What a trial may take beyond its start and its sampling or training."""
STOP_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a trial that is given up."""

Told = Callable[[Settings, Trial | None, str], None]
"""Hears of each trial: settings, what came of it, and the reason where nothing did."""


def current_settings(config: RunConfig) -> tuple[Settings, Settings]:
    """Return what a configuration says now of an engine and of the learner."""
    names = ("threads", "block_size", "prefix_caching", "compiled")
    engine = {f"rollout.{name}": getattr(config.rollout, name) for name in names}
    return engine | {"model.dtype": config.model.dtype}, {"learner.threads": config.learner.threads}


def values_to_try(config: RunConfig) -> dict[str, Sequence[Any]]:
    """Return key -> values to try on this machine, in the order in which settings are tried."""
    on_cpu = device() == "cpu"
    blocks = (32, 64, 128) if on_cpu else (16, 32, 64)
    compiles = not on_cpu or why_not_compiling() is None
    return {
        "model.dtype": ("float32", "bfloat16"),
        "rollout.threads": _threads_to_try(),
        "rollout.block_size": blocks,
        "rollout.prefix_caching": (False, True),
        "rollout.compiled": (False, True) if compiles else (config.rollout.compiled,),
    }


def _threads_to_try() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    tried = sorted({n for n in (1, 2, 4, 8, 16, 32, cores) if n <= cores})
    return tried if device() == "cpu" else []


def spared_unit(config: RunConfig, alone: bool) -> Unit:
    """Return what to spare: CPU seconds where workers and learner share cores, seconds elsewhere."""
    shared = config.rollout.workers > 0 and device() == "cpu" and not alone
    return "cpu_seconds" if shared else "seconds"


def completions_of_a_worker(config: RunConfig, acceptance: float = 1.0) -> int:
    """Return how many completions of training one worker of a run samples, those that are replaced too."""
    step = shape_of(config.loop, 1.0, 0.0, 1.0, 1.0, acceptance).raw_completions
    return int(config.run.steps * step) // max(1, config.rollout.workers)


def completions_of_the_learner(config: RunConfig) -> int:
    """Return how many completions a run trains."""
    return config.run.steps * config.loop.prompts_per_step * config.loop.group_size


def tune(
    config: RunConfig, seconds: float, unit: Unit, completions: int, alone: bool, told: Told
) -> tuple[Settings, Settings]:
    """Try settings and return the best for the run of a configuration.

    The learner trains completions as long as the engine sampled them, in steps of one update.

    Args:
        config: the run; its model and prompts are used.
        seconds: how long each engine samples and each learner trains.
        unit: what is spared.
        completions: what one worker samples in the run.
        alone: a worker has this machine to itself, so the learner's threads are not tried.
        told: hears of each trial.

    Raises:
        AntiphonError: when the settings of now do not work.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-tune-") as folder:
        lengths: list[float] = []

        def attempt(settings: Settings) -> Trial | None:
            try:
                trial = try_out(config, settings, seconds, Path(folder), *lengths[:1])
            except AntiphonError as error:
                if settings in now:
                    raise
                told(settings, None, str(error))
                return None
            lengths.append(trial.completion_tokens)
            told(settings, trial, "")
            return trial

        now = current_settings(config)
        engine = choose(now[0], values_to_try(config), attempt, unit, completions)
        threads = [] if alone else _threads_to_try()
        if len(threads) < 2:  # nothing to choose from
            return engine, now[1]
        trained = completions_of_the_learner(config)
        return engine, choose(now[1], {"learner.threads": threads}, attempt, unit, trained)


def try_out(
    config: RunConfig, settings: Settings, seconds: float, folder: Path, completion_tokens: float = 0.0
) -> Trial:
    """Let an engine sample, or a learner train, with these settings in a process of its own.

    Args:
        config: the run.
        settings: of an engine or of the learner.
        seconds: how long.
        folder: for files of the trial.
        completion_tokens: mean length of the completions that a learner trains.

    Raises:
        AntiphonError: when it could not, with its last words.
    """
    path, result = folder / "config.yaml", folder / "trial.json"
    result.unlink(missing_ok=True)
    path.write_text(dump_config(config), encoding="utf-8")
    # OpenMP and vLLM read their settings when a process starts.
    threads = settings.get("rollout.threads")
    environment = child_environment(threads) if threads else os.environ | learner_environment()
    role = "engine" if threads else "learner"
    given = map(str, (path, result, seconds, completion_tokens))
    words = [*LOADING, __name__, role, *given, *overrides(settings)]
    process = ChildProcess(words, folder / "trial.log", environment)
    limit_s = config.services.start_timeout_s + seconds + SLACK_S
    try:
        process.wait(limit_s)
    except TimeoutExpired:
        raise AntiphonError(f"no result within {limit_s:g} s: {quote(process.lines())}") from None
    finally:
        process.stop(STOP_S)
    if process.returncode != 0 or not result.exists():
        raise AntiphonError(f"the trial with {describe(settings)} {process.how_it_ended()}")
    return Trial(**json.loads(result.read_text(encoding="utf-8")))


def _main(role: str, path: str, result: str, seconds: str, completion_tokens: str, *settings: str) -> int:
    """Run the trial that the command line of a child names."""
    tie_to_parent()
    try:
        config = load_config(Path(path), list(settings))
        if role == "engine":
            from antiphon.services.rollout import trial

            done = trial.run_trial(config, float(seconds))
        else:
            from antiphon.services.learner import trial as training

            done = training.run_trial(config, float(seconds), float(completion_tokens))
    except AntiphonError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    write_atomically(Path(result), json.dumps(asdict(done)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
