"""Programs are judged by their tests, apart from the judge, and none decides its own verdict."""

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks import programs as benchmark
from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError
from antiphon.environments.file import FileEnvironment
from antiphon.environments.programs import PROGRAM_CHARS, program_in, read_tests
from antiphon.environments.registry import make_environment
from antiphon.environments.scoring.messages import Verdict
from antiphon.environments.scoring.runners import decode, encode
from antiphon.environments.suites import GROUPS, PARAMETERS, Suite
from antiphon.runs.preflight import check_solutions
from antiphon.services.reward.server import scorer_of
from tests.support.bubblewrap import needs_bubblewrap

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
PROBLEMS = [json.loads(line) for line in (ROOT / "examples/code/problems.jsonl").read_text().splitlines()]
DOUBLE: Row = {"question": "Double.", "answer": "", "tests": ["assert f(2) == 4", "assert f(3) == 6"]}
THIRD: Row = {"question": "Third.", "entry_point": "f", "answer": "def f(n): return n / 3"}
ENDING = "def f(n): return 2 * n if n < 3 else exit()"
HUNG = "import time; time.sleep(600)"
"""Takes no CPU, so that the others have what they need on a busy machine; loops are among the attacks."""
LIMIT_S = 10.0
"""Of a program among those that hang: much more than it takes."""


def with_tests(tests: Any) -> Row:
    """Return a problem with other tests."""
    return {**DOUBLE, "tests": tests}


