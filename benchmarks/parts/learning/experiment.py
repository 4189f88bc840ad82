"""Experiment: one recipe, one seed, trained step by step in one process.

Advantages, the filter's batch file, the objective and the optimizer are those of production. The
stages follow one another, and each step trains on what the version `lag` steps before it sampled,
so the staleness of a recipe is exactly what it says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.core.loop.admission import prompt_place
from antiphon.core.loop.advantages import group_advantages, has_variance
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Environment, Problem
from antiphon.environments.registry import make_environment
from antiphon.lineage.rollout_table import LeftOut, encode_batch
from antiphon.models.rendering import Renderer
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.policy import load_causal_model
from antiphon.services.learner.step import Trainer

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


class Task:
    """Environment, tokenizer and a copy of the policy's model, in this process."""

    def __init__(self, config: RunConfig) -> None:
        section = config.environment
        self._seed, self._sampling = config.run.seed, config.sampling
        self.environment: Environment = make_environment(
            section.name,
            section.parameters,
            section.seed,
            train_size=section.train_size,
            heldout_size=section.heldout_size,
        )
        self._renderer = Renderer.load(config)
        self._codec = self._renderer.codec
        model: Any = load_causal_model(config.model.path, torch.float32, gradient_checkpointing=False)
        self._model = model.eval()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample with these weights from now on; they are as the trainer publishes them."""
        self._model.load_state_dict(weights, strict=False)

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """Return the token ids of a problem."""
        return self._renderer.encode_prompt(problem.text)

    def sample(self, problems: Sequence[Problem], each: int, seed: int) -> list[list[Sampled]]:
        """Return `each` completions of every problem."""
        prompts = [prompt for problem in problems for prompt in [self.prompt(problem)] * each]
        found: list[Sampled] = []
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for begin in range(0, len(prompts), AT_ONCE):
                found += self._sample(prompts[begin : begin + AT_ONCE], generator)
        return [found[place : place + each] for place in range(0, len(found), each)]

    def _sample(self, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> list[Sampled]:
        longest, most, end = max(map(len, prompts)), self._sampling.max_tokens, self._codec.end_token_id
        inputs = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(inputs)
        for place, prompt in enumerate(prompts):  # padding on the left
            inputs[place, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[place, longest - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        tokens = torch.full((len(prompts), most), -1, dtype=torch.int64)
        logprobs = torch.zeros((len(prompts), most))
        growing = torch.arange(len(prompts))
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for length in range(most):
            logits = self._model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            known = torch.log_softmax(logits.float() / self._sampling.temperature, -1)
            drawn = torch.multinomial(known.exp(), 1, generator=generator)
            tokens[growing[alive], length] = drawn[alive, 0]
            logprobs[growing, length] = known.gather(1, drawn)[:, 0]
            alive &= drawn[:, 0] != end
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
            Sampled(row[:count].numpy(), known[:count].numpy(), bool(row[count - 1] == end))
            for row, known, count in zip(tokens, logprobs, (tokens >= 0).sum(1).tolist(), strict=True)
        ]

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


class Experiment:
    """The parties of one run in one process."""

    def __init__(self, config: RunConfig, lag: int, folder: Path) -> None:
        """Load them.

        Args:
            config: the recipe; its loop section says groups and filter.
            lag: a step trains on what the version this many steps before it sampled.
            folder: empty; checkpoints would go there.
        """
        self._config, self._lag = config, lag
        self._task = Task(config)
        self._trainer = Trainer(config, CheckpointStore(folder, 1))
        weights = self._trainer.start(0).weights
        self._versions: dict[int, dict[str, torch.Tensor]] = {0: weights.copies()}
        self.payload = b""
        """The batch file of the last step."""
        self._opened = 0

    def train(self, step: int) -> None:
        """Sample, judge and train one step."""
        self.payload = self._batch(step)
        self._versions[step + 1] = self._trainer.train(step, self.payload).weights.copies()
        self._versions.pop(step - self._lag, None)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Return the weights of a version that may still be sampled with."""
        return self._versions[version]

    def close(self) -> None:
        """Drop the trainer."""
        self._trainer.stop()

    def _problems(self) -> Iterator[tuple[Problem, int]]:
        """Yield the training problems in the order of production, each with the number of its group."""
        while True:
            number, self._opened = self._opened, self._opened + 1
            index, _ = prompt_place(self._config, number)
            yield self._task.environment.problem("train", index), number

    def _batch(self, step: int) -> bytes:
        """Sample and judge a step's groups; return its batch file."""
        loop = self._config.loop
        version = max(0, step - self._lag)
        self._task.load(self._versions[version])
        rows: list[BatchRow] = []
        left_out: list[LeftOut] = []
        wanted, taken, opened = loop.prompts_per_step, 0, 0
        most = int(wanted * loop.refill_limit) if loop.filter == "refill" else wanted
        while taken < wanted and opened < most:
            chosen = list(islice(self._problems(), min(wanted - taken, most - opened)))
            opened += len(chosen)
            seed = derive_seed("sampling", self._config.run.seed, step, opened) % 2**63
            groups = self._task.sample([problem for problem, _ in chosen], loop.group_size, seed)
            for (problem, number), group in zip(chosen, groups, strict=True):
                scored = np.asarray(self._task.reward(problem, group), dtype=np.float64)
                kept = loop.filter == "none" or has_variance(scored)
                taken += kept or loop.filter == "drop"
                if kept:
                    rows.extend(self._rows(problem, number, group, scored, version))
                elif loop.filter == "drop":
                    masks = self._config.algorithm.truncated_completions == "mask"
                    counted = [len(one.tokens) for one in group if one.ended or not masks]
                    left_out.append(LeftOut(f"g{number:07d}", len(counted), sum(counted)))
        return encode_batch(rows, left_out)

    def _rows(
        self, problem: Problem, number: int, group: list[Sampled], rewards: Any, version: int
    ) -> list[BatchRow]:
        algorithm = self._config.algorithm
        if algorithm.baseline == "batch" or algorithm.deviation == "batch":
            raise ConfigError(
                "algorithm.deviation=batch and algorithm.baseline=batch need all groups of a batch, "
                "which are made one by one here; leave them out"
            )
        masks = algorithm.truncated_completions == "mask"
        counted = np.array([one.ended or not masks for one in group])
        advantages = group_advantages(rewards, algorithm.divides_by_deviation, algorithm.baseline, counted)
        prompt = np.asarray(self._task.prompt(problem), dtype=np.int32)
        return [
            BatchRow(
                np.asarray(one.tokens, dtype=np.int32),
                np.asarray(one.logprobs, dtype=np.float32),
                (VersionSpan(version, 0, len(one.tokens)),),
                FinishReason.STOP if one.ended else FinishReason.LENGTH,
                group_id=f"g{number:07d}",
                prompt_key=problem.key,
                sample_index=index,
                prompt_token_ids=prompt,
                reward=float(rewards[index]),
                advantage=float(advantages[index]),
            )
            for index, one in enumerate(group)
        ]
