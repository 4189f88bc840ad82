"""Imitation: supervised training on demonstrations, repeatable to the bit.

Problems, demonstrations and batches follow from the recipe's seed alone; training runs in
float32 on one thread with deterministic kernels.

Legend: B demonstrations of one batch, T tokens of the longest of them.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from antiphon.benchmarks.parts.warmstart.recipe import Habit, Phase, WarmstartRecipe, demonstrate
from antiphon.core.errors import IntegrityError
from antiphon.core.seeds import generator
from antiphon.environments.environment import Environment

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that drives singular values towards 1 in a few rounds."""
ROUNDS = 5
RMS_OF_ADAMW = 0.2
"""Updates are scaled to the root mean square that AdamW's have, so learning rates carry over."""


class Muon:
    """Optimizer for matrices: Nesterov momentum, orthogonal updates, decoupled weight decay."""

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.01
    ):
        """Take over `matrices`, all of two dimensions."""
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            self._by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        self._velocities = {
            shape: torch.zeros((len(group), *shape)) for shape, group in self._by_shape.items()
        }

    def step(self, learning_rate: float) -> None:
        """Update every matrix along its gradient, which must be there."""
        with torch.no_grad():
            for shape, matrices in self._by_shape.items():
                gradients = torch.stack([matrix.grad for matrix in matrices])
                velocities = self._velocities[shape].lerp_(gradients, 1 - self._momentum)
                updates = orthogonalise(gradients.lerp(velocities, self._momentum))
                scale = RMS_OF_ADAMW * max(shape) ** 0.5
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - learning_rate * self._weight_decay)
                    matrix.add_(update, alpha=-learning_rate * scale)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Push the singular values of each matrix in [N, rows, columns] close to 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    wide = wide / (wide.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(ROUNDS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if tall else wide


IGNORED = -100
"""Target of a token that takes no part in the loss: the prompt's and the padding."""

Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, loss) after each step."""


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Fix what rounding depends on: kernels and thread count; restore them afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(threads)


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: Environment,
    recipe: WarmstartRecipe,
    progress: Progress,
) -> tuple[list[float], int]:
    """Train `model` in place through all phases of the recipe.

    Returns:
        The loss of each step (nats per completion token) and the number of tokens seen.

    Raises:
        IntegrityError: when the loss stops being a number.
    """
    model.train()
    losses: list[float] = []
    tokens = 0
    writer = _Writer(tokenizer, environment, recipe)
    for number, phase in enumerate(recipe.phases):
        muon, adamw = _optimizers(model, recipe.weight_decay)
        batches = writer.batches(number, phase)
        for step in range(phase.steps):
            ids, targets = next(batches)
            logits = model(input_ids=ids, use_cache=False).logits
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
            rate = learning_rate(phase, step)
            muon.step(rate)
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
            model.zero_grad()
            losses.append(loss.item())
            tokens += ids.numel()
            if not math.isfinite(losses[-1]):
                raise IntegrityError(
                    f"warm start {recipe.name!r}: the loss of step {len(losses)} is {losses[-1]}; "
                    "lower the learning_rate of its phase"
                )
            progress(len(losses), recipe.steps, losses[-1])
    return losses, tokens


def _optimizers(model: Qwen3ForCausalLM, weight_decay: float) -> tuple[Muon, torch.optim.AdamW]:
    """Give the matrices inside the layers to Muon and everything else to AdamW.

    With AdamW alone the careful habit takes thousands of steps to learn, with Muon hundreds.
    Muon's updates are scaled to AdamW's size, so one learning rate serves both.
    """
    inner = {name: ".layers." in name and value.ndim == 2 for name, value in model.named_parameters()}
    hidden = [value for name, value in model.named_parameters() if inner[name]]
    rest = [value for name, value in model.named_parameters() if not inner[name]]
    return (
        Muon(hidden, weight_decay=weight_decay),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=weight_decay),
    )


def learning_rate(phase: Phase, step: int) -> float:
    """Return the learning rate of `step` within a phase: linear warm-up, then a half cosine."""
    if step < phase.warmup_steps:
        return phase.learning_rate * (step + 1) / phase.warmup_steps
    done = (step - phase.warmup_steps) / max(1, phase.steps - phase.warmup_steps)
    span = phase.learning_rate - phase.final_learning_rate
    return phase.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * done))


class _Writer:
    """Writes demonstrations and lays them out in batches of like length."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, environment: Environment, recipe: WarmstartRecipe):
        self._tokenizer = tokenizer
        self._environment = environment
        self._recipe = recipe
        self._cursor = 0

    def batches(self, number: int, phase: Phase) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield token ids and targets, both [B, T] int64, without end."""
        rng = generator("warmstart", self._recipe.seed, number)
        while True:
            rows = sorted(
                (self._demonstration(phase.habits, rng) for _ in range(self._recipe.bucket)),
                key=lambda row: len(row[0]) + len(row[1]),
            )
            cuts = self._cuts([len(prompt) + len(completion) for prompt, completion in rows])
            for place in rng.permutation(len(cuts)):
                yield self._tensors(rows[slice(*cuts[place])])

    def _demonstration(
        self, habits: Mapping[Habit, float], rng: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        problem = self._environment.problem("train", self._cursor % self._recipe.problems)
        self._cursor += 1
        text = demonstrate(problem.text, habits, rng).text
        prompt, completion = self._tokenizer([problem.text, text])["input_ids"]
        return prompt, [*completion, self._tokenizer.eos_token_id]

    def _cuts(self, lengths: list[int]) -> list[tuple[int, int]]:
        """Cut rows, sorted by length, into stretches that hold `batch_tokens` when padded."""
        cuts, start = [], 0
        for stop, longest in enumerate(lengths, start=1):
            if (stop - start) * longest > self._recipe.batch_tokens and stop - 1 > start:
                cuts.append((start, stop - 1))
                start = stop - 1
        return [*cuts, (start, len(lengths))]

    def _tensors(self, rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(prompt) + len(completion) for prompt, completion in rows)
        pad = self._tokenizer.pad_token_id
        ids: npt.NDArray[np.int64] = np.full((len(rows), longest), pad, dtype=np.int64)
        targets: npt.NDArray[np.int64] = np.full((len(rows), longest), IGNORED, dtype=np.int64)
        for row, (prompt, completion) in enumerate(rows):
            stop = len(prompt) + len(completion)
            ids[row, :stop] = prompt + completion
            targets[row, len(prompt) : stop] = completion
        return torch.from_numpy(ids), torch.from_numpy(targets)
