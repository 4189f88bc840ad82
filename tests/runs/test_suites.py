"""Suites: what is sampled, what the cache has, what is refused, and how scores are made."""

import gzip
import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError
from antiphon.environments.contamination import WORDS, contamination
from antiphon.environments.suites import SUITES, Suite, find_suites
from antiphon.lineage.suite_cache import SuiteCache, SuiteSample
from antiphon.models.codec import TextCodec
from antiphon.runs.suites import (
    SampleAll,
    Subject,
    SuiteOptions,
    SuiteResult,
    evaluate_suites,
    sample_with_workers,
    subject_of_model,
)
from antiphon.services.rollout.suite_worker import SuiteRequest

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
OVERRIDES = ("score=number", "prompt_suffix=", "environment.max_lost_share=1")
KEYS = {"question": "problem", "answer": "answer", "id": "id", "score": "number", "prompt_suffix": ""}


class Stopped(Exception):
    """Stands for a kill."""


class Sampler:
    """Stands for the workers: answers each item with its number, and may be killed after some."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.drawn: list[tuple[int, int]] = []
        self.sampling: set[tuple[float, int]] = set()
        self._left = dies_after
        self._codec = TextCodec.load(str(MODEL))

    def __call__(
        self, config: RunConfig, database: Path, requests: Sequence[SuiteRequest], workers: int
    ) -> None:
        with SuiteCache(database) as cache:
            for one in requests:
                if self._left == 0:
                    raise Stopped
                self._left = None if self._left is None else self._left - 1
                said = one.item if one.sample % 2 == 0 else one.item + 100
                tokens = self._codec.encode(f"{said}", add_special_tokens=False)
                cache.add([(one.key, SuiteSample(one.item, one.sample, tokens, "stop"))])
                self.drawn.append((one.item, one.sample))
                self.sampling.add((one.sampling.temperature, one.seed))


def write_suite(path: Path, count: int = 6, first: int = 0) -> Path:
    rows = [{"id": f"n-{n}", "problem": f"{n} + 0 =", "answer": f"{n}"} for n in range(first, first + count)]
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return path


def evaluate(
    home: Path, file: Path, sampler: SampleAll, say: Callable[[str], None] = print, **options: Any
) -> SuiteResult:
    chosen = SuiteOptions(**{"overrides": OVERRIDES, **options})
    (found,) = evaluate_suites(
        subject_of_model(MODEL), find_suites(str(file), None), chosen, home, say, sampler
    )
    return found


def test_what_was_sampled_before_a_kill_is_not_sampled_again(tmp_path: Path) -> None:
    file, first, then = write_suite(tmp_path / "sums.jsonl"), Sampler(dies_after=5), Sampler()
    with pytest.raises(Stopped):
        evaluate(tmp_path, file, first, samples=2)
    found = evaluate(tmp_path, file, then, samples=2)
    assert len(first.drawn) == 5 and not {*first.drawn} & {*then.drawn}
    assert {*first.drawn} | {*then.drawn} == {(item, number) for item in range(6) for number in range(2)}
    assert (found.sampled, found.cached) == (7, 5)


def test_a_second_call_samples_nothing_and_says_the_same(tmp_path: Path) -> None:
    file, sampler = write_suite(tmp_path / "sums.jsonl.gz"), Sampler()
    first = evaluate(tmp_path, file, sampler, samples=4)
    again = evaluate(tmp_path, file, sampler, samples=4)
    assert len(sampler.drawn) == 24 and (again.sampled, again.cached) == (0, 24)
    assert again.scores == first.scores
    assert first.scores["avg@4"].mean == first.scores["pass@1"].mean == 0.5
    assert first.scores["pass@4"].mean == 1.0 and first.scores["pass@2"].mean == pytest.approx(5 / 6)
    assert first.scores["maj@4"].mean == 0.5  # two right ones against two that agree on another answer


def test_more_samples_and_fewer_items_use_what_is_there(tmp_path: Path) -> None:
    file, sampler = write_suite(tmp_path / "sums.jsonl"), Sampler()
    evaluate(tmp_path, file, sampler, samples=2, temperature=0.7)
    assert evaluate(tmp_path, file, sampler, samples=3, temperature=0.7).sampled == 6
    assert evaluate(tmp_path, file, sampler, samples=3, temperature=0.7, limit=2).sampled == 0
    assert evaluate(tmp_path, file, sampler, samples=2, temperature=0.8).sampled == 12
    assert {temperature for temperature, _ in sampler.sampling} == {0.7, 0.8}


def test_another_judge_judges_anew_and_samples_nothing(tmp_path: Path) -> None:
    file, sampler = write_suite(tmp_path / "sums.jsonl"), Sampler()
    assert evaluate(tmp_path, file, sampler).scores["avg@1"].mean == 1.0
    other = (*OVERRIDES[1:], "score=choice", "answer=id")
    with pytest.raises(ConfigError, match="neither a letter"):
        evaluate(tmp_path, file, sampler, overrides=other)
    exact = evaluate(tmp_path, file, sampler, overrides=(*OVERRIDES[1:], "score=exact", "answer=problem"))
    assert (exact.sampled, exact.scores["avg@1"].mean) == (0, 0.0)


def test_a_changed_file_is_named_and_sampled_anew(tmp_path: Path) -> None:
    file, said = write_suite(tmp_path / "sums.jsonl"), list[str]()
    evaluate(tmp_path, file, Sampler())
    write_suite(file, first=1)
    assert evaluate(tmp_path, file, Sampler(), said.append).sampled == 6
    assert any("sums.jsonl has changed since it was evaluated last" in line for line in said)


def test_a_sample_is_never_kept_twice(tmp_path: Path) -> None:
    with SuiteCache(tmp_path / "samples.sqlite") as cache:
        one = SuiteSample(0, 0, (1, 2), "stop")
        cache.add([("key", one)])
        with pytest.raises(IntegrityError, match="drawn twice"):
            cache.add([("key", one)])
        assert cache.samples("key") == [one] and cache.places("key") == {(0, 0)}


def test_two_files_that_are_the_same_are_sampled_once(tmp_path: Path) -> None:
    files = ",".join(str(write_suite(tmp_path / f"{name}.jsonl")) for name in ("one", "other"))
    options, sampler = SuiteOptions(overrides=OVERRIDES), Sampler()
    found = evaluate_suites(
        subject_of_model(MODEL), find_suites(files, None), options, tmp_path, print, sampler
    )
    assert len(sampler.drawn) == 6 and found[0].scores == found[1].scores


def test_two_calls_at_once_are_refused(tmp_path: Path) -> None:
    file = write_suite(tmp_path / "sums.jsonl")

    def sampler(*_: Any) -> None:
        evaluate(tmp_path, file, Sampler())

    with pytest.raises(ConfigError, match="another evaluation of suites"):
        evaluate(tmp_path, file, sampler)


def test_too_many_answers_without_a_verdict_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[float]:
        raise ValueError("no judge")

    file = write_suite(tmp_path / "sums.jsonl")
    monkeypatch.setattr("antiphon.environments.file.FileEnvironment.reward", broken)
    with pytest.raises(AntiphonError, match=r"sums: 6 of 6 answers could not be judged.*row 1 of .*no judge"):
        evaluate(tmp_path, file, Sampler())


def test_items_that_the_run_trains_on_are_counted(tmp_path: Path) -> None:
    file, trained = write_suite(tmp_path / "sums.jsonl"), write_suite(tmp_path / "train.jsonl", 20, first=4)
    section = {"name": "file", "parameters": {**KEYS, "train": str(trained)}}
    config = build_config(
        {"environment": section, "loop": {"prompts_per_step": 1}, "evaluation": {"prompts": 1}}
    )
    subject = replace(subject_of_model(MODEL), config=config, run_dir=tmp_path)
    options = SuiteOptions(overrides=OVERRIDES)
    (found,) = evaluate_suites(subject, find_suites(str(file), None), options, tmp_path, print, Sampler())
    assert found.contaminated is not None
    assert {*found.contaminated.same} <= {4, 5} and found.contaminated.same


def test_words_in_a_row_and_whole_prompts_are_found_and_templates_are_not() -> None:
    words = [f"w{n}" for n in range(40)]
    begin = "please think about this question step by step and then say the final number "
    evaluated = [begin + f"{n} {n + 1}" for n in range(5)] + [" ".join(words[:20]), "What is $X+1$?"]
    trained = [
        begin + "something else",
        " ".join(words[20 - WORDS : 33]),
        "what is  x + 1",
        " ".join(words[9:21]),
    ]
    found = contamination(evaluated, trained)
    assert dict(found.same) == {6: 2} and dict(found.overlapping) == {5: 1}
    assert dict(contamination(evaluated, evaluated).same) == {n: n for n in range(7)}


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("gsm8", "did you mean gsm8k"),
        ("aime2025", "looked for on no hub"),
        ("there-is-none.jsonl", "there is no such file"),
    ],
)
def test_unknown_suites_and_missing_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str, said: str
) -> None:
    assert execute(["evaluate", "--model", str(MODEL), "--suite", named]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_a_folder_without_the_file_and_a_group_with_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has none of gsm8k_test\.jsonl"):
        find_suites("gsm8k", tmp_path)
    for name in ("aime2024", "minerva"):
        write_suite(tmp_path / f"{name}.jsonl.gz")
    assert [suite.name for suite, _ in find_suites("math", tmp_path)] == ["aime2024", "minerva"]
    (suite, parameters), *_ = find_suites("aime2024", tmp_path)
    assert suite is SUITES["aime2024"] and parameters["heldout"].endswith("aime2024.jsonl.gz")
    known = find_suites(str(tmp_path / "minerva.jsonl.gz"), None)[0][0]
    assert known is SUITES["minerva"]


def test_a_missing_field_names_row_and_key(tmp_path: Path) -> None:
    file = write_suite(tmp_path / "sums.jsonl")
    file.write_text(file.read_text() + json.dumps({"id": "x", "problem": "1 ="}) + "\n")
    with pytest.raises(ConfigError, match=r"row 7 of .*sums\.jsonl: there is no key 'answer'"):
        evaluate(tmp_path, file, Sampler())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--k", "0"], "--k 0 must be at least 1"),
        (["--share", "0"], "--share 0 must be above 0"),
        (["--k", "2", "--temperature", "0"], "--k 2 at temperature 0 gives equal samples"),
        (["--set", "score=numbr"], "did you mean number"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    file = write_suite(tmp_path / "sums.jsonl")
    command = ["evaluate", "--model", str(MODEL), "--suite", str(file), *words]
    assert execute(command) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_options_of_suites_need_a_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["evaluate", "--k", "4"]) == ConfigError.exit_code
    assert "need a --suite" in capsys.readouterr().err


def test_workers_beside_a_run_are_a_share_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = write_suite(tmp_path / "sums.jsonl"), list[int]()
    config = build_config({"rollout": {"workers": 4}})
    subject: Subject = replace(subject_of_model(MODEL), config=config, run_dir=tmp_path)
    suites: list[tuple[Suite, dict[str, Any]]] = find_suites(str(file), None)
    for running, share in ((False, 0.5), (True, 0.5), (True, 0.1)):
        monkeypatch.setattr("antiphon.runs.suites.is_running", lambda _, now=running: now)
        options = SuiteOptions(share=share, overrides=OVERRIDES, temperature=0.1 + share + running)

        def sampler(config: RunConfig, database: Path, requests: Any, workers: int) -> None:
            asked.append(workers)
            Sampler()(config, database, requests, workers)

        evaluate_suites(subject, suites, options, tmp_path, print, sampler)
    assert asked == [4, 2, 1]


@pytest.mark.engine
def test_real_workers_share_a_suite_and_answer_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, found = write_suite(tmp_path / "sums.jsonl"), list[list[SuiteSample]]()
    command = ["evaluate", "--model", str(MODEL), "--suite", str(file), "--json", "--k", "2"]
    command += [word for one in (*OVERRIDES, "sampling.max_tokens=8") for word in ("--set", one)]
    for home, workers in (("one", "2"), ("other", "1")):
        monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / home))
        assert execute([*command, "--workers", workers]) == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert (told["sampled"], told["cached"], told["samples"]) == (12, 0, 2)
        database = tmp_path / home / "suites" / "samples.sqlite"
        with closing(sqlite3.connect(database)) as connection:
            ((key,),) = connection.execute("select key from suites")
        with SuiteCache(database) as cache:
            found.append(cache.samples(key))
    assert len(found[0]) == 12 and found[0] == found[1]
    assert execute(command) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["sampled"], told["cached"]) == (0, 12)


def test_a_worker_that_cannot_sample_says_why(tmp_path: Path) -> None:
    def sampler(config: RunConfig, *rest: Any) -> None:
        gone = config.model.model_copy(update={"path": str(tmp_path / "gone")})
        sample_with_workers(config.model_copy(update={"model": gone}), *rest)

    with pytest.raises(
        AntiphonError, match=r"a worker failed: model\.path=.*gone.* what was sampled is kept"
    ):
        evaluate(tmp_path, write_suite(tmp_path / "sums.jsonl"), sampler)


def test_a_model_that_has_fewer_positions_is_refused(tmp_path: Path) -> None:
    file, overrides = write_suite(tmp_path / "sums.jsonl"), (*OVERRIDES, "rollout.max_model_tokens=9000")
    with pytest.raises(ConfigError, match=r"rollout\.max_model_tokens=9000 is more than"):
        evaluate(tmp_path, file, Sampler(), overrides=overrides)
