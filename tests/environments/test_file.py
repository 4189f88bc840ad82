"""Prompts from files: rows, splits and scores, what is refused, what is recorded, and large files."""

import asyncio
import gzip
import importlib
import json
import os
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, build_config, dump_config, parse_config
from antiphon.core.config_sections import MOST_PROMPTS
from antiphon.core.errors import ConfigError, ContractError
from antiphon.environments.answers import END_CHARS, KINDS, answer_in, is_right, reference_of
from antiphon.environments.environment import explain
from antiphon.environments.file import FileEnvironment
from antiphon.environments.registry import describe_file, make_environment, with_sizes
from antiphon.environments.scoring.messages import Failed, Verdict
from antiphon.environments.scoring.pool import InProcess
from antiphon.lineage.documents.graph import origin_facts
from antiphon.lineage.documents.manifest import build_manifest, source_tree
from antiphon.lineage.documents.replay_copy import environment_differences
from antiphon.models.rendering import Renderer
from antiphon.runs.directory import choose_run
from antiphon.runs.preflight import looked_at, preflight
from antiphon.services.coordinator import prompts as coordinator_prompts
from antiphon.services.coordinator.journal.pinned import check_same_run, input_files, pinned_values
from antiphon.services.coordinator.prompts import EnvironmentPrompts
from antiphon.services.reward.server import scorer_of
from antiphon.system.packages import digest_of
from antiphon.system.rows import Rows, named_files
from tests.support.bubblewrap import needs_bubblewrap

Row = dict[str, Any]
DATA = os.environ.get("ANTIPHON_TASK_DATA", "")


def sums(first: int, count: int) -> list[Row]:
    return [
        {"question": f"{n} + 1 =", "answer": str(n + 1), "id": f"sum-{n}"}
        for n in range(first, first + count)
    ]


