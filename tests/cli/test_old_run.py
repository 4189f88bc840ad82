"""A run that an older version recorded is shown by this one: its journal opens and its pages are written."""

import json
from pathlib import Path

import pytest

from antiphon.cli.app import execute


def test_its_status_and_events_are_as_they_were(old_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["status", old_run.name, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["run_id"] == old_run.name and status["figures"]["tokens_trained"] == 1909
    assert execute(["status", old_run.name, "--events", "--json"]) == 0
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert len(kinds) == 383 and kinds.count("step.committed") == 6 and kinds[-1] == "run.finished"


def test_its_report_is_written_and_it_stands_in_the_list(
    old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["report", old_run.name]) == 0
    page = Path(capsys.readouterr().out.strip().splitlines()[-1]).read_text()
    assert old_run.name in page and "held-out" in page.lower()
    assert execute(["runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["run"], listed["state"], listed["steps_total"]) == (old_run.name, "finished", 6)


def test_its_completions_are_shown(old_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["evaluate", old_run.name, "--samples"]) == 0
    assert "answer" in capsys.readouterr().out
