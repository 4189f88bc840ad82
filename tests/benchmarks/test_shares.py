"""A short share of the benchmarks that prove promises: they run, print their fields and find nothing wrong.

How fast anything is depends on the machine and is not asserted. Kills, preemption and fuzz have shares of
their own in test_kills.py, test_preemption.py and tests/properties/test_fuzz.py.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from antiphon.benchmarks.parts.measure import PROJECT

DEADLINE_S = 240.0


def printed(*command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", *command], cwd=PROJECT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.long
def test_the_coordinator_answers_many_clients_and_none_wrongly() -> None:
    found = printed(
        *("benchmarks/coordinator.py", "--clients", "16", "--seconds", "3", "--idle", "100", "--no-postgres"),
        *("--fleet", "60", "--processes", "2", "--events", "5000"),
    )
    assert found["pairs_per_s"] > 0 and found["p99_ms"] > 0
    assert found["wrong"] == 0
    assert found["heartbeats_per_s"] > 0
    assert found["workers_60_heartbeats_per_s"] > 0 and found["workers_60_wrong"] == 0
    assert found["restart_events_s"] > 0 and found["finish_events_missing"] == 0


@pytest.mark.long  # tests/simulation runs schedules of faults every time
def test_schedules_of_faults_break_nothing(test_seed: int) -> None:
    found = printed("benchmarks/fault_schedules.py", "--seeds", "10", "--first", str(1000 + test_seed))
    assert (found["seeds"], found["violations"], found["failing"]) == (10, 0, [])
    assert found["events_per_s"] > 0 and found["restarts"] > 0
