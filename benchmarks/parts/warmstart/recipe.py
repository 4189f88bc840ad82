"""Warm-start recipes: everything that decides a base model's weights, as one frozen value."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.benchmarks.parts.warmstart.demonstrations import Habit
from antiphon.benchmarks.parts.warmstart.tiny_model import ModelShape
from antiphon.core.errors import ConfigError


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
