"""A run that cannot learn, on every real part: it says so everywhere, and shows what was answered."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.bubblewrap import needs_bubblewrap
from tests.support.main_job import SMALL, Job, make_home, typed
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

STEPS = 2
HOPELESS = (
    "environment.name=reasoning/spell_backward",
    "environment.parameters={}",
    "environment.max_lost_share=1",
    f"run.steps={STEPS}",
    *SMALL,
    "loop.prompts_per_step=2",
    "evaluation.prompts=8",
    "sampling.max_tokens=32",
    "record.mlflow=false",
)
"""The demo's model has no letters: it cannot read this task, nor write its answers."""


@pytest.fixture(scope="module")
def hopeless(standing: Standing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    needs_bubblewrap()
    job = standing.start(make_home(tmp_path_factory.mktemp("hopeless")), HOPELESS)
    try:
        job.wait()
        yield job
    finally:
        job.close()


def test_it_ends_with_exit_code_1_a_sentence_and_completions(hopeless: Job) -> None:
    assert hopeless.wait() == 1, hopeless.everything()
    assert not hopeless.complaints()
    said = hopeless.said
    assert f"no_signal: this run taught nothing; {STEPS} steps in a row trained nothing" in " ".join(
        said.split()
    )
    outcome = json.loads((hopeless.run_dir / "outcome.json").read_text())
    sentence, *shown, last = outcome["no_signal"]
    assert "all rewards were 0" in sentence and "--samples" in last
    assert len(shown) == 3 and all(line.startswith("  reward 0: ") for line in shown)


def test_prefect_shows_a_failed_run_with_that_name(standing: Standing, hopeless: Job) -> None:
    query = "SELECT state_type, state_name FROM flow_run WHERE name = ?"
    with closing(sqlite3.connect(f"file:{standing.database}?mode=ro", uri=True)) as connection:
        ended = connection.execute(query, [hopeless.run_dir.name]).fetchall()
    assert ended == [("FAILED", "NoSignal")]


def test_its_answers_can_be_read_afterwards(hopeless: Job) -> None:
    shown = typed(hopeless.home, "evaluate", hopeless.run_dir.name, "v0", "--samples", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert {sample["split"] for sample in found} == {"train", "heldout"}
    assert {sample["kept_as"] for sample in found} == {"best", "worst", "random"}
    assert all(sample["reward"] == 0.0 and sample["reason"] and not sample["trained"] for sample in found)
    page = (hopeless.run_dir / "report.html").read_text()
    assert "What it answers" in page and "no closing answer" in page