def write(path: Path, rows: Sequence[Row]) -> str:
    """Write rows in the form that the path's suffix says, and return the path."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(list(rows)) if path.suffix in (".parquet", ".arrow") else None
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif table is not None:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, 7)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def opened(
    train_size: int = MOST_PROMPTS, heldout_size: int = MOST_PROMPTS, **values: Any
) -> FileEnvironment:
    environment = make_environment("file", {"score": "number", **values}, 0, train_size, heldout_size)
    assert isinstance(environment, FileEnvironment)
    return environment


@pytest.fixture
def two(tmp_path: Path) -> dict[str, str]:
    """A file for each split."""
    train, heldout = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    return {"train": write(train, sums(0, 30)), "heldout": write(heldout, sums(100, 10))}


def configured(parameters: Row, **sections: Any) -> RunConfig:
    environment = {"name": "file", "parameters": {"score": "number", **parameters}}
    sections = {"evaluation": {"prompts": 4}, "loop": {"prompts_per_step": 4}, **sections}
    return with_sizes(build_config({"environment": environment, **sections}))


# What the answer in a text is, and whether it is right.


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("number", "3 + 4 = 7. In all $1,234.50.", "1,234.50"),
        ("number", "<answer> 5 </answer>, not 9", "5"),
        ("number", "<answer>5</answer> <answer>6</answer> <answer>7", "6"),
        ("number", r"so \boxed{\frac{3}{4}} of 12", "3/4"),
        ("number", r"\boxed{3} and \boxed{x_{1} = 2}.", "2"),
        ("number", r"\boxed{2} and \boxed{3", "3"),
        ("number", "10-5", "5"),
        ("number", "it is −7", "-7"),
        ("number", "x2 is 10^6", "10"),
        ("number", "0.5%", "0.5"),
        ("number", "2e-3 km", "2e-3"),
        ("number", "12/0", ""),
        ("number", "9" * 100, ""),
        ("number", "none", ""),
        ("choice", "Not (A), I think: the answer is **C**", "C"),
        ("choice", "Answer: B, since (C) is wrong", "B"),
        ("choice", "first (A), then (D)", "D"),
        ("choice", "B is a cat", "B"),
        ("choice", "I have A cat", ""),
        ("choice", r"\boxed{\text{E}}", "E"),
        ("choice", "b", "B"),
        ("choice", "Z", ""),
        ("exact", " New   York\n", "New York"),
        ("exact", "I say <answer>Paris</answer>", "Paris"),
        ("exact", "", ""),
    ],
)
def test_the_answer_in_a_text_is_what_the_module_says(kind: str, text: str, answer: str) -> None:
    assert answer_in(text, kind) == answer


@pytest.mark.parametrize(
    ("value", "kind", "reference"),
    [
        ("48/2=<<48/2=24>>24\n#### 72", "number", "72"),
        (72, "number", "72"),
        (1e-05, "number", "1e-05"),
        ("$1,000.", "number", "1,000"),
        (r"\frac{1}{2}", "number", "1/2"),
        ("72 apples", "number", None),
        ("10^6", "number", None),
        ("3 or 4", "number", None),
        ("(b)", "choice", "B"),
        (3, "choice", "D"),
        (10, "choice", None),
        ("3", "choice", None),
        (" a  b ", "exact", "a b"),
        (" ", "exact", None),
    ],
)
def test_a_reference_must_be_of_its_kind(value: Any, kind: str, reference: str | None) -> None:
    assert reference_of(value, kind) == reference


@given(number=st.integers(-(10**30), 10**30), other=st.integers(-(10**30), 10**30))
def test_whole_numbers_are_compared_exactly(number: int, other: int) -> None:
    for text in (f"{number}", f"so it is {number:,}.", f"<answer>{number}</answer>"):
        assert is_right(answer_in(text, "number"), str(number), "number")
        assert is_right(answer_in(text, "number"), str(other), "number") == (number == other)


@given(number=st.fractions(-1000, 1000, max_denominator=1000))
def test_fractions_and_their_decimals_are_within_a_millionth(number: Fraction) -> None:
    decimal, reference = f"{float(number):.12f}", f"{number.numerator}/{number.denominator}"
    assert is_right(answer_in(f"= {decimal}", "number"), reference, "number")
    assert not is_right(answer_in(f"= {float(number) + 0.01:.12f}", "number"), reference, "number")


@given(text=st.text(st.sampled_from("<>/answer\\boxed{}0123456789,.-^eEABI() '"), max_size=200))
def test_no_text_breaks_the_search_and_a_right_answer_behind_it_counts(text: str) -> None:
    for kind, answer in (("exact", "x y"), ("number", "17"), ("choice", "C")):
        assert isinstance(answer_in(text, kind), str)
        assert answer_in(f"{text}<answer>{answer}</answer>", kind) == answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "piece",
    ["9", "1,234", "1/", "-", "\\boxed{", "<answer>", "</answer>", "answer is ", " ", "(A", "I ", "1e"],
)
def test_a_hostile_text_is_read_to_its_end_and_no_further(kind: str, piece: str) -> None:
    text = piece * 200_000
    assert len(answer_in(text, kind)) <= END_CHARS


# Rows and splits.


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".arrow"])
def test_every_form_gives_the_same_problems_in_the_order_of_the_rows(suffix: str, tmp_path: Path) -> None:
    rows = sums(0, 20)
    parts = [
        write(tmp_path / f"a{suffix}", rows[:12]),
        write(tmp_path / f"b{suffix}", rows[12:]),
    ]
    heldout = write(tmp_path / f"c{suffix}", sums(50, 5))
    environment = opened(train=parts, heldout=heldout, score="exact")
    environment.try_out()
    assert (environment.size("train"), environment.size("heldout")) == (20, 5)
    problems = [environment.problem("train", index) for index in range(20)]
    assert [problem.text for problem in problems] == [row["question"] for row in rows]
    assert [problem.answer for problem in problems] == [row["answer"] for row in rows]
    assert [problem.key for problem in problems] == [f"train-0-{index}" for index in range(20)]
    assert all(environment.problem_by_key(problem.key) == problem for problem in problems)
    assert environment.where("train", 13) == f"row 2 of {tmp_path}/b{suffix}"
    assert (environment.most_bytes("train") >= [len(problem.text) for problem in problems]).all()


def test_keys_of_rows_can_be_named_and_ids_are_kept(tmp_path: Path) -> None:
    rows = [{"q": f"{n}?", "a": n, "name": f"row {n}", "more": [n]} for n in range(4)]
    train, heldout = write(tmp_path / "a.jsonl", rows[:3]), write(tmp_path / "b.jsonl", rows[3:])
    keys = {"question": "q", "answer": "a", "id": "name", "prompt_suffix": " Say <answer>.."}
    keys["prompt_prefix"] = "Solve: "
    environment = opened(train=train, heldout=heldout, **keys)
    problem = environment.problem("train", 2)
    assert (problem.key, problem.text, problem.answer) == ("train-0-2:row 2", "Solve: 2? Say <answer>..", "2")
    assert environment.problem_by_key(problem.key) == problem
    assert environment.reward(problem, ["so 2", "3", ""]) == [1.0, 0.0, 0.0]
    for key in ("train-0-2:row 1", "train-0-2", "train-0-3:row 3", "train-1-2:row 2", ""):
        with pytest.raises(ContractError, match="both sides of a run need the same"):
            environment.problem_by_key(key)


def test_blank_lines_and_a_missing_last_newline_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n\n{"n": 2}\n\n\n{"n": 3}')
    rows = Rows([path])
    assert [row["n"] for row in rows] == [rows[index]["n"] for index in range(len(rows))] == [1, 2, 3]


@given(
    questions=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=40, max_size=60),
    share=st.floats(0.2, 0.8),
)
def test_a_share_that_is_held_out_splits_by_the_question(
    tmp_path_factory: pytest.TempPathFactory, questions: list[str], share: float
) -> None:
    rows = [{"question": f"{n} {text}", "answer": n} for n, text in enumerate(questions)]
    folder = tmp_path_factory.mktemp("share")
    environment = opened(train=write(folder / "a.jsonl", [*rows, *rows]), heldout=share)
    environment.try_out()
    found = {
        split: [environment.problem(split, index).text for index in range(environment.size(split))]
        for split in ("train", "heldout")
    }
    assert not set(found["train"]) & set(found["heldout"])
    assert sorted(found["train"] + found["heldout"]) == sorted(row["question"] for row in rows * 2)
    backwards = opened(train=write(folder / "b.jsonl", rows[::-1]), heldout=share)
    assert {backwards.problem("heldout", n).text for n in range(backwards.size("heldout"))} == {
        *found["heldout"]
    }


# What is refused, in one sentence.


def refused(tmp_path: Path, lines: Sequence[Any], **values: Any) -> str:
    """Return why a training file with these lines cannot be used; bytes are written as they are."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    heldout = write(tmp_path / "held.jsonl", sums(500, 3))
    with pytest.raises(ConfigError) as caught:
        opened(**{"train": str(path), "heldout": heldout, **values}).try_out()
    assert "\n" not in str(caught.value)
    return str(caught.value)


