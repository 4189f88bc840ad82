"""Warm-start recipes: everything that decides a base model's weights, as one frozen value."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.warmstart.tiny_model import ModelShape
from antiphon.core.errors import ConfigError, ContractError
from antiphon.environments.reasoning.reward import ANSWER_CLOSE, ANSWER_OPEN

_CHAIN = re.compile(r"-?\d+(?: [+-] -?\d+)*(?= =|\.$)")
"""Up to the equals sign of chain_sum, or the full stop of basic_arithmetic."""

RECHECK_ENDS, MOST_RECHECKS = 0.35, 8
"""Probability that a thorough solution ends after each time it was checked again, and the most times."""


class Habit(StrEnum):
    """A way of working out a chain sum, from the hastiest to the most thorough."""

    BLURT = "blurt"
    """Answers at once."""
    LEAP = "leap"
    """Adds several terms at a time."""
    RUNNING = "running"
    """Keeps a running total, one term at a time."""
    REWRITE = "rewrite"
    """Replaces the first two terms by their sum and writes out the whole rest each time."""
    RECHECK = "recheck"
    """Keeps a running total, and does so again from the start, two to eight times."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A completion worth imitating, and the habit it shows."""

    text: str
    """From `<think>` to `</answer>`, without the end token."""
    habit: Habit


def terms_of(problem_text: str) -> tuple[int, ...]:
    """Read the signed terms of a chain sum out of its prompt.

    >>> terms_of("State the final answer to the following arithmetic problem: 4 - 1 + 7 =")
    (4, -1, 7)

    Raises:
        ContractError: when the text holds no chain of sums.
    """
    found = _CHAIN.search(problem_text)
    if found is None:
        raise ContractError(f"no chain sum in the prompt {problem_text[:80]!r}")
    words = found.group().split()
    signs = [1] + [1 if sign == "+" else -1 for sign in words[1::2]]
    return tuple(sign * int(number) for sign, number in zip(signs, words[0::2], strict=True))


def demonstrate(problem_text: str, habits: Mapping[Habit, float], rng: np.random.Generator) -> Demonstration:
    """Write a solution in a habit drawn from `habits`.

    Args:
        problem_text: a chain sum as its environment writes it.
        habits: habit -> share; the shares sum to 1.
        rng: draws the habit, and how far a leap goes.

    Raises:
        ConfigError: when the shares are negative or do not sum to 1.
        ContractError: when the text holds no chain of sums.
    """
    shares = np.array(list(habits.values()), dtype=np.float64)
    if len(shares) == 0 or shares.min() < 0 or abs(shares.sum() - 1) > 1e-6:
        raise ConfigError(f"habits={dict(habits)} need shares of at least 0 that sum to 1")
    habit = list(habits)[int(rng.choice(len(shares), p=shares / shares.sum()))]
    terms = terms_of(problem_text)
    work = _WORK[habit](terms, rng)
    answer = f"{ANSWER_OPEN}{sum(terms)}{ANSWER_CLOSE}"
    return Demonstration(text=f"<think>{work}</think>{answer}", habit=habit)


def _rewrite(terms: tuple[int, ...]) -> str:
    lines = [_sum(terms)]
    for done in range(1, len(terms)):
        lines.append(_sum((sum(terms[: done + 1]), *terms[done + 1 :])))
    return "=".join(lines)


def _totals(terms: tuple[int, ...], stride: int) -> str:
    total, steps = terms[0], []
    for start in range(1, len(terms), stride):
        chunk = terms[start : start + stride]
        steps.append(f"{_sum((total, *chunk))}={total + sum(chunk)};")
        total += sum(chunk)
    return "".join(steps)


def _rechecked(terms: tuple[int, ...], rng: np.random.Generator) -> str:
    again = min(1 + int(rng.geometric(RECHECK_ENDS)), MOST_RECHECKS)
    return _totals(terms, 1) * (1 + again)


def _sum(terms: tuple[int, ...]) -> str:
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:])


