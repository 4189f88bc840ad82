"""What README and docs quote is what the benchmarks measured last."""

import json
import shlex
from pathlib import Path

import pytest

from antiphon.benchmarks.parts import pages, results
from antiphon.benchmarks.parts.pages import BadMark, benchmarks_page, fill_in
from antiphon.benchmarks.parts.results import MeasuredFigure, Result

ROOT = Path(__file__).parents[2]
DEMO = Result(
    name="demo",
    command=".venv/bin/python benchmarks/demo.py",
    commit="0123456789ab",
    date="2026-01-01 00:00",
    machine={"cpu": "some CPU", "cores": 2, "memory_gb": 8.2, "gpus": []},
    took_s=90.0,
    figures=[
        MeasuredFigure("pass_after", 0.85, "", 3, [0.85, 0.8312, 0.87]),
        MeasuredFigure("loop.wall_s", 61.25, "s", 1),
        MeasuredFigure("wall_s", 90.5, "s", 1),
    ],
    result={"pass_after": 0.85},
)


def mark(told: str, shown: str = "") -> str:
    return f"x <!-- figure: {told} -->{shown}<!-- /figure --> y"


def test_every_page_says_what_the_result_files_say() -> None:
    for path, text in pages.wanted_pages(results.read()).items():
        shown = path.read_text(encoding="utf-8")
        assert shown == text, f"{path.relative_to(ROOT)} is not current; run scripts/benchmarks"


def test_every_measurement_has_its_script() -> None:
    for name, entry in pages.MEASUREMENTS.items():
        script = ROOT / "benchmarks" / shlex.split(entry.arguments)[0]
        assert script.is_file(), f"{name}: there is no {script.name}"
        assert pages.summary(script), f"{script.name} does not say what it measures"


def test_every_script_has_a_smallest_form() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}
    assert scripts == set(pages.SMALLEST)


def test_every_smallest_form_is_run_and_what_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    scripts = {
        "good": f"import os; assert os.environ[{results.SMOKE_VARIABLE!r}]; print('{{}}')",
        "violated": "print('{}'); raise SystemExit(1)",
        "silent": "print('no object')",
        "slow": "import time; print('{}', flush=True); time.sleep(60)",
    }
    for name, text in scripts.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.setattr(pages, "PROJECT", tmp_path)
    monkeypatch.setattr(pages, "SMALLEST", dict.fromkeys(scripts, ""))
    assert pages.smoke(["good"]) == 0
    monkeypatch.setattr(pages, "SMOKE_S", 1)
    assert pages.smoke(["violated", "silent", "slow"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert json.loads(said[-1])["failed"] == ["violated", "silent", "slow"]


def test_in_a_smallest_form_what_holds_only_at_size_does_not_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results.finish({"x": 1}, record=False, at_size=["too slow"]) == 1
    assert "violated: too slow" in capsys.readouterr().err
    monkeypatch.setenv(results.SMOKE_VARIABLE, "1")
    assert results.finish({"x": 1}, record=True, at_size=["too slow"]) == 0
    said = capsys.readouterr()
    assert "at this size: too slow" in said.err and "violated" not in said.out
    assert results.finish({"x": 1}, record=False, violated=["a promise"], at_size=["too slow"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["violated"] == ["a promise"]


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("demo.pass_after .2f", "0.85"),
        ("demo.pass_after", "0.85"),
        ("demo.pass_after .1%", "85.0%"),
        ("demo.pass_after range .2f", "0.83 to 0.87"),
        ("demo.loop.wall_s .0f", "61"),
        ("demo.loop.wall_s range .0f", "61"),
        ("demo.@commit", "0123456789ab"),
        ("demo.@repetitions", "3"),
        ("demo.@machine", "2 cores (some CPU), 8.2 GB, no GPU"),
        ("overlap.ratio .2f", "(not measured)"),
    ],
)
def test_a_mark_is_filled_in(told: str, shown: str) -> None:
    filled = fill_in(mark(told, "anything"), {"demo": DEMO})
    assert filled == mark(told, shown)
    assert fill_in(filled, {"demo": DEMO}) == filled


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (mark("demo.pass_afer"), "names no figure of demo; it has pass_after, loop.wall_s, wall_s"),
        (mark("dmeo.pass_after"), "names no benchmark; there are demo, overlap"),
        (mark("demo.@host"), "there are @commit, @machine"),
        (mark("demo.pass_after").replace("<!-- /figure -->", ""), "a mark is malformed"),
        (mark("demo pass_after"), "a mark is malformed"),
        (mark("demo.pass_after").removeprefix("x "), "a mark must not begin a line"),
        ("- " + mark("demo.pass_after").removeprefix("x "), "a mark must not begin a line"),
    ],
)
def test_a_wrong_mark_is_named(text: str, words: str) -> None:
    with pytest.raises(BadMark, match=words):
        fill_in(f"before\n{text}\nafter", {"demo": DEMO})


