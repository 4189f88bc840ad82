"""Expressions: which answers a scorer that evaluates its answer may see.

Some of the library's scorers give the answer to Python's `eval`, or to SymPy's `parse_expr`, which ends in
`eval`. The sandbox keeps such an answer from doing harm; this keeps it from earning a reward by what it does
instead of by what it says. Only the syntax tree is looked at, nothing is evaluated here.
"""

import ast

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

_LITERAL = (ast.Expression, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict)
_SIGNED = (ast.UnaryOp, ast.USub, ast.UAdd, ast.Load)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Name, *_SIGNED)


def may_be_scored(task: str, answer: str) -> bool:
    """Return whether the scorer of a task of reasoning-gym may see an answer.

    >>> may_be_scored("spiral_matrix", "1 2 3"), may_be_scored("spiral_matrix", "[1, 2, 3]")
    (True, True)
    >>> may_be_scored("spiral_matrix", "open('/etc/passwd')"), may_be_scored("chain_sum", "f(x)")
    (False, True)
    >>> may_be_scored("countdown", "(75 - 3)*4"), may_be_scored("countdown", "(4).__class__")
    (True, False)
    """
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
    return all(_is_arithmetic(node, id(node) in called) for node in ast.walk(tree))


def _is_arithmetic(node: ast.AST, called: bool) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Name):
        return node.id in FUNCTIONS if called else not node.id.startswith("_")
    return isinstance(node, _ARITHMETIC)
