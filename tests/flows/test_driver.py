"""Driver: the whole schedule is submitted, and the error that it began with is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect.exceptions import UnfinishedRun

from antiphon.benchmarks.parts.plain_job import PlainStages
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import IntegrityError
from antiphon.core.loop.schedule import schedule
from antiphon.flows.driver import drive
from antiphon.runs.clients import RunStopped
from antiphon.runs.live_run import LiveRun


@dataclass
class Stage:
    """One submitted stage; it runs when somebody waits for it."""

    name: str
    number: int
    after: tuple["Stage", ...]
    error: Exception | None = None
    ended: bool = False

    def result(self, timeout: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        if timeout == 0 and not self.ended:
            raise TimeoutError
        self.ended = True


@dataclass
class Book:
    """Notes what is submitted; `fails` names the stages that end badly."""

    fails: dict[tuple[str, int], Exception] = field(default_factory=dict)
    stages: dict[tuple[str, int], Stage] = field(default_factory=dict)

    def submit(self, stage: str, number: int, after: Sequence[Stage]) -> Stage:
        before = tuple(after)
        error = self.fails.get((stage, number))
        if error is None and any(s.error is not None for s in before):
            error = UnfinishedRun("a stage before this one failed")
        assert (stage, number) not in self.stages
        made = self.stages[stage, number] = Stage(stage, number, before, error)
        return made

    def edges(self, stage: str, number: int) -> set[tuple[str, int]]:
        return {(s.name, s.number) for s in self.stages[stage, number].after}


class Run:
    """As much of a run as the schedule looks at."""

    def __init__(self, config: RunConfig, scored: frozenset[int] = frozenset()) -> None:
        self.config = config
        self.stopped = ""
        self.coordinator = SimpleNamespace(status=lambda: SimpleNamespace(scored=scored, evaluated=scored))

    def call(self, work: Callable[[], Any]) -> Any:
        return work()

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason


def config_of(steps: int, staleness: int, interval: int = 1, evaluated: int = 0) -> RunConfig:
    return build_config(
        {
            "run": {"steps": steps},
            "loop": {"max_staleness": staleness, "publish_interval": interval},
            "evaluation": {"interval": evaluated},
        }
    )


def driven(run: Run, first: int = 0, book: Book | None = None) -> Book:
    book = book or Book()
    drive(cast("LiveRun", run), book.submit, first)
    return book


def test_every_stage_of_the_schedule_is_submitted_after_those_it_waits_for() -> None:
    scores = frozenset({0, 2})
    run = Run(config_of(10, staleness=2, evaluated=2), scores)
    book = driven(run, first=7)
    stages = list(schedule(run.config, 7, scores))
    assert list(book.stages) == [stage.key for stage in stages]
    assert all(book.edges(*stage.key) == set(stage.after) for stage in stages)


@pytest.mark.parametrize("failing", ["collect", "reward", "step", "broadcast", "evaluate"])
def test_the_error_that_is_told_is_the_one_it_began_with(failing: str) -> None:
    run = Run(config_of(6, staleness=2, evaluated=2))
    book = Book({(failing, 2): IntegrityError("the cause")})
    with pytest.raises(IntegrityError, match="the cause"):
        driven(run, book=book)
    assert run.stopped == "the cause"


def test_a_stop_is_told_by_its_reason() -> None:
    run = Run(config_of(6, staleness=2))
    with pytest.raises(RunStopped, match="cancelled from the page"):
        driven(run, book=Book({("collect", 3): RunStopped("cancelled from the page")}))


def test_plain_stages_wait_for_what_comes_before() -> None:
    done: list[tuple[str, int]] = []
    stages = PlainStages(lambda stage, number: done.append((stage, number)))
    try:
        drive(cast("LiveRun", Run(config_of(5, staleness=2))), stages.submit, 0)
    finally:
        stages.close()
    assert len(done) == len(set(done))
    for t in range(5):
        assert done.index(("collect", t)) < done.index(("step", t)) < done.index(("broadcast", t + 1))
        assert done.index(("broadcast", max(0, t - 2))) < done.index(("collect", t))
