"""Tasks that pay for answers which say nothing of the problem are found before a run."""

from collections.abc import Sequence

import pytest

from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError
from antiphon.environments.decoys import CONSTANTS, FIRST, FORMS, best_decoy
from antiphon.environments.environment import Problem
from antiphon.environments.registry import make_environment
from antiphon.runs.preflight import check_decoys


class Paying:
    """Pays what a function of the number of a problem and the text says."""

    name, only_compares = "paying", True

    def __init__(self, pays) -> None:
        self.pays = pays
        self.asked = 0

    def problem(self, split: str, index: int) -> Problem:
        return Problem(f"{split}-0-{index}", f"problem {index}", f"right {index}")

    def size(self, split: str) -> int:
        return 64

    def problem_by_key(self, key: str) -> Problem:
        return self.problem("train", int(key.rpartition("-")[2]))

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        self.asked += len(completions)
        return [self.pays(int(problem.key.rpartition("-")[2]), text) for text in completions]


def right(number: int, text: str) -> float:
    return float(text == f"right {number}")


def raising(number: int, text: str) -> float:
    if not text:
        raise RuntimeError("an empty answer")
    return float("True" in text)


@pytest.mark.parametrize(
    ("pays", "constant", "share"),
    [
        (right, "right 0", 1 / 8),
        (lambda number, text: 1.0, "", 1.0),
        (lambda number, text: float(text == "<answer>0</answer>"), "<answer>0</answer>", 1.0),
        (lambda number, text: float("yes" in text and number % 2), "yes", 1 / 2),
        (lambda number, text: 0.9 if "nan" in text else 0.0, "nan", 0.9),
        (lambda number, text: 5.0, "", 0.0),
        (raising, "True", 1.0),
    ],
)
def test_what_is_paid_whatever_was_asked_is_found(pays, constant: str, share: float) -> None:
    environment = Paying(pays)
    problems = [environment.problem("train", index) for index in range(64)]
    assert best_decoy(environment, problems, 0.85) == (constant, pytest.approx(share))


def test_an_honest_task_is_asked_for_few_rewards_and_a_slow_one_is_let_go() -> None:
    environment = Paying(right)
    problems = [environment.problem("train", index) for index in range(64)]
    best_decoy(environment, problems, 0.85)
    assert environment.asked <= (len(CONSTANTS) + FIRST) * len(FORMS) * FIRST + 2 * FIRST
    slow = Paying(right)
    ticks = iter(range(0, 1000, 15))
    # After one problem its own reference answer is the constant that is always paid.
    assert best_decoy(slow, problems, 0.85, clock=lambda: float(next(ticks)))[1] == 0.0
    assert slow.asked < environment.asked
    paying = Paying(lambda number, text: 1.0)
    seconds = iter(range(1000))
    assert best_decoy(paying, problems, 0.85, clock=lambda: float(next(seconds)))[1] == 1.0
    assert paying.asked < 64 * (len(CONSTANTS) + FIRST) * len(FORMS) / 2


@pytest.mark.parametrize("task", ["game_of_life_halting", "coin_flip", "complex_arithmetic", "chain_sum"])
def test_the_tasks_of_the_library_that_pay_constants_are_refused(task: str) -> None:
    config = build_config({"environment": {"name": f"reasoning/{task}", "train_size": 64}})
    environment = make_environment(f"reasoning/{task}", {}, 0, 64, 1)
    if task in ("complex_arithmetic", "chain_sum"):
        assert check_decoys(config, environment) == []
        return
    with pytest.raises(ConfigError, match=r"environment\.max_constant_share=0\.85 allows"):
        check_decoys(config, environment)
    accepted = config.environment.model_copy(update={"max_constant_share": 1.0})
    check_decoys(config.model_copy(update={"environment": accepted}), environment)


@pytest.mark.parametrize("task", ["boxnet", "propositional_logic", "rush_hour"])
def test_a_task_without_reference_answers_says_so(task: str) -> None:
    config = build_config({"environment": {"name": f"reasoning/{task}", "train_size": 32}})
    (said,) = check_decoys(config, make_environment(f"reasoning/{task}", {}, 0, 32, 1))
    assert "reference answers" in said


def test_reference_answers_that_earn_nothing_are_said() -> None:
    config = build_config({"environment": {"train_size": 64}})
    (said,) = check_decoys(config, Paying(lambda number, text: 0.0))  # type: ignore[arg-type]
    assert "no reference answers that earn anything" in said
