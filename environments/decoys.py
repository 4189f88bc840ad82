"""Decoys: answers that say nothing of the problem, and what an environment pays for them.

A policy finds within steps an answer that is paid whatever was asked, and learns nothing else. So constants
and right answers to other problems are handed in before a run. A task of yes and no pays half of them, which
is fair.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.environments.environment import Environment, Problem
from antiphon.environments.scoring.messages import Failed, checked_reward

CONSTANTS = (
    *("", "0", "1", "-1", "0.5", "nan", "inf", "True", "False", "yes", "no", "None", "N/A"),
    *("a", "A", "()", "[]", "{}", "..."),
)
FORMS = ("{}", "<answer>{}</answer>")
"""How an answer may be written; which of them a task reads is not known here."""
PROBLEMS, FIRST = 64, 8
"""Problems that a decoy is tried on, and the first of them, after which only those that are paid go on."""
FEWEST = 16
"""With fewer problems a right answer to one of them is paid for a large share of all."""
MARGIN = 0.25
"""What luck may take from a decoy's share of the first problems."""
GIVE_UP_S = 20.0
"""A scorer that needs longer, such as a judge behind a network, is not tried any further."""


@dataclass(frozen=True, slots=True)
class DecoyReport:
    """What was found."""

    constant: str
    """The decoy that is paid most."""
    share: float
    """Its mean reward over the problems."""
    reference: float | None
    """Mean reward of the reference answers to the first problems; None where there are none."""


def try_decoys(
    environment: Environment,
    problems: Sequence[Problem],
    limit: float,
    clock: Callable[[], float] = time.monotonic,
) -> DecoyReport:
    """Hand in decoys for problems, one or more, and the reference answers of the first ones.

    Decoys that can hardly be paid for more than a share of `limit` are not tried on all problems.
    """
    until = clock() + GIVE_UP_S
    answers = dict.fromkeys(problem.answer for problem in problems[:FIRST])
    paid = {form.format(text): 0.0 for text in (*CONSTANTS, *answers) for form in FORMS}
    right = [
        max(_rewards(environment, problem, [form.format(problem.answer) for form in FORMS]))
        for problem in problems[:FIRST]
        if problem.answer
    ]
    tried = 0
    for problem in problems[:PROBLEMS]:
        if tried >= FIRST:
            paid = {text: sum_ for text, sum_ in paid.items() if sum_ >= (limit - MARGIN) * tried} or paid
        if clock() > until or (tried >= FIRST and max(paid.values()) < (limit - MARGIN) * tried):
            break
        for text, reward in zip(paid, _rewards(environment, problem, list(paid)), strict=True):
            paid[text] += reward
        tried += 1
    constant = max(paid, key=lambda text: paid[text])
    return DecoyReport(constant, paid[constant] / max(1, tried), sum(right) / len(right) if right else None)


def _rewards(environment: Environment, problem: Problem, texts: Sequence[str]) -> list[float]:
    """Return what each text is paid; one that the scorer fails on is paid nothing."""
    try:
        verdicts = [checked_reward(reward) for reward in environment.reward(problem, texts)]
    except Exception:  # noqa: BLE001 - a scorer of somebody else may raise anything
        return [0.0] if len(texts) == 1 else [_rewards(environment, problem, [text])[0] for text in texts]
    return [0.0 if isinstance(verdict, Failed) else verdict for verdict in verdicts]
