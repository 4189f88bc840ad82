"""A run on an environment of an installed package: real engines, answers scored in the sandbox, recorded."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.lineage.run_log import read_steps
from antiphon.lineage.run_overview import read_figures
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.figure_views import check_against_the_journal
from tests.support.main_job import SMALL, Job, command, make_home
from tests.support.own_package import install
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS = 2
OWN = ("environment.name=near-sums", "environment.parameters={largest: 30}", "environment.heldout_size=64")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = install(tmp_path_factory.mktemp("package"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


@pytest.fixture(scope="module")
def trained(package: Path, standing: Standing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A finished run of the synchronous loop on the package's environment."""
    needs_bubblewrap()
    home = make_home(tmp_path_factory.mktemp("own"))
    words = [*OWN, f"run.steps={STEPS}", "loop.max_staleness=0", "record.mlflow=false", *SMALL]
    job = standing.start(home, words)
    try:
        assert job.wait() == 0, job.everything()
        yield job
    finally:
        job.close()


def test_the_figures_of_a_synchronous_run_are_those_of_its_journal(trained: Job) -> None:
    figures = read_figures(trained.run_dir)
    check_against_the_journal(trained, figures)
    assert figures.steps == STEPS
    assert figures.staleness_max == 0 and figures.staleness_mean == 0.0
    assert set(figures.staleness_histogram) == {0}


def test_a_run_trains_on_an_installed_package(package: Path, trained: Job) -> None:
    steps = read_steps(trained.run_dir)
    assert len(steps) == STEPS and all(step["batch"]["trajectories_failed"] == 0 for step in steps)
    rewards = {row.reward for batch in trained.batches() for row in batch}
    assert any(0.0 < reward < 1.0 for reward in rewards), "what is near is worth something"

    manifest = json.loads((trained.run_dir / "manifest.json").read_text())
    recorded = manifest["environment"]
    assert (recorded["class"], recorded["release"]) == ("near_sums:NearSums", "near-sums 0.1")
    module = package / "near_sums.py"
    module.write_text(module.read_text() + "\n# changed\n")
    again = command(trained.home, "replay", trained.run_dir.name, "--step", "0", timeout_s=200.0)
    assert again.returncode == 0, again.stderr
    assert (
        "bit for bit" in again.stdout
        and "the environment was near_sums:NearSums near-sums 0.1 (" in again.stdout
    )
