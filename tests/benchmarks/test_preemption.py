"""The preemption benchmark: its schedules, its fleets in virtual time, and its bars."""

import itertools
import json
import math

import pytest

from antiphon.benchmarks import preemption
from antiphon.benchmarks.preemption import (
    FleetRun,
    Site,
    Stay,
    main,
    simulate_fleet,
    steps_per_hour,
)

HOUR = 3600.0


def test_chance_reclaims_the_share_it_was_given() -> None:
    stays = preemption.by_chance(200, 10 * HOUR, 0.4, 600.0, seed=3)
    reclaimed = sum(stay.stop_s < 10 * HOUR for stay in stays)
    hours = sum(min(stay.stop_s, 10 * HOUR) - stay.start_s for stay in stays) / HOUR
    assert 1 - math.exp(-reclaimed / hours) == pytest.approx(0.4, abs=0.02)
    by_slot: dict[int, list[Stay]] = {}
    for stay in stays:
        by_slot.setdefault(stay.slot, []).append(stay)
    for members in by_slot.values():
        for before, after in itertools.pairwise(members):
            assert after.start_s == before.stop_s + 600.0
    assert preemption.by_chance(8, HOUR, 0.4, 600.0, 1) == preemption.by_chance(8, HOUR, 0.4, 600.0, 1)


def test_never_replaced_means_never() -> None:
    stays = preemption.by_chance(8, 100 * HOUR, 0.9, math.inf, seed=0)
    assert len(stays) == 8 and all(stay.stop_s < math.inf for stay in stays)


def test_the_simulator_empties_slots_as_the_schedule_says() -> None:
    stays = [Stay(0, 0.0, 100.0), Stay(0, 150.0, math.inf), Stay(1, 30.0, 60.0)]
    faults = [(fault.at_s, fault.target, fault.lasts_s) for fault in preemption.as_faults(stays, 3)]
    assert faults == [
        *((0.0, "worker-1", 30.0), (0.0, "worker-2", math.inf)),
        *((60.0, "worker-1", math.inf), (100.0, "worker-0", 50.0)),
    ]
    assert preemption.as_faults(preemption.undisturbed(8), 8) == []


def test_a_step_that_is_late_at_the_end_counts_as_late() -> None:
    commits = [100.0 * step for step in range(1, 14)]
    assert steps_per_hour(commits, 100.0, 1350.0) == pytest.approx(36.0)
    assert steps_per_hour(commits, 100.0, 3200.0) == pytest.approx(36.0 * 900 / 2700)


@pytest.mark.long
def test_demand_is_what_the_undisturbed_fleet_supplies() -> None:
    site = Site(workers=4)
    found = simulate_fleet(site, preemption.undisturbed(4), 3 * HOUR, seed=0)
    assert found.violations == () and found.continued == 0 and found.preempted_share == 0.0
    assert found.steps_per_hour == pytest.approx(HOUR / site.train_s, rel=0.05)


@pytest.mark.long
def test_hand_over_saves_what_lost_workers_had_sampled() -> None:
    middle = HOUR / 4  # half of the fleet goes at one moment
    stays = [Stay(slot, 0.0, middle if slot < 2 else math.inf) for slot in range(4)]
    stays += [Stay(slot, middle + 300.0, math.inf) for slot in range(2)]
    preempted = {True: 0.0, False: 0.0}
    for seed in range(4):
        for handover in preempted:
            site = Site(workers=4, headroom=0.1, handover=handover)
            run = simulate_fleet(site, stays, HOUR / 2, seed)
            assert run.violations == ()
            assert (run.continued > 0) == handover
            preempted[handover] += run.preempted_share
    assert preempted[True] < 0.85 * preempted[False]


@pytest.mark.long  # tests/simulation has a shorter one
def test_a_joiner_a_straggler_and_a_hung_engine_hold_up_no_fleet() -> None:
    site = Site(workers=4, headroom=0.1, stragglers=True, prompts_per_step=16)
    found = simulate_fleet(site, preemption.undisturbed(4), 2 * HOUR, seed=0)
    assert found.violations == () and found.hung_leases > 0
    assert found.steps_per_hour > 0.9 * HOUR / site.train_s


@pytest.mark.long
def test_the_bar_fails_without_headroom_and_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--workers", "4", "--hours", "3", "--seeds", "1", "--one-case"]
    worse = ["--headroom", "0", "--replacement", "inf", "--share", "0.9"]
    assert main([*small, *worse]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["lost_throughput"] > 0.12 and found["violations"] == 0
    (row,) = found["table"]
    assert row["lost_throughput"]["mean"] == found["lost_throughput"] == row["lost_throughput"]["worst"]


def test_the_table_has_every_case_and_a_violation_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    violations: tuple[str, ...] = ()

    def fleet(site: Site, stays: list[Stay], span_s: float, seed: int) -> FleetRun:
        return FleetRun(10.0 - bool(preemption.reclaimed(stays, span_s)), 0.02, 0.01, 3, violations)

    monkeypatch.setattr(preemption, "simulate_fleet", fleet)
    assert main(["--seeds", "8"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    *table, troubled = found["table"]
    cases = [(row["max_staleness"], row["headroom"], row["handover"]) for row in table]
    assert cases == list(itertools.product((2, 6), (0.1, 0.0), (True, False)))
    assert troubled["stragglers"] and not any(row["stragglers"] for row in table)
    assert found["lost_throughput"] == 0.1 and found["seeds"] == list(range(8))
    assert all(len(row["wasted_share"]["values"]) == 8 for row in found["table"])
    violations = ("a token beyond the bound",)
    assert main(["--one-case"]) == 1
    assert "a token beyond the bound" in capsys.readouterr().err
