"""Decoys: answers that say nothing of the problem, and what an environment pays for them.

A policy finds within steps an answer that is paid whatever was asked, and learns nothing else. So constants
and right answers to other problems are handed in before a run. A task of yes and no pays half of them, which
is fair.
"""

import time
from collections.abc import Callable, Sequence

from antiphon.environments.environment import Environment, Problem
from antiphon.environments.scoring.messages import Failed, checked_reward

CONSTANTS = (
    *("", "0", "1", "-1", "0.5", "nan", "inf", "True", "False", "yes", "no", "None", "N/A"),
    *("a", "A", "()", "[]", "{}", "..."),
)
FORMS = ("{}", "<answer>{}</answer>")
"""How an answer may be written; which of them a task reads is not known here."""
PROBLEMS, FIRST, FEWEST = 64, 8, 16
"""Problems that a decoy is tried on, the first of them, after which only those that are paid go on, and the
fewest: with less, a right answer to one problem is paid for a large share of all."""
MARGIN = 0.25
"""What luck may take from a decoy's share of the first problems."""
GIVE_UP_S = 20.0
"""A scorer that needs longer, such as a judge behind a network, is not tried any further."""


def best_decoy(
    environment: Environment,
    problems: Sequence[Problem],
    limit: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, float]:
    """Return the decoy that is paid most for some problems, and its mean reward.

    What is clearly paid less than `limit` for the first problems is not tried on the others. Of a scorer that
    is too slow for the fewest of them nothing is known: it pays 0.
    """
    until, tried = clock() + GIVE_UP_S, 0
    answers = dict.fromkeys(problem.answer for problem in problems[:FIRST])
    paid = {form.format(text): 0.0 for text in (*CONSTANTS, *answers) for form in FORMS}
    for problem in problems[:PROBLEMS]:
        likely = {text: sum_ for text, sum_ in paid.items() if sum_ >= (limit - MARGIN) * tried}
        if clock() > until:
            paid = paid if tried >= FEWEST else dict.fromkeys(paid, 0.0)
            break
        if tried >= FIRST and not likely:
            break
        paid = likely if tried >= FIRST else paid
        for text, reward in zip(paid, rewards(environment, problem, list(paid)), strict=True):
            paid[text] += reward
        tried += 1
    constant = max(paid, key=lambda text: paid[text])
    return constant, paid[constant] / max(1, tried)


def rewards(environment: Environment, problem: Problem, texts: Sequence[str]) -> list[float]:
    """Return what each text is paid; one that the scorer fails on is paid nothing."""
    try:
        verdicts = [checked_reward(reward) for reward in environment.reward(problem, texts)]
    except Exception:  # noqa: BLE001 - a scorer of somebody else may raise anything
        return [0.0] if len(texts) == 1 else [rewards(environment, problem, [text])[0] for text in texts]
    return [0.0 if isinstance(verdict, Failed) else verdict for verdict in verdicts]
