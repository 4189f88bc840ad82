"""A stage ends with what it was for, when nothing moves any more, or when the run is paused."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from antiphon.core.config import build_config
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.services.coordinator.api import StageReply
from antiphon.services.loop import stages
from antiphon.services.loop.stages import LoopStages


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


class Learner:
    async def publish(self, version: int) -> int:
        return version


def run(
    work: Callable[[LoopStages], Coroutine[Any, Any, Any]],
    *replies: StageReply | Exception,
    mode: str = "elastic",
) -> list[tuple[str, int]]:
    config = build_config(
        {
            "loop": {"mode": mode},
            "services": {"stall_timeout_s": 0.2},
            "broadcast": {"transfer_timeout_s": 0.1},
        }
    )
    coordinator = Coordinator(replies)
    asyncio.run(work(LoopStages(config, cast("Any", coordinator), cast("Any", Learner()))))
    return coordinator.asked


def waiting(progress: float, halted: str = "") -> StageReply:
    return StageReply(False, "w-1 and w-2", progress, halted)


def test_a_step_is_opened_once_and_waited_for_through_an_outage() -> None:
    replies = (waiting(0.1), UnavailableError("away"), waiting(0.5), StageReply(True))
    asked = run(lambda s: s.collect(3), *replies)
    assert asked == [("open", 3), *[("collect", 3)] * 4]


def test_a_stage_that_makes_no_progress_says_whom_it_waits_for() -> None:
    words = r"reward 3 made no progress for 0\.2 s; it waits for w-1 and w-2"
    with pytest.raises(UnavailableError, match=words):
        run(lambda s: s.reward(3), waiting(0.5))


def test_progress_ends_no_wait() -> None:
    slow = [waiting(n / 50) for n in range(40)]  # longer than the stall timeout in all
    assert len(run(lambda s: s.collect(0), *slow, StageReply(True))) == 42


def test_a_broadcast_waits_for_the_workers_in_elastic_mode_alone() -> None:
    assert run(lambda s: s.broadcast(2), StageReply(True)) == [("broadcast", 2)]
    assert run(lambda s: s.broadcast(2), waiting(0.0), mode="fixed") == []
    with pytest.raises(UnavailableError, match=r"broadcast 2 made no progress for 0\.1 s"):
        run(lambda s: s.broadcast(2), waiting(0.0))


def test_a_paused_run_is_left_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "HALTED_WAIT_S", 0.01)
    with pytest.raises(IntegrityError, match="the run is paused: two digests"):
        run(lambda s: s.reward(1), waiting(0.0, "the run is paused: two digests"))
