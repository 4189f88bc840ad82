"""Batches to measure the learner's step on: those of the demo, and long-tailed ones."""

import math
import tempfile
from collections.abc import Collection
from pathlib import Path

import numpy as np

from antiphon.benchmarks.parts.learning.experiment import Experiment
from antiphon.core.config import RunConfig
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.lineage.rollout_table import decode_batch

MEDIAN_TOKENS, SIGMA = 40, 1.0
"""Long-tailed completions: median, tokens, and deviation of the lengths' logarithm."""


def demo_batches(config: RunConfig, steps: Collection[int]) -> list[list[BatchRow]]:
    """Run a recipe on its real model until the last of `steps`, and return the batches of these steps."""
    found = []
    with tempfile.TemporaryDirectory(prefix="antiphon-learner-speed-") as folder:
        experiment = Experiment(config, config.loop.max_staleness, 1, Path(folder))
        for step in range(max(steps) + 1):
            experiment.train(step)
            if step in steps:
                found.append(decode_batch(experiment.payload))
        experiment.close()
    return found


def long_tailed_batch(like: list[BatchRow], vocabulary: int, longest: int, seed: int) -> list[BatchRow]:
    """Return a batch with the groups, prompts and advantages of another one, and log-normal lengths.

    Its tokens are drawn at random, so that completions have nothing in common but the prompt.

    Args:
        like: the other batch.
        vocabulary: token ids are below it.
        longest: no completion is longer, tokens.
        seed: of lengths and tokens.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for row in like:
        length = int(np.clip(rng.lognormal(math.log(MEDIAN_TOKENS), SIGMA), 2, longest))
        rows.append(
            BatchRow(
                rng.integers(0, vocabulary, length).astype(np.int32),
                rng.uniform(-1.5, -0.5, length).astype(np.float32),
                (VersionSpan(row.spans[0].version, 0, length),),
                FinishReason.STOP,
                group_id=row.group_id,
                prompt_key=row.prompt_key,
                sample_index=row.sample_index,
                prompt_token_ids=row.prompt_token_ids,
                reward=row.reward,
                advantage=row.advantage,
            )
        )
    return rows
