"""Whole runs under virtual time: schedules of faults, each from its seed."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.core.loop.events import (
    GroupSubmitted,
    JournalEvent,
    LeaseExpired,
    LeaseGranted,
    SnapshotDelivered,
    load_event,
)
from antiphon.services.coordinator.journal.store import StoredEvent
from antiphon.simulator.campaign import Campaign
from antiphon.simulator.checks.invariants import Witness
from antiphon.simulator.faults import Fault, FaultKind, FaultMix
from antiphon.simulator.report import Outcome, command_for, failure_lines
from antiphon.simulator.scenario import Scenario, drawn_scenario, load_scenario
from antiphon.simulator.virtual.disk import FileDisk, JournalDisk
from antiphon.simulator.virtual.loop import Process, VirtualLoop
from antiphon.simulator.virtual.random_streams import RandomStream
from antiphon.simulator.world import World

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 5
"""Seeds of one test; `benchmarks/fault_schedules.py` runs thousands."""


@cache
def drawn_run(seed: int) -> tuple[Outcome, list[StoredEvent]]:
    """Return what the run that a seed draws came to, and its journal; tests that compare with it share it."""
    disk = JournalDisk()
    return World(drawn_scenario(seed), seed, journal=disk).run(), list(disk.written())


COMPARED = (1, 8)
"""Seeds of runs with restarts, which are lived again in other ways."""


@pytest.mark.parametrize("block", range(3))
def test_no_schedule_of_faults_breaks_a_promise(block: int) -> None:
    campaign = Campaign()
    found = []
    for outcome in campaign.seeds(range(block * BLOCK, (block + 1) * BLOCK)):
        if outcome.violations:
            found += failure_lines(outcome, "")
        assert outcome.steps > 0 and outcome.events > 0
    assert not found, "\n".join(found)


def test_the_seed_of_this_run_breaks_no_promise(test_seed: int) -> None:
    outcome = Campaign().seed(test_seed)
    assert not outcome.violations, "\n".join(failure_lines(outcome, ""))


def test_a_worker_that_comes_in_the_last_moment_is_journalled_before_the_run_is_looked_at() -> None:
    outcome = Campaign().seed(569)
    assert not outcome.violations, "\n".join(failure_lines(outcome, ""))


@pytest.mark.parametrize("seed", COMPARED)
def test_in_a_real_sqlite_file_the_run_is_the_same(seed: int, tmp_path: Path) -> None:
    in_memory, _ = drawn_run(seed)
    disk = FileDisk(tmp_path / "journal.db")
    in_file = World(drawn_scenario(seed), seed, journal=disk).run()
    disk.close()
    assert in_memory.restarts and in_file == in_memory
    with closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        assert database.execute("SELECT count(*) FROM events").fetchone() == (in_memory.events,)


@pytest.mark.parametrize("seed", COMPARED)
def test_a_time_of_day_that_jumps_changes_only_what_people_read(seed: int) -> None:
    wrong, error = JournalDisk(), RandomStream("wall-errors", seed)
    expected, right = drawn_run(seed)
    found = World(
        drawn_scenario(seed), seed, journal=wrong, wall_error_s=lambda now: error.between(-3600.0, 3600.0)
    ).run()
    times = [row.at for row in wrong.written()]
    assert any(later < earlier for earlier, later in pairwise(times)), "the clock never went back"
    told, kept = ([_without_breaks(row) for row in rows] for rows in (wrong.written(), right))
    assert told == kept
    assert expected.restarts and replace(found, digest=expected.digest) == expected


def _without_breaks(row: StoredEvent) -> tuple[int, str, dict[str, Any]]:
    """Return an event without the length of the break before it, which no other clock can tell."""
    return row.seq, row.kind, {name: v for name, v in json.loads(row.body).items() if name != "break_s"}


def test_a_journal_file_that_is_there_already_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_text("of an earlier run")
    with pytest.raises(ConfigError, match="is there already"):
        FileDisk(tmp_path / "journal.db")
    with pytest.raises(ConfigError, match="does not exist"):
        FileDisk(tmp_path / "missing" / "journal.db")


def test_the_same_seed_gives_the_same_journal_in_every_process() -> None:
    program = (
        "from antiphon.simulator.campaign import mute_logs; mute_logs()\n"
        "from antiphon.simulator.scenario import drawn_scenario\n"
        "from antiphon.simulator.world import World\n"
        f"print(*(World(drawn_scenario(seed), seed).run().digest for seed in {COMPARED}))\n"
    )
    # This process has a chance of its own for the order of sets.
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    digests = [drawn_run(seed)[0].digest for seed in COMPARED]
    assert done.stdout.split() == digests and len(set(digests)) == len(COMPARED)


def test_an_undisturbed_run_trains_every_step_and_restarts_nothing() -> None:
    outcome = World(Scenario(run={"run": {"steps": 4}}), 1).run()
    assert not outcome.violations
    assert len(outcome.weights) == 4 and outcome.restarts == 0 and not outcome.faults


@pytest.mark.parametrize("write", range(0, 16, 2))
def test_a_coordinator_that_dies_right_after_a_transaction_loses_nothing(write: int) -> None:
    # The transaction is on the disk and nobody heard of it: the unknown result of a commit.
    faults = [Fault(0.5 + 0.5 * write, FaultKind.KILL_AT_WRITE, "coordinator", 0.3)]
    outcome = World(Scenario(), write, faults).run()
    assert not outcome.violations, outcome.violations
    assert len(outcome.weights) == 4


def test_everything_dies_at_once_and_the_run_goes_on() -> None:
    names = ("coordinator", "learner", "flow", "reward-0", "worker-0", "worker-1", "worker-2")
    faults = [Fault(3.0, FaultKind.KILL, name, 1.0) for name in names]
    for mode in ("elastic", "fixed"):
        scenario = Scenario(run={"loop": {"mode": mode, "prompts_per_step": 3, "group_size": 2}})
        outcome = World(scenario, 5, faults).run()
        assert not outcome.violations, outcome.violations
        assert outcome.restarts == len(names)
        if mode == "fixed":
            assert outcome.weights == World(scenario, 6).run().weights


SAMPLING_S = 6 * 0.4 * 3.0
"""Longest time that the slowest worker takes for a group: tokens, seconds of a step, slowness."""


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_others_do_the_groups_of_an_engine_that_stands_still(mode: str) -> None:
    loop = {"mode": mode, "prompts_per_step": 3, "group_size": 2}
    scenario = Scenario(run={"loop": loop, "coordinator": {"lease_s": 10.0}, "rollout": {"grace_s": 2.0}})
    for seed in range(2):
        world = World(scenario, seed, [Fault(2.5, FaultKind.HANG, "worker-0", 400.0)])
        outcome = world.run()
        assert not outcome.violations, outcome.violations
        assert outcome.virtual_s < 100.0, "the run waited for the engine"
        assert longest_recovery_s(world, "worker-0", 2.5) <= 2 * 10.0 + SAMPLING_S
        if mode == "fixed":
            assert outcome.weights == World(scenario, seed + 100, []).run().weights


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_a_joiner_a_straggler_and_a_hung_engine_hold_up_no_one(mode: str) -> None:
    loop = {"mode": mode, "prompts_per_step": 3, "group_size": 2}
    scenario = Scenario(
        run={"loop": loop, "coordinator": {"lease_s": 10.0}, "services": {"stall_timeout_s": 60.0}}, workers=5
    )
    faults = [
        Fault(0.0, FaultKind.DEAD_TRANSFER, "worker-0", 2000.0),
        Fault(0.0, FaultKind.SLOW_LINK, "worker-1", 2000.0),
        Fault(3.0, FaultKind.HANG, "worker-2", 2000.0),
    ]
    for seed in range(2):
        world = World(scenario, seed, faults)
        outcome = world.run()
        assert not outcome.violations, outcome.violations
        assert len(outcome.weights) == 4 and outcome.restarts == 0 and outcome.virtual_s < 100.0
        leased = [event for _, event in told(world) if isinstance(event, LeaseGranted)]
        assert "worker-0-1" not in {event.worker_id for event in leased}, "it never loaded a version"
        assert longest_recovery_s(world, "worker-2", 3.0) <= 2 * 10.0 + SAMPLING_S
        if mode == "fixed":
            assert outcome.weights == World(scenario, seed + 100, []).run().weights


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_workers_hand_weights_on_whatever_happens_to_them(mode: str) -> None:
    # The cap makes the plan want relays; nothing keeps to it here.
    run = {"loop": {"mode": mode}, "broadcast": {"uplink_bytes_per_s": 2000.0}}
    relayed = copies = 0
    for seed in range(3):
        world = World(Scenario(run=run, workers=4), seed)
        outcome = world.run()
        assert not outcome.violations, outcome.violations
        for _, event in told(world):
            if isinstance(event, SnapshotDelivered):
                relayed += sum(count for name, count in event.bytes_from.items() if name)
                copies += sum(event.bytes_from.values())
    assert relayed > copies / 3


def told(world: World) -> list[tuple[float, JournalEvent]]:
    return [(row.at, load_event(row.kind, row.body)) for row in world.shared.journal.events]


def longest_recovery_s(world: World, name: str, hung_s: float) -> float:
    """Return the longest time that a group which the hung engine of a worker held was not handed in."""
    hung: set[str] = set()
    granted: dict[tuple[str, str], float] = {}
    taken: dict[str, float] = {}
    for at, event in told(world):
        if isinstance(event, LeaseGranted):
            granted[event.group_id, event.worker_id] = at
        elif isinstance(event, LeaseExpired) and event.hung:
            assert event.worker_id == f"{name}-1"
            hung.add(event.group_id)
        elif isinstance(event, GroupSubmitted):
            taken[event.group_id] = at
    assert hung, "the engine held no group"
    return max(taken[group] - max(hung_s, granted[group, f"{name}-1"]) for group in hung)


def test_the_shipped_storm_passes() -> None:
    scenario = load_scenario(ROOT / "examples/preemption_storm.yaml")
    outcome = World(scenario, 3).run()
    assert not outcome.violations, outcome.violations
    assert sum(fault.kind is FaultKind.RECLAIM for fault in outcome.faults) == 2


def test_a_scenario_that_cannot_be_meant_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "storm.yaml"
    for text, words in (
        ("workers: 0", "workers"),
        ("faults: {coordinator_kills: many}", "faults.coordinator_kills"),
        ("storms: 2", "storms"),
        ("run: {loop: {mode: quick}}", "loop.mode"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_scenario(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_scenario(tmp_path / "none.yaml")


def test_a_failing_seed_prints_the_command_that_replays_it() -> None:
    assert command_for(7, "examples/preemption_storm.yaml") == (
        "antiphon simulate examples/preemption_storm.yaml --seed 7"
    )


def _still() -> tuple[float, float]:
    return 0.001, 0.001


def test_a_stuck_run_names_who_waits() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(UnavailableError, match=r"nothing can happen any more.*waits_for_nobody"):
        VirtualLoop(_still, 100.0).run(waits_for_nobody())


def test_a_clock_that_runs_away_or_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever() -> None:
        while True:
            await asyncio.sleep(1.0)

    async def at_once() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(UnavailableError, match=r"not over after 50 virtual seconds.*for_ever"):
        VirtualLoop(_still, 50.0).run(for_ever())
    monkeypatch.setattr("antiphon.simulator.virtual.loop.STILL_LIMIT", 1000)
    with pytest.raises(UnavailableError, match=r"stands still.*at_once"):
        VirtualLoop(_still, 50.0).run(at_once())


def test_a_rest_that_another_clock_sees_passes() -> None:
    """Of two clocks the one that shows smaller numbers tells shorter times apart."""

    async def wait() -> float:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(4108.5)
        before = clock()
        await asyncio.sleep(1e-13)
        return clock() - before

    assert 0.0 < VirtualLoop(_still, 1e6).run(wait()) < 1e-6


def test_virtual_time_keeps_order_and_a_stopped_process_catches_up() -> None:
    loop = VirtualLoop(_still, 1e6)
    seen: list[tuple[str, float]] = []

    async def tick(name: str, pause_s: float, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(pause_s)
            seen.append((name, loop.time()))

    async def main() -> None:
        process = Process(loop, "p")
        process.spawn(tick("p", 10.0, 3))
        loop.call_later(15.0, process.stop)
        loop.call_later(35.0, process.resume)
        other = Process(loop, "q")
        other.spawn(tick("q", 12.0, 9))
        loop.call_later(30.0, other.kill)
        await asyncio.sleep(3600.0)

    loop.run(main())
    assert [(name, round(at_s)) for name, at_s in seen] == [
        ("p", 10),
        ("q", 12),
        ("q", 24),
        ("p", 35),
        ("p", 45),
    ]


def test_a_worker_whose_version_falls_is_reported() -> None:
    scenario = Scenario()
    assert scenario.run_config().loop.mode == "elastic"
    witness = Witness(scenario.run_config(), scenario.reward_rarity, 0, lambda: 1.0)
    for before, now in ((None, None), (None, 2), (2, 2), (2, 5)):
        witness.held("worker-0", before, now)
    assert not witness.violations
    witness.held("worker-0", 5, 4)
    witness.held("worker-1", 3, None)
    assert [sentence.split(": ")[1] for sentence in witness.violations] == [
        "worker-0 went back from version 5 to 4",
        "worker-1 went back from version 3 to None",
    ]


def test_a_mix_without_faults_draws_none() -> None:
    outcome = World(Scenario(faults=FaultMix()), 2).run()
    assert outcome.faults == ()
