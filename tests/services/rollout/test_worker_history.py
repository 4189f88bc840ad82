"""A worker hands history to an engine that drafts, asks for none otherwise, and survives any of it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from antiphon.core.config import RunConfig, build_config
from antiphon.core.records import Lease, PastCompletion, PromptHistory
from antiphon.protos import records_pb2
from antiphon.services.rollout.worker import RolloutWorker
from tests.support.light_coordinator import LightCoordinator, light_lease
from tests.support.light_engine import LightEngine
from tests.support.light_weights import LightSource, light_manifest
from tests.support.messages import read, written

CONFIG = build_config({"loop": {"group_size": 2}, "rollout": {"concurrent_groups": 4}})


def history_for(lease: Lease, *rows: list[int]) -> PromptHistory:
    completions = tuple(
        PastCompletion(np.array(row, dtype=np.int32), 0, 0, index, 1.0) for index, row in enumerate(rows)
    )
    return PromptHistory(lease.prompt_key, 0, completions)


def work_off(leases: list[Lease], drafts: bool) -> tuple[LightCoordinator, LightEngine]:
    """Let a worker sample `leases` and leave."""
    coordinator, engines = LightCoordinator(CONFIG), []

    def make_engine(config: RunConfig) -> LightEngine:
        engines.append(LightEngine(drafts=drafts))
        return engines[-1]

    async def story() -> None:
        worker = RolloutWorker(
            coordinator, "w", "", make_engine, lambda config: LightSource(), lease_wait_s=0.01
        )
        coordinator.queue.extend(leases)
        task = asyncio.create_task(worker.run(lambda: None))
        try:
            async with asyncio.timeout(30.0):
                await coordinator.announce(light_manifest("run-1", 0))
                await coordinator.until(lambda: len(coordinator.submissions) >= len(leases))
                coordinator.finished = True
                await task
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=30.0)

    asyncio.run(story())
    return coordinator, engines[0]


@pytest.mark.parametrize("drafts", [False, True])
def test_history_is_asked_for_when_the_engine_drafts(drafts: bool) -> None:
    bare, lease = light_lease(0), light_lease(1)
    lease = replace(lease, history=history_for(lease, [1, 2, 3], [4]))
    coordinator, engine = work_off([bare, lease], drafts)
    assert {request.wants_history for request in coordinator.asked} == {drafts}
    by_group = {request.request_id: (request.group, request.history) for request in engine.requests}
    assert by_group == {
        **{f"{bare.lease_id}/{i}": (bare.lease_id, None) for i in range(2)},
        **{f"{lease.lease_id}/{i}": (lease.lease_id, lease.history) for i in range(2)},
    }


def test_no_history_is_asked_for_once_the_drafter_switched_itself_off() -> None:
    class Breaking(LightEngine):
        def step(self):  # type: ignore[no-untyped-def]
            self.drafts = False
            return super().step()

    coordinator = LightCoordinator(CONFIG)

    async def story() -> None:
        worker = RolloutWorker(
            coordinator, "w", "", lambda config: Breaking(drafts=True), lambda config: LightSource(),
            lease_wait_s=0.01,
        )  # fmt: skip
        task = asyncio.create_task(worker.run(lambda: None))
        try:
            async with asyncio.timeout(30.0):
                await coordinator.announce(light_manifest("run-1", 0))
                await coordinator.until(lambda: any(request.wants_history for request in coordinator.asked))
                coordinator.queue.append(light_lease(0))
                await coordinator.until(lambda: bool(coordinator.submissions))
                before = len(coordinator.asked)
                await coordinator.until(lambda: len(coordinator.asked) > before + 1)
                assert not coordinator.asked[-1].wants_history
                coordinator.finished = True
                await task
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=30.0)

    asyncio.run(story())


def damaged(change: Callable[[records_pb2.PromptHistory], None]) -> Lease:
    lease = light_lease(3)
    message = written(replace(lease, history=history_for(lease, [1, 2], [3])), records_pb2.Lease)
    change(message.history)
    return read(records_pb2.Lease.FromString(message.SerializeToString()))


def _cut(m: records_pb2.PromptHistory) -> None:
    m.tokens = m.tokens[:5]


def _short_row(m: records_pb2.PromptHistory) -> None:
    del m.rewards[:]


def _huge(m: records_pb2.PromptHistory) -> None:
    m.lengths[0] = 2**31 - 1


def _empty(m: records_pb2.PromptHistory) -> None:
    m.Clear()


@pytest.mark.parametrize("change", [_cut, _short_row, _huge, _empty])
def test_damaged_history_is_no_history(change: Callable[[records_pb2.PromptHistory], None]) -> None:
    lease = damaged(change)
    assert lease.history is None
    assert lease == light_lease(3)  # everything else arrived
    coordinator, engine = work_off([lease], drafts=True)
    assert len(coordinator.submissions) == 1 and engine.requests[0].history is None


def test_history_of_another_prompt_or_tokenizer_changes_no_token() -> None:
    leases = [light_lease(n) for n in range(3)]
    lies = [
        history_for(light_lease(9), [1, 2, 3]),
        history_for(leases[1], [-5, 2**31 - 1, 150_000]),
        history_for(leases[2], []),
    ]
    told = [replace(lease, history=lie) for lease, lie in zip(leases, lies, strict=True)]
    plain, _ = work_off(leases, drafts=False)
    misled, _ = work_off(told, drafts=True)
    assert tokens_of(plain) == tokens_of(misled)


def tokens_of(coordinator: LightCoordinator) -> dict[str, list[list[int]]]:
    return {s.group_id: [t.token_ids.tolist() for t in s.trajectories] for s in coordinator.submissions}
