"""Live capacity: the plan follows what is measured, and noise does not move it much."""

import math

import pytest

from antiphon.core.capacity.live import LiveCapacity
from antiphon.core.capacity.model import required_supply, shape_of
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop import events as e
from antiphon.core.loop.loop_measures import LoopMeasures
from antiphon.core.metrics import PLAN_METRICS

CONFIG = build_config({"loop": {"max_staleness": 4, "prompts_per_step": 8, "group_size": 4}})
TOKENS = 50.0


class Measured(LoopMeasures):
    """Seconds that are given, and completions of `TOKENS`."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.given = seconds

    def seconds(self) -> tuple[float, float, float, float] | None:
        return (*self.given, self.given[-1]) if self.given else None  # type: ignore[return-value]

    def completion_tokens(self) -> float:
        return TOKENS


def live(steps: int, step_s: float, filtered: int = 0, config: RunConfig = CONFIG) -> LiveCapacity:
    found = LiveCapacity(config)
    for step in range(steps):
        groups = tuple(f"g{step}-{place}" for place in range(8))
        found.observe(
            e.BatchSealed(step, groups, (), "", "", 32, filtered, 0, 0, 0.5, TOKENS, ()), step * step_s
        )
        found.observe(e.StepCommitted(step, step + 1, "", "", {}, True), step * step_s)
    return found


def test_nothing_is_planned_before_anything_is_measured() -> None:
    assert live(0, 1.0).plan(Measured(1.0, 0.1, 1.0), 100.0) is None
    assert live(3, 1.0).plan(Measured(), 100.0) is None
    for nonsense in (0.0, -1.0, math.inf, math.nan):
        assert live(3, 1.0).plan(Measured(1.0, 0.1, 1.0), nonsense) is None


def with_loop(**changes: object) -> RunConfig:
    return CONFIG.model_copy(update={"loop": CONFIG.loop.model_copy(update=changes)})


@pytest.mark.parametrize(("name", "sampled"), [("none", 32), ("drop", 32), ("refill", 64)])
def test_the_plan_is_the_model_over_what_was_measured(name: str, sampled: int) -> None:
    # Of a batch of 8 groups with drop 4 are trained on; with refill 16 are sampled for 8.
    config, filtered = with_loop(filter=name), 0 if name == "none" else 8
    plan = live(6, 2.5, filtered, config).plan(Measured(0.5, 0.25, 1.0), 640.0)
    assert plan is not None
    shape = shape_of(config.loop, 0.5, 0.25, 1.0, 1.0, plan.acceptance)
    assert plan.acceptance == pytest.approx(1.0 if name == "none" else 0.5)
    assert plan.need_tokens_per_s == pytest.approx(required_supply(shape) * TOKENS)
    assert plan.step_s == pytest.approx(sampled * TOKENS / 640.0) and plan.regime == "sampling"
    assert plan.measured_step_s == pytest.approx(2.5)
    assert f"{plan.step_s:.3g} s a step expected, 2.5 measured" in plan.describe()


def test_drift_is_followed_and_noise_is_smoothed() -> None:
    found, shape = live(6, 2.0), Measured(2.0, 0.0, 1.0)
    first = found.plan(shape, 1000.0)
    once = found.plan(shape, 2000.0)
    for _ in range(30):
        last = found.plan(shape, 2000.0)
    assert first and once and last
    assert first.supply_tokens_per_s == 1000.0
    assert 1000.0 < once.supply_tokens_per_s < 1200.0
    assert math.isclose(last.supply_tokens_per_s, 2000.0, rel_tol=0.01)


def test_a_publish_interval_that_costs_time_is_told() -> None:
    found = live(6, 5.0, config=with_loop(publish_interval=5))
    plan, usual = (
        found.plan(Measured(2.0, 0.1, 1.0), 5000.0),
        live(6, 2.0).plan(Measured(2.0, 0.1, 1.0), 5000.0),
    )
    assert plan is not None and plan.regime == "staleness" and plan.publish_interval == 1
    assert usual is not None and usual.publish_interval == 1


def test_what_is_logged_is_in_the_catalogue() -> None:
    plan = live(6, 2.5).plan(Measured(2.0, 0.5, 1.0), 1280.0)
    assert plan is not None and set(plan.numbers()) == {metric.name for metric in PLAN_METRICS}
