"""The run clock: seconds of work, whatever start-ups and breaks stand between them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import build_config
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import sealed_batch
from antiphon.core.records import BatchRef, DraftingStatistics
from antiphon.core.reporting.figures import RunFigures, figures_of
from antiphon.core.run_clock import RunClock, RunTimes
from antiphon.lineage.run_log import step_line


def lease(at_s: float) -> e.LeaseGranted:
    return e.LeaseGranted("g", "l", "w-1", 1, 0, at_s)


def commit(at_s: float, train_s: float = 0.0) -> e.StepCommitted:
    return e.StepCommitted(0, 1, "w", "b", {"train_s": train_s}, True, at_s)


def opened(at_s: float) -> e.RunOpened:
    return e.RunOpened("r", {}, at_s)


@pytest.mark.parametrize(
    ("events", "times"),
    [
        ([], (0, 0, 0, 0)),
        ([opened(100.0)], (0, 0, 0, 0)),
        # Workers register and start their engines: that is start-up.
        ([opened(100.0), e.WorkerRegistered("w-1", "w", 4, 130.0)], (0, 30, 0, 0)),
        ([opened(100.0), lease(140.0)], (0, 40, 0, 0)),
        ([opened(100.0), lease(140.0), commit(155.0)], (15, 40, 0, 0)),
        # Another coordinator, whose clock began elsewhere.
        (
            [opened(100.0), lease(140.0), commit(155.0), e.RunResumed(7.0, 600.0), lease(17.0), commit(20.0)],
            (18, 50, 600, 1),
        ),
        # What began before the break ends after it: the learner's step is the first sign of work.
        (
            [opened(100.0), lease(140.0), e.RunResumed(7.0, 60.0), commit(20.0, train_s=4.0)],
            (4, 49, 60, 1),
        ),
        # A start-up that was interrupted led to no work, so that nothing was continued after it.
        ([opened(0.0), e.WorkerLost("w", "", 9.0), e.RunResumed(0.0, 60.0), lease(30.0)], (0, 39, 60, 0)),
        # Looked at while it rested, by a coordinator that granted nothing.
        (
            [
                opened(0.0),
                lease(5.0),
                commit(9.0),
                e.RunResumed(0.0, 60.0),
                e.RunResumed(1.0, 40.0),
                lease(3.0),
            ],
            (4, 7, 100, 1),
        ),
        # Of a version that kept no times of openings and commits.
        (
            [e.RunOpened("r", {}), e.WorkerRegistered("w-1", "w", 4, 3.0), lease(5.0), commit(9.0)],
            (4, 2, 0, 0),
        ),
    ],
)
def test_where_the_seconds_went(events: list[e.JournalEvent], times: tuple[float, ...]) -> None:
    clock = RunClock()
    for event in events:
        clock.apply(event)
    assert clock.times() == RunTimes(*times)


WORK = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 40)), min_size=1, max_size=12)
"""Of each step: eighths of a second that its groups and its training took."""


def events_of(work: list[tuple[int, int]], breaks: dict[int, tuple[int, int]]) -> list[e.JournalEvent]:
    """Return a run's events; before each step in `breaks`, a break and a start-up of this many eighths."""
    now, found = 45.0, [opened(40.0), e.WorkerRegistered("w-1", "w", 4, 45.0)]
    for step, (sampling, training) in enumerate(work):
        if step in breaks:
            gap, startup = breaks[step]
            now = 3.0 + startup / 8
            found.append(e.RunResumed(3.0, gap / 8))
        drafting = DraftingStatistics(80, 40, 20, 18, 10 + step % 5, 0, 0.5, 0.5, 1.5)
        name, tokens = f"g{step}", (10 + step, 10)
        found.append(e.LeaseGranted(name, f"l{step}", "w-1", 1, step, now))
        now += sampling / 8
        found.append(e.GroupSubmitted(name, f"l{step}", "w-1", 1, "d", step, tokens, 1.0, now, drafting))
        total, stale = sum(tokens), ((step % 2, 2),)
        sealed = (step, (name,), (), "b", "t", 2, 0, step % 2, total, 0.5, total / 2, stale, drafting, 0, 7)
        found.append(e.BatchSealed(*sealed))
        now += training / 8
        found.append(e.StepCommitted(step, step + 1, "w", "b", {"train_s": training / 8}, True, now))
    return found


def figures(events: list[e.JournalEvent]) -> RunFigures:
    """Return the figures of a run with these events, as its records would have them."""
    clock, lines = RunClock(), []
    batches: dict[int, BatchRef] = {}
    for event in events:
        clock.apply(event)
        if isinstance(event, e.BatchSealed):
            batches[event.step] = sealed_batch(event, (), ())
        if isinstance(event, e.StepCommitted):
            lines.append(step_line(event, batches[event.step], 0.0, clock.times()))
    return figures_of(lines, [], build_config({"loop": {"group_size": 2}}))


@given(WORK, st.dictionaries(st.integers(1, 11), st.tuples(st.integers(0, 9999), st.integers(0, 999))))
def test_sessions_change_no_figure_but_those_of_the_breaks(
    work: list[tuple[int, int]], breaks: dict[int, tuple[int, int]]
) -> None:
    straight, split = figures(events_of(work, {})), figures(events_of(work, breaks))
    taken = [gap for step, gap in breaks.items() if step < len(work)]
    assert split.wall_s == sum(map(sum, work)) / 8 and split.breaks == len(taken)
    assert split.break_s == sum(gap for gap, _ in taken) / 8
    assert split.startup_s == straight.startup_s + sum(startup for _, startup in taken) / 8
    apart = {"breaks": 0, "break_s": 0.0, "startup_s": straight.startup_s}
    assert replace(split, **apart) == straight  # type: ignore[arg-type]