_WORK: dict[Habit, Callable[[tuple[int, ...], np.random.Generator], str]] = {
    Habit.BLURT: lambda terms, rng: "",
    Habit.LEAP: lambda terms, rng: _totals(terms, int(rng.integers(2, 4))),
    Habit.RUNNING: lambda terms, rng: _totals(terms, 1),
    Habit.REWRITE: lambda terms, rng: _rewrite(terms),
    Habit.RECHECK: _rechecked,
}


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training with its own habits and learning-rate curve (warm-up, then cosine)."""

    steps: int
    learning_rate: float
    """At the peak."""
    final_learning_rate: float
    """At the last step."""
    habits: Mapping[Habit, float]
    """Habit -> share of the demonstrations."""
    warmup_steps: int = 30


@dataclass(frozen=True, slots=True)
class WarmstartRecipe:
    """Everything that decides the weights."""

    name: str
    parameters: Mapping[str, Any]
    """Parameters of the environment: how hard the problems are."""
    phases: tuple[Phase, ...]
    environment: str = "reasoning/chain_sum"
    shape: ModelShape = field(default_factory=ModelShape)
    seed: int = 0
    problems: int = 60_000
    """Training problems, each used again once all were."""
    batch_tokens: int = 4096
    """Tokens of one batch, padding included."""
    bucket: int = 512
    """Demonstrations that are sorted by length together, so that batches hardly need padding."""
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        if not self.phases or min(phase.steps for phase in self.phases) < 1:
            raise ConfigError(f"warmstart recipe {self.name!r} needs phases of at least one step")

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


def recipe_as_json(recipe: WarmstartRecipe) -> dict[str, Any]:
    """Return the recipe as plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return plain


CHAIN_SUM = WarmstartRecipe(
    name="chain-sum",
    parameters={"min_terms": 3, "max_terms": 12, "min_digits": 1, "max_digits": 1},
    phases=(
        Phase(
            steps=400,
            learning_rate=6e-3,
            final_learning_rate=2e-4,
            habits={Habit.RUNNING: 0.88, Habit.LEAP: 0.08, Habit.BLURT: 0.04},
        ),
        Phase(
            steps=60,
            learning_rate=1e-3,
            final_learning_rate=1e-4,
            warmup_steps=10,
            habits={Habit.RUNNING: 0.1, Habit.LEAP: 0.6, Habit.BLURT: 0.3},
        ),
    ),
)
"""The demo's base model. The first phase teaches the careful habit until it hardly ever fails,
the second makes the hasty ones the usual ones: what reinforcement finds is already there."""

BASIC_ARITHMETIC = WarmstartRecipe(
    name="basic-arithmetic",
    environment="reasoning/basic_arithmetic",
    parameters={
        "min_terms": 2,
        "max_terms": 16,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    phases=(
        Phase(
            steps=700,
            learning_rate=6e-3,
            final_learning_rate=2e-4,
            habits={Habit.RUNNING: 0.7, Habit.REWRITE: 0.2, Habit.LEAP: 0.06, Habit.BLURT: 0.04},
        ),
        Phase(
            steps=60,
            learning_rate=1e-3,
            final_learning_rate=1e-4,
            warmup_steps=10,
            habits={Habit.RUNNING: 0.08, Habit.REWRITE: 0.04, Habit.LEAP: 0.58, Habit.BLURT: 0.3},
        ),
    ),
)
"""A base model whose two careful habits differ in length by far: work that grows with the number of
terms, and work that grows with its square. So the lengths of what reinforcement finds have a long tail."""

LONG_ANSWERS = WarmstartRecipe(
    name="long-answers",
    environment="reasoning/basic_arithmetic",
    parameters={**BASIC_ARITHMETIC.parameters, "min_terms": 3, "max_terms": 12},
    phases=(
        Phase(
            steps=900,
            learning_rate=6e-3,
            final_learning_rate=2e-4,
            habits={Habit.RUNNING: 0.5, Habit.RECHECK: 0.4, Habit.LEAP: 0.06, Habit.BLURT: 0.04},
        ),
        Phase(
            steps=60,
            learning_rate=1e-3,
            final_learning_rate=1e-4,
            warmup_steps=10,
            habits={Habit.RUNNING: 0.2, Habit.RECHECK: 0.3, Habit.LEAP: 0.3, Habit.BLURT: 0.2},
        ),
    ),
)
"""A base model that writes long answers from the start, as models that reason do: most are careful, a few are
ten times longer than the usual one, and rollouts of the same prompt repeat each other."""

RECIPES = {recipe.name: recipe for recipe in (CHAIN_SUM, BASIC_ARITHMETIC, LONG_ANSWERS)}
"""Recipes by name."""
