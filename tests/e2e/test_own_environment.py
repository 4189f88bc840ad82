"""A run on an environment of an installed package: real engines, answers scored in the sandbox, recorded."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.lineage.run_log import read_steps
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.main_job import SMALL, Job, command, make_home
from tests.support.own_package import install

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
OWN = ("environment.name=near-sums", "environment.parameters={largest: 30}", "environment.heldout_size=64")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield folder


def test_a_run_trains_on_an_installed_package(package: Path, tmp_path: Path) -> None:
    needs_bubblewrap()
    job = Job(make_home(tmp_path), [*OWN, "run.steps=2", "record.mlflow=false", *SMALL])
    try:
        assert job.wait() == 0, job.everything()
    finally:
        job.close()
    steps = read_steps(job.run_dir)
    assert len(steps) == 2 and all(step["batch"]["trajectories_failed"] == 0 for step in steps)
    rewards = {row.reward for batch in job.batches() for row in batch}
    assert any(0.0 < reward < 1.0 for reward in rewards), "what is near is worth something"

    manifest = json.loads((job.run_dir / "manifest.json").read_text())
    recorded = manifest["environment"]
    assert (recorded["class"], recorded["release"]) == ("near_sums:NearSums", "near-sums 0.1")
    module = package / "near_sums.py"
    module.write_text(module.read_text() + "\n# changed\n")
    again = command(job.home, "replay", job.run_dir.name, "--step", "0", timeout_s=200.0)
    assert again.returncode == 0, again.stderr
    assert (
        "bit for bit" in again.stdout
        and "the environment was near_sums:NearSums near-sums 0.1 (" in again.stdout
    )
