"""The list of stages: the staleness bound is one edge, and every walker gets the same list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop.admission import kept_until
from antiphon.core.loop.schedule import Stage, StageKey, is_evaluated, schedule
from antiphon.core.loop.staleness import is_published


def config_of(steps: int, staleness: int, interval: int = 1, evaluated: int = 0) -> RunConfig:
    return build_config(
        {
            "run": {"steps": steps},
            "loop": {"max_staleness": staleness, "publish_interval": interval},
            "evaluation": {"interval": evaluated},
            "broadcast": {"snapshots_kept": staleness + 2},
        }
    )


def edges(stages: list[Stage]) -> dict[StageKey, set[StageKey]]:
    return {stage.key: set(stage.after) for stage in stages}


def numbers(stages: list[Stage], name: str) -> list[int]:
    return [stage.number for stage in stages if stage.name == name]


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunConfig, int]:
    """A configuration, and how many steps were committed before."""
    steps, staleness = draw(st.integers(1, 24)), draw(st.integers(0, 6))
    interval = draw(st.integers(1, staleness + 1))
    return config_of(steps, staleness, interval, draw(st.integers(0, 5))), draw(st.integers(0, steps))


@given(runs())
def test_every_stage_waits_only_for_earlier_ones_and_no_batch_is_older_than_the_bound(
    drawn: tuple[RunConfig, int],
) -> None:
    config, first = drawn
    steps, loop = config.run.steps, config.loop
    stages = list(schedule(config, first, opened=range(first + 1)))
    assert stages == list(schedule(config, first, opened=range(first + 1)))
    seen: set[StageKey] = set()
    for stage in stages:
        assert set(stage.after) <= seen and stage.key not in seen
        seen.add(stage.key)
        if stage.name == "collect":
            ((name, version),) = stage.after
            assert name == "broadcast" and is_published(version, loop.publish_interval, steps)
            assert stage.number - version <= loop.max_staleness
            done = stage.number - loop.max_staleness - 1
            assert stage.submitted_after == (("step", done) if done >= first else None)
            assert stage.submitted_after is None or stage.submitted_after in seen
        if stage.name == "evaluate":
            assert is_evaluated(stage.number, config)
    for name in ("collect", "reward", "step"):
        assert numbers(stages, name) == list(range(first, steps))
    published = [v for v in range(steps + 1) if is_published(v, loop.publish_interval, steps)]
    base = max(v for v in published if v <= first)
    left = [v for v in published if v < base <= kept_until(config, v) and is_evaluated(v, config)]
    assert numbers(stages, "broadcast") == [*left, base, *(v for v in published if v > first)]
    assert set(numbers(stages, "evaluate")) == {v for v in range(steps + 1) if is_evaluated(v, config)}


@pytest.mark.parametrize("staleness", range(5))
def test_the_bound_moves_one_edge(staleness: int) -> None:
    found = edges(list(schedule(config_of(8, staleness))))
    for t in range(8):
        oldest = ("broadcast", max(0, t - staleness))
        assert found["collect", t] == found["reward", t] == {oldest}
        previous = {("step", t - 1)} if t else set()
        assert found["step", t] == {("collect", t), ("reward", t)} | previous
        assert ("step", t) in found["broadcast", t + 1]


def test_with_a_publish_interval_the_edge_goes_to_the_oldest_published_version() -> None:
    stages = list(schedule(config_of(9, staleness=3, interval=2)))
    found = edges(stages)
    assert numbers(stages, "broadcast") == [0, 2, 4, 6, 8, 9]
    assert [next(iter(found["collect", t]))[1] for t in range(9)] == [0, 0, 0, 0, 2, 2, 4, 4, 6]


def test_a_resumed_run_continues_after_its_commits_and_evaluates_what_was_left_open() -> None:
    stages = list(schedule(config_of(10, staleness=2, evaluated=2), 7, scored={0, 2}, opened={0, 2, 4, 6}))
    found = edges(stages)
    assert numbers(stages, "step") == [7, 8, 9]
    assert found["collect", 7] == found["collect", 9] == {("broadcast", 7)}
    assert numbers(stages, "evaluate") == [4, 6, 8, 10]


def test_what_is_to_be_evaluated_is_broadcast_though_the_process_that_was_to_do_it_died() -> None:
    config = config_of(10, staleness=2, evaluated=2)
    assert kept_until(config, 4) >= 7
    stages = list(schedule(config, 7, scored={0, 2}, opened={0, 2, 4, 6}))
    assert numbers(stages, "broadcast")[:3] == [4, 6, 7]
    assert edges(stages)["evaluate", 4] == {("broadcast", 7)}
    assert edges(stages)["broadcast", 7] == {("broadcast", 6)}


def test_a_run_resumed_with_another_interval_evaluates_what_is_kept() -> None:
    config = config_of(60, staleness=2, evaluated=1)
    kept = config.broadcast.snapshots_kept
    stages = list(schedule(config, 40, scored={0}, opened={0, 30}))
    assert numbers(stages, "evaluate") == [30, *range(40 + 2 + 1 - (kept - 1), 61)]


def test_a_finished_loop_is_only_closed() -> None:
    stages = list(schedule(config_of(4, staleness=1), 4, scored={0}))
    assert [stage.key for stage in stages] == [("broadcast", 4), ("evaluate", 4)]


def test_a_run_of_a_million_steps_submits_no_more_than_overlap() -> None:
    waiting = 0
    for stage in schedule(config_of(10**6, 2)):
        if stage.submitted_after is not None:
            break  # the walker waits here for the first step
        waiting += stage.name == "collect"
    assert waiting == 3
