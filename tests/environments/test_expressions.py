"""No scorer of the library runs what an answer says, whatever the task."""

import builtins

import pytest

from antiphon.core.errors import ConfigError
from antiphon.environments.environment import Environment
from antiphon.environments.reasoning.prompts import task_names
from antiphon.environments.reasoning.reward import EVALUATED, PARSED_BY_SYMPY, may_be_scored, only_compares
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
        ("countdown", "9**9**9**9", False),
        ("countdown", "((9**99)**99)**99", False),
        ("countdown", "1e999999999", False),
        ("countdown", "1e-999999999", False),
        ("countdown", "1." + "0" * 300, True),
        ("countdown", "exp(exp(9))", False),
        ("countdown", "+".join(["1"] * 4000), False),
        ("polynomial_multiplication", "8*x**7 - 3*x**3*y**2 + 1", True),
        ("polynomial_multiplication", "(x + 1)*(y - 2)**3", True),
        ("polynomial_multiplication", "(a + b + c + d + e)**60", False),
        ("polynomial_multiplication", "x**(10**9)", False),
        ("intermediate_integration", "exp(3*x)*(x**2 - 2)/12 + log(x)**2 + C", True),
        ("coin_flip", "1e999999999", False),
        ("coin_flip", "1e1_000_000", False),
        ("coin_flip", "3/8", True),
        ("rush_hour", "E+1000000000", False),
        ("rush_hour", "F+1 K+1 M-1 C+3 H+2", True),
        ("complex_arithmetic", "nan", False),
        ("complex_arithmetic", "nan+infj", False),
        ("complex_arithmetic", "3 - infinity i", False),
        ("complex_arithmetic", "-3.0 + 2.0i", True),
        ("word_sorting", "banana, infantry", True),
        ("polynomial_multiplication", "(" * 5000 + "x" + ")" * 5000, False),
    ],
)
def test_what_an_evaluating_scorer_may_see(task: str, answer: str, may: bool) -> None:
    assert may_be_scored(task, answer) is may


@pytest.mark.parametrize("task", [*sorted(PARSED_BY_SYMPY), "coin_flip", "rush_hour"])
def test_no_number_takes_a_scorer_s_time(task: str) -> None:
    """Any of these would take it for minutes."""
    environment = _built(task)
    answers = ("9**9**9**9", "1e999999999", "1E+1000000000", "A+1000000000", "-1e-999999999")
    problem = environment.problem("train", 0)
    assert environment.reward(problem, [f"<answer>{answer}</answer>" for answer in answers]) == [0.0] * 5


@pytest.mark.parametrize("task", sorted(EVALUATED | PARSED_BY_SYMPY))
def test_reference_answers_still_count(task: str) -> None:
    environment = make_environment(f"reasoning/{task}", {}, 0, 8, 1)
    for index in range(8):
        problem = environment.problem("train", index)
        right = 0.0 if "Integral" in problem.answer else 1.0  # an integral that the library left undone
        assert environment.reward(problem, [f"<answer>{problem.answer}</answer>"]) == [right]
