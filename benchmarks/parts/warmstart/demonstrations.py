"""Demonstrations: worked solutions of chain sums, of mixed quality and always well-formed.

A warm start trains on these before reinforcement learning begins. Each solution follows one
habit; the answer it ends with is always right, but a model that imitates a hasty habit will
seldom be. So the mixture of habits sets where a policy starts, and the skill of its best habit
sets how far reinforcement can take it. Every function is pure: the randomness comes from the
generator that the caller passes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

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
