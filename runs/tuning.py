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

from antiphon.core.capacity.engine_tuning import Choice, EngineChoice, LearnerChoice, Trial, Unit, choose
from antiphon.core.capacity.model import shape_of
from antiphon.core.config import RunConfig, dump_config
from antiphon.core.errors import AntiphonError
from antiphon.cpu.compiler import why_not_compiling
from antiphon.runs.supervisor import learner_environment
from antiphon.services.rollout.engine.environment import child_environment, device
from antiphon.system.processes import ChildProcess, quote

SLACK_S = 120.0
"""What a trial may take beyond its start and its sampling or training."""
STOP_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a trial that is given up."""

Told = Callable[[EngineChoice | LearnerChoice, Trial | None, str], None]
"""Hears of each trial: settings, what came of it, and the reason where nothing did."""


def current_choices(config: RunConfig) -> tuple[EngineChoice, LearnerChoice]:
    """Return what a configuration says now."""
    rollout = config.rollout
    engine = EngineChoice(
        rollout.threads, rollout.block_size, rollout.prefix_caching, rollout.compiled, config.model.dtype
    )
    return engine, LearnerChoice(config.learner.threads)


def values_to_try(config: RunConfig) -> dict[str, Sequence[Any]]:
    """Return setting -> values to try on this machine, in the order in which settings are tried."""
    on_cpu = device() == "cpu"
    blocks = (32, 64, 128) if on_cpu else (16, 32, 64)
    compiles = not on_cpu or why_not_compiling() is None
    return {
        "dtype": ("float32", "bfloat16"),
        "threads": _threads_to_try(),
        "block_size": blocks,
        "prefix_caching": (False, True),
        "compiled": (False, True) if compiles else (config.rollout.compiled,),
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
) -> tuple[EngineChoice, LearnerChoice]:
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

        def attempt(choice: Choice) -> Trial | None:
            try:
                trial = try_out(config, choice, seconds, Path(folder), *lengths[:1])
            except AntiphonError as error:
                if choice in now:
                    raise
                told(choice, None, str(error))
                return None
            lengths.append(trial.completion_tokens)
            told(choice, trial, "")
            return trial

        now = current_choices(config)
        engine = choose(now[0], values_to_try(config), attempt, unit, completions)
        threads = [] if alone else _threads_to_try()
        if len(threads) < 2:  # nothing to choose from
            return engine, now[1]
        trained = completions_of_the_learner(config)
        return engine, choose(now[1], {"threads": threads}, attempt, unit, trained)


def try_out(
    config: RunConfig,
    choice: EngineChoice | LearnerChoice,
    seconds: float,
    folder: Path,
    completion_tokens: float = 0.0,
) -> Trial:
    """Let an engine sample, or a learner train, with these settings in a process of its own.

    Args:
        config: the run.
        choice: the settings.
        seconds: how long.
        folder: for files of the trial.
        completion_tokens: mean length of the completions that a learner trains.

    Raises:
        AntiphonError: when it could not, with its last words.
    """
    path, result = folder / "config.yaml", folder / "trial.json"
    result.unlink(missing_ok=True)
    values = asdict(choice)
    sections: dict[str, Any]
    more: tuple[str, ...] = ()
    if isinstance(choice, EngineChoice):
        role, environment = "rollout", child_environment(choice.threads)
        model = config.model.model_copy(update={"dtype": values.pop("dtype")})
        sections = {"model": model, "rollout": config.rollout.model_copy(update=values)}
    else:
        role, environment = "learner", os.environ | learner_environment()
        more = (f"{completion_tokens}",)
        sections = {"learner": config.learner.model_copy(update=values)}
    path.write_text(dump_config(config.model_copy(update=sections)), encoding="utf-8")
    module = f"antiphon.services.{role}.trial"
    words = [sys.executable, "-P", "-m", module, str(path), str(result), f"{seconds}", *more]
    process = ChildProcess(words, folder / "trial.log", environment)
    limit_s = config.services.start_timeout_s + seconds + SLACK_S
    try:
        process.wait(limit_s)
    except TimeoutExpired:
        raise AntiphonError(f"no result within {limit_s:g} s: {quote(process.lines())}") from None
    finally:
        process.stop(STOP_S)
    if process.returncode != 0 or not result.exists():
        raise AntiphonError(f"the trial with {choice.describe()} {process.how_it_ended()}")
    return Trial(**json.loads(result.read_text(encoding="utf-8")))
