"""What rewards move with is the mean of differences within groups, as arithmetic says."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.loop.events import (
    GroupDropped,
    GroupOpened,
    GroupRewarded,
    GroupSubmitted,
    JournalEvent,
    dump_event,
)
from antiphon.core.reporting.shortcuts import LONGER, Differences
from antiphon.core.status import Event
from tests.support.run_views import view_of

COMPLETIONS = st.lists(st.tuples(st.integers(1, 9), st.floats(-1.0, 1.0)), min_size=0, max_size=12)


@given(st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=30))
def test_mean_and_interval_are_those_of_the_differences(values: list[float]) -> None:
    found = Differences()
    for value in values:
        found.add(value)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    (line,) = found.lines(LONGER, "groups")
    assert f"{found.mean:.3f} ± " in line and f"of {len(values)} groups" in line
    assert float(line.partition(" ± ")[2].split()[0]) == pytest.approx(half, abs=0.0006)


def test_one_difference_says_nothing() -> None:
    found = Differences()
    assert found.lines(LONGER, "groups") == []
    found.add(1.0)
    assert found.lines(LONGER, "groups") == []


def compared(completions: list[tuple[int, float]]) -> float | None:
    found = Differences()
    found.compare(completions)
    return found.mean if found.count else None


@given(COMPLETIONS)
def test_a_comparison_depends_on_no_order_and_turns_with_the_rewards(
    completions: list[tuple[int, float]],
) -> None:
    found = compared(completions)
    assert (found is None) == (len({length for length, _ in completions}) < 2)
    if found is not None:
        assert compared(completions[::-1]) == pytest.approx(found)
        assert compared([(length, -reward) for length, reward in completions]) == pytest.approx(-found)
        assert (compared([(length, float(length)) for length, _ in completions]) or 0.0) > 0.0


@pytest.mark.parametrize(
    ("completions", "difference"),
    [
        ([(1, 0.0), (2, 1.0)], 1.0),
        ([(1, 0.0), (2, 5.0), (3, 1.0)], 1.0),
        ([(1, 0.0), (2, 0.5), (3, 0.5), (4, 1.0)], 0.5),
        ([(1, 0.0), (2, 1.0), (2, 1.0), (2, 1.0)], 1.0),
        ([(2, 1.0), (2, 0.5)], None),
        ([], None),
    ],
)
def test_longer_completions_are_compared_with_shorter_ones(
    completions: list[tuple[int, float]], difference: float | None
) -> None:
    assert compared(completions) == difference


def test_a_view_compares_training_groups_and_leaves_failed_answers_out() -> None:
    def group(name: str, rewards: tuple[float, ...], opened: bool = True, failed: int | None = None) -> None:
        if opened:
            said.append(GroupOpened(name, len(said), 0, 0, None, None, False))
        said.append(GroupSubmitted(name, f"l{name}", "w", 1, "d" * 64, 0, (10, 20, 30), 1.0, 1.0))
        failures = () if failed is None else ((failed, "no"),)
        said.append(GroupRewarded(name, rewards, "judge", 1.0, failures))

    said: list[JournalEvent] = []
    group("a", (0.0, 0.0, 1.0))
    group("b", (0.5, 0.0, 0.0), failed=2)
    group("c", (0.0, 0.0, 1.0), opened=False)  # of an evaluation
    said.append(GroupDropped("a", "filtered"))
    view = view_of(Event(i, 1.7e9, one.kind, dump_event(one)) for i, one in enumerate(said))
    found = view.by_length
    assert (found.count, found.mean) == (2, 0.25)
