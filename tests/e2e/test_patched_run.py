"""With the real engines, a run whose worker fetches patches is the run it would be without them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.services.rollout.engine.environment import child_environment
from tests.support.main_job import PROJECT

pytestmark = [pytest.mark.e2e, pytest.mark.engine]
STEPS = 4


def test_patches_carry_a_run_and_change_no_bit_of_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.patched_runs", str(tmp_path)],
            cwd=PROJECT,
            env=child_environment(threads=1),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=280.0,
            check=False,
        )
    said = (tmp_path / "log").read_text(errors="replace")
    assert done.returncode == 0, said[-6000:]
    off, on = (json.loads((tmp_path / "results.json").read_text())[name] for name in ("off", "on"))
    assert on["weights"] == off["weights"] and on["batches"] == off["batches"]
    # The last version is not waited for: the run may end before it was fetched.
    assert off["bytes_fetched"] >= STEPS * off["full_bytes"]
    assert on["full_bytes"] <= on["bytes_fetched"] < 1.5 * on["full_bytes"]
