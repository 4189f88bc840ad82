"""tune: which settings of rollout engine and learner are the fastest on this machine for a run."""

import json
import math
from dataclasses import asdict
from pathlib import Path

from antiphon.cli.arguments import Json
from antiphon.cli.plan import measured_run
from antiphon.core.capacity.engine_tuning import Settings, Trial, describe
from antiphon.core.capacity.engine_tuning import overrides as words_of
from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.environments.registry import with_sizes
from antiphon.runs.tuning import (
    completions_of_a_worker,
    completions_of_the_learner,
    current_settings,
    spared_unit,
)
from antiphon.runs.tuning import tune as find

LEAST_S = 0.5


def tune(
    path: Path, /, *overrides: str, seconds: float = 8.0, alone: bool = False, as_json: Json = False
) -> None:
    """Find the fastest settings of rollout engine and learner on this machine.

    Tries precision, threads, cache blocks, prefix caching and compilation, each in an engine of its own on
    the run's model and prompts, then threads of the learner in steps of the run's size, and keeps what saves
    5% of a whole run with the start: a run has to be long for compiling to pay. On a CPU that workers share
    with the learner CPU seconds count, else seconds. Some nine engines and two to five learners start,
    one after the other. Nothing is written: the last line is what to give
    to `antiphon run`. Other threads or block sizes give other last bits, and another precision more than
    that (docs/guides/tuning.md), so a run keeps what it began with.

    Args:
        path: the YAML file.
        overrides: key=value pairs, such as rollout.concurrent_groups=8.
        seconds: how long each engine samples and each learner trains.
        alone: a worker has this machine to itself: seconds count, and the learner is not tuned.
        as_json: print one JSON document.
    """
    config = with_sizes(load_config(path, list(overrides)))
    if not LEAST_S <= seconds < math.inf:
        raise ConfigError(f"--seconds {seconds:g} is too short for a trial; give {LEAST_S:g} or more")
    now, unit = current_settings(config), spared_unit(config, alone)
    measured, source, _ = measured_run(config, None) or (None, "", config)
    completions = completions_of_a_worker(config, measured.acceptance if measured else 1.0)
    trials: list[dict[str, object]] = []
    first: dict[bool, Trial] = {}

    def told(settings: Settings, trial: Trial | None, reason: str) -> None:
        said = reason
        row: dict[str, object] = {"overrides": words_of(settings), "failed": reason}
        if trial is not None:
            samples = settings.keys() == now[0].keys()
            before = first.setdefault(samples, trial)
            number = completions if samples else completions_of_the_learner(config)
            cost = trial.cost(unit, number * before.completion_tokens)
            speed = trial.rate("seconds") / before.rate("seconds")
            step_s = measured.expected(config.loop, speed).step_s if measured and samples else None
            said = _figures(trial, cost) + (f"{step_s:8.2f} s" if step_s else "")
            row |= {**asdict(trial), "cost": cost, "step_s": step_s}
        trials.append(row)
        if not as_json:
            print(f"{describe(settings):60s}{said}", flush=True)

    if not as_json:
        what = "seconds" if unit == "seconds" else "CPU seconds, since the learner shares the cores"
        print(f"{completions:,} completions a worker; what counts: {what}")
        print(f"seconds a step as `antiphon plan` has them by run {source}\n" if measured else "")
        print(
            f"{'settings':60s}{'start':>8s}{'tokens/s':>11s}{'tokens/CPU-s':>14s}{'the run':>11s}"
            + (f"{'a step':>10s}" if measured else ""),
            flush=True,
        )
    found = find(config, seconds, unit, completions, alone, told)
    set_now = {word for settings in now for word in words_of(settings)}
    words = [word for settings in found for word in words_of(settings) if word not in set_now]
    if as_json:
        print(json.dumps({"unit": unit, "completions": completions, "trials": trials, "overrides": words}))
    elif words:
        print(f"\nbest: {'; '.join(map(describe, found))}\n{' '.join(words)}")
    else:
        said = "; ".join(map(describe, now))
        print(f"\nnothing is 5% better than what is set now: {said}")


def _figures(trial: Trial, cost: float) -> str:
    rates = f"{trial.rate('seconds'):11,.0f}{trial.rate('cpu_seconds'):14,.0f}"
    return f"{trial.start['seconds']:6.1f} s{rates}{cost:9,.0f} s"
