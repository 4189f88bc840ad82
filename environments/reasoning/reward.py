"""Reward: 1 when the text between the closing answer tags is exactly right, else 0.

The library's scorers give partial credit (an answer that merely contains the right one, a
rubbish answer of the right shape), which a policy learns to exploit. So the answer must stand
alone between `<answer>` and `</answer>` at the very end, and only a full score counts.

Some of the library's scorers give the answer to Python's `eval`, or to SymPy's `parse_expr`, which ends in
`eval`. The sandbox keeps such an answer from doing harm; what is checked here keeps it from earning a
reward by what it does instead of by what it says, and from taking a scorer's time: how large numbers and
sums become is bounded before anything is computed. Only the text and its syntax tree are looked at, nothing
is evaluated here.
"""

import ast
import math
import re
import tokenize
from typing import Any, Protocol

from antiphon.environments.reasoning import library

EVALUATED = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""Tasks that evaluate answers as Python, in order to read lists and strings."""
PARSED_BY_SYMPY = frozenset(
    {
        *("countdown", "puzzle24"),
        *("polynomial_multiplication", "simple_integration", "intermediate_integration"),
    }
)
"""Tasks that evaluate answers as SymPy's expressions."""
FUNCTIONS = frozenset(
    {
        *("sqrt", "cbrt", "exp", "log", "ln", "Abs", "sign"),
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"),
        *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "erf"),
    }
)
"""What an expression may call."""

MOST_DIGITS, MOST_EXPONENT, MOST_TERMS = 400.0, 400.0, 10_000
"""Bounds of an expression: digits of its numbers, its powers, and its terms once it is multiplied out."""
_NO_NUMBER = re.compile(r"(?<![a-z])(nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)
_HUGE_EXPONENT = re.compile(r"\d[._]?[eE][+-]?[\d_]{3,}")
_MOVES = {"rush_hour": re.compile(r"[+-]\d{3,}")}
"""What is too far for a piece on a board."""

_LITERAL = (ast.Expression, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict)
_SIGNED = (ast.UnaryOp, ast.USub, ast.UAdd, ast.Load)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Name, *_SIGNED)


def may_be_scored(task: str, answer: str, reference: str = "") -> bool:
    """Return whether the scorer of a task of reasoning-gym may see an answer.

    What stands for no finite number may be seen only where the reference answer is the same text.

    >>> may_be_scored("spiral_matrix", "1 2 3"), may_be_scored("spiral_matrix", "[1, 2, 3]")
    (True, True)
    >>> may_be_scored("spiral_matrix", "open('/etc/passwd')"), may_be_scored("chain_sum", "f(x)")
    (False, True)
    >>> may_be_scored("countdown", "(75 - 3)*4"), may_be_scored("countdown", "(4).__class__")
    (True, False)
    >>> may_be_scored("complex_arithmetic", "nan"), may_be_scored("countdown", "9**9**9**9")
    (False, False)
    """
    if answer != reference and (_NO_NUMBER.search(answer) or _HUGE_EXPONENT.search(answer)):
        return False
    if task in _MOVES and _MOVES[task].search(answer):
        return False
    if task not in EVALUATED and task not in PARSED_BY_SYMPY:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Python does not evaluate it either. SymPy has notations of its own (5!); no answer needs them.
        return task in EVALUATED
    if task in EVALUATED:
        return all(isinstance(node, (*_LITERAL, *_SIGNED)) for node in ast.walk(tree))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    if not all(_is_arithmetic(node, id(node) in called) for node in ast.walk(tree)):
        return False
    try:
        digits, terms = _size(tree.body)
    except (RecursionError, OverflowError):
        return False
    return digits <= MOST_DIGITS and terms <= MOST_TERMS


def _is_arithmetic(node: ast.AST, called: bool) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Name):
        return node.id in FUNCTIONS if called else not node.id.startswith("_")
    return isinstance(node, _ARITHMETIC)


def _size(node: ast.AST) -> tuple[float, float]:
    """Return upper bounds of an expression of arithmetic: digits of its numbers, and terms multiplied out.

    A name counts as a number without digits.
    """
    if isinstance(node, ast.Constant):
        value = abs(node.value) if isinstance(node.value, (int, float)) else 0
        return (abs(math.log10(value)) if value else 0.0), 1.0
    if isinstance(node, ast.UnaryOp):
        return _size(node.operand)
    if isinstance(node, ast.Call):  # such as exp, which of numbers makes larger ones
        digits = max((_size(argument)[0] for argument in node.args), default=0.0)
        return (10.0**digits if digits else 0.0), 1.0
    if not isinstance(node, ast.BinOp):
        return 0.0, 1.0
    (left, terms), (right, others) = _size(node.left), _size(node.right)
    if isinstance(node.op, (ast.Add, ast.Sub)):
        return max(left, right) + math.log10(2.0), terms + others
    if not isinstance(node.op, ast.Pow):
        return left + right, terms * others
    power = 10.0**right
    if power > MOST_EXPONENT:
        return math.inf, math.inf
    # The sum of n terms to the power k has (n + k - 1 over k) terms.
    made = math.comb(math.ceil(terms + power) - 1, math.ceil(power)) if terms > 1.0 else 1
    return left * power, float(min(made, 10 * MOST_TERMS))


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