def configured(path: Path, rows: Sequence[Row], answer_timeout_s: float = 20.0, **more: Any) -> RunConfig:
    """Return the configuration of a run on the programs of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parameters = {"train": str(path), "heldout": str(path), "score": "programs", **more}
    section = {"name": "file", "parameters": parameters, "train_size": len(rows), "heldout_size": len(rows)}
    reward = {"answer_timeout_s": answer_timeout_s, "processes": 1}
    evaluation = {"prompts": len(rows)}
    loop = {"prompts_per_step": 1}
    return build_config({"environment": section, "reward": reward, "evaluation": evaluation, "loop": loop})


def judged(
    path: Path, row: Row, programs: Sequence[str], answer_timeout_s: float = 20.0, **more: Any
) -> list[Verdict]:
    """Return the verdicts on programs for one row."""
    needs_bubblewrap()
    config = configured(path / "rows.jsonl", [row], answer_timeout_s, **more)
    section = config.environment
    environment = make_environment("file", section.parameters, 0, 1, 1)

    async def scored() -> list[Verdict]:
        async with scorer_of(config, environment) as scorer:
            return await scorer.score(environment.problem("train", 0).key, programs)

    return asyncio.run(scored())


@pytest.mark.parametrize("sandbox", ["auto", "process"])
def test_the_solutions_of_all_forms_are_right_and_those_of_others_wrong(tmp_path: Path, sandbox: str) -> None:
    needs_bubblewrap()
    config = configured(tmp_path / "rows.jsonl", PROBLEMS)
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"sandbox": sandbox})})
    environment = FileEnvironment(config.environment.parameters, 0, len(PROBLEMS), len(PROBLEMS))
    assert environment.check_answers("train", len(PROBLEMS)) == []
    answers = [row["answer"] for row in PROBLEMS]

    async def scored() -> list[list[Verdict]]:
        async with scorer_of(config, environment) as scorer:
            return [
                await scorer.score(f"train-0-{place}", [answer, answers[place - 1]])
                for place, answer in enumerate(answers)
            ]

    assert asyncio.run(scored()) == [[1.0, 0.0]] * len(PROBLEMS)


DOUBLING = "def f(n):\n    return 2 * n\n"
INPUTS: Row = {"task_id": 2, "entry_point": "f", "base_input": [[1]], "plus_input": [[3]], "atol": 0}
SUITE_ROWS: dict[str, Row] = {
    "humaneval": {
        **{"task_id": "HumanEval/0", "prompt": "def f(n):\n", "entry_point": "f"},
        **{"canonical_solution": "    return 2 * n\n", "test": "def check(g):\n    assert g(2) == 4\n"},
    },
    "humaneval+": {**INPUTS, "prompt": "def f(n):\n", "canonical_solution": "    return 2 * n\n"},
    "mbpp": {"task_id": 1, "prompt": "Double.", "code": DOUBLING, "tests": ["assert f(2) == 4"]},
    "mbpp+": {**INPUTS, "prompt": "Double.", "canonical_solution": DOUBLING},
}


@pytest.mark.parametrize("suite", GROUPS["code"], ids=lambda suite: suite.name)
def test_the_table_of_suites_judges_a_row_of_each_form(tmp_path: Path, suite: Suite) -> None:
    row, parameters = SUITE_ROWS[suite.name], {**PARAMETERS, **suite.keys}
    programs = [row[parameters["answer"]], "def f(n):\n    return n\n"]
    assert judged(tmp_path, row, programs, **parameters) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "program", "share"),
    [
        (DOUBLE, "def f(n): return 4", 0.5),
        (DOUBLE, "def f(n): return n * 2 if n < 3 else 1 / 0", 0.5),
        (DOUBLE, ENDING, 0.5),
        (with_tests("for n in (1, 2):\n    assert f(n) == 2 * n"), "def f(n): return 2", 0.0),
        (with_tests("assert f(1) == 2\nf(2)\nassert f(3) == 6"), "def f(n): return [0, 2][n]", 0.5),
        (with_tests("for n in (2, 3):\n    assert f(n) == 2 * n"), ENDING, 0.0),
        (with_tests("for n in (2, 3):\n    found = f(n)\n    assert found == 2 * n\nassert 1"), ENDING, 0.0),
        (with_tests("assert f(2) == 4\nfor n in (2, 3):\n    assert f(n) == 2 * n"), ENDING, 0.5),
        (with_tests("def check(f):\n    assert f(2) == 4\n    assert f(3) == 6\ncheck(f)"), ENDING, 0.5),
        (with_tests("if f(1) == 3:\n    assert f(2) == 5\nassert f(3) == 6"), "def f(n): return 2 * n", 1.0),
        (with_tests("if f(1) == 3:\n    assert f(2) == 5"), "def f(n): return 2 * n", 0.0),
        (
            with_tests([{"input": "2", "output": "4\n"}, {"input": "3", "output": "6 \n\n"}]),
            "n = int(input())\nprint(2 * n)\nexit(n - 3)",
            0.5,
        ),
        (
            {**THIRD, "base_input": [[2]], "plus_input": [[0.5], ["x", 1]]},
            "def f(n): return n * 0.333333333 if n > 1 else 0",
            2 / 3,
        ),
    ],
)  # fmt: skip
def test_credit_is_the_share_of_tests_that_are_passed_or_all_or_nothing(
    tmp_path: Path, row: Row, program: str, share: float
) -> None:
    keys = {"tests": "plus_input"} if "plus_input" in row else {}
    assert judged(tmp_path, row, [program], credit="share", **keys) == [pytest.approx(share)]
    assert judged(tmp_path, row, [program], **keys) == [float(share == 1.0)]


def test_a_program_that_hangs_is_wrong_and_those_behind_it_are_judged(tmp_path: Path) -> None:
    right = "def f(n): return 2 * n"
    assert judged(tmp_path, DOUBLE, [HUNG, f"def f(n):\n    {HUNG}", right], LIMIT_S) == [0.0, 0.0, 1.0]


def test_no_attack_forges_its_verdict_and_the_judge_goes_on() -> None:
    needs_bubblewrap()
    found = asyncio.run(benchmark.attack(["share"], 1.0))
    assert found["attacks"] >= 40 and found["forged"] == [] and found["disturbed"] == []


def test_a_program_that_knows_the_tests_would_pass_them(tmp_path: Path) -> None:
    """Attacks that find what they look for win: so the others did not find it."""
    row = benchmark.rows_of_attacks()[0]
    told = benchmark.LEARN + "learn('''" + "\n".join(row["tests"]) + "''')"
    assert judged(tmp_path, row, [told, benchmark.LEARN]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("I think.\n```python\nx = 1\n```\nNo:\n```py\nx = 2\n```\nDone", "x = 2\n"),
        ("```\nx = 1\n```\nand\n```python\nx = 2", "x = 1\n"),
        ("<answer>x = 1</answer> or <answer>x = 3</answer>", "x = 3"),
        ("x = 1", "x = 1"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block(text: str, program: str) -> None:
    assert program_in(text) == program


def test_what_is_too_long_is_no_program(tmp_path: Path) -> None:
    right = "def f(n): return 2 * n\n"
    assert judged(tmp_path, DOUBLE, [right + "#" * PROGRAM_CHARS, right]) == [0.0, 1.0]


def test_a_row_s_own_helpers_and_the_objects_of_a_program_can_be_tested(tmp_path: Path) -> None:
    row = {
        **DOUBLE,
        "setup": "import math\nfrom fractions import Fraction\nlimit = 3",
        "tests": "assert math.isclose(f(int, [Pair(1, 2), Pair(a=3, b=limit)], by=(0.5,)), 4.5)",
        "answer": (
            "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
            "def f(kind, pairs, by): return kind(sum(p.a for p in pairs)) + by[0]"
        ),
    }
    assert judged(tmp_path, row, [row["answer"]]) == [1.0]


MATH = "import math\ndef f(n): return math.pi * n"
FORGED_MATH = "class math:\n    isclose = lambda *a, **k: True\ndef f(n): return 0"
PAIR = "class Pair:\n    def __init__(self, a, b): self.ok, self.all = a < b, [a, b]"
STACK = (
    "class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
    "    def pop(self): return self.a.pop()"
)
CATCHES = "try:\n    right = f(2) == 4\nexcept:\n    right = True\nassert right"
LEAVES = "for n in (2,):\n    try:\n        f(n)\n    finally:\n        continue\nassert True"
ENDS_LOOPS = "def f(n): raise StopIteration"
DOUBLED = "def f(n): return 2 * n"
COUNTS = "def f(s): return {c: s.count(c) for c in s}"
SCRIPT = [{"input": "2", "output": "4\n"}]


def test_tests_mean_what_they_say_whatever_the_program_is(tmp_path: Path) -> None:
    """Each row's tests with its solution, and a program with what it earns."""
    needs_bubblewrap()
    cases: list[tuple[Any, str, str, float]] = [
        ("assert math.isclose(f(1), 3.1416, rel_tol=1e-3)", MATH, MATH, 1.0),
        ("assert math.isclose(f(1), 3.1416, rel_tol=1e-3)", MATH, FORGED_MATH, 0.0),
        ("assert math.isclose(f(1), 3.1416, rel_tol=1e-3)", "", FORGED_MATH, 0.0),
        (
            "assert f(3).bit_length() > 2",
            DOUBLED,
            "class A:\n    bit_length = lambda s: 9\ndef f(n): return A()",
            0.0,
        ),
        ("assert sorted(f('aab').items()) == [('a', 2), ('b', 1)]", COUNTS, COUNTS, 1.0),
        ("assert Pair(1, 2).ok and len(Pair(3, 4).all) == 2", PAIR, PAIR, 1.0),
        ("assert Pair(1, 2).ok", PAIR, "x = 1", 0.0),
        ("assert Pair(1, 2).total", PAIR, "class Pair:\n    total = print\n    def __init__(*_): pass", 0.0),
        ("p = Pair(1, 2)\np.ok = 5\nassert p.ok == 5", PAIR, PAIR, 1.0),
        ("assert Pair(1, 2) != Pair(3, 4)", PAIR, PAIR, 0.0),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1", STACK, STACK, 1.0),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1", "", STACK, 1.0),
        (CATCHES, DOUBLED, "def f(n): exit()", 0.0),
        (CATCHES, DOUBLED, f"def f(n):\n    {HUNG}", 0.0),
        (LEAVES, DOUBLED, "def f(n): exit()", 0.0),
        (LEAVES, DOUBLED, f"def f(n):\n    {HUNG}", 0.0),
        ("assert all(map(lambda n: f(n) == 2 * n, [1, 2]))", DOUBLED, ENDS_LOOPS, 0.0),
        ("import sys\nif f(1) != 2: sys.exit(1)\nassert f(2) == 4", DOUBLED, "def f(n): return 0", 0.0),
        (
            "try:\n    f(1)\nexcept ValueError as error:\n    said = str(error)\nassert said == 'negative'",
            DOUBLED,
            "def f(n): raise ValueError('negative')",
            1.0,
        ),
        (
            SCRIPT,
            "",
            "import sys, io, atexit\nsys.stdout = io.StringIO()\nprint(2 * int(input()))\n"
            "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))",
            1.0,
        ),
        (SCRIPT, "", "out = open(1, 'w')\nprint(2 * int(input()), file=out)", 1.0),
        (SCRIPT, "", "import sys\nprint(2 * int(input()))\nsys.stdout.close()", 1.0),
    ]
    rows = [{"question": f"{n}", "tests": one[0], "answer": one[1]} for n, one in enumerate(cases)]
    head = {"entry_point": "f", "prompt": "import math\n\ndef f(n):\n    # circumference\n"}
    close = "assert math.isclose(f(1), 3.1416, rel_tol=1e-3)"
    rows.append({"question": "head", **head, "tests": close, "answer": "    return math.pi * n"})
    cases.append((close, "", FORGED_MATH, 0.0))
    config = configured(tmp_path / "rows.jsonl", rows, LIMIT_S)
    environment = make_environment("file", config.environment.parameters, 0, len(rows), len(rows))

    async def scored() -> list[list[Verdict]]:
        async with scorer_of(config, environment) as scorer:
            return [await scorer.score(f"train-0-{n}", [one[2]]) for n, one in enumerate(cases)]

    found = asyncio.run(scored())
    assert [[(n, one[3])] for n, one in enumerate(cases)] == [[(n, *one)] for n, one in enumerate(found)]


