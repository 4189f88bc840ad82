"""A stage ends with what it was for, when nothing moves any more, or when the run is paused."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from antiphon.api.learner import SnapshotReply, StepReply, StepResult
from antiphon.core.config import build_config
from antiphon.core.errors import BlockedError, IntegrityError, UnavailableError
from antiphon.core.records import StepCommit
from antiphon.core.requests import StageReply
from antiphon.core.status import LearnerProgress
from antiphon.services import stages
from antiphon.services.stages import LoopStages
from antiphon.simulator.virtual.loop import VirtualLoop
from tests.support.loop_model import light_manifest


class Coordinator:
    """Gives prepared replies; the last one again and again."""

    def __init__(self, replies: Sequence[StageReply | Exception]) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[str, int]] = []

    async def await_stage(self, stage: str, number: int, wait_s: float) -> StageReply:
        await asyncio.sleep(0.01)
        self.asked.append((stage, number))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def open_step(self, step: int) -> None:
        self.asked.append(("open", step))

    async def open_evaluation(self, version: int) -> None:
        self.asked.append(("evaluation", version))


class Learner:
    """Gives prepared replies; the last one again and again."""

    def __init__(self, *replies: StepReply) -> None:
        self.replies = list(replies)

    async def await_step(self, step: int, wait_s: float) -> StepReply:
        await asyncio.sleep(0.01)
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    async def await_snapshot(self, version: int, wait_s: float) -> SnapshotReply:
        return SnapshotReply(LearnerProgress("idle", 0, "step"), light_manifest(version))


def run(
    work: Callable[[LoopStages], Coroutine[Any, Any, Any]],
    *replies: StageReply | Exception,
    mode: str = "elastic",
    learner: Learner | None = None,
    outage_s: float = 60.0,
) -> list[tuple[str, int]]:
    services = {"stall_timeout_s": 0.2, "empty_fleet_timeout_s": 0.6, "outage_timeout_s": outage_s}
    config = build_config({"loop": {"mode": mode}, "services": services})
    coordinator = Coordinator(replies)
    stages = LoopStages(config, cast("Any", coordinator), cast("Any", learner or Learner()))
    VirtualLoop(lambda: (0.0, 0.0), 1e4).run(work(stages))  # type: ignore[abstract]
    return coordinator.asked


def waiting(counter: int, halted: str = "", progress: float = 0.0, no_workers: bool = False) -> StageReply:
    return StageReply(False, "w-1 and w-2", progress, halted, counter=counter, no_workers=no_workers)


def test_a_step_is_opened_once_and_waited_for_through_an_outage() -> None:
    replies = (waiting(1), UnavailableError("away"), waiting(5), StageReply(True))
    asked = run(lambda s: s.collect(3), *replies)
    assert asked == [("open", 3), *[("collect", 3)] * 4]


def test_a_stage_that_makes_no_progress_says_what_it_counts_and_whom_it_waits_for() -> None:
    words = r"reward 3: no token, group or reward for 0\.2\d* s; it waits for w-1 and w-2"
    with pytest.raises(UnavailableError, match=words):
        run(lambda s: s.reward(3), waiting(5))


def test_a_counter_that_moves_ends_no_wait_though_the_groups_that_are_ready_become_fewer() -> None:
    slow = [waiting(n, progress=0.9 - n / 50) for n in range(40)]  # longer than the stall timeout in all
    assert len(run(lambda s: s.collect(0), *slow, StageReply(True))) == 42


def test_an_empty_fleet_is_waited_for_longer_than_a_stall_and_not_for_ever() -> None:
    long = [waiting(5, no_workers=True)] * 40  # twice the stall timeout
    assert len(run(lambda s: s.collect(0), *long, StageReply(True))) == 42
    # Workers that come and go without doing anything do not prolong the wait.
    flickering = [waiting(5, no_workers=n % 5 > 0) for n in range(400)]
    with pytest.raises(UnavailableError, match=r"collect 0: no \w+.* for 0\.[26]"):
        run(lambda s: s.collect(0), *flickering)
    with pytest.raises(UnavailableError, match=r"no worker or host for 0\.6\d* s; it waits for w-1"):
        run(lambda s: s.collect(0), waiting(5, no_workers=True))


def test_a_broadcast_waits_for_the_workers_in_elastic_mode_alone() -> None:
    assert run(lambda s: s.broadcast(2), StageReply(True)) == [("broadcast", 2)]
    assert run(lambda s: s.broadcast(2), waiting(0), mode="fixed") == []
    with pytest.raises(UnavailableError, match=r"broadcast 2: no byte or loaded version for 0\.2"):
        run(lambda s: s.broadcast(2), waiting(0))


def test_an_evaluation_is_opened_before_its_version_exists() -> None:
    commit = StepCommit(9, 10, "weights", "batch")
    done = StepReply(training(0).progress, StepResult(commit, 0.0, 9.0))
    assert run(lambda s: s.step(9), learner=Learner(done)) == [("evaluation", 10)]
    assert run(lambda s: s.broadcast(0), StageReply(True)) == [("evaluation", 0), ("broadcast", 0)]


def test_a_quorum_that_stands_still_ends_no_run_while_some_hold_the_version() -> None:
    assert len(run(lambda s: s.broadcast(2), waiting(0, progress=0.1))) > 10


def training(counter: int) -> StepReply:
    return StepReply(LearnerProgress("training step 12", counter, "micro-batch"))


def test_a_learner_step_may_take_any_time_while_its_counter_moves() -> None:
    commit = StepCommit(12, 13, "weights", "batch")
    replies = [
        *(training(n) for n in range(40)),
        StepReply(training(40).progress, StepResult(commit, 0.0, 9.0)),
    ]
    found = []

    async def step(stages: LoopStages) -> None:
        found.append(await stages.step(12))

    run(step, learner=Learner(*replies))
    assert found[0].commit == commit


def test_a_learner_that_stands_still_is_named_with_its_counter() -> None:
    words = r"step 12: no micro-batch for 0\.2\d* s; the learner is training step 12"
    with pytest.raises(UnavailableError, match=words):
        run(lambda s: s.step(12), learner=Learner(training(3)))


def test_a_paused_run_is_left_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "HALTED_WAIT_S", 0.01)
    with pytest.raises(IntegrityError, match="the run is paused: two digests"):
        run(lambda s: s.reward(1), waiting(0, "the run is paused: two digests"))


def test_an_outage_of_the_journal_is_no_lack_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts longer than the stall timeout, and nothing has moved right after it either."""
    monkeypatch.setattr(stages, "POLL_S", 0.05)
    full = [BlockedError("no space is left for the journal")] * 4
    replies = (waiting(5), *full, waiting(5), waiting(5), StageReply(True))
    assert run(lambda s: s.collect(1), *replies) == [("open", 1), *[("collect", 1)] * 8]


def test_an_outage_that_is_too_long_ends_the_stage_with_its_reason() -> None:
    with pytest.raises(BlockedError, match="no space is left for the journal"):
        run(lambda s: s.reward(1), BlockedError("no space is left for the journal"), outage_s=0.3)
