"""A share of `benchmarks/kills.py`: the one that is killed, nothing acknowledged is lost or trained twice."""

import asyncio
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from antiphon.benchmarks.kills import KilledRun, Tally, make_config, roles, run_kills, undisturbed, violations
from antiphon.benchmarks.parts.kills.audit import audit
from antiphon.core.errors import ConfigError
from antiphon.core.loop.events import LeaseExpired
from antiphon.net.wire import CALLS, WORK_CALLS
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal
from antiphon.system import failpoints
from tests.support.wrong_clocks import WrongClocks, build_wrong_clock

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_processes_killed_at_fail_points_and_from_outside_lose_nothing(test_seed: int) -> None:
    found = run_kills(kills=7, steps=6, seed=test_seed)
    assert violations(found) == [] and found["restart_median_s"] is not None
    assert found["kills"] >= 7 and found["acked"] > 0 and found["trained"] > 0, found
    assert [found[name] for name in ("lost", "twice", "beyond_bound", "wrong")] == [0, 0, 0, 0], found
    assert found["learner_digests_equal"] and found["other_exits"] == 0, found
    assert found["ended"] == found["runs"] and found["full_disks"] != 0, found


@pytest.mark.timeout(300)
@pytest.mark.long
def test_clocks_that_are_hours_wrong_and_jump_change_nothing(tmp_path: Path, test_seed: int) -> None:
    rng, config = np.random.default_rng(test_seed), make_config("fixed", 4)
    skewed = tmp_path / "skewed"
    clocks = WrongClocks(build_wrong_clock(tmp_path), tmp_path, rng)
    tally = Tally(kills=Counter(roles()))  # as after an earlier run in which everybody died
    run = KilledRun(skewed, config, rng, tally, surroundings=clocks.environment, meanwhile=clocks.jump)
    run.live(0)
    found = asyncio.run(audit(skewed, config))
    print(f"{clocks.jumps} jumps of {len(clocks.offsets_s)} clocks; {found}")
    assert clocks.jumps >= 5 and not tally.other_exits
    assert not tally.restarts_s, "the first starts of a run are no restarts"
    assert (found.lost, found.twice, found.beyond_bound, found.wrong) == (0, 0, 0, 0)
    assert found.digests == undisturbed(config) and len(found.digests) == 4
    journal = Journal(skewed / JOURNAL_NAME, config.run.name)
    silences = [e for e in journal.replay() if isinstance(e, LeaseExpired) and e.reason.startswith("no ")]
    asyncio.run(journal.close())
    assert all(event.silent_s >= 5 * config.coordinator.heartbeat_s for event in silences), silences


def test_whatever_a_kill_must_not_do_is_a_violation() -> None:
    names = ("lost", "twice", "beyond_bound", "wrong", "other_exits")
    sound: dict[str, object] = {**dict.fromkeys(names, 0), "learner_digests_equal": True}
    assert violations(sound) == []
    for name in names:
        assert violations(sound | {name: 2}) == [f"{name} is 2, not 0"]
    assert violations(sound | {"learner_digests_equal": False})


def test_every_fail_point_has_its_place_in_the_code() -> None:
    placed = [
        name
        for path in (ROOT / "services").rglob("*.py")
        for name in re.findall(r'failpoints\.reach\(\s*"([a-z.]+)"\s*\)', path.read_text())
    ]
    replies = {call.failpoint for call in (*CALLS.values(), *WORK_CALLS.values())} - {""}
    assert {*placed, *replies} == set(failpoints.NAMES)


def test_fail_points_are_off_and_cannot_be_misspelt() -> None:
    failpoints.reach("coordinator.commit.before")  # nothing is armed in this process
    assert failpoints.parse("") == {}
    assert failpoints.parse("worker.apply,learner.forward:3") == {"worker.apply": 1, "learner.forward": 3}
    for wrong in ("worker.aply:1", "worker.apply:0", "worker.apply:x", "worker.apply:-1"):
        with pytest.raises(ConfigError, match="write PLACE:VISITS"):
            failpoints.parse(wrong)
