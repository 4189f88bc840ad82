"""What the verbs that look at recorded runs say, and where they put it."""

import asyncio
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from statistics import stdev

import pytest

from antiphon.cli.app import execute
from antiphon.core.config import load_config
from antiphon.core.loop import events as e
from antiphon.lineage.suite_records import write_result
from antiphon.report.comparison import mean_interval
from antiphon.runs.directory import known_homes, make_home
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal
from antiphon.services.coordinator.journal.pinned import pinned_values
from antiphon.system.set_up import command
from tests.support.recorded_folders import record_run
from tests.support.suite_results import suite_result

ROOT = Path(__file__).resolve().parents[2]


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
    assert f"continue small-b: ./antiphon run {home}/runs/small-b/config.yaml --resume small-b" in said
    assert "./antiphon report small-b other-a" in said


def test_a_run_that_a_client_drives_has_no_planned_steps_and_goes_on_with_its_client(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(home, "door-a", 2, environment__name="client")
    assert execute(["runs"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^door-a +unfinished +2 ", said, re.MULTILINE) and "continue door-a" not in said
    assert execute(["runs", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["steps_total"] is None and run["next"] == f"{command()} report door-a"


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
    assert "start one with `./antiphon demo`" in capsys.readouterr().out


def test_compare_names_only_what_differs_and_writes_one_page_that_needs_nothing_else(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(home, "small-a", 4)
    other = record_run(home, "small-b", 3, reward=0.25, run__seed=7, environment__parameters={"max_terms": 3})
    for version in (1, 3):
        write_result(other, suite_result("gsm8k", version, version / 4))
    assert execute(["report", "small-a", "small-b"]) == 0
    said = capsys.readouterr().out
    first = said.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first] == [
        "parameter",
        "run.seed",
        "environment.parameters.max_terms",
    ]
    assert re.search(r"pass@1 after\s+90\.0%\s+55\.0%", said)
    assert re.search(r"suite gsm8k\s+–\s+v3 avg@1 0\.7500 \(0\.6500 to 0\.8500\)", said)
    assert "note: the seed differs: small-a 0, small-b 7" in said
    assert "note: not all steps are done: small-a 4 of 4, small-b 3 of 4" in said
    page = home / "compare-small-a-small-b.html"
    assert f"page: {page}" in said
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']+""", text) and "@import" not in text
    assert text.count("<figure class=") >= 3 and "Reward over tokens" in text and "max_terms" in text
    assert "Reward over dollars" not in text and "worker_usd_per_hour" in text


def test_runs_with_prices_are_compared_by_dollars_too(home: Path) -> None:
    for name in ("small-a", "small-b"):
        record_run(home, name, 4, record__worker_usd_per_hour=3600.0)
    out = home / "page.html"
    assert execute(["report", "small-a", "small-b", "--out", str(out)]) == 0
    assert "Reward over dollars" in out.read_text()


def test_compare_as_json_says_the_same(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("small-a", "small-b", "small-c")):
        record_run(home, name, 4, run__seed=seed)
    assert execute(["report", "small-a", "small-b", "small-c", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == {"run.seed": [0, 1, 2]}
    assert set(told["figures"]) == {"small-a", "small-b", "small-c"}
    assert Path(told["page"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "small-a", "small-a"], "small-a is named twice"),
        (["report", "small-a", "nosuchrun"], "nosuchrun"),
        (["report", "small-a", "--json"], "--json compares two runs or more"),
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


def test_hints_can_be_pasted_where_they_are_printed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a b"
    record_run(folder / "home", "small-a", 2, run__steps=4)
    monkeypatch.setenv("ANTIPHON_HOME", str(folder / "home"))
    monkeypatch.chdir(folder)
    assert execute(["runs"]) == 0
    (hint,) = re.findall(r"^continue small-a: (.*)$", capsys.readouterr().out, re.MULTILINE)
    program, verb, config, *rest = shlex.split(hint)
    assert os.access(program, os.X_OK) and Path(program).is_absolute()
    assert (verb, rest) == ("run", ["--resume", "small-a"]) and Path(config).is_file()
    assert execute(["report", "none"]) == 2
    monkeypatch.chdir(ROOT)
    assert command() == "./antiphon"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(ROOT), prepend=":")
    assert command() == "antiphon"


def test_runs_of_other_homes_are_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    other = tmp_path / "my task" / ".antiphon"
    for place in (home, other, home):
        make_home(place)
        (place / "runs").mkdir(exist_ok=True)
    assert known_homes() == sorted([home, other])
    record_run(other, "qa-a", 4)
    for found in ([], ["small-a"]):
        for name in found:
            record_run(home, name, 4)
        assert execute(["runs"]) == 0
        said = capsys.readouterr().out
        assert f"1 of another home, the newest qa-a: ANTIPHON_HOME='{other}' ./antiphon runs" in said
    assert execute(["status", "qa-a"]) == 2
    assert f"it is in another home: give the command again after `export ANTIPHON_HOME='{other}'`" in (
        capsys.readouterr().err
    )
    shutil.rmtree(other)
    assert known_homes() == [home]


def test_a_home_that_cannot_be_looked_at_stops_no_command(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    make_home(home)
    (home / "runs").mkdir(exist_ok=True)
    noted = tmp_path / "state" / "antiphon" / "homes"
    # The system refuses to say whether there is a file of such a name, as it does within folders of others.
    noted.write_text(f"{noted.read_text()}/{'o' * 300}\n")
    make_home(home)
    assert known_homes() == [home]


def test_starts_without_a_step_stand_apart_and_can_be_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(home, "small-a", 4)
    begun = record_run(home, "small-b", 0, run__steps=4)
    assert execute(["runs"]) == 0
    said = capsys.readouterr().out
    assert "stopped before the first step: small-b\n  remove them: ./antiphon gc --run small-b" in said
    assert "continue small-b" not in said and not re.search(r"^small-b ", said, re.MULTILINE)
    assert execute(["gc", "--run", "small-b"]) == 0
    assert not begun.exists()


def test_reading_a_run_needs_no_module_of_its_environment(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(home, "small-a", 2, run__steps=4, environment__name="gone_tomorrow:Task")
    config = load_config(run / "config.yaml")

    async def pause() -> None:
        journal = Journal(run / JOURNAL_NAME, run.name)
        opened = e.RunOpened(run.name, pinned_values(config), 0.0)
        await journal.enqueue([opened, e.RunPaused("28 of the newest 256 answers could not be scored")])
        await journal.close()

    asyncio.run(pause())
    assert execute(["status", "small-a", "--kind", "run.paused"]) == 0
    assert "28 of the newest 256 answers could not be scored" in capsys.readouterr().out
    assert execute(["report", "small-a"]) == 0
    assert execute(["evaluate", "small-a"]) == 0


def test_compare_says_means_over_seeds_with_their_intervals(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, reward in enumerate((0.4, 0.5, 0.6)):
        record_run(home, f"small-s{seed}", 4, reward=reward, run__seed=seed)
    record_run(home, "other", 4, loop__max_staleness=0)
    names = ["small-s0", "small-s1", "small-s2", "other"]
    assert execute(["report", *names]) == 0
    said = capsys.readouterr().out
    row = r"small-s0 and 2 more\s+0, 1, 2\s+50\.0% ± 24\.8%\s+90\.0% ± 24\.8%\s+90\.0% ± 24\.8%"
    assert re.search(row, said) and "note: the seed differs" in said
    page = next(home.glob("compare-*.html")).read_text()
    assert "Over seeds" in page and "90.0% ± 24.8%" in page and "repeat each with a few seeds" not in page
    assert execute(["report", *names[:3], "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    (group,) = plain["over_seeds"]
    assert group["runs"] == names[:3] and group["scores"]["reward_last"]["mean"] == pytest.approx(0.9)
    assert not plain["warnings"]  # that seeds differ is what is asked for


@pytest.mark.parametrize(("freedom", "quantile"), [(9, 2.262), (10, 2.228), (20, 2.086), (100, 1.984)])
def test_intervals_are_those_of_students_distribution(freedom: int, quantile: float) -> None:
    values = [float(number) for number in range(freedom + 1)]
    mean, half = mean_interval(values)
    assert mean == pytest.approx(freedom / 2)
    assert half / (stdev(values) / len(values) ** 0.5) == pytest.approx(quantile, abs=0.004)
