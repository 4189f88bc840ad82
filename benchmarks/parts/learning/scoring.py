"""Learning parts: the task of a configuration, and the held-out reward of any weights on it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from antiphon.benchmarks.parts.learning.sampling import Sampled, Sampler
from antiphon.core.config import RunConfig
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Environment, Problem
from antiphon.environments.registry import make_environment
from antiphon.models.codec import TextCodec, resolve_model_path
from antiphon.services.learner.policy import load_causal_model


class Task:
    """Environment, tokenizer and sampler of one configuration, in this process."""

    def __init__(self, config: RunConfig) -> None:
        section, sampling = config.environment, config.sampling
        self._seed = config.run.seed
        self.environment: Environment = make_environment(
            section.name,
            section.parameters,
            section.seed,
            train_size=section.train_size,
            heldout_size=section.heldout_size,
        )
        self._codec = TextCodec.load(resolve_model_path(config.model.path))
        model = load_causal_model(config.model.path, torch.float32, gradient_checkpointing=False)
        self._sampler = Sampler(model, self._codec.end_token_id, sampling.max_tokens, sampling.temperature)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample with these weights from now on."""
        self._sampler.load(weights)

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """Return the token ids of a problem."""
        return self._codec.encode_prompt(problem.text)

    def sample(self, problems: Sequence[Problem], each: int, seed: int) -> list[list[Sampled]]:
        """Return `each` completions of every problem."""
        prompts = [prompt for problem in problems for prompt in [self.prompt(problem)] * each]
        found = self._sampler.sample(prompts, seed)
        return [found[place : place + each] for place in range(0, len(found), each)]

    def reward(self, problem: Problem, found: Sequence[Sampled]) -> list[float]:
        """Return the reward of each completion of a problem."""
        return self.environment.reward(problem, [self._codec.decode(one.tokens) for one in found])

    def heldout(self, samples: int, version: int, part: int = 0) -> float:
        """Return the mean reward of the loaded weights, `samples` completions of each held-out problem.

        Version and part only name the random stream, so that two trainers are asked the same way.
        """
        size = self.environment.size("heldout")
        problems = [self.environment.problem("heldout", index) for index in range(size)]
        found = self.sample(problems, samples, derive_seed("scoring", self._seed, version, part) % 2**63)
        return float(
            np.mean([self.reward(problem, group) for problem, group in zip(problems, found, strict=True)])
        )


def heldout_score(config: RunConfig, weights: Path, samples: int, version: int, part: int = 0) -> float:
    """Return the held-out reward of a safetensors file, or of one part of its samples; one thread."""
    torch.set_num_threads(1)
    task = Task(config)
    task.load(load_file(weights))
    return task.heldout(samples, version, part)