def test_a_program_may_have_the_name_of_a_built_in_function(tmp_path: Path) -> None:
    row = {**DOUBLE, "tests": ["assert sum(1, 2) == 12"], "answer": "def sum(a, b): return 10 * a + b"}
    assert judged(tmp_path, row, [row["answer"], "x = 1"]) == [1.0, 0.0]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.integers(), inner),
    max_leaves=20,
)  # fmt: skip


@given(plain | st.sets(st.integers()) | st.frozensets(st.text()))
def test_plain_values_cross_as_they_are(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["tuple", "set", "dict", "named", "x"]), inner)
    ),
)


@given(json_values)
def test_whatever_is_answered_becomes_built_in_values_or_an_error(value: Any) -> None:
    def check(found: Any) -> None:
        assert type(found) in {type(None), bool, int, float, str, bytes, complex, list, tuple, set, dict}
        if isinstance(found, list | tuple | set | dict):
            for one in found:
                check(one)

    with contextlib.suppress(ValueError, TypeError):
        check(decode(value))


@given(
    st.fixed_dictionaries(
        {
            "tests": json_values
            | st.lists(st.fixed_dictionaries({"input": json_values, "output": json_values}))
        },
        optional={
            "entry_point": json_values,
            "prompt": json_values,
            "setup": json_values,
            "atol": json_values,
        },
    ),
    st.sampled_from(["tests", "base_input", "plus_input"]),
)
def test_tests_of_no_form_are_named(row: Row, key: str) -> None:
    row = {**row, key: row["tests"]}
    try:
        read_tests(row, key, "def f(): pass")
    except ValueError as error:
        assert repr(key) in str(error) or "entry_point" in str(error) or "atol" in str(error)


