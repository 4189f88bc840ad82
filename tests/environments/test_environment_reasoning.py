"""The reasoning environment: same problems everywhere, splits apart, judges that never raise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, ContractError
from antiphon.environments.environment import Environment
from antiphon.environments.reasoning.prompts import split_of
from antiphon.environments.reasoning.reward import MAX_ANSWER_CHARS, extract_answer
from antiphon.environments.registry import environment_names, make_environment
from antiphon.system.processes import SAME_ORDER


def chain_sum(
    seed: int = 0, train_size: int = 64, heldout_size: int = 48, **parameters: object
) -> Environment:
    return make_environment("reasoning/chain_sum", parameters, seed, train_size, heldout_size)


@pytest.mark.parametrize(
    "task", ["chain_sum", "gcd", "number_sorting", "spell_backward", "leg_counting", "simple_equations"]
)
def test_same_seed_and_index_give_the_same_problem_in_any_order(task: str) -> None:
    one = make_environment(f"reasoning/{task}", {}, 3, 8, 8)
    other = make_environment(f"reasoning/{task}", {}, 3, 8, 8)
    backward = [other.problem("heldout", index) for index in reversed(range(8))]
    assert [one.problem("heldout", index) for index in range(8)] == backward[::-1]
    assert one.problem("train", 5) == other.problem("train", 5)


def test_sizes_do_not_move_problems() -> None:
    small, large = chain_sum(train_size=4), chain_sum(train_size=400)
    assert [small.problem("train", i) for i in range(4)] == [large.problem("train", i) for i in range(4)]


@pytest.mark.parametrize("parameters", [{}, {"min_terms": 2, "max_terms": 3, "max_digits": 1}])
def test_no_heldout_problem_is_in_any_train_split(parameters: dict[str, int]) -> None:
    heldout = chain_sum(seed=0, heldout_size=300, **parameters)
    texts = {heldout.problem("heldout", index).text for index in range(300)}
    for seed in (0, 1, 77):
        train = chain_sum(seed=seed, train_size=600, **parameters)
        assert texts.isdisjoint(train.problem("train", index).text for index in range(600))
    assert all(split_of(text) == "heldout" for text in texts)


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
        ("products", {}),
        ("lcm", {}),
        ("calendar_arithmetic", {}),
    ],
)
def test_no_problem_comes_twice_within_a_split(task: str, parameters: dict[str, int]) -> None:
    environment = make_environment(f"reasoning/{task}", parameters, 0, 256, 256)
    texts = {
        split: [environment.problem(split, i).text for i in range(256)] for split in ("train", "heldout")
    }
    assert all(len(set(found)) == 256 for found in texts.values())
    assert not set(texts["train"]) & set(texts["heldout"])


def test_two_wordings_of_one_question_are_one_problem() -> None:
    environment = make_environment("reasoning/calendar_arithmetic", {"tasks": ["is_leap_year"]}, 0, 96, 32)
    years = [
        re.findall(r"[0-9]{4}", environment.problem(split, index).text)[0]
        for split, size in (("train", 96), ("heldout", 32))
        for index in range(size)
    ]
    assert len(set(years)) == len(years)


def test_a_task_with_fewer_problems_than_asked_for_is_refused() -> None:
    few = make_environment("reasoning/calendar_arithmetic", {"tasks": ["is_leap_year"]}, 0, 256, 32)
    with pytest.raises(ConfigError, match=r"too few different problems .* lower environment\.train_size"):
        few.problem("train", 255)


def test_another_seed_gives_other_problems() -> None:
    texts = [{chain_sum(seed).problem("train", i).text for i in range(64)} for seed in (0, 1)]
    assert len(texts[0] & texts[1]) < 4


def test_a_key_finds_its_problem_again() -> None:
    environment = chain_sum(seed=5)
    for split in ("train", "heldout"):
        problem = environment.problem(split, 7)
        assert problem.key == f"{split}-5-7"
        assert environment.problem_by_key(problem.key) == problem


@pytest.mark.parametrize(
    "key", ["", "train", "train-1-0", "train-0-64", "train-0--1", "train-0-07", "test-0-1", "train-0-x"]
)
def test_a_foreign_key_is_refused(key: str) -> None:
    with pytest.raises(ContractError, match="prompt key"):
        chain_sum(seed=0).problem_by_key(key)


@pytest.mark.parametrize(("split", "index"), [("train", 64), ("heldout", 48), ("train", -1), ("dev", 0)])
def test_a_place_outside_the_split_is_refused(split: str, index: int) -> None:
    with pytest.raises(ConfigError):
        chain_sum().problem(split, index)


def test_only_a_right_closing_answer_counts() -> None:
    environment = chain_sum(min_terms=3)
    problem = environment.problem("train", 0)
    right = problem.answer
    rewards = {
        f"<think></think><answer>{right}</answer>": 1.0,
        f"<answer> {right} </answer>\n": 1.0,
        f"<answer>1</answer><answer>{right}</answer>": 1.0,
        f"<answer>{right}</answer> is it": 0.0,
        f"<answer>the answer is {right}</answer>": 0.0,
        f"<answer>{right}</answer><answer></answer>": 0.0,
        f"<answer>{right}": 0.0,
        f"{right}</answer>": 0.0,
        right: 0.0,
        "": 0.0,
    }
    assert environment.reward(problem, list(rewards)) == list(rewards.values())


def test_a_long_answer_is_not_read() -> None:
    environment = chain_sum()
    problem = environment.problem("train", 0)
    padded = problem.answer.rjust(MAX_ANSWER_CHARS + 1, "0")
    assert environment.reward(problem, [f"<answer>{padded}</answer>"]) == [0.0]


@given(st.text(max_size=60))
def test_extraction_returns_what_stands_between_the_tags(answer: str) -> None:
    if "<answer>" not in answer and "</answer>" not in answer:
        assert extract_answer(f"so <answer>{answer}</answer>\n") == answer.strip()


HOSTILE = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="0123456789+-*/()[]{}xy,.:'\"^ \n", max_size=40),
    st.sampled_from(["[", "{}", "1/0", "None", "nan", "inf", "9" * 400, "[[1,2],[3]]", "((((", "\x00"]),
)


@pytest.mark.parametrize(
    "task",
    [
        "chain_sum",
        "prime_factorization",
        "number_sorting",
        "polynomial_multiplication",
        "countdown",
        "n_queens",
    ],
)
@given(answer=HOSTILE)
@settings(max_examples=30, deadline=None)
def test_judges_never_raise_for_what_a_model_wrote(task: str, answer: str) -> None:
    environment = _built(task)
    problem = environment.problem("train", 0)
    assert environment.reward(problem, [f"<answer>{answer}</answer>"])[0] in (0.0, 1.0)


_CACHE: dict[str, Environment] = {}


def _built(task: str) -> Environment:
    if task not in _CACHE:
        _CACHE[task] = make_environment(f"reasoning/{task}", {}, 0, 2, 2)
    return _CACHE[task]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reasoning/chain_sums", "chain_sum"),
        ("chain_sum", "reasoning/chain_sum"),
        ("maths", "names look|mean"),
    ],
)
def test_an_unknown_name_lists_what_is_close(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        make_environment(name, {}, 0, 1, 1)


def test_every_task_of_the_library_has_a_name() -> None:
    assert len(environment_names()) > 100
    assert "reasoning/chain_sum" in environment_names()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_term": 3}, r"environment\.parameters\.max_term .*max_terms"),
        ({"min_terms": 5, "max_terms": 3}, r"environment\.parameters\.min_terms=5.*max_terms=3"),
        ({"min_terms": "many"}, r"environment\.parameters\.min_terms='many'"),
        ({"min_terms": True}, r"environment\.parameters\.min_terms=True"),
        ({"seed": 3}, r"environment\.parameters\.seed .*environment\.seed"),
        ({"size": 3}, r"environment\.parameters\.size .*environment\.train_size"),
        ({"prompt_suffix": 3}, r"environment\.parameters\.prompt_suffix=3"),
    ],
)
def test_a_bad_parameter_is_named(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_environment("reasoning/chain_sum", parameters, 0, 8, 8)


@pytest.mark.parametrize(("train", "heldout", "field"), [(0, 1, "train_size"), (1, -3, "heldout_size")])
def test_a_size_must_be_positive(train: int, heldout: int, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.{field}"):
        make_environment("reasoning/chain_sum", {}, 0, train, heldout)


def test_a_task_without_variety_cannot_be_split() -> None:
    # Its ten texts all happen to belong to the train split.
    one_term = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    environment = make_environment("reasoning/chain_sum", one_term, 0, 100, 1)
    assert len({environment.problem("train", index).text for index in range(10)}) == 10
    with pytest.raises(ConfigError, match=r"draws gave 10; lower environment\.train_size"):
        environment.problem("train", 10)
    with pytest.raises(ConfigError, match="too few different problems"):
        environment.problem("heldout", 0)


def test_a_suffix_follows_every_prompt() -> None:
    plain, instructed = chain_sum(), chain_sum(prompt_suffix=" Answer between <answer> and </answer>.")
    assert instructed.problem("train", 3).text.startswith(plain.problem("train", 3).text)
    assert instructed.problem("train", 3).text.endswith("</answer>.")


def test_a_process_loads_the_family_of_its_task_and_all_only_when_asked() -> None:
    script = """
