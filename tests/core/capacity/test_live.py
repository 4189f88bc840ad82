"""Live capacity: the plan follows what is measured, and noise does not move it much."""

import math

import pytest

from antiphon.core.capacity.loop_measures import LoopMeasures
from antiphon.core.capacity.model import required_supply, shape_of
from antiphon.core.config import build_config
from antiphon.core.config_sections import LoopSection
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import new_state
from antiphon.core.metrics import PLAN_METRICS
from antiphon.core.status import CapacityRecord

CONFIG = build_config({"loop": {"max_staleness": 4, "prompts_per_step": 8, "group_size": 4}})
TOKENS = 50.0


class Given(LoopMeasures):
    """Seconds that are given, and completions of `TOKENS`."""

    given: tuple[float, ...] = ()

    def seconds(self) -> tuple[float, float, float, float] | None:
        return (*self.given, self.given[-1]) if self.given else None  # type: ignore[return-value]

    def completion_tokens(self) -> float:
        return TOKENS


def live(steps: int, step_s: float, *seconds: float, filtered: int = 0) -> Given:
    found, state = Given(), new_state(CONFIG)
    found.given = seconds
    for step in range(steps):
        groups = tuple(f"g{step}-{place}" for place in range(8))
        sealed = e.BatchSealed(step, groups, (), "", "", 32, filtered, 0, 0, 0.5, TOKENS, ())
        found.observe(sealed, state, step * step_s)
        found.observe(e.StepCommitted(step, step + 1, "", "", {}, True), state, step * step_s)
    return found


def plan(measures: Given, supply: float, loop: LoopSection = CONFIG.loop) -> CapacityRecord:
    measured = measures.measured(supply)
    assert measured is not None
    return measured.expected(loop)


def test_nothing_is_planned_before_anything_is_measured() -> None:
    assert live(0, 1.0, 1.0, 0.1, 1.0).measured(100.0) is None
    assert live(3, 1.0).measured(100.0) is None
    for nonsense in (0.0, -1.0, math.inf, math.nan):
        assert live(3, 1.0, 1.0, 0.1, 1.0).measured(nonsense) is None


@pytest.mark.parametrize(("name", "sampled"), [("none", 32), ("drop", 32), ("refill", 64)])
def test_the_plan_is_the_model_over_what_was_measured(name: str, sampled: int) -> None:
    # Of a batch of 8 groups with drop 4 are trained on; with refill 16 are sampled for 8.
    loop = CONFIG.loop.model_copy(update={"filter": name})
    found = plan(live(6, 2.5, 0.5, 0.25, 1.0, filtered=0 if name == "none" else 8), 640.0, loop)
    shape = shape_of(loop, 0.5, 0.25, 1.0, 1.0, found.acceptance)
    assert found.acceptance == pytest.approx(1.0 if name == "none" else 0.5)
    assert found.need_tokens_per_s == pytest.approx(required_supply(shape) * TOKENS)
    assert found.step_s == pytest.approx(sampled * TOKENS / 640.0) and found.regime == "sampling"
    assert found.measured_step_s == pytest.approx(2.5)
    assert f"{found.step_s:.3g} s a step expected, 2.5 measured" in found.describe()


def test_drift_is_followed_and_noise_is_smoothed() -> None:
    found = live(6, 2.0, 2.0, 0.0, 1.0)
    supplies = [plan(found, supply).supply_tokens_per_s for supply in (1000.0, *[2000.0] * 31)]
    assert supplies[0] == 1000.0
    assert 1000.0 < supplies[1] < 1200.0
    assert math.isclose(supplies[-1], 2000.0, rel_tol=0.01)


def test_a_publish_interval_that_costs_time_is_told() -> None:
    costly = plan(live(6, 5.0, 2.0, 0.1, 1.0), 5000.0, CONFIG.loop.model_copy(update={"publish_interval": 5}))
    assert costly.regime == "staleness" and costly.publish_interval == 1
    assert plan(live(6, 2.0, 2.0, 0.1, 1.0), 5000.0).publish_interval == 1


def test_what_is_logged_is_in_the_catalogue() -> None:
    found = plan(live(6, 2.5, 2.0, 0.5, 1.0), 1280.0)
    assert set(found.numbers()) == {metric.name for metric in PLAN_METRICS}
