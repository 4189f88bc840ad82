"""Tasks that pay for answers which say nothing of the problem are found before a run."""

import asyncio
from collections.abc import Sequence

import pytest

from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError
from antiphon.environments.environment import Problem
from antiphon.environments.registry import make_environment
from antiphon.environments.scoring.messages import Failed, Verdict
from antiphon.environments.scoring.pool import InProcess
from antiphon.runs.preflight import CONSTANTS, FIRST, FORMS, best_decoy, check_scoring
from antiphon.simulator.virtual.loop import VirtualLoop


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


def best(environment: Paying) -> tuple[str, float, bool]:
    problems = [environment.problem("train", index) for index in range(64)]
    return asyncio.run(best_decoy(InProcess(environment).score, problems, 0.85))  # type: ignore[arg-type]


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
    assert best(Paying(pays))[:2] == (constant, pytest.approx(share))


def test_an_honest_task_is_asked_for_few_rewards() -> None:
    environment = Paying(right)
    assert best(environment)[2]
    assert environment.asked <= (len(CONSTANTS) + FIRST) * len(FORMS) * FIRST + 2 * FIRST


@pytest.mark.parametrize(
    ("pause_s", "found", "asked"), [(15.0, ("", 0.0, True), 2), (1.1, ("", 1.0, False), 19)]
)
def test_a_slow_scorer_is_let_go(pause_s: float, found: tuple[str, float, bool], asked: int) -> None:
    keys: list[str] = []

    async def score(key: str, texts: Sequence[str]) -> Sequence[Verdict]:
        keys.append(key)
        await asyncio.sleep(pause_s)
        return [0.0 if "right" in text else 1.0 for text in texts]

    problems = [Paying(right).problem("train", index) for index in range(64)]
    loop = VirtualLoop(lambda: (0.0, 0.0), 100.0)  # type: ignore[abstract]
    # After one problem its own reference answer is the constant that is always paid.
    assert loop.run(best_decoy(score, problems, 0.85)) == found
    assert len(keys) == asked


def configured(task: str, **environment: object) -> RunConfig:
    named = {"name": f"reasoning/{task}", "parameters": {}, "train_size": 64, **environment}
    return build_config({"environment": named, "reward": {"sandbox": "process"}})


@pytest.mark.parametrize("task", ["game_of_life_halting", "coin_flip", "complex_arithmetic", "chain_sum"])
def test_the_tasks_of_the_library_that_pay_constants_are_refused(task: str) -> None:
    environment = make_environment(f"reasoning/{task}", {}, 0, 64, 1)
    if task in ("complex_arithmetic", "chain_sum"):
        assert check_scoring(configured(task), environment) == []
        return
    with pytest.raises(ConfigError, match=r"environment\.max_constant_share=0\.85 allows"):
        check_scoring(configured(task), environment)
    check_scoring(configured(task, max_constant_share=1.0), environment)


@pytest.mark.parametrize("task", ["boxnet", "propositional_logic", "rush_hour"])
def test_a_task_without_reference_answers_says_so(task: str) -> None:
    environment = make_environment(f"reasoning/{task}", {}, 0, 32, 1)
    (said,) = check_scoring(configured(task, train_size=32), environment)
    assert "reference answers" in said


def test_reference_answers_that_earn_nothing_are_said() -> None:
    (said,) = check_scoring(configured("chain_sum"), Paying(lambda number, text: 0.0))  # type: ignore[arg-type]
    assert "no reference answers that earn anything" in said


def test_a_scorer_that_always_raises_is_no_scorer_that_pays_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"train-0-0 was not scored where the run scores .*ZeroDivisionError"
    ):
        check_scoring(configured("chain_sum"), Paying(lambda number, text: 1 / 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("within", [(0.0, 1.0), (-1.0, 1.0), (100.0, 300.0)])
def test_what_a_constant_earns_is_a_share_of_the_range(within: tuple[float, float]) -> None:
    low, high = within

    async def score(key: str, texts: Sequence[str]) -> Sequence[Verdict]:
        rewards = [low + (high - low) * (0.75 if "yes" in text else 0.25) for text in texts]
        return [Failed("no") if "nan" in text else r for text, r in zip(texts, rewards, strict=True)]

    problems = [Paying(right).problem("train", index) for index in range(64)]
    constant, share, _ = asyncio.run(best_decoy(score, problems, 0.85, within))
    assert "yes" in constant and share == pytest.approx(0.75)
