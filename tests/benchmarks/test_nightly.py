"""Benchmark tables are kept, compared and drawn; scripts end with the flow, whole."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from antiphon.benchmarks.parts.nightly.flow import (
    SMOKE,
    BenchmarkPlan,
    build_benchmark_page,
    check_plan,
    conclude,
    history,
    measure_script,
    noted,
    rows_of,
    run_metrics,
)
from antiphon.benchmarks.parts.nightly.script import run_script
from antiphon.benchmarks.parts.nightly.table import (
    BenchmarkTable,
    Verdict,
    compare_tables,
    name_of_commit,
    pin_table,
    read_table,
    read_tables,
    settings_of,
    write_table,
)
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.core.reporting.figures import RunFigures
from antiphon.flows.deployments import DEPLOYMENTS

ROOT = Path(__file__).parents[2]


def table(
    commit: str, seconds: float, hour: int, machine: str = "one", weights: str = "ab", rate: str = "0.001"
) -> BenchmarkTable:
    cases = {f"demo seed {s}": {"seconds_per_step": seconds + s / 50, "steps": 20.0} for s in range(3)}
    digests = {case: f"{weights}{case}" for case in cases}
    at, settings = f"2026-01-01T{hour:02d}:00:00+00:00", {"learner.learning_rate": rate, "loop.mode": "fixed"}
    return BenchmarkTable(commit, at, machine, cases, digests, settings=dict.fromkeys(cases, settings))


def test_a_table_comes_back_and_its_derived_files_are_for_dvc(tmp_path: Path) -> None:
    first, second = table("aaa", 2.0, 1), table("bbb", 2.6, 2)
    write_table(tmp_path, compare_tables(first, []))
    path = write_table(tmp_path, compare_tables(second, read_tables(tmp_path)))
    assert read_table(path) == second
    assert read_tables(tmp_path) == [first, second]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["commit"] == "bbb" and metrics["regressions"] == 1
    assert metrics["metrics"]["seconds_per_step"] == pytest.approx(2.62)
    history = json.loads((tmp_path / "history.json").read_text())
    assert [row["commit"] for row in history] == ["aaa", "bbb"]
    plain = json.loads(path.read_text())
    assert plain["before"] == "aaa" and plain["verdicts"]["seconds_per_step"] == "worse"


def test_a_commit_measured_again_replaces_its_table_and_is_not_compared_with_itself(tmp_path: Path) -> None:
    for hour, seconds in ((1, 2.0), (2, 9.0)):
        write_table(tmp_path, compare_tables(table("aaa", seconds, hour), read_tables(tmp_path)))
    (found,) = read_tables(tmp_path)
    assert found == table("aaa", 9.0, 2)
    assert compare_tables(found, [found]).before == ""


def test_tables_of_another_machine_are_not_compared(tmp_path: Path) -> None:
    compared = compare_tables(table("bbb", 9.0, 2, machine="other"), [table("aaa", 2.0, 1)])
    assert compared.before == "" and {c.verdict for c in compared.comparisons} == {Verdict.UNDECIDED}
    compared = compare_tables(
        table("ccc", 2.0, 3), [table("aaa", 2.0, 1), table("bbb", 9.0, 2, machine="other")]
    )
    assert compared.before == "aaa" and compared.worse() == []


def test_cases_with_other_configurations_are_not_compared_and_the_page_says_what_differs(
    tmp_path: Path,
) -> None:
    earlier = [table("aaa", 2.0, 1), table("bbb", 2.0, 2, rate="0.005")]
    now = table("ccc", 9.0, 3, rate="0.005")
    slower = replace(now, settings=now.settings | {"demo seed 0": {"learner.learning_rate": "0.1"}})
    compared = compare_tables(slower, earlier)
    (figure,) = compared.comparisons
    assert (compared.before, figure.pairs, compared.worse()) == ("bbb", 2, ["seconds_per_step"])
    assert compared.differing == {
        "demo seed 0": {"learner.learning_rate": ("0.005", "0.1"), "loop.mode": ("fixed", "")}
    }
    page = build_benchmark_page(compared, [*earlier, slower], tmp_path / "index.html").read_text()
    assert "<td>learner.learning_rate</td>" in page and "<td>0.005</td>" in page
    aside = [row for row in rows_of(compared, [*earlier, slower]) if row["verdict"] == "not compared"]
    assert [(row["figure"], row["change"], row["before"], row["now"]) for row in aside] == [
        ("demo seed 0", "learner.learning_rate", "0.005", "0.1"),
        ("demo seed 0", "loop.mode", "fixed", ""),
    ]

    alone = compare_tables(now, earlier[:1])
    assert alone.before == "" and {c.verdict for c in alone.comparisons} == {Verdict.UNDECIDED}
    assert set(alone.differing) == set(now.cases)


def test_a_table_without_configurations_is_compared_in_its_scripts_alone() -> None:
    old, new = table("aaa", 2.0, 1), table("bbb", 9.0, 2)
    script = {"kills.py #1": {"lost": 0.0}}
    compared = compare_tables(
        replace(new, cases=new.cases | script), [replace(old, cases=old.cases | script, settings={})]
    )
    assert {c.measure.name: c.pairs for c in compared.comparisons} == {"seconds_per_step": 0, "lost": 1}
    assert compared.differing["demo seed 1"] == {"configuration": ("not recorded", "recorded")}


def test_what_only_says_where_things_lie_is_no_setting() -> None:
    config = build_config({"services": {"coordinator_port": 7700}, "record": {"ledger": "elsewhere"}})
    assert settings_of(config) == settings_of(RunConfig())
    assert settings_of(build_config({"loop": {"max_staleness": 1}})) != settings_of(RunConfig())


def test_only_figures_that_are_judged_are_listed(tmp_path: Path) -> None:
    cases = {"quick.py #1": {"seconds": 1.0, "load_s": 2.0, "seed": 7.0, "vocabulary": 32.0}}
    compared = compare_tables(BenchmarkTable("aaa", "2026-01-01T01:00:00+00:00", "one", cases), [])
    assert [c.measure.name for c in compared.comparisons] == ["load_s"]
    write_table(tmp_path, compared)
    assert json.loads((tmp_path / "metrics.json").read_text())["metrics"] == {"load_s": 2.0}
    assert json.loads((tmp_path / "aaa.json").read_text())["cases"] == cases
    page = build_benchmark_page(compared, [compared.table], tmp_path / "index.html").read_text()
    assert "vocabulary" not in page and "load_s" in page


def test_a_spoilt_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "aaa.json").write_text('{"format": 1, "commit": "aaa"}')
    with pytest.raises(IntegrityError, match=r"aaa\.json is no benchmark table of format 1"):
        read_tables(tmp_path)


def test_the_page_says_what_got_worse_and_draws_the_history(tmp_path: Path) -> None:
    tables = [table("aaa", 2.0, 1), table("bbb", 2.02, 2), table("c<c", 3.0, 3, weights="zz")]
    compared = compare_tables(tables[-1], tables[:-1])
    page = build_benchmark_page(compared, tables, tmp_path / "index.html").read_text()
    assert '<tr class="worse"><td>seconds_per_step</td>' in page
    assert "c&lt;c" in page and "c<c" not in page
    assert "Other final weights than before" in page
    assert "<script" not in page and "http" not in page
    assert history("seconds_per_step", tables) == "▁▁█" and history("seconds_per_step", tables[:1]) == ""
    assert compared.other_weights(tables[1]) == list(tables[1].cases)


def test_every_table_stays_in_the_ledger(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    for hour in (1, 2):
        path = write_table(tmp_path / "results", compare_tables(table("aaa", 2.0 + hour, hour), []))
        pin_table(path, tmp_path, "ledger")
        pin_table(path, tmp_path, "ledger")  # again: the same entry
    assert len(list((tmp_path / "ledger").rglob("aaa/*.json"))) == 2
    assert list((tmp_path / "ledger").glob("benchmarks*.pointer"))


def test_a_folder_without_git_has_no_commit(tmp_path: Path) -> None:
    assert name_of_commit(tmp_path) == "unversioned"


def test_a_scripts_nested_numbers_reach_the_table(tmp_path: Path) -> None:
    _with(
        tmp_path, "nested.py", """print('{"lost": 0, "greedy": {"c4": 2.5}, "equal": true, "each": [1]}')"""
    )
    found = measure_script.fn("nested.py", 0, 60.0, str(tmp_path), str(tmp_path / "logs"))
    assert found.pop("script_seconds") >= 0
    assert found == {"lost": 0.0, "greedy.c4": 2.5}


def test_a_script_that_finds_a_violation_is_a_red_row_and_fails_the_flow(tmp_path: Path) -> None:
    failed: dict[str, str] = {}
    with noted("kills.py #1", failed):
        measure_script.fn("bad.py", 0, 60.0, str(_with(tmp_path, "bad.py", FAILING)), str(tmp_path / "logs"))
    good = table("aaa", 2.0, 1)
    compared = compare_tables(BenchmarkTable("aaa", good.at, "one", good.cases, failed=failed), [])
    page = build_benchmark_page(compared, [compared.table], tmp_path / "index.html").read_text()
    assert '<tr class="failed"><td>kills.py #1</td>' in page and "bad.py ended with status 3" in page
    with pytest.raises(AntiphonError, match=r"kills\.py #1 failed: bad\.py ended with status 3"):
        conclude(compared, BenchmarkPlan())
    assert conclude(compared, BenchmarkPlan(on_regression="report"))["failed"] == ["kills.py #1"]


def test_the_deployed_benchmark_runs_every_script_in_its_smallest_form() -> None:
    (deployed,) = [planned for planned in DEPLOYMENTS if planned["name"] == "benchmark"]
    assert BenchmarkPlan.model_validate(deployed["parameters"]["plan"]).smoke
    assert not BenchmarkPlan().smoke and (ROOT / SMOKE.split()[0]).is_file()


def test_a_lost_group_is_a_regression() -> None:
    def counted(commit: str, hour: int, lost: float) -> BenchmarkTable:
        cases = {
            f"kills.py #{i}": {"lost": lost, "s3.missing": lost, "ratio.64": 1.0 + lost} for i in range(3)
        }
        return BenchmarkTable(commit, f"2026-01-01T{hour:02d}:00:00+00:00", "one", cases)

    found = compare_tables(counted("bbb", 2, 1.0), [counted("aaa", 1, 0.0)])
    assert found.worse() == ["lost", "s3.missing"]


def test_a_run_gives_its_figures() -> None:
    known = RunFigures(steps=20, seconds_per_step=2.0, reward_first=0.25, reward_last=0.75)
    figures = run_metrics({"total_s": 9.0, "figures": replace(known, drafting_acceptance=0.5).plain()})
    assert figures["seconds_per_step"] == 2.0 and figures["pass_gain"] == 0.5 and figures["total_s"] == 9.0
    assert figures["drafting_acceptance"] == 0.5 and "tokens_per_pass" not in figures
    assert "pass_gain" not in run_metrics({"figures": RunFigures().plain()})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"configs": []}, "the plan measures nothing"),
        ({"seeds": []}, "the plan measures nothing"),
        ({"configs": ["nowhere.yaml"]}, "there is no configuration file at"),
        ({"overrides": ["loop.max_stalenes=2"]}, "unknown key loop.max_stalenes"),
        ({"scripts": ["benchmarks/nothing.py --fast"]}, "there is no script benchmarks/nothing.py"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_before_the_first_minute(
    plan: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_plan(BenchmarkPlan(**{"record": False, **plan}), ROOT, tmp_path)  # type: ignore[arg-type]


def test_a_plan_names_its_cases(tmp_path: Path) -> None:
    plan = BenchmarkPlan(seeds=[3, 5], overrides=["run.steps=7"], record=False)
    found = check_plan(plan, ROOT, tmp_path)
    assert list(found) == ["quickstart seed 3", "quickstart seed 5"]
    assert [(c.run.seed, c.run.steps) for c in found.values()] == [(3, 7), (5, 7)]


def test_a_regression_fails_the_flow_unless_told_otherwise() -> None:
    compared = compare_tables(table("bbb", 3.0, 2), [table("aaa", 2.0, 1)])
    with pytest.raises(AntiphonError, match="bbb is worse than aaa beyond noise in seconds_per_step"):
        conclude(compared, BenchmarkPlan())
    assert conclude(compared, BenchmarkPlan(on_regression="report"))["worse"] == ["seconds_per_step"]


def test_a_script_gives_the_object_it_ends_with(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import sys\nprint('x')\nprint('{\"n\": ' + sys.argv[1] + '}')\n")
    assert run_script("one.py 7", tmp_path, 60.0, tmp_path / "log") == {"n": 7}
    with pytest.raises(AntiphonError, match=r"must end with one JSON object .* but said x"):
        run_script("two.py", _with(tmp_path, "two.py", "print('x')"), 60.0, tmp_path / "log")
    with pytest.raises(AntiphonError, match=r"ended with status 3: .*the reason"):
        run_script("three.py", _with(tmp_path, "three.py", FAILING), 60.0, tmp_path / "log")
    with pytest.raises(ConfigError, match=r"there is no script four\.py"):
        run_script("four.py", tmp_path, 60.0, tmp_path / "log")


FAILING = "import sys\nprint('the reason', flush=True)\nsys.exit(3)"
LINGERING = """\
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
pathlib.Path("child").write_text(str(child.pid))
time.sleep(300)
"""


def _with(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder


def test_a_script_beyond_its_time_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="took longer than 2 s"):
        run_script("slow.py", _with(tmp_path, "slow.py", LINGERING), 2.0, tmp_path / "log")
    told, ends = tmp_path / "child", time.perf_counter() + 60.0
    pid = int((told.exists() and told.read_text()) or 0)
    while pid and _alive(pid):  # it was told to end with its parent, and is not waited for
        assert time.perf_counter() < ends
        time.sleep(0.05)


def test_a_killed_flow_takes_its_script_with_it(tmp_path: Path) -> None:
    _with(tmp_path, "slow.py", LINGERING)
    program = (
        "import sys; from pathlib import Path\n"
        "from antiphon.benchmarks.parts.nightly.script import run_script\n"
        "run_script('slow.py', Path(sys.argv[1]), 300.0, Path(sys.argv[1]) / 'log')"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program, str(tmp_path)]) as flow:
        ends = time.perf_counter() + 60.0
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            assert time.perf_counter() < ends and flow.poll() is None
            time.sleep(0.05)
        child = psutil.Process(int((tmp_path / "child").read_text()))
        os.kill(flow.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
