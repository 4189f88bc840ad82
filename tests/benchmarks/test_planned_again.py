"""A plan by the record of a run says that run's own seconds, whatever its filter, bound and interval."""

from dataclasses import replace

import pytest

from antiphon.benchmarks.provisioning import FILTERS, SMALL, PlannedRun
from antiphon.simulator.campaign import mute_logs

BY_FILTER = [
    replace(run, steps=40)
    for run in FILTERS
    if run.varied in (1.0, 0.5)
    and (run.max_staleness, run.supply, run.spread) in ((0, 1.6, 0.3), (2, 0.7, 0.3))
]
EDGE = [
    replace(run, steps=40) for run in SMALL if run.interval == 3 and run.supply < 1.0 and run.broadcast < 1.0
]


@pytest.mark.parametrize("run", [*BY_FILTER, *EDGE])
def test_a_recorded_run_planned_again_meets_its_own_seconds(run: PlannedRun) -> None:
    mute_logs()
    recorded = run.walk()
    planned = recorded.planned()
    assert planned.pace.step_s == pytest.approx(recorded.step_s, rel=0.1)
    # What the report says of the run is what the planner says of it.
    expected = recorded.measured().expected(run.config().loop)
    assert expected.step_s == pytest.approx(planned.pace.step_s)
    assert expected.regime == planned.pace.regime
    # And what its live panel said last: averages over the last steps, not over all.
    assert recorded.lines[-1]["timings"]["plan_step_s"] == pytest.approx(planned.pace.step_s, rel=0.15)


def test_refilled_places_have_groups_in_flight_behind_them() -> None:
    mute_logs()
    # Half of the groups are replaced and there is supply to spare: the learner need not wait.
    run = PlannedRun("refill", 0.5, max_staleness=6, supply=1.6, steps=40, seed=2)
    assert run.walk().step_s == pytest.approx(10.0, rel=0.03)


def test_places_that_nothing_takes_any_more_are_no_part_of_the_next_batch() -> None:
    """More groups are left out than the refill limit replaces."""
    mute_logs()
    recorded = PlannedRun("refill", 0.2, max_staleness=0, supply=1.5, spread=0.8, steps=40).walk()
    assert recorded.planned().pace.step_s == pytest.approx(recorded.step_s, rel=0.1)
