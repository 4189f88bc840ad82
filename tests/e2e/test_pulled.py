"""A run that was kept, pushed and pulled elsewhere is found there by its name, and says the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.dvc import dvc
from tests.support.main_job import MAIN_STEPS, Job, make_home, typed

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]


def said(home: Path, *arguments: str, made: Path | None = None) -> str:
    """Return what a command printed, without the paths of `home` and of the home where its run was `made`."""
    done = typed(home, *arguments)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout.replace(str(home), "HOME").replace(str(made or home), "HOME")


@pytest.fixture(scope="module")
def first(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the home where the run was made."""
    home = tmp_path_factory.mktemp("first") / "home"
    shutil.copytree(job.home, home, ignore=shutil.ignore_patterns("*.sock", "prefect", "mlflow", "payloads"))
    return home


def test_what_was_pulled_is_a_run_like_any_other(first: Path, job: Job, tmp_path: Path) -> None:
    run, second = job.run_dir.name, make_home(tmp_path / "second")
    kept = said(first, "keep", run)
    assert f"ledger/{run}.dvc" in kept and " push " in kept and "dvc pull" in kept
    for home in (first, second):
        dvc(home, "remote", "add", "-d", "team", str(tmp_path / "remote"))
    dvc(first, "push", f"ledger/{run}.dvc")
    (second / "ledger").mkdir()
    shutil.copy(first / "ledger" / f"{run}.dvc", second / "ledger")

    pull = f"`dvc pull {second}/ledger/{run}.dvc`"
    for arguments in (
        ["report", run],
        ["replay", run],
        ["lineage", run, "--verify"],
        ["lineage", "--verify"],
    ):
        refused = typed(second, *arguments)
        assert refused.returncode in (1, 2) and pull in refused.stderr, (arguments, refused.stderr)
    dvc(second, "pull", f"ledger/{run}.dvc")

    verified = said(second, "lineage", "--verify")
    files = int(verified.split(" files")[0])
    assert files > 5 * MAIN_STEPS and f"of ledger {run} are as recorded" in verified
    assert "policy v1" in said(second, "lineage", run, "v1")
    replayed = typed(second, "replay", "--step", "0")  # the only run there is
    assert replayed.returncode == 0 and "bit for bit" in replayed.stdout, replayed.stderr
    assert not (second / "runs").exists(), "neither needs more than the ledger"

    for arguments in (["status"], ["status", run, "--json"], ["evaluate", run], ["status", run, "--events"]):
        assert said(second, *arguments) == said(first, *arguments, made=job.home), arguments
    pages = [home / "runs" / run / "report.html" for home in (first, second)]
    for home in (first, second):
        said(home, "report", run)
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert json.loads((second / "runs" / run / "outcome.json").read_text())["run_dir"] == str(
        second / "runs" / run
    )
    assert "as recorded" in said(second, "lineage", run, "--verify")
    assert "as recorded" in said(second, "lineage", "--verify")
    assert dvc(second, "status", f"ledger/{run}.dvc").strip() == "Data and pipelines are up to date."

    suite, told = tmp_path / "sums.jsonl", list[list[dict[str, Any]]]()
    rows = ({"problem": f"What is {n} + 2 =", "answer": n + 2} for n in range(4))
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (
        "score=number",
        "id=null",
        "prompt_suffix=",
        "environment.max_lost_share=1",
        "sampling.max_tokens=8",
    )
    words = [word for one in given for word in ("--set", one)]
    for home in (first, second, second):
        told.append(json.loads(said(home, "evaluate", run, "best", "--suite", str(suite), "--json", *words)))
    assert [one["sampled"] for (one,) in told] == [4, 4, 0]
    assert told[0][0]["scores"] == told[1][0]["scores"] == told[2][0]["scores"]
    for page, home in zip(pages, (first, second), strict=True):
        said(home, "report", run)
        assert "<h2>Suites</h2>" in page.read_text()