def test_the_page_has_command_commit_and_spread() -> None:
    page = benchmarks_page({"demo": DEMO})
    assert (
        "with 2 cores (some CPU), 8.2 GB, no GPU unless" in page
        and "`.venv/bin/python benchmarks/demo.py`;" in page
    )
    assert "commit 0123456789ab, 2026-01-01 00:00 UTC, 1.5 minutes" in page
    assert "- `pass_after` 0.85 (0.8312 to 0.87)" in page
    assert "`wall_s` 90.5 s" in page and "loop.wall_s" not in page
    assert "No result file is kept of `overlap`" in page


def test_a_result_comes_back_and_a_spoilt_one_is_named(tmp_path: Path) -> None:
    path = results.write(DEMO, tmp_path)
    assert results.read(tmp_path) == {"demo": DEMO}
    path.rename(tmp_path / "other.json")
    with pytest.raises(SystemExit, match=r"other\.json holds the result of demo"):
        results.read(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"name": "other"}))
    with pytest.raises(SystemExit, match=r"other\.json is no benchmark result"):
        results.read(tmp_path)


def test_a_result_is_made_of_every_number() -> None:
    said = {
        "lost": 0,
        "ratio": {"c4": 0.97},
        "pass_after": 0.5,
        "equal": True,
        "samples": {"pass_after": [0.4, 0.6]},
    }
    made = results.make("demo", "benchmarks/demo.py --seeds 2 --keep /some/where/kept.jsonl", said, 2.0)
    assert [(f.name, f.value, f.repetitions, f.spread) for f in made.figures] == [
        ("lost", 0.0, 1, None),
        ("ratio.c4", 0.97, 1, None),
        ("pass_after", 0.5, 2, [0.4, 0.6]),
    ]
    assert made.result == said
    assert made.command == ".venv/bin/python benchmarks/demo.py --seeds 2 --keep kept.jsonl"
    assert set(made.machine) == {"cpu", "cores", "memory_gb", "gpus"}


def test_a_violation_gives_status_1_and_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks/demo.py", "--seeds", "1", "--record"])
    monkeypatch.setattr(results, "write", lambda made: made_results.append(made))
    made_results: list[Result] = []
    assert results.finish({"lost": 1}, record=True, violated=["a group was lost"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1]) == {"lost": 1, "violated": ["a group was lost"]}
    assert "violated: a group was lost" in said.err and not made_results
    assert results.finish({"lost": 0}, record=True, samples={"ratio": [1.0, 3.0, 1.5]}) == 0
    (made,) = made_results
    assert (made.name, made.command) == ("demo", ".venv/bin/python benchmarks/demo.py --seeds 1")
    assert json.loads(capsys.readouterr().out)["ratio"] == 1.5


def test_what_is_run_is_recorded_unless_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    scripts = {
        "good": 'import sys; print(\'first\'); print(\'{"lost": 0, "said": "%s"}\' % sys.argv[1])',
        "violated": "print('{\"lost\": 1}'); raise SystemExit(1)",
        "silent": "print('no object')",
    }
    for name, text in scripts.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    made: list[Result] = []
    monkeypatch.setattr(pages, "PROJECT", tmp_path)
    monkeypatch.setattr(
        pages, "MEASUREMENTS", {name: pages.Measurement(f"{name}.py 'a b'", 1) for name in scripts}
    )
    monkeypatch.setattr(results, "write", made.append)
    assert pages.measure(["good"]) == 0
    assert pages.measure(["violated", "silent"]) == 1
    assert [(result.name, result.command) for result in made] == [
        ("good", ".venv/bin/python benchmarks/good.py 'a b'")
    ]
    assert made[0].result == {"lost": 0, "said": "a b"}
    said = capsys.readouterr()
    assert "first" in said.out and "violated ended with status 1 and is not recorded" in said.err
    assert "silent did not end with a JSON object and is not recorded" in said.err