@pytest.mark.parametrize(
    ("row", "values", "words"),
    [
        ({"question": "q"}, {}, "row [12] of .*'tests', where the tests .* is not among its keys question"),
        ({**DOUBLE, "tests": []}, {}, "'tests', where the tests should be, is \\[\\]"),
        ({**DOUBLE, "tests": ["assert f(2 == 4"]}, {}, "tests should be, '\\(' was never closed"),
        ({**DOUBLE, "tests": "f(2)"}, {}, "should be, has no assert statement"),
        ({**DOUBLE, "tests": {"inputs": ["1"], "outputs": []}}, {}, "has no inputs, or not as many outputs"),
        ({**DOUBLE, "tests": [{"input": "1"}]}, {}, "has no inputs, or not as many outputs"),
        ({**DOUBLE, "base_input": [[1]]}, {"tests": "base_input"}, "takes lists of arguments, entry_p"),
        ({**THIRD, "plus_input": [[1]], "base_input": "x"}, {"tests": "plus_input"}, "can only concatenate"),
        ({**THIRD, "base_input": [[1]], "atol": "inf"}, {"tests": "base_input"}, "with atol='inf', wh"),
        (DOUBLE, {"credit": "half"}, "environment.parameters.credit='half' is neither all nor share"),
        (DOUBLE, {"score": "program"}, "did you mean programs\\?"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, row: Row, values: Row, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "question": "Other."}) + "\n")
    with pytest.raises(ConfigError, match=words):
        made = FileEnvironment({"train": str(path), "heldout": 0.5, "score": "programs", **values}, 0, 1, 1)
        for split in ("train", "heldout"):
            made.check_answers(split, 1)


def test_solutions_that_fail_their_own_tests_are_named_before_the_start(tmp_path: Path) -> None:
    needs_bubblewrap()
    rows = [{**DOUBLE, "question": f"{n}", "answer": "def f(n): return 2 * n"} for n in range(11)]
    rows[3] = {**DOUBLE, "answer": "def f(n): return n"}

    def checked(rows: Sequence[Row]) -> list[str]:
        config = configured(tmp_path / "rows.jsonl", rows)
        environment = FileEnvironment(config.environment.parameters, 0, len(rows), len(rows))
        return check_solutions(config, environment)

    (note,) = checked(rows)
    assert note.startswith("2 of 22 reference solutions fail their own tests: row 4 of ")
    with pytest.raises(ConfigError, match=r"parameters\.tests: 2 of 6 reference .* more than 10%"):
        checked(rows[2:5])
    assert checked([{**DOUBLE, "answer": ""}]) == []


def test_it_is_shown_what_programs_would_earn(capsys: pytest.CaptureFixture[str]) -> None:
    needs_bubblewrap()
    files = [f"{split}=examples/code/{split}.jsonl" for split in ("train", "heldout")]
    assert execute(["environments", "file", *files, "score=programs"]) == 0
    said = yaml.safe_load(capsys.readouterr().out)
    assert [one["earns"] for one in said["answers"]] == [1.0, 0.0, 0.0]


DATA = os.environ.get("ANTIPHON_CODE_DATA", "")


@pytest.mark.skipif(not DATA, reason="ANTIPHON_CODE_DATA names no folder with humaneval.jsonl.gz")
def test_published_solutions_are_right() -> None:
    found = asyncio.run(benchmark.judge_references(Path(DATA), "humaneval", benchmark.SETS["humaneval"], 1))
    assert found[0] == 88 and found[1] == []
