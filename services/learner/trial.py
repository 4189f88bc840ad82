"""Trial: a learner, in a process of its own, makes steps of a run's size for a while and says what they took.

Completions are made up: tokens of the prompts in any order, lengths of a geometric distribution. The learning
rate is 0, so the weights stay those of the start.
"""

import time

import numpy as np
import psutil

from antiphon.core.capacity.engine_tuning import Trial, Unit
from antiphon.core.config import RunConfig
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.environments.registry import environment_of
from antiphon.models.rendering import Renderer
from antiphon.models.spared_libraries import spare_unused_libraries
from antiphon.system.clock import wall_clock


def run_trial(config: RunConfig, seconds: float, completion_tokens: float) -> Trial:
    """Build the learner of a configuration in this process and let it train.

    Args:
        config: its prompts, groups and `learner` section are used.
        seconds: how long it trains; one step is always made.
        completion_tokens: mean length, before `sampling.max_tokens` bounds it.

    Raises:
        ConfigError: when a learner cannot have these settings.
    """
    spare_unused_libraries()
    from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
    from antiphon.services.learner.objective import UpdateTotals
    from antiphon.services.learner.packing import Packing

    config = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 1})})
    rows = made_up_rows(config, Renderer.load(config), completion_tokens)
    packing = Packing(rows, 0, config.learner.micro_batch_tokens)
    batches, totals = list(packing.of_rank(0)), UpdateTotals(packing.trajectories, packing.completion_tokens)
    engine = DeepSpeedEngine(config)
    engine.update(batches, totals, share=0.0)  # the first one is slower
    started: dict[Unit, float] = {
        "seconds": wall_clock() - psutil.Process().create_time(),
        "cpu_seconds": time.process_time(),
    }
    in_step = sum(len(row.token_ids) for row in rows)
    steps, begun, cpu = 0, time.perf_counter(), time.process_time()
    while not steps or time.perf_counter() - begun < seconds:
        engine.update(batches, totals, share=0.0)
        steps += 1
    took: dict[Unit, float] = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
    }
    engine.close()
    return Trial(started, took, steps * in_step, in_step / len(rows))


def made_up_rows(config: RunConfig, renderer: Renderer, completion_tokens: float) -> list[BatchRow]:
    """Return a step's groups of training prompts with random completions; every second one is the better."""
    section, rng = config.environment, np.random.default_rng(config.run.seed)
    environment = environment_of(section)
    rows = []
    for number in range(config.loop.prompts_per_step):
        text = environment.problem("train", number % section.train_size).text
        prompt = np.array(renderer.encode_prompt(text), np.int32)
        for index in range(config.loop.group_size):
            length = min(int(rng.geometric(1.0 / max(1.0, completion_tokens))), config.sampling.max_tokens)
            rows.append(
                BatchRow(
                    rng.choice(prompt, length),
                    rng.uniform(-1.5, -0.5, length).astype(np.float32),
                    (VersionSpan(0, 0, length),),
                    FinishReason.STOP,
                    group_id=str(number),
                    prompt_key=str(number),
                    sample_index=index,
                    prompt_token_ids=prompt,
                    reward=float(index % 2),
                    advantage=1.0 if index % 2 else -1.0,
                )
            )
    return rows