GOOD = {"question": "1 + 1 =", "answer": "2"}


@pytest.mark.parametrize(
    ("line", "values", "words"),
    [
        (b"{", {}, "row 2 of {path} is not JSON in UTF-8: "),
        (
            b'{"question": "\xff", "answer": 1}',
            {},
            "row 2 of {path} is not JSON in UTF-8: 'utf-8' codec can't",
        ),
        (b"[" * 100_000, {}, "row 2 of {path} is not JSON in UTF-8: "),
        (b'{"question": 1' + b"0" * 5000 + b"}", {}, "row 2 of {path} is not JSON in UTF-8: "),
        ([1], {}, "row 2 of {path} is no JSON object with keys"),
        ({"answer": "2"}, {}, "row 2 of {path}: there is no key 'question'; it has answer"),
        ({"question": "?"}, {}, "row 2 of {path}: there is no key 'answer'; it has question"),
        (
            {"question": ["?"], "answer": "2"},
            {},
            "row 2 of {path}: 'question' is of type list, which is neither",
        ),
        ({"question": None, "answer": "2"}, {}, "row 2 of {path}: 'question' is of type NoneType"),
        ({"question": "?", "answer": True}, {}, "row 2 of {path}: 'answer' is of type bool"),
        ({"question": " ", "answer": "2"}, {}, "row 2 of {path}: 'question' is empty"),
        (
            {"question": "\ud83d?", "answer": "2"},
            {},
            "row 2 of {path}: 'question' holds '\\ud83d', half a char",
        ),
        ({"question": "?", "answer": "two"}, {}, "row 2 of {path}: 'answer' is 'two', which is no number"),
        (
            {"question": "?", "answer": "2"},
            {"score": "choice"},
            "'answer' is '2', which is neither a letter A",
        ),
        ({"question": "?", "answer": ""}, {"score": "exact"}, "'answer' is '', which is empty"),
        (
            {"question": "501 + 1 =", "answer": "2"},
            {},
            "row 2 of {held} has the same prompt as row 2 of {path}",
        ),
        (GOOD, {"id": "name"}, "row 1 of {path}: there is no key 'name'; it has question, answer"),
        (
            GOOD,
            {"questoin": "q"},
            "environment.parameters.questoin is not a parameter of this task; did you mean",
        ),
        (
            GOOD,
            {"score": None},
            "environment.parameters.score is missing: give exact, number, choice, math,",
        ),
        (GOOD, {"train": None}, "environment.parameters.train is missing: name a file"),
        (GOOD, {"question": 3}, "environment.parameters.question=3 is no text"),
        (GOOD, {"score": "numbr"}, "environment.parameters.score=numbr is unknown; did you mean number?"),
        (GOOD, {"train": "no.jsonl"}, "environment.parameters.train: there is no file no.jsonl under "),
        (
            GOOD,
            {"train": "pyproject.toml"},
            "pyproject.toml must end in one of .jsonl, .jsonl.gz, ",
        ),
        (
            GOOD,
            {"train": 7},
            "environment.parameters.train=7 is neither the path of a file nor a list of them",
        ),
        (GOOD, {"heldout": 1.5}, "heldout=1.5 is neither a file nor a share between 0 and 1"),
        (
            GOOD,
            {"heldout_size": 4},
            "environment.heldout_size=4, but this split has 3 rows of {held}; lower it",
        ),
        (
            GOOD,
            {"train": "hub:a:b:c:d"},
            "'hub:a:b:c:d' is none of hub:NAME, hub:NAME:SPLIT and hub:NAME:CONFIG",
        ),
        (GOOD, {"train": "hub:a:train[:10]"}, "is none of hub:NAME"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, line: Any, values: Row, words: str) -> None:
    said = refused(tmp_path, [GOOD, line], **values)
    assert words.format(path=tmp_path / "bad.jsonl", held=tmp_path / "held.jsonl") in said


def test_empty_and_spoilt_files_are_named(tmp_path: Path) -> None:
    assert refused(tmp_path, []).endswith("bad.jsonl holds no rows")
    table = write(tmp_path / "a.parquet", [GOOD])
    said = refused(tmp_path, [GOOD], train=table, question="q")
    assert said == f"{table} has no column 'q'; it has question, answer"
    for name, body in (("b.parquet", b"PAR1 no"), ("c.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9])):
        (tmp_path / name).write_bytes(body)
        assert str(tmp_path / name) in refused(tmp_path, [GOOD], train=str(tmp_path / name))


def test_a_file_that_is_written_over_is_noticed_and_one_that_replaces_it_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    environment = opened(train=write(path, sums(0, 8)), heldout=0.5)
    problem = environment.problem("train", 0)
    other = tmp_path / "new.jsonl"
    write(other, sums(50, 8))
    other.rename(path)
    assert environment.problem("train", 0) == problem
    environment = opened(train=str(path), heldout=0.5)
    write(path, sums(90, 9))
    with pytest.raises(ConfigError, match=rf"{path} was written over while it was in use; put it back"):
        environment.problem("train", 0)


# A function of one's own.

MINE = """
def near(text, row):
    return 1.0 if text == row["answer"] else row["worth"] if text else len(row["question"])

def three(text, row, more):
    return 1.0
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A score function in a module that PYTHONPATH leads to, and parameters with it."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "my_scores.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_scores", raising=False)
    importlib.invalidate_caches()
    rows = [{**row, "worth": 0.25} for row in sums(0, 20)]
    train, heldout = write(tmp_path / "a.parquet", rows[:10]), write(tmp_path / "b.jsonl", rows[10:])
    return {"train": train, "heldout": heldout, "score": "my_scores:near"}


@pytest.mark.parametrize("sandbox", ["auto", "process"])
def test_a_function_is_asked_where_classes_from_outside_are(mine: Row, sandbox: str) -> None:
    if sandbox == "auto":
        needs_bubblewrap()
    config = configured(mine, reward={"sandbox": sandbox, "processes": 1})
    environment = opened(**mine)
    assert not environment.only_compares

    async def score(split: str) -> list[Verdict]:
        problem = environment.problem(split, 3)
        async with asyncio.timeout(60.0), scorer_of(config, environment) as scorer:
            return await scorer.score(problem.key, [problem.answer, "x", ""])

    for split in ("train", "heldout"):
        right, near, failed = asyncio.run(score(split))
        assert (right, near) == (1.0, 0.25)
        assert isinstance(failed, Failed) and "which lies outside 0..1" in failed.reason


def test_what_only_compares_is_scored_in_the_service_itself(two: Row) -> None:
    for kind in ("exact", "number"):
        environment = opened(**two, score=kind)
        assert environment.only_compares
        assert isinstance(asyncio.run(_entered(configured({**two, "score": kind}), environment)), InProcess)


async def _entered(config: RunConfig, environment: FileEnvironment) -> object:
    async with scorer_of(config, environment) as scorer:
        return scorer


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ("my_scores:far", "module my_scores has no function far; it has near, three"),
        ("my_scores:three", "cannot be called with (answer text, row): missing a required argument: 'more'"),
        ("no_scores:near", "there is no module no_scores; install its package"),
        ("my_scores:", "'my_scores:' is no package.module:function"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_sentence(mine: Row, score: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(**{**mine, "score": score})
    assert f"environment.parameters.score={score}" in str(caught.value) and words in str(caught.value)


def test_a_function_needs_no_reference_answer(mine: Row) -> None:
    environment = opened(**mine, answer="solution")
    assert environment.problem("train", 0).answer == ""
    environment.try_out()


def test_a_model_that_judges_needs_no_reference_answer_and_is_the_only_one_that_does(two: Row) -> None:
    for answer, wanted in (("answer", "2"), ("solution", "")):
        environment = opened(**{**two, "score": "judge", "answer": answer})
        environment.try_out()
        assert environment.problem("train", 1).answer == wanted
    with pytest.raises(ContractError, match=r"the model of judge\.url gives rewards"):
        environment.reward(environment.problem("train", 1), ["2"])
    with pytest.raises(ConfigError, match="did you mean judge"):
        opened(**{**two, "score": "judges"})


def test_a_reward_is_explained(two: Row, mine: Row) -> None:
    for score, text, found in (
        ("number", "it is 7", "7"),
        ("math", r"so \boxed{\frac{9}{2}}", r"\frac{9}{2}"),
    ):
        environment = opened(**two, score=score)
        problem = environment.problem("train", 1)
        assert explain(environment, problem, text, 0.0) == f"found {found!r}, wanted '2'"
        assert explain(environment, problem, text, 1.0) == f"found {found!r}"
        assert explain(environment, problem, "", 0.0) == "found no answer, wanted '2'"
    own = opened(**mine)
    assert explain(own, own.problem("train", 1), "it is 7", 0.0) == "wanted '2'"


# Mathematical answers.


def problems(first: int, count: int, answer: Any = None) -> list[Row]:
    return [
        {"question": f"{n} + 1/2?", "answer": answer or f"{2 * n + 1}/2"} for n in range(first, first + count)
    ]


def test_references_of_mathematics_are_stripped_and_any_of_a_list_is_right(tmp_path: Path) -> None:
    rows = [
        *problems(0, 3),
        {"question": "?", "answer": ["$4$\n", r"\frac{9}{2}"]},
        {"question": "!", "answer": 7},
    ]
    environment = opened(
        train=write(tmp_path / "a.jsonl", rows),
        heldout=write(tmp_path / "b.parquet", problems(9, 2)),
        score="math",
    )
    assert not environment.only_compares and environment.try_out() == []
    assert [environment.problem("train", n).answer for n in (2, 4)] == ["5/2", "7"]
    both = environment.problem("train", 3)
    assert environment.reward(both, ["4", "4.5", "5", "4 or 4.5"]) == [1.0, 1.0, 0.0, 0.0]
    for bad in ({"question": "?", "answer": []}, {"question": "?", "answer": " "}, {"question": "?"}):
        path = write(tmp_path / "c.jsonl", [*problems(0, 3), bad])
        with pytest.raises(ConfigError, match=rf"row 4 of {path}: "):
            opened(train=path, heldout=write(tmp_path / "d.jsonl", problems(9, 2)), score="math").try_out()


def test_references_that_cannot_be_compared_are_named_and_too_many_refused(tmp_path: Path) -> None:
    heldout = write(tmp_path / "b.jsonl", problems(90, 4))
    broken = {"question": "broken?", "answer": r"\frac{5055}{2^{15}"}
    environment = opened(
        train=write(tmp_path / "a.jsonl", [*problems(0, 30), broken]), heldout=heldout, score="math"
    )
    (said,) = environment.try_out()
    assert said.startswith("1 of 31 train references can be matched by nothing but their text: ")
    assert f"{broken['answer']!r} in row 31 of " in said
    environment = opened(
        train=write(tmp_path / "a.jsonl", [*problems(0, 10), broken]), heldout=heldout, score="math"
    )
    with pytest.raises(ConfigError, match=r"1 of 11 train references .* row 11 of .*; more than 5%: repair"):
        environment.try_out()


def test_held_out_prompts_like_training_prompts_are_counted(tmp_path: Path) -> None:
    long = "A train of 8 cars leaves the old station at noon and runs for three hours to the sea"
    train = [{"question": f"{long}. How far is {n}?", "answer": 1} for n in range(2)]
    train += [
        {"question": f"What is the sum of all the numbers from one up to the number {n}?", "answer": 1}
        for n in range(9)
    ]
    train += [{"question": "Two  apples?", "answer": 1}, {"question": "7 + 1 - 2 =", "answer": 6}]
    heldout = [
        {"question": text, "answer": 1} for text in (f"Now {long.upper()}!", "two apples?", "Three apples?")
    ]
    heldout += [{"question": "7 - 1 + 2 =", "answer": 8}]
    heldout += [{"question": "What is the sum of all the numbers from one up to the number 99?", "answer": 1}]
    environment = opened(
        train=write(tmp_path / "a.jsonl", train), heldout=write(tmp_path / "b.jsonl", heldout)
    )
    (said,) = environment.try_out()
    assert said.startswith("2 of 5 held-out prompts share 13 words in a row, or all, with a training prompt")
    assert f"row 1 of {tmp_path}/b.jsonl with row 1 of {tmp_path}/a.jsonl" in said


def test_mathematics_is_judged_in_the_sandbox(tmp_path: Path) -> None:
    needs_bubblewrap()
    rows = [*problems(0, 3), {"question": "Which plane?", "answer": "x - 3z = 0"}]
    train, heldout = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", problems(9, 4))
    parameters = {"train": train, "heldout": heldout, "score": "math"}
    config, environment = configured(parameters, reward={"processes": 1}), opened(**parameters)

    async def scored(index: int, answers: Sequence[str]) -> list[Verdict]:
        async with asyncio.timeout(120.0), scorer_of(config, environment) as scorer:
            return await scorer.score(environment.problem("train", index).key, answers)

    plane = asyncio.run(
        scored(3, [r"\boxed{3z = x}", r"\boxed{3z = y}", r"\boxed{(x+y+z+w+1)^{20} = 0}", ""])
    )
    assert plane == [1.0, 0.0, 0.0, 0.0]
    assert asyncio.run(scored(1, [r"\boxed{\frac{3}{2}}", "9^{9^{9^{9}}}"])) == [1.0, 0.0]


def test_a_file_of_mathematics_is_described_where_the_library_can_work(tmp_path: Path) -> None:
    needs_bubblewrap()
    rows = [{"question": f"Line {n}?", "answer": f"(x,y) = t(1,{n})"} for n in range(2)]
    train, heldout = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", problems(9, 4))
    said = describe_file({"train": train, "heldout": heldout, "score": "math"})
    assert [one["earns"] for one in said["answers"]] == [1.0, 0.0, 0.0]


# Configuration and record.


def test_a_file_gives_all_its_rows_unless_it_is_asked_for_fewer(two: Row) -> None:
    config = configured(two)
    assert (config.environment.train_size, config.environment.heldout_size) == (30, 10)
    assert with_sizes(config) is config and parse_config(dump_config(config)) == config
    tree = {"name": "file", "parameters": {**two, "score": "number"}, "train_size": 20, "heldout_size": None}
    some = with_sizes(
        build_config({"environment": tree, "evaluation": {"prompts": 4}, "loop": {"prompts_per_step": 4}})
    )
    assert (some.environment.train_size, some.environment.heldout_size) == (20, 10)
    with pytest.raises(ConfigError, match=r"evaluation\.prompts=11 exceeds environment\.heldout_size=10"):
        configured(two, evaluation={"prompts": 11})
    with pytest.raises(ConfigError, match=r"environment\.train_size"):
        build_config({"environment": {"train_size": None}})
    assert build_config({}).environment.train_size == 256 and with_sizes(build_config({})) == build_config({})


def test_the_digests_of_the_files_are_recorded_and_hold_a_run_to_them(two: Row, tmp_path: Path) -> None:
    config = configured(two)
    before, pinned = build_manifest(config, "r-1", source_tree()), pinned_values(config, input_files(config))
    assert {*before["environment"]} == {"class", "release", "digest", "train", "heldout"}
    assert origin_facts(config, before, {})["origins/train.json"]["package"] == before["environment"]
    write(Path(two["heldout"]), sums(200, 10))
    after = build_manifest(config, "r-1", source_tree())
    assert before["environment"]["train"] == after["environment"]["train"]
    (said,) = environment_differences(before, after)
    assert said.startswith("the environment was file (") and " and is file (" in said
    with pytest.raises(ConfigError, match=r"the digest of environment\.name's files.*differs"):
        check_same_run("r-1", pinned, pinned_values(config, input_files(config)))
    Path(two["heldout"]).unlink()
    check_same_run("r-1", pinned, pinned_values(config, input_files(config)))  # it is not on this machine
    assert "environment" not in build_manifest(config, "r-1", source_tree())


def test_a_file_with_more_rows_names_the_same_run(two: Row, tmp_path: Path) -> None:
    config = configured(two)
    place = choose_run(config, None, tmp_path, fresh=False)
    write(Path(two["train"]), sums(0, 31))
    more = configured(two)
    assert more != config and choose_run(more, None, tmp_path, fresh=False) == place


def test_the_score_function_is_part_of_the_digest(mine: Row, tmp_path: Path) -> None:
    config = configured(mine)
    before = build_manifest(config, "r-1", source_tree())["environment"]
    assert before["class"] == "my_scores:near"
    module = tmp_path / "code" / "my_scores.py"
    module.write_text(MINE + "\n# changed\n")
    after = build_manifest(config, "r-1", source_tree())["environment"]
    assert before["train"] == after["train"] and before["digest"] != after["digest"]


# Many rows.


class Counting:
    """A tokenizer of one token for each byte, between two others, that counts what it is asked."""

    asked = 0

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        self.asked += 1
        return (0, *text.encode(), 0)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_only_prompts_that_could_be_too_long_are_tokenised_before_the_start(
    suffix: str, tmp_path: Path
) -> None:
    rows = [{"question": f"{n} " + "é" * (n % 50), "answer": n} for n in range(500)]
    train, heldout = write(tmp_path / f"a{suffix}", rows), write(tmp_path / f"b{suffix}", sums(0, 5))
    environment, codec = opened(train=train, heldout=heldout), Counting()
    longest = max(len(row["question"].encode()) for row in rows) + 2
    prompts = EnvironmentPrompts(environment, codec, longest)  # type: ignore[arg-type]
    prompts.check_all(500, 5)
    assert codec.asked < 500
    prompts = EnvironmentPrompts(environment, codec, longest - 1)  # type: ignore[arg-type]
    first = next(n for n, row in enumerate(rows) if len(row["question"].encode()) + 2 == longest)
    with pytest.raises(
        ConfigError, match=rf"prompt train-0-{first}, row {first + 1} of {train}, has {longest} tok"
    ):
        prompts.check_all(500, 5)


def test_few_prompts_are_remembered(two: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_prompts, "MOST_KNOWN", 8)
    codec = Counting()
    prompts = EnvironmentPrompts(opened(**two), codec, 100)  # type: ignore[arg-type]
    first = [prompts.prompt("train", index) for index in range(30)]
    assert [prompts.prompt("train", index) for index in range(22, 30)] == first[22:] and codec.asked == 30
    assert [prompts.prompt("train", index) for index in range(30)] == first and codec.asked == 60


@given(size=st.integers(1, 5000), count=st.integers(1, 300))
def test_what_is_looked_at_lies_evenly_in_a_file(size: int, count: int) -> None:
    environment = FileEnvironment.__new__(FileEnvironment)
    environment.seed = 3
    found = looked_at(environment, "train", size, count)
    assert len(found) == len({*found}) == min(size, count) and found == sorted(found)
    assert all(index < size for index in found)
    assert all(later - earlier <= 2 * (size // len(found) + 1) for earlier, later in pairwise(found))
    assert looked_at(make_environment("reasoning/chain_sum", {}, 0, 8, 8), "train", size, count) == [
        *range(min(size, count))
    ]


def test_a_run_from_a_file_is_checked_before_it_starts(tmp_path: Path) -> None:
    drawn = make_environment("reasoning/chain_sum", {}, 0, 40, 20)
    for split, size in (("train", 40), ("heldout", 20)):
        problems = [drawn.problem(split, index) for index in range(size)]
        write(tmp_path / f"{split}.jsonl", [{"question": one.text, "answer": one.answer} for one in problems])
    parameters = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "heldout")}
    record = {"record": {"dvc": False}, "model": {"path": "examples/models/chain-sum"}}
    config = configured(parameters, **record)
    assert not [note for note in preflight(config, tmp_path / "home") if "reference" in note]
    short = configured(parameters, **record, rollout={"max_model_tokens": 200}, sampling={"max_tokens": 192})
    with pytest.raises(ConfigError, match=rf"row 1 of {tmp_path}/train\.jsonl, has \d+ tokens, but rollout"):
        preflight(short, tmp_path / "home")
    write(tmp_path / "train.jsonl", [{"question": "Ω?", "answer": 1}, *sums(0, 30)])
    with pytest.raises(ConfigError, match="'Ω' in train-0-0"):
        preflight(configured(parameters, **record), tmp_path / "home")


def test_the_renderer_makes_no_more_tokens_than_bytes() -> None:
    renderer = Renderer.load(build_config({"model": {"path": "examples/models/chain-sum"}}))
    for text in ("1 + 2 =", "State the final answer: é∑ 12345", "x" * 100):
        assert len(renderer.encode_prompt(text)) <= len(text.encode()) + len(renderer.encode_prompt("x"))


# What is said of one.


def test_a_file_is_described_with_what_answers_would_earn(
    two: Row, mine: Row, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["environments", "file", f"train={two['train']}", f"heldout={two['heldout']}", "score=number"]
    assert execute(words) == 0
    said = yaml.safe_load(capsys.readouterr().out)
    assert said["rows"] == {"train": 30, "heldout": 10} and said["prompt"] == "0 + 1 ="
    assert said["files"]["train"] == digest_of([Path(two["train"])])
    assert said["answers"] == [
        {"answer": "1", "earns": 1.0},
        {"answer": "", "earns": 0.0},
        {"answer": "2", "earns": 0.0},
    ]
    words = ["environments", "file", *(f"{name}={value}" for name, value in mine.items()), "--json"]
    assert execute(words) == 0
    right, empty, wrong = json.loads(capsys.readouterr().out)["answers"]
    assert (right["earns"], wrong["earns"]) == (1.0, 0.25) and "outside 0..1" in empty["earns"]
    assert execute(["environments", "file"]) == 2
    assert "environment.parameters.train is missing" in capsys.readouterr().err
    assert execute(["environments"]) == 0 and "\nfile " in capsys.readouterr().out


# Data that others made, where it is at hand.


@pytest.mark.skipif(
    not DATA, reason="ANTIPHON_TASK_DATA names no folder with gsm8k_train.jsonl.gz and others"
)
@pytest.mark.parametrize(
    ("train", "heldout", "score"),
    [("gsm8k_train", "gsm8k_test", "number"), ("math_test_rest", "math500", "exact")],
)
def test_published_problems_are_read_and_their_solutions_earn_the_reward(
    train: str, heldout: str, score: str
) -> None:
    files = {"train": f"{DATA}/{train}.jsonl.gz", "heldout": f"{DATA}/{heldout}.jsonl.gz"}
    environment = opened(**files, question="problem", id="id", score=score)
    environment.try_out()
    rows, paid = Rows([Path(files["train"])]), 0.0
    for index in range(environment.size("train")):
        problem = environment.problem("train", index)
        assert environment.reward(problem, [f"<answer>{problem.answer}</answer>", ""]) == [1.0, 0.0]
        paid += environment.reward(problem, [rows[index].get("solution", problem.answer)])[0]
    assert paid / environment.size("train") > 0.99


def test_a_data_set_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed (the extra hub)")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums" / "data").mkdir(parents=True)
    for split, first in (("train", 0), ("test", 50)):
        write(tmp_path / "sums" / "data" / f"{split}-00000-of-00001.parquet", sums(first, 9))
    name = f"hub:{tmp_path / 'sums'}"
    for train, heldout in ((name, name), (f"{name}:train", f"{name}:test"), (f"{name}:default:train", name)):
        environment = opened(train=train, heldout=heldout)
        environment.try_out()
        assert (environment.size("train"), environment.size("heldout")) == (9, 9)
        assert environment.problem("heldout", 8).text == "58 + 1 ="
    write(tmp_path / "more.jsonl", sums(90, 4))
    for mixed in ([name, str(tmp_path / "more.jsonl")], [str(tmp_path / "more.jsonl"), name]):
        assert opened(train=mixed, heldout=name).size("train") == 13
    with pytest.raises(ConfigError, match="cannot be loaded"):
        opened(train=f"{name}:validation", heldout=name)


def test_without_datasets_a_name_says_what_to_install(two: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the library datasets .*pip install .datasets>=4"):
        opened(**{**two, "train": "hub:owner/name"})


def test_a_list_names_files_and_data_sets(two: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.system.rows._hub_files", lambda named, field, split: (Path(named + split),))
    found = named_files([two["train"], "hub:a", "hub:b"], "data.train", "test")
    assert found == (Path(two["train"]).resolve(), Path("hub:atest"), Path("hub:btest"))
