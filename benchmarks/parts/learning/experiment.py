"""Learning parts: one recipe, one seed, from the base model to the last version.

Advantages, the filter's batch file, the objective and the optimizer are those of production. The
stages follow one another, and each step trains on what the version `lag` steps before it sampled,
so the staleness of a recipe is exactly what it says.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.benchmarks.parts.learning.scoring import Sampled, Task
from antiphon.core.config import RunConfig
from antiphon.core.loop.admission import prompt_place
from antiphon.core.loop.advantages import group_advantages, has_variance
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Problem
from antiphon.lineage.rollout_table import LeftOut, encode_batch
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.step import Trainer
from antiphon.services.learner.training import TrainedStep


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run showed."""

    versions: list[int]
    scores: list[float]
    """Mean held-out reward at these versions."""
    rewards: list[float]
    """Mean reward of each step's samples, filtered groups included."""
    gradient_norms: list[float]
    trained_share: float
    """Trained groups over sampled ones."""


class Experiment:
    """The parties of one run in one process."""

    def __init__(self, config: RunConfig, lag: int, samples: int, folder: Path) -> None:
        """Load them.

        Args:
            config: the recipe; its loop section says groups and filter.
            lag: a step trains on what the version so many steps before it sampled.
            samples: completions of each held-out prompt in an evaluation.
            folder: empty; checkpoints would go there.
        """
        self._config, self._lag, self._samples = config, lag, samples
        self._task = Task(config)
        self._trainer = Trainer(config, CheckpointStore(folder, 1))
        weights = self._trainer.start(0).weights
        self._versions: dict[int, dict[str, torch.Tensor]] = {0: weights.copies()}
        self.payload = b""
        """The batch file of the last step."""
        self._opened = 0
        self._sampled_groups = self._trained_groups = 0

    def run(self, interval: int) -> Curve:
        """Train all steps and evaluate every so many versions."""
        curve = Curve([0], [self.evaluate(0)], [], [], 0.0)
        steps = self._config.run.steps
        for step in range(steps):
            trained, reward = self.train(step)
            curve.rewards.append(reward)
            curve.gradient_norms.append(trained.metrics["gradient_norm"])
            if (step + 1) % interval == 0 or step + 1 == steps:
                curve.versions.append(step + 1)
                curve.scores.append(self.evaluate(step + 1))
        self.close()
        share = self._trained_groups / max(1, self._sampled_groups)
        return Curve(curve.versions, curve.scores, curve.rewards, curve.gradient_norms, share)

    def train(self, step: int) -> tuple[TrainedStep, float]:
        """Sample, judge and train one step; return what it left and the mean reward of its samples."""
        self.payload, reward = self._batch(step)
        trained = self._trainer.train(step, self.payload)
        self._versions[step + 1] = trained.weights.copies()
        self._versions.pop(step - self._lag, None)
        return trained, reward

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Return the weights of a version that may still be sampled with."""
        return self._versions[version]

    def close(self) -> None:
        """Drop the trainer."""
        self._trainer.stop()

    def evaluate(self, version: int) -> float:
        """Return the mean reward of a version on the held-out problems."""
        self._task.load(self._versions[version])
        return self._task.heldout(self._samples, version)

    def _problems(self) -> Iterator[tuple[Problem, int]]:
        """Yield the training problems in the order of production, each with the number of its group."""
        while True:
            number, self._opened = self._opened, self._opened + 1
            index, _ = prompt_place(self._config, number)
            yield self._task.environment.problem("train", index), number

    def _batch(self, step: int) -> tuple[bytes, float]:
        """Sample and judge a step's groups; return its batch file and the mean reward of all samples."""
        loop = self._config.loop
        version = max(0, step - self._lag)
        self._task.load(self._versions[version])
        rows: list[BatchRow] = []
        left_out: list[LeftOut] = []
        taken = opened = 0
        rewards: list[float] = []
        most = (
            int(loop.prompts_per_step * loop.refill_limit)
            if loop.filter == "refill"
            else loop.prompts_per_step
        )
        wanted = loop.prompts_per_step
        while taken < wanted and opened < most:
            chosen = list(islice(self._problems(), min(wanted - taken, most - opened)))
            opened += len(chosen)
            for problem, number, group in self._sample(chosen, step, opened):
                scored = np.asarray(self._task.reward(problem, group), dtype=np.float64)
                rewards.extend(scored)
                if loop.filter != "none" and not has_variance(scored):
                    if loop.filter == "drop":
                        taken += 1
                        masks = self._config.algorithm.truncated_completions == "mask"
                        counted = [len(one.tokens) for one in group if one.ended or not masks]
                        left_out.append(LeftOut(f"g{number:07d}", len(counted), sum(counted)))
                    continue
                taken += 1
                self._trained_groups += 1
                rows.extend(self._rows(problem, number, group, scored, version))
        self._sampled_groups += opened
        return encode_batch(rows, left_out), float(np.mean(rewards))

    def _sample(
        self, chosen: list[tuple[Problem, int]], step: int, opened: int
    ) -> Iterator[tuple[Problem, int, list[Sampled]]]:
        seed = derive_seed("sampling", self._config.run.seed, step, opened) % 2**63
        problems = [problem for problem, _ in chosen]
        found = self._task.sample(problems, self._config.loop.group_size, seed)
        for (problem, number), group in zip(chosen, found, strict=True):
            yield problem, number, group

    def _rows(
        self, problem: Problem, number: int, group: list[Sampled], rewards: Any, version: int
    ) -> list[BatchRow]:
        algorithm = self._config.algorithm
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


def run_recipe(config: RunConfig, lag: int, samples: int, interval: int) -> Curve:
    """Run one recipe with one seed."""
    with tempfile.TemporaryDirectory(prefix="antiphon-learning-") as folder:
        return Experiment(config, lag, samples, Path(folder)).run(interval)
