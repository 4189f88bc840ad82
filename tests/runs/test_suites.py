"""Suites: what is sampled, what the cache has, what is refused, and how scores are made."""

import gzip
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from antiphon.api.engine import EngineRequest
from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.environments.suites import SUITES, Suite, find_suites
from antiphon.lineage.kept import Kept
from antiphon.lineage.suite_records import read_results
from antiphon.models.codec import TextCodec
from antiphon.runs import suites as suites_module
from antiphon.runs.suites import (
    SampleAll,
    Subject,
    SuiteOptions,
    SuiteResult,
    evaluate_suites,
    sample_with_workers,
    subject_of_model,
)
from antiphon.services.rollout.suite_worker import SAMPLES, SuiteSample
from antiphon.system.processes import ChildProcess
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.recorded_folders import record_run

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
OVERRIDES = ("score=number", "prompt_suffix=", "environment.max_lost_share=1")
KEYS = {"question": "problem", "answer": "answer", "id": "id", "score": "number", "prompt_suffix": ""}


class Stopped(Exception):
    """Stands for a kill."""


class Sampler:
    """Stands for the workers: answers a sum of two with it or with 100 more, and may be killed after some."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.drawn: list[str] = []
        self.requests: list[EngineRequest] = []
        self._left = dies_after
        self._codec = TextCodec.load(str(MODEL))
        self._asked: Counter[tuple[int, ...]] = Counter()

    def __call__(
        self, config: RunConfig, database: Path, requests: Sequence[EngineRequest], workers: int
    ) -> None:
        with Kept(database, SAMPLES, SuiteSample) as kept:
            for one in requests:
                if self._left == 0:
                    raise Stopped
                self._left = None if self._left is None else self._left - 1
                first, second = re.findall(r"\d+", self._codec.decode(one.prompt_token_ids))
                said = int(first) + int(second) + 100 * (self._asked[one.prompt_token_ids] % 2)
                self._asked[one.prompt_token_ids] += 1
                tokens = np.asarray(self._codec.encode(f"{said}", add_special_tokens=False), np.int32)
                kept.add(one.request_id, SuiteSample(tokens.tobytes(), "stop"))
                self.drawn.append(one.request_id)
                self.requests.append(one)


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
    assert (
        len({*first.drawn} | {*then.drawn}) == len({one.seed for one in first.requests + then.requests}) == 12
    )
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
    assert {one.sampling.temperature for one in sampler.requests} == {0.7, 0.8}


def test_another_judge_judges_anew_and_samples_nothing(tmp_path: Path) -> None:
    file, sampler = write_suite(tmp_path / "sums.jsonl"), Sampler()
    assert evaluate(tmp_path, file, sampler).scores["avg@1"].mean == 1.0
    other = (*OVERRIDES[1:], "score=choice", "answer=id")
    with pytest.raises(ConfigError, match="neither a letter"):
        evaluate(tmp_path, file, sampler, overrides=other)
    exact = evaluate(tmp_path, file, sampler, overrides=(*OVERRIDES[1:], "score=exact", "answer=problem"))
    assert (exact.sampled, exact.scores["avg@1"].mean) == (0, 0.0)


def test_of_a_changed_file_only_new_prompts_are_sampled(tmp_path: Path) -> None:
    file, said = write_suite(tmp_path / "sums.jsonl"), list[str]()
    evaluate(tmp_path, file, Sampler())
    write_suite(file, first=2)
    found = evaluate(tmp_path, file, Sampler(), said.append)
    assert (found.sampled, found.cached, found.scores["avg@1"].mean) == (2, 4, 1.0)
    (line,) = [line for line in said if "sums.jsonl has changed since it was evaluated last" in line]
    assert "2 of 6 answers are sampled again" in line
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "answer": "7"}) + "\n" for row in rows))
    mended = evaluate(tmp_path, file, Sampler())
    assert (mended.sampled, mended.scores["avg@1"].mean) == (0, pytest.approx(1 / 6)), "other references"


@pytest.mark.parametrize(
    ("override", "sampled"),
    [
        ("sampling.max_tokens=7", 6),
        ("evaluation.top_p=0.9", 6),
        ("sampling.rule=gumbel", 6),
        ("model.dtype=bfloat16", 6),
        ("loop.mode=fixed", 6),
        ("run.seed=1", 6),
        ("prompt_prefix=Add ", 6),
        ("rollout.max_model_tokens=256", 0),
        ("reward.processes=1", 0),
        ("id=null", 0),
    ],
)
def test_what_decides_tokens_is_sampled_anew_and_nothing_else(
    tmp_path: Path, override: str, sampled: int
) -> None:
    file, options = write_suite(tmp_path / "sums.jsonl"), {"temperature": 0.5}
    evaluate(tmp_path, file, Sampler(), **options)
    sampler = Reader()
    assert evaluate(tmp_path, file, sampler, overrides=(*OVERRIDES, override), **options).sampled == sampled


class Reader(Sampler):
    """Answers nothing, whatever is asked."""

    def __call__(self, config: RunConfig, database: Path, requests: Sequence[EngineRequest], _: int) -> None:
        with Kept(database, SAMPLES, SuiteSample) as kept:
            for one in requests:
                kept.add(one.request_id, SuiteSample(b"", "stop"))


def test_another_engine_or_end_of_answers_is_sampled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, model = write_suite(tmp_path / "sums.jsonl"), tmp_path / "model"
    shutil.copytree(MODEL, model)
    monkeypatch.setattr(f"{__name__}.MODEL", model)
    assert evaluate(tmp_path, file, Reader()).sampled == 6
    (model / "README.md").write_text("It is said otherwise.")
    assert evaluate(tmp_path, file, Reader()).sampled == 0
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 1, 2]}')
    assert evaluate(tmp_path, file, Reader()).sampled == 6
    monkeypatch.setattr("antiphon.runs.suites.library_versions", lambda: {"vllm": "0.0.1"})
    assert evaluate(tmp_path, file, Reader()).sampled == 6


def test_what_two_files_share_is_sampled_once(tmp_path: Path) -> None:
    files = ",".join(str(write_suite(tmp_path / f"{n}.jsonl", first=n)) for n in (0, 4))
    options, sampler = SuiteOptions(overrides=OVERRIDES), Sampler()
    found = evaluate_suites(
        subject_of_model(MODEL), find_suites(files, None), options, tmp_path, print, sampler
    )
    assert len(sampler.drawn) == 10 and [(one.sampled, one.cached) for one in found] == [(6, 0), (4, 2)]
    assert [one.scores["avg@1"].mean for one in found] == [1.0, 1.0]


def test_an_item_that_comes_twice_is_sampled_once_and_counts_twice(tmp_path: Path) -> None:
    file = write_suite(tmp_path / "sums.jsonl")
    file.write_text(file.read_text() * 2)
    sampler = Sampler()
    found = evaluate(tmp_path, file, sampler)
    assert (len(sampler.drawn), found.items, found.sampled, found.cached) == (6, 12, 6, 6)


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
    assert found.same == 2 and found.overlapping == 0


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


def test_references_that_cannot_be_compared_are_named_before_anything_is_sampled(tmp_path: Path) -> None:
    needs_bubblewrap()
    file, said = tmp_path / "sums.jsonl", list[str]()
    rows = [
        {"problem": f"{n} + 0 =", "answer": r"\frac{5055}{2^{15}" if n < 2 else f"{n}"} for n in range(50)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"overrides": (*OVERRIDES[1:], "score=math", "id=null")}
    evaluate(tmp_path, file, Reader(), said.append, **options)
    evaluate(tmp_path, file, Reader(), limit=2, **options)
    (line,) = [line for line in said if "can be matched by nothing but their text" in line]
    assert "2 of 50 heldout references" in line and "row 1 of" in line
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    with pytest.raises(ConfigError, match=r"2 of 20 heldout references .* more than 5%"):
        evaluate(tmp_path, file, never, **options)


def never(*_: Any) -> None:
    pytest.fail("nothing may be sampled")


def test_tests_that_are_none_are_named_before_anything_is_sampled(tmp_path: Path) -> None:
    file = tmp_path / "mbpp.jsonl"
    file.write_text(json.dumps({"task_id": "1", "prompt": "Double.", "code": "x = 1", "tests": 3}) + "\n")
    with pytest.raises(ConfigError, match=r"row 1 of .*mbpp\.jsonl: 'tests'"):
        evaluate(tmp_path, file, never, overrides=("environment.max_lost_share=1",))


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
    file, found = write_suite(tmp_path / "sums.jsonl"), list[list[SuiteSample | None]]()
    asked = list[str]()
    prepare = suites_module._prepare

    def prepared(*rest: Any) -> Any:
        one = prepare(*rest)
        asked[:] = one.requests
        return one

    monkeypatch.setattr(suites_module, "_prepare", prepared)
    words = ["--model", str(MODEL), "--suite", str(file), "--json", "--k", "2"]
    command = ["evaluate", *words]
    command += [word for one in (*OVERRIDES, "sampling.max_tokens=8") for word in ("--set", one)]
    for home, workers in (("one", "2"), ("other", "1")):
        monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / home))
        assert execute([*command, "--workers", workers]) == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert (told["sampled"], told["cached"], told["samples"]) == (12, 0, 2)
        with Kept(tmp_path / home / "suites" / "samples.sqlite", SAMPLES, SuiteSample) as kept:
            found.append([kept.find(digest) for digest in asked])
    assert len(found[0]) == 12 and None not in found[0] and found[0] == found[1]
    assert execute(command) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["sampled"], told["cached"]) == (0, 12)


def test_a_worker_that_cannot_sample_says_why(tmp_path: Path) -> None:
    def sampler(config: RunConfig, *rest: Any) -> None:
        gone = config.model.model_copy(update={"path": str(tmp_path / "gone")})
        sample_with_workers(config.model_copy(update={"model": gone}), *rest)

    with pytest.raises(
        AntiphonError, match=r"a worker ended with status 2: model\.path=.*gone.* what was sampled is kept"
    ):
        evaluate(tmp_path, write_suite(tmp_path / "sums.jsonl"), sampler)


def test_a_model_that_has_fewer_positions_is_refused(tmp_path: Path) -> None:
    file, overrides = write_suite(tmp_path / "sums.jsonl"), (*OVERRIDES, "rollout.max_model_tokens=9000")
    with pytest.raises(ConfigError, match=r"rollout\.max_model_tokens=9000 is more than"):
        evaluate(tmp_path, file, Sampler(), overrides=overrides)


class Child:
    """Stands for a worker that ends after some looks, and touches its file at all but the last of them."""

    def __init__(self, path: Path, looks: int, quiet: int) -> None:
        self._path, self._looks, self._quiet = path, looks, quiet
        path.touch()

    def poll(self) -> int | None:
        return None if self._looks else 0

    def wait(self, timeout: float) -> None:
        self._looks -= 1
        if self._looks >= self._quiet:
            stamp = self._path.stat().st_mtime_ns + 10**9
            os.utime(self._path, ns=(stamp, stamp))
        raise subprocess.TimeoutExpired("child", timeout)


@pytest.mark.parametrize(("looks", "quiet", "hangs"), [(500, 0, False), (40, 20, False), (500, 400, True)])
def test_a_worker_that_samples_no_token_hangs_however_few_answers_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int, quiet: int, hangs: bool
) -> None:
    ticks = count()
    monkeypatch.setattr("antiphon.runs.suites.time.monotonic", lambda: float(next(ticks)))
    child = cast(ChildProcess, Child(tmp_path / "work", looks, quiet))
    hung = pytest.raises(AntiphonError, match=r"no token came for services\.stall_timeout_s=30")
    with hung if hangs else nullcontext():
        suites_module._wait([child], [tmp_path / "work"], 30.0)


def test_a_result_is_kept_in_the_runs_folder_also_where_mlflow_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise UnavailableError("MLflow is away")

    monkeypatch.setattr("antiphon.runs.suites.log_suite", fails)
    run_dir, said = record_run(tmp_path, "small-a", 4), list[str]()
    subject = replace(subject_of_model(MODEL), run_dir=run_dir, version=3)
    file, options = write_suite(tmp_path / "sums.jsonl"), SuiteOptions(overrides=OVERRIDES)
    for _ in range(2):
        (found,) = evaluate_suites(
            subject, find_suites(str(file), None), options, tmp_path, said.append, Sampler()
        )
    assert any("sums: not in MLflow, but in" in line and "MLflow is away" in line for line in said)
    assert read_results(run_dir) == [replace(found, sampled=0, cached=0)]
    (run_dir / "suite-x.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"suite-x\.json is no result of a suite"):
        read_results(run_dir)
