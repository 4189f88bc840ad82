"""A share of `benchmarks/kills.py`: whoever is killed, nothing acknowledged is lost or trained twice."""

import re
from pathlib import Path

import pytest

from antiphon.benchmarks.kills import run_kills
from antiphon.core.errors import ConfigError
from antiphon.services import failpoints

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_processes_killed_at_fail_points_and_from_outside_lose_nothing(test_seed: int) -> None:
    found = run_kills(kills=7, steps=6, seed=test_seed, keep=False)
    assert found["kills"] >= 7 and found["acked"] > 0 and found["trained"] > 0, found
    assert [found[name] for name in ("lost", "twice", "beyond_bound", "wrong")] == [0, 0, 0, 0], found
    assert found["learner_digests_equal"] and found["other_exits"] == 0, found


def test_every_fail_point_has_its_place_in_the_code() -> None:
    placed = [
        name
        for path in (ROOT / "services").rglob("*.py")
        for name in re.findall(r'failpoints\.reach\(\s*"([a-z.]+)"\s*\)', path.read_text())
    ]
    assert set(placed) == set(failpoints.NAMES)


def test_fail_points_are_off_and_cannot_be_misspelt() -> None:
    failpoints.reach("coordinator.commit.before")  # nothing is armed in this process
    assert failpoints.parse("") == {}
    assert failpoints.parse("worker.apply,learner.forward:3") == {"worker.apply": 1, "learner.forward": 3}
    for wrong in ("worker.aply:1", "worker.apply:0", "worker.apply:x", "worker.apply:-1"):
        with pytest.raises(ConfigError, match="write PLACE:VISITS"):
            failpoints.parse(wrong)
