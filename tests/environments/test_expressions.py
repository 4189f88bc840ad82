"""No scorer of the library runs what an answer says, whatever the task."""

import builtins

import pytest

from antiphon.core.errors import ConfigError
from antiphon.environments.environment import Environment
from antiphon.environments.reasoning.expressions import EVALUATED, PARSED_BY_SYMPY, may_be_scored
from antiphon.environments.reasoning.prompts import task_names
from antiphon.environments.reasoning.reward import only_compares
from antiphon.environments.registry import make_environment

CALL = "antiphon_canary()"
PAYLOADS = (
    CALL,
    f"[{CALL}]",
    f"[[{CALL}]]",
    f"1 + {CALL}",
    f"x + {CALL}",
    f"({CALL})",
    f"{{'a': {CALL}}}",
    f"str({CALL})",
    f"f'{{{CALL}}}'",
    f"[x for x in ({CALL},)]",
    f"lambda: {CALL}",
    f"(lambda: {CALL})()",
    "__import__('builtins').antiphon_canary()",
    "sqrt(__import__('builtins').antiphon_canary())",
    "().__class__.__base__.__subclasses__()[0](antiphon_canary())",
)
"""Texts that call the canary where they are evaluated."""
TOO_DEAR = {"arc_agi", "rearc", "composite"}
"""Tasks that cannot be built without data or parameters of their own."""


@pytest.mark.parametrize("task", [task for task in task_names() if task not in TOO_DEAR])
def test_no_scorer_runs_an_answer(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(builtins, "antiphon_canary", lambda: called.append(task), raising=False)
    environment = _built(task)
    problem = environment.problem("train", 0)
    rewards = environment.reward(problem, [f"<answer>{payload}</answer>" for payload in PAYLOADS])
    assert called == []
    if task != "game_of_life_halting":  # its scorer accepts any text
        assert rewards == [0.0] * len(PAYLOADS)


def _built(task: str) -> Environment:
    try:
        return make_environment(f"reasoning/{task}", {}, 0, 1, 1)
    except ConfigError as error:
        pytest.skip(str(error))


def test_those_that_evaluate_are_the_ones_that_are_named() -> None:
    """Without the check each of them runs a payload, so none is named for nothing."""
    assert set(task_names()) > EVALUATED | PARSED_BY_SYMPY
    assert not any(only_compares(task) for task in EVALUATED | PARSED_BY_SYMPY)
    assert only_compares("chain_sum") and not only_compares("countdown")


@pytest.mark.parametrize(
    ("task", "answer", "may"),
    [
        ("n_queens", "Q _ _ _\n_ _ Q _", True),
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", True),
        ("string_insertion", "ABCDE", True),
        ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "'A' * 10**9", False),
        ("binary_matrix", "[-1, +2]", True),
        ("binary_matrix", "[n for n in (1, 2)]", False),
        ("countdown", "(53*28 - 4)/2", True),
        ("countdown", "5!", False),
        ("countdown", "'9'", False),
        ("countdown", "__x", False),
        ("simple_integration", "7*X**2/2 + sin(X) + C", True),
        ("simple_integration", "Integral(X)", False),
        ("simple_integration", "sin(X, evaluate=False)", False),
        ("simple_integration", "X.func", False),
        ("polynomial_multiplication", "(" * 5000 + "x" + ")" * 5000, False),
    ],
)
def test_what_an_evaluating_scorer_may_see(task: str, answer: str, may: bool) -> None:
    assert may_be_scored(task, answer) is may


@pytest.mark.parametrize("task", sorted(EVALUATED | PARSED_BY_SYMPY))
def test_reference_answers_still_count(task: str) -> None:
    environment = _built(task)
    problem = environment.problem("train", 0)
    assert environment.reward(problem, [f"<answer>{problem.answer}</answer>"]) == [1.0]
