"""Learning parts: the task of a configuration, and the held-out reward of any weights on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from antiphon.core.config import RunConfig
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Environment, Problem
from antiphon.environments.registry import make_environment
from antiphon.models.codec import TextCodec, resolve_model_path
from antiphon.services.learner.policy import load_causal_model

COMPACT_BELOW = 0.7
"""Finished completions leave the batch when fewer than this share of it still grow."""
AT_ONCE = 512
"""Completions sampled at the same time."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One completion."""

    tokens: npt.NDArray[np.int64]
    """[T]"""
    logprobs: npt.NDArray[np.float32]
    """[T] nats, at the temperature sampled with."""
    ended: bool
    """The model ended it; else it was cut at the longest length."""


class Sampler:
    """A copy of the policy's model that takes the weights of any version."""

    def __init__(self, model: Any, end_token_id: int, max_tokens: int, temperature: float) -> None:
        """`model` is a Hugging Face causal model; it is put into evaluation mode."""
        self._model = model.eval()
        self._end, self._most, self._temperature = end_token_id, max_tokens, temperature

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of a version, as the trainer publishes them."""
        self._model.load_state_dict(weights, strict=False)

    def sample(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Sampled]:
        """Return one completion for each prompt; repeat a prompt to have several of it."""
        found: list[Sampled] = []
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for begin in range(0, len(prompts), AT_ONCE):
                found += self._sample(prompts[begin : begin + AT_ONCE], generator)
        return found

    def _sample(self, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> list[Sampled]:
        longest = max(map(len, prompts))
        inputs = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(inputs)
        for place, prompt in enumerate(prompts):  # padding on the left
            inputs[place, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[place, longest - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        tokens = torch.full((len(prompts), self._most), -1, dtype=torch.int64)
        logprobs = torch.zeros((len(prompts), self._most))
        growing = torch.arange(len(prompts))
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for length in range(self._most):
            logits = self._model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            known = torch.log_softmax(logits.float() / self._temperature, -1)
            drawn = torch.multinomial(known.exp(), 1, generator=generator)
            tokens[growing[alive], length] = drawn[alive, 0]
            logprobs[growing, length] = known.gather(1, drawn)[:, 0]
            alive &= drawn[:, 0] != self._end
            left = int(alive.sum())
            if not left:
                break
            inputs, positions = drawn, positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones((len(mask), 1), dtype=mask.dtype)], 1)
            if left < COMPACT_BELOW * len(alive):
                kept = alive.nonzero()[:, 0]
                cache.batch_select_indices(kept)
                inputs, positions, mask, growing = inputs[kept], positions[kept], mask[kept], growing[kept]
                alive = alive[kept]
        return [
            Sampled(row[:count].numpy(), known[:count].numpy(), bool(row[count - 1] == self._end))
            for row, known, count in zip(tokens, logprobs, (tokens >= 0).sum(1).tolist(), strict=True)
        ]


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
