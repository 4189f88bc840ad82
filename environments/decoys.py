"""Decoys: answers that say nothing of the problem, and what an environment pays for them.

A policy finds within steps an answer that is paid whatever was asked, and learns nothing else. So constants
and right answers to other problems are handed in before a run. A task of yes and no pays half of them, which
is fair.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from antiphon.environments.environment import Problem
from antiphon.environments.scoring.messages import Failed, Verdict

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

Score = Callable[[str, Sequence[str]], Awaitable[Sequence[Verdict]]]
"""Returns the verdict on each answer to the problem with a key, as a scoring pool does."""


async def best_decoy(score: Score, problems: Sequence[Problem], limit: float) -> tuple[str, float, bool]:
    """Return the decoy that is paid most for some problems, its mean reward, and whether any reference answer
    to its own problem is paid.

    What is clearly paid less than `limit` for the first problems is not tried on the others, and what cannot
    be scored is paid nothing. Of a scorer that is too slow for the fewest problems nothing is known: it pays
    0, and references.
    """
    tried, pays_references = 0, False
    answers = dict.fromkeys(problem.answer for problem in problems[:FIRST])
    paid = {form.format(text): 0.0 for text in (*CONSTANTS, *answers) for form in FORMS}
    try:
        async with asyncio.timeout(GIVE_UP_S):
            for problem in problems[:PROBLEMS]:
                likely = {text: sum_ for text, sum_ in paid.items() if sum_ >= (limit - MARGIN) * tried}
                if tried >= FIRST and not likely:
                    break
                paid = likely if tried >= FIRST else paid
                own = [form.format(problem.answer) for form in FORMS if problem.answer]
                for text, verdict in zip(paid, await score(problem.key, list(paid)), strict=True):
                    reward = 0.0 if isinstance(verdict, Failed) else verdict
                    paid[text] += reward
                    pays_references |= reward > 0.0 and text in own
                tried += 1
    except TimeoutError:
        if tried < FEWEST:
            return "", 0.0, True
    constant = max(paid, key=lambda text: paid[text])
    return constant, paid[constant] / max(1, tried), pays_references
