"""A run that an older version recorded is shown by this one: its journal opens and its pages are written."""

import json
import tarfile
from pathlib import Path

import pytest

from antiphon.cli.app import execute

RECORDED = Path(__file__).resolve().parents[1] / "golden" / "run-of-november.tar.gz"
"""Six steps on real engines, with `loop.order=auto`, an order that is no more."""
RUN = "quickstart-s0-947626d2-1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "runs" / RUN


def test_its_status_and_events_are_as_they_were(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["status", RUN, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["run_id"] == RUN and status["figures"]["tokens_trained"] == 1909
    assert execute(["status", RUN, "--events", "--json"]) == 0
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert len(kinds) == 383 and kinds.count("step.committed") == 6 and kinds[-1] == "run.finished"


def test_its_report_is_written_and_it_stands_in_the_list(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["report", RUN]) == 0
    page = Path(capsys.readouterr().out.strip().splitlines()[-1]).read_text()
    assert RUN in page and "held-out" in page.lower()
    assert execute(["runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["run"], listed["state"], listed["steps_total"]) == (RUN, "finished", 6)


def test_its_completions_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["evaluate", RUN, "--samples"]) == 0
    assert "answer" in capsys.readouterr().out
