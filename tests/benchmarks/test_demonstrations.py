"""Demonstrations: well-formed, right in every line, and a pure function of the generator."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.parts.warmstart.recipe import Habit, demonstrate, terms_of
from antiphon.core.errors import ConfigError, ContractError
from antiphon.environments.registry import make_environment

TERMS = st.lists(st.integers(0, 99), min_size=1, max_size=12)
PLAIN = {"operators": ["+", "-"], "allow_parentheses": False, "allow_negation": False}
SIGNS = st.lists(st.sampled_from("+-"), min_size=11, max_size=11)


def prompt(terms: list[int], signs: list[str]) -> str:
    chain = "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=False))
    return f"State the final answer to the following arithmetic problem: {terms[0]}{chain} ="


@given(TERMS, SIGNS)
def test_terms_are_read_with_their_signs(terms: list[int], signs: list[str]) -> None:
    expected = [terms[0], *(t if s == "+" else -t for s, t in zip(signs, terms[1:], strict=False))]
    assert list(terms_of(prompt(terms, signs))) == expected


def test_terms_of_basic_arithmetic_end_at_the_full_stop() -> None:
    environment = make_environment("reasoning/basic_arithmetic", PLAIN, 0, 16, 16)
    for index in range(16):
        problem = environment.problem("train", index)
        assert problem.text.startswith("Calculate ") and sum(terms_of(problem.text)) == int(problem.answer)


@pytest.mark.parametrize("text", ["", "what is two plus two?", "4 + 5", "Calculate 4 + 5. Then rest"])
def test_a_text_without_a_chain_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="no chain sum"):
        terms_of(text)


@given(TERMS, SIGNS, st.sampled_from(list(Habit)), st.integers(0, 2**32))
def test_every_line_of_work_and_the_answer_are_right(
    terms: list[int], signs: list[str], habit: Habit, seed: int
) -> None:
    text = prompt(terms, signs)
    demonstration = demonstrate(text, {habit: 1.0}, np.random.default_rng(seed))
    assert demonstration.habit is habit
    found = re.fullmatch(r"<think>(.*)</think><answer>(-?\d+)</answer>", demonstration.text)
    assert found is not None
    work, answer = found.groups()
    total = sum(terms_of(text))
    assert int(answer) == total
    for line in filter(None, work.split(";")):
        values = {_value(side) for side in line.split("=")}
        assert len(values) == 1


def _value(side: str) -> int:
    return sum(int(number) for number in re.findall(r"[+-]?\d+", side))


@pytest.mark.parametrize("habit", list(Habit))
def test_the_judge_accepts_what_a_demonstration_answers(habit: Habit) -> None:
    environment = make_environment("reasoning/chain_sum", {"max_digits": 2}, 0, 16, 16)
    rng = np.random.default_rng(0)
    for index in range(16):
        problem = environment.problem("train", index)
        assert environment.reward(problem, [demonstrate(problem.text, {habit: 1.0}, rng).text]) == [1.0]


def test_the_same_generator_writes_the_same_text() -> None:
    text = prompt([4, 1, 7, 9, 2, 3], list("-+-+-+-+-+-"))
    habits = {habit: 1 / len(Habit) for habit in Habit}
    rngs = [np.random.default_rng(5), np.random.default_rng(5)]
    one, other = ([demonstrate(text, habits, rng) for _ in range(50)] for rng in rngs)
    assert one == other
    assert {demonstration.habit for demonstration in one} == set(Habit)


def test_habits_differ_in_length_as_they_differ_in_care() -> None:
    text = prompt([4, 1, 7, 9, 2, 3], list("-+-+-+-+-+-"))
    lengths = [len(demonstrate(text, {habit: 1.0}, np.random.default_rng(0)).text) for habit in Habit]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    "habits", [{}, {Habit.BLURT: 0.5}, {Habit.BLURT: 1.5, Habit.LEAP: -0.5}, {Habit.BLURT: 2.0}]
)
def test_shares_must_sum_to_one(habits: dict[Habit, float]) -> None:
    with pytest.raises(ConfigError, match="shares"):
        demonstrate(prompt([1, 2], ["+"]), habits, np.random.default_rng(0))
