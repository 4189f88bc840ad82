"""What the verbs that look at recorded runs say, and where they put it."""

import json
import re
from pathlib import Path

import pytest

from antiphon.cli.app import execute
from tests.support.recorded_folders import record_run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_runs_are_listed_newest_first_with_what_differs_and_how_to_continue(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(home, "small-a", 4)
    record_run(home, "small-b", 2, loop__max_staleness=1)
    other = record_run(home, "other-a", 4, run__name="other")
    (other / "config.yaml").touch()
    assert execute(["runs"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^(\w+-\w)  ", said, re.MULTILINE) == ["other-a", "small-b", "small-a"]
    assert re.search(r"small-b\s+unfinished\s+2/4\s+50\.0%\s+70\.0%\s+70\.0% v2", said)
    assert "loop.max_staleness=1" in said and "loop.max_staleness=2" in said
    assert f"continue small-b: antiphon run {home}/runs/small-b/config.yaml --resume small-b" in said
    assert "antiphon compare small-b other-a" in said


def test_runs_as_json_has_every_figure(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(home, "small-a", 4)
    assert execute(["runs", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["run"], run["state"], run["steps_total"]) == ("small-a", "finished", 4)
    assert run["figures"]["reward_last"] == pytest.approx(0.9) and run["figures"]["tokens_trained"] == 320


def test_a_run_of_another_release_hides_no_other(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(home, "small-a", 4)
    strange = record_run(home, "small-b", 4)
    (strange / "config.yaml").write_text("loop: {no_such_key: 1}\n")
    assert execute(["runs"]) == 0
    said = capsys.readouterr().out
    assert "not shown: small-b" in said and re.search(r"^small-a ", said, re.MULTILINE)


def test_an_empty_home_says_how_to_start(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["runs"]) == 0
    assert "start one with `antiphon demo`" in capsys.readouterr().out


def test_compare_names_only_what_differs_and_writes_one_page_that_needs_nothing_else(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(home, "small-a", 4)
    record_run(home, "small-b", 3, reward=0.25, run__seed=7, environment__parameters={"max_terms": 3})
    assert execute(["compare", "small-a", "small-b"]) == 0
    said = capsys.readouterr().out
    first = said.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first] == [
        "parameter",
        "run.seed",
        "environment.parameters.max_terms",
    ]
    assert re.search(r"pass@1 after\s+90\.0%\s+55\.0%", said)
    assert "note: the seed differs: small-a 0, small-b 7" in said
    assert "note: not all steps are done: small-a 4 of 4, small-b 3 of 4" in said
    page = home / "compare-small-a-small-b.html"
    assert f"page: {page}" in said
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']+""", text) and "@import" not in text
    assert text.count("<svg") >= 6 and "Reward over tokens" in text and "max_terms" in text
    assert "Reward over dollars" not in text and "worker_usd_per_hour" in text


def test_runs_with_prices_are_compared_by_dollars_too(home: Path) -> None:
    for name in ("small-a", "small-b"):
        record_run(home, name, 4, record__worker_usd_per_hour=3600.0)
    out = home / "page.html"
    assert execute(["compare", "small-a", "small-b", "--output", str(out)]) == 0
    assert "Reward over dollars" in out.read_text()


def test_compare_as_json_says_the_same(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("small-a", "small-b", "small-c")):
        record_run(home, name, 4, run__seed=seed)
    assert execute(["compare", "small-a", "small-b", "small-c", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == {"run.seed": [0, 1, 2]}
    assert set(told["figures"]) == {"small-a", "small-b", "small-c"}
    assert Path(told["page"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "small-a", "small-a"], "small-a is named twice"),
        (["compare", "small-a", "nosuchrun"], "nosuchrun"),
        (["compare", "small-a"], "SECOND"),
        (["export", "nosuchrun", "best", "x"], "nosuchrun"),
    ],
)
def test_mistakes_are_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    record_run(home, "small-a", 4)
    assert execute(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(home.glob("compare*"))


def test_an_environment_is_shown_with_parameters_prompt_answer_and_yaml(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import yaml

    from antiphon.core.config import build_config

    assert execute(["environments", "reasoning/chain_sum"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"max_terms\s+int\s+6", said) and "<answer>" in said
    told = yaml.safe_load(said.split("to use it:\n")[1].rpartition("\nor on")[0])
    assert build_config(told).environment.name == "reasoning/chain_sum"
    assert execute(["environments"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^reasoning/chain_sum\s+\w+", listed, re.MULTILINE) and listed.count("\n") > 90
    assert execute(["environments", "reasoning/chainsum"]) == 2
    assert "did you mean reasoning/chain_sum" in capsys.readouterr().err
