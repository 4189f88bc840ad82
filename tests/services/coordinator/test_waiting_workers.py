"""A waiting worker is woken for work or news, not for what others do."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.coordinator import consequences
from antiphon.core.loop import admission
from antiphon.core.requests import LeaseReply, LeaseRequest
from antiphon.services.coordinator.service import CoordinatorService
from tests.support.light_parties import hello, sample_lease, served
from tests.support.loop_model import light_manifest, make_config

IDLE = 40
CONFIG = make_config(steps=6, max_staleness=0, filter_="none", prompts_per_step=4, lease_s=60.0)


async def settled() -> None:
    """Let everybody who was woken have a look."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_waiting_workers_are_woken_as_many_as_there_is_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    plan_leases = admission.plan_leases

    def counted(*arguments: Any) -> admission.LeasePlan:
        looks.append("look")
        return plan_leases(*arguments)

    async def ask(service: CoordinatorService, worker_id: str, groups: int, wait_s: float) -> LeaseReply:
        """Ask as a worker does: again, when it was only told which version is the newest."""
        reply = await service.lease_group(LeaseRequest(worker_id, 0, groups, wait_s))
        if not reply.leases:
            reply = await service.lease_group(LeaseRequest(worker_id, 0, groups, wait_s))
        return reply

    async def act(service: CoordinatorService) -> None:
        machine = service.state_machine
        await service.announce_snapshot(light_manifest(0))
        await service.open_step(0)
        busy = (await service.register(hello("busy"))).worker_id
        leases = (await service.lease_group(LeaseRequest(busy, 0, 4, 0.0))).leases
        assert len(leases) == 4
        waiting = []
        for number in range(IDLE):
            worker_id = (await service.register(hello(f"idle-{number}"))).worker_id
            waiting.append(asyncio.ensure_future(ask(service, worker_id, 1, 30.0)))
            while len(machine.work._queue) <= number:
                await asyncio.sleep(0)
        monkeypatch.setattr(admission, "plan_leases", counted)

        await service.submit_group(sample_lease(leases[0], busy, 0))
        await settled()
        assert looks == []  # nothing has become leasable, and nobody looked

        held = machine.loop.leases.get(leases[1].lease_id)
        assert held is not None
        machine.run(consequences.take_back(machine.loop, held, "test", machine.clock()))
        await waiting[0]
        await settled()
        assert len(looks) == 1 and [task.done() for task in waiting] == [True] + [False] * (IDLE - 1)
        assert waiting[0].result().leases[0].group_id == leases[1].group_id

        await service.pause("test")
        await settled()
        assert len(looks) == IDLE  # all the others heard of it
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def run() -> None:
        async with served(CONFIG, tmp_path) as site, asyncio.timeout(60.0):
            await act(site.service)

    asyncio.run(run())