import sys
from antiphon.environments.registry import make_environment
made = make_environment("reasoning/chain_sum", {}, 0, 8, 8).problem("train", 3)
assert not {"sympy", "matplotlib"} & set(sys.modules), "the whole library was loaded"
gcd = make_environment("reasoning/gcd", {}, 0, 8, 8).problem("train", 3)
import reasoning_gym
assert reasoning_gym.create_dataset("rubiks_cube", seed=1, size=1)[0]["question"]
from antiphon.environments.registry import environment_names
assert len(environment_names()) > 90
assert make_environment("reasoning/chain_sum", {}, 0, 8, 8).problem("train", 3) == made
assert make_environment("reasoning/gcd", {}, 0, 8, 8).problem("train", 3) == gcd
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_problem_comes_from_the_numbers_of_the_interpreter() -> None:
    drawn = [
        [environment.problem("train", index) for index in range(12)]
        for environment in (make_environment("reasoning/list_functions", {}, 0, 12, 2) for _ in range(2))
    ]
    assert drawn[0] == drawn[1]


def test_codeio_writes_nothing_and_has_the_same_problems_in_another_process(tmp_path: Path) -> None:
    script = """
from antiphon.environments.registry import make_environment
environment = make_environment("reasoning/codeio", {}, 0, 60, 20)
sizes = {"train": 60, "heldout": 20}
problems = [environment.problem(split, index) for split, size in sizes.items() for index in range(size)]
assert environment.reward(problems[0], [f"<answer>{problems[0].answer}</answer>", "0"]) == [1.0, 0.0]
print(len(problems), hash(tuple((problem.text, problem.answer) for problem in problems)))
"""
    said = []
    for name in ("one", "other"):
        (folder := tmp_path / name).mkdir()
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            cwd=folder,
            env={**os.environ, **SAME_ORDER, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert [path.name for path in folder.rglob("*")] == []
        said.append(done.stdout.splitlines()[-1])
    assert said[0] == said[1] and said[0].startswith("80 ")
