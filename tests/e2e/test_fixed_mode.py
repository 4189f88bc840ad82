"""In fixed mode the real engines give the same batches and weights again, whatever the timing."""

import json
import subprocess
import sys
from typing import Any

import pytest

from antiphon.services.rollout.engine.environment import child_environment
from antiphon.system import collecting
from tests.support.main_job import PROJECT

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]

STEPS = 4
Run = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, test_seed: int) -> dict[str, Run]:
    """Every run of tests/support/fixed_runs.py by its name."""
    folder = tmp_path_factory.mktemp("fixed")
    command = [sys.executable, "-m", collecting.__name__, "tests.support.fixed_runs"]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            [*command, str(folder), str(test_seed)],
            cwd=PROJECT,
            env=child_environment(threads=1),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=360.0,
            check=False,
        )
    assert done.returncode == 0, (folder / "log").read_text(errors="replace")[-6000:]
    found: dict[str, Run] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("case", ["S0k1", "S2k1", "S2k2"])
def test_delays_and_concurrency_change_no_bit(runs: dict[str, Run], case: str) -> None:
    calm, disturbed = runs[f"{case}-calm"], runs[f"{case}-disturbed"]
    assert len(calm["batches"]) == STEPS
    assert calm["trajectories"] > 0
    assert disturbed["batches"] == calm["batches"]
    assert disturbed["weights"] == calm["weights"]


def test_evaluations_beside_training_change_no_bit(runs: dict[str, Run]) -> None:
    calm, evaluated = runs["S2k1-calm"], runs["S2k1-evaluated"]
    assert (calm["evaluations"], evaluated["evaluations"]) == (0, STEPS + 1)
    assert evaluated["batches"] == calm["batches"]
    assert evaluated["weights"] == calm["weights"]


def test_drafting_on_off_and_from_siblings_in_another_order_change_no_bit(runs: dict[str, Run]) -> None:
    calm, disturbed, undrafted = (runs[f"S2k1-{name}"] for name in ("calm", "disturbed", "evaluated"))
    assert calm["accepted"] > 0
    assert disturbed["accepted"] > 0
    assert undrafted["accepted"] == 0
    assert undrafted["batches"] == calm["batches"] == disturbed["batches"]
    assert undrafted["weights"] == calm["weights"] == disturbed["weights"]


def test_the_settings_that_may_matter_do(runs: dict[str, Run]) -> None:
    assert len({runs[f"{case}-calm"]["weights"] for case in ("S0k1", "S2k1", "S2k2")}) == 3
    # Under S=2 the first three batches all come from the base model; only what trains between differs.
    assert runs["S2k1-calm"]["batches"][:3] == runs["S2k2-calm"]["batches"][:3]
    assert runs["S0k1-calm"]["batches"][1] != runs["S2k1-calm"]["batches"][1]


def test_patches_carry_a_run_and_change_no_bit_of_it(runs: dict[str, Run]) -> None:
    off, on = runs["patches-off"], runs["patches-on"]
    assert on["weights"] == off["weights"] and on["batches"] == off["batches"]
    # The last version is not waited for: the run may end before it was fetched.
    assert off["bytes_fetched"] >= STEPS * off["full_bytes"]
    assert on["full_bytes"] <= on["bytes_fetched"] < 1.5 * on["full_bytes"]
