"""Held-out task: what a supervised training's weights score, while it goes on.

Workers of this machine sample the held-out prompts of an environment, each with an engine that begins with
the weights and ends with the evaluation. They run beside the trainer, which waits and keeps its memory.
"""

import asyncio
import tempfile
from pathlib import Path

import numpy as np

from antiphon.api.engine import EngineRequest
from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.seeds import derive_seed
from antiphon.environments.conversation import ConversationEnvironment
from antiphon.environments.registry import environment_of, with_sizes
from antiphon.environments.scoring.messages import Failed
from antiphon.lineage.kept import Kept
from antiphon.models.codec import decoder
from antiphon.models.rendering import Renderer
from antiphon.runs.preflight import check_characters, check_model
from antiphon.runs.suites import MOST_FAILED, SAMPLES_FILE, SampleAll, judged, sample_with_workers
from antiphon.services.coordinator.prompts import prompts_of
from antiphon.services.rollout.suite_worker import SAMPLES, SuiteSample


class HeldoutTask:
    """The held-out prompts of an environment of one turn."""

    def __init__(self, config: RunConfig, model: Path, sample: SampleAll = sample_with_workers) -> None:
        """Read and check the prompts.

        Args:
            config: whose environment, evaluation, sampling, rollout and reward say how.
            model: folder of the model that the weights belong to.
            sample: draws the samples.

        Raises:
            ConfigError: when the environment has turns or cannot be used, or a prompt does not fit the model.
        """
        config = with_sizes(config)
        environment = environment_of(config.environment)
        if isinstance(environment, ConversationEnvironment):
            raise ConfigError(
                f"environment.name={config.environment.name} has turns, and antiphon sft scores tasks of one "
                "turn; name such a task, or leave environment out"
            )
        check_model(config, model)
        places = range(min(config.evaluation.prompts, environment.size("heldout")))
        prompts = prompts_of(config, environment, renderer := Renderer.load(config))
        problems = (environment.problem("heldout", place) for place in places)
        check_characters(problems, renderer.codec, config.environment.max_lost_share)
        self._prompts = [prompts.prompt("heldout", place) for place in places]
        self._config, self._environment, self._sample = config, environment, sample
        self._decode = decoder(str(model))

    def score(self, folder: Path) -> float:
        """Return the mean reward of the model in a folder over prompts and samples.

        Raises:
            AntiphonError: when a worker fails, or more than a few answers cannot be judged.
        """
        config = self._config
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
        sampling = config.evaluation.parameters(config.sampling)
        requests = [
            EngineRequest(
                f"{prompt.key} {number}",
                prompt.token_ids,
                derive_seed("sft", config.run.seed, prompt.key, number),
                sampling,
                f"{prompt.key} 0",
            )
            for prompt in self._prompts
            for number in range(config.evaluation.samples)
        ]
        with tempfile.TemporaryDirectory(prefix="antiphon-sft-") as work:
            database = Path(work) / SAMPLES_FILE
            with Kept(database, SAMPLES, SuiteSample) as kept:
                self._sample(config, database, requests, min(max(1, config.rollout.workers), len(requests)))
                found = [sample for one in requests if (sample := kept.find(one.request_id)) is not None]
            assert len(found) == len(requests), "workers end in order when all is sampled"
            texts = [[self._decode(np.frombuffer(sample.tokens, np.int32))] for sample in found]
            keys = [one.request_id.rpartition(" ")[0] for one in requests]
            verdicts = asyncio.run(judged(config, self._environment, keys, texts, Path(work)))
        failed = [verdict for (verdict,) in verdicts if isinstance(verdict, Failed)]
        if len(failed) > MOST_FAILED * len(verdicts):
            raise AntiphonError(
                f"{len(failed)} of {len(verdicts)} held-out answers could not be judged, more than "
                f"{MOST_FAILED:.0%}, such as one: {failed[0].reason}"
            )
        return sum(0.0 if isinstance(verdict, Failed) else verdict for (verdict,) in verdicts) / len(verdicts)
