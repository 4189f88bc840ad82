"""Trial: one engine, in a process of its own, samples a run's prompts for a while and says what that took.

It samples with the start-up weights, undrafted but for what the samples of a group tell each other, as in a
run's first epoch.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import psutil

from antiphon.api.engine import Engine, EngineRequest
from antiphon.core.capacity.engine_tuning import Trial, Unit
from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError
from antiphon.core.seeds import derive_seed
from antiphon.environments.registry import environment_of
from antiphon.models.rendering import Renderer
from antiphon.services.rollout.process import start_engine
from antiphon.system.clock import wall_clock

WARM_TOKENS = 8
"""Tokens of each completion before anything is counted: the first steps of an engine are slower."""


def run_trial(config: RunConfig, seconds: float) -> Trial:
    """Build the engine of a configuration in this process and let it sample.

    Args:
        config: its prompts, group size and `rollout` section are used.
        seconds: how long it samples, its places always taken.

    Raises:
        ConfigError: when an engine cannot have these settings.
        AntiphonError: when no token came in that time.
    """
    engine = start_engine(config)
    settings = engine.settings
    requests = _requests(config, Renderer.load(config))
    with engine.rehearsal():
        short = islice(requests, settings.max_num_seqs)
        engine.add([replace(one, sampling=replace(one.sampling, max_tokens=WARM_TOKENS)) for one in short])
        while engine.unfinished:
            engine.step()
        seconds_so_far = wall_clock() - psutil.Process().create_time()
        started: dict[Unit, float] = {"seconds": seconds_so_far, "cpu_seconds": time.process_time()}
        trial = _sample(engine, requests, settings.max_num_seqs, seconds, started)
        if not trial.tokens:
            raise AntiphonError(f"the engine brought no token within {seconds:g} s; give more --seconds")
        if not trial.completion_tokens:  # none was that short
            trial = replace(trial, completion_tokens=float(config.sampling.max_tokens))
    engine.close()
    return trial


def _sample(
    engine: Engine, requests: Iterator[EngineRequest], places: int, seconds: float, started: dict[Unit, float]
) -> Trial:
    """Keep all places taken for this many seconds; completions of 0 tokens say that none ended."""
    ended: list[int] = []
    running: set[str] = set()
    begun, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        new = list(islice(requests, places - engine.unfinished))
        running.update(one.request_id for one in new)
        engine.add(new)
        for output in engine.step():
            running.discard(output.request_id)
            ended.append(len(output.token_ids))
    took: dict[Unit, float] = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
    }
    unfinished = sum(len(one.token_ids) for one in engine.progress(dict.fromkeys(running, 0)))
    engine.abort(list(running))
    return Trial(started, took, sum(ended) + unfinished, sum(ended) / max(1, len(ended)))


def _requests(config: RunConfig, renderer: Renderer) -> Iterator[EngineRequest]:
    """Yield the samples of one training prompt after the other, again and again."""
    section, sampling = config.environment, config.sampling
    environment = environment_of(section)
    parameters = sampling.parameters()
    for number in count():
        prompt = renderer.encode_prompt(environment.problem("train", number % section.train_size).text)
        for index in range(config.loop.group_size):
            seed = derive_seed("trial", config.run.seed, number, index)
            yield EngineRequest(f"{number}-{index}", prompt, seed, parameters, group=f"{number}")
