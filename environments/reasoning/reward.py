"""Reward: 1 when the text between the closing answer tags is exactly right, else 0.

The library's scorers give partial credit (an answer that merely contains the right one, a
rubbish answer of the right shape), which a policy learns to exploit. So the answer must stand
alone between `<answer>` and `</answer>` at the very end, and only a full score counts.
"""

import tokenize
from typing import Any, Protocol

from antiphon.environments.reasoning import library
from antiphon.environments.reasoning.expressions import may_be_scored

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"

MAX_ANSWER_CHARS = 8192
"""Longer answers score 0 unread: no task here has one, and a scorer may be quadratic."""

SCORER_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)
"""What the library's scorers raise for text they did not expect.

There are a hundred scorers, written for well-formed answers: they index into what they split
(LookupError), convert (ValueError, TypeError), divide or overflow (ArithmeticError), parse
expressions (SyntaxError, NameError, TokenError, RecursionError as a RuntimeError) and assert.
None of them documents which. An answer that makes its scorer fail is a wrong answer, so the
catch must be as wide as these families; errors of the machine (OSError, KeyboardInterrupt)
stay outside it.
"""


COMPARE_DECIMALS = frozenset({"chain_sum", "products"})
"""Tasks with a scorer of their own that only reads the answer as a decimal number and compares it."""


class Scorer(Protocol):
    """The part of a library dataset that scores answers."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Score an answer to an entry in [0, 1]."""


def only_compares(task: str) -> bool:
    """Return whether a task's scorer only compares: it is the library's common one, or a known other.

    The common one looks whether the answer is, or contains, the reference answer.
    """
    dataset, _ = library.load_task(task)
    return task in COMPARE_DECIMALS or dataset.score_answer is library.common_scorer()


def extract_answer(completion: str) -> str | None:
    """Return the text between the last answer tags if they end the completion, else None.

    >>> extract_answer("<think>1+1=2;</think><answer>2</answer>")
    '2'
    >>> extract_answer("<answer>2</answer> or so") is None
    True
    """
    text = completion.rstrip()
    if not text.endswith(ANSWER_CLOSE):
        return None
    body = text[: -len(ANSWER_CLOSE)]
    start = body.rfind(ANSWER_OPEN)
    if start < 0:
        return None
    answer = body[start + len(ANSWER_OPEN) :]
    return None if ANSWER_CLOSE in answer else answer.strip()


def score(task: str, scorer: Scorer, entry: dict[str, Any], completion: str) -> float:
    """Reward one completion: 1.0 for a fully right answer between the tags, else 0.0."""
    answer = extract_answer(completion)
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    if not may_be_scored(_task_of(task, entry), answer, str(entry["answer"])):
        return 0.0
    try:
        return 1.0 if scorer.score_answer(answer, entry) == 1.0 else 0.0
    except SCORER_FAILURES:
        return 0.0


def explain(expected: str, completion: str, reward: float) -> str:
    """Say why a completion got its reward, without scoring it again.

    >>> explain("15", "<answer>12</answer>", 0.0), explain("15", "it is 15", 0.0)
    ("answer '12', expected '15'", 'no closing answer between <answer> and </answer> at the end')
    """
    answer = extract_answer(completion)
    if answer is None:
        return f"no closing answer between {ANSWER_OPEN} and {ANSWER_CLOSE} at the end"
    if len(answer) > MAX_ANSWER_CHARS:
        return f"answer of {len(answer)} characters, more than {MAX_ANSWER_CHARS}"
    if reward >= 1.0:
        return f"answer {answer!r} is right"
    return f"answer {answer!r}, expected {expected!r}"


def _task_of(task: str, entry: dict[str, Any]) -> str:
    """Return the task whose scorer decides: a composite task's entries name theirs."""
    metadata = entry.get("metadata")
    source = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    return source if task == "composite" and isinstance(source, str) else task
