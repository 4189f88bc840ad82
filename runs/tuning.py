"""Tuning: tries settings of the rollout engine one process after the other and finds the best for a run."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from antiphon.core.capacity.engine_tuning import EngineChoice, Trial, Unit, choose_engine
from antiphon.core.capacity.model import shape_of
from antiphon.core.config import RunConfig, dump_config
from antiphon.core.errors import AntiphonError
from antiphon.services.rollout.engine.environment import child_environment, device
from antiphon.system.compiler import why_not_compiling
from antiphon.system.processes import ChildProcess, quote

SLACK_S = 120.0
"""What a trial may take beyond its engine's start and its sampling."""
STOP_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a trial that is given up."""

Told = Callable[[EngineChoice, Trial | None, str], None]
"""Hears of each trial: settings, what came of it, and the reason where nothing did."""


def current_choice(config: RunConfig) -> EngineChoice:
    """Return what a configuration says now."""
    rollout = config.rollout
    return EngineChoice(
        rollout.threads, rollout.block_size, rollout.prefix_caching, rollout.compiled, config.model.dtype
    )


def values_to_try(config: RunConfig) -> dict[str, Sequence[Any]]:
    """Return setting -> values to try on this machine, in the order in which settings are tried."""
    cores = len(os.sched_getaffinity(0))
    on_cpu = device() == "cpu"
    threads = sorted({n for n in (1, 2, 4, 8, 16, 32, cores) if n <= cores}) if on_cpu else []
    blocks = (32, 64, 128) if on_cpu else (16, 32, 64)
    compiles = not on_cpu or why_not_compiling() is None
    return {
        "dtype": ("float32", "bfloat16"),
        "threads": threads,
        "block_size": blocks,
        "prefix_caching": (False, True),
        "compiled": (False, True) if compiles else (config.rollout.compiled,),
    }


def spared_unit(config: RunConfig, alone: bool) -> Unit:
    """Return what to spare: CPU seconds where workers and learner share cores, seconds elsewhere."""
    shared = config.rollout.workers > 0 and device() == "cpu" and not alone
    return "cpu_seconds" if shared else "seconds"


def completions_of_a_worker(config: RunConfig, acceptance: float = 1.0) -> int:
    """Return how many completions of training one worker of a run samples, those that are replaced too."""
    step = shape_of(config.loop, 1.0, 0.0, 1.0, 1.0, acceptance).raw_completions
    return int(config.run.steps * step) // max(1, config.rollout.workers)


def tune(config: RunConfig, seconds: float, unit: Unit, completions: int, told: Told) -> EngineChoice:
    """Try settings and return the best for the run of a configuration.

    Args:
        config: the run; its model and prompts are used.
        seconds: how long each engine samples.
        unit: what is spared.
        completions: what one worker samples in the run.
        told: hears of each trial.

    Raises:
        AntiphonError: when an engine with the settings of now does not work.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-tune-") as folder:

        def attempt(choice: EngineChoice) -> Trial | None:
            try:
                trial = try_engine(config, choice, seconds, Path(folder))
            except AntiphonError as error:
                if choice == now:
                    raise
                told(choice, None, str(error))
                return None
            told(choice, trial, "")
            return trial

        now = current_choice(config)
        return choose_engine(now, values_to_try(config), attempt, unit, completions)


def try_engine(config: RunConfig, choice: EngineChoice, seconds: float, folder: Path) -> Trial:
    """Let an engine with these settings sample in a process of its own.

    Raises:
        AntiphonError: when it could not, with its last words.
    """
    path, result = folder / "config.yaml", folder / "trial.json"
    result.unlink(missing_ok=True)
    rollout = asdict(choice)
    model = config.model.model_copy(update={"dtype": rollout.pop("dtype")})
    sections = {"model": model, "rollout": config.rollout.model_copy(update=rollout)}
    path.write_text(dump_config(config.model_copy(update=sections)), encoding="utf-8")
    words = [
        sys.executable,
        "-P",
        "-m",
        "antiphon.services.rollout.trial",
        str(path),
        str(result),
        f"{seconds}",
    ]
    process = ChildProcess(words, folder / "trial.log", child_environment(choice.threads))
    limit_s = config.services.start_timeout_s + seconds + SLACK_S
    try:
        process.wait(limit_s)
    except TimeoutExpired:
        raise AntiphonError(f"no result within {limit_s:g} s: {quote(process.lines())}") from None
    finally:
        process.stop(STOP_S)
    if process.returncode != 0 or not result.exists():
        raise AntiphonError(f"an engine with {choice.describe()} {process.how_it_ended()}")
    return Trial(**json.loads(result.read_text(encoding="utf-8")))
