"""A coordinator behind TLS whose groups are audited with a real model, and workers that sample with it."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.trust import dishonest_workers as workers
from antiphon.core.config import RunConfig, build_config
from antiphon.core.records import GroupSubmission, Lease, SubmitVerdict, Trajectory
from antiphon.core.requests import LeaseRequest
from antiphon.net.security.keys import LEARNER_KEY, load_key
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.learner.audits.auditor import Auditor
from antiphon.services.learner.snapshot_model import SnapshotModel
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.signature import sign_manifest
from tests.support.light_parties import hello
from tests.support.loop_model import light_manifest
from tests.support.secured import House, SecuredSite, secured

SAMPLES = 4
PLAIN: dict[str, Any] = {
    "run": {"steps": 4, "seed": 7},
    "model": {"path": str(workers.MODEL)},
    "environment": {"train_size": 64, "heldout_size": 3},
    "evaluation": {"prompts": 3},
    "loop": {"max_staleness": 3, "prompts_per_step": 16, "group_size": SAMPLES},
    "sampling": {"max_tokens": workers.MAX_TOKENS},
    "broadcast": {"snapshots_kept": 16},
    "trust": {"audits": "all", "trusted": ["good"]},
}
CONFIG = build_config(PLAIN)


class _OneModel(SnapshotModel):
    def fill(self, version: int) -> bool:
        return True


class ScoringAuditor(Auditor):
    """Every version is the shipped model, which is never published here."""

    def __init__(self, config: RunConfig, payloads: PayloadStore, model: Any = None) -> None:
        super().__init__(config, payloads)
        self._held = _OneModel(config, payloads, model)


def submission(lease: Lease, worker_id: str, made: tuple[Trajectory, ...]) -> GroupSubmission:
    return GroupSubmission(lease.lease_id, lease.group_id, worker_id, made, 0.1)


@dataclasses.dataclass
class Guest:
    """A worker that samples with the sampler's model."""

    client: CoordinatorClient
    worker_id: str

    async def work(self, make: workers.Make) -> int:
        """Do one lease; return how many groups were accepted."""
        reply = await self.client.lease_group(LeaseRequest(self.worker_id, 0, 1, 5.0))
        accepted = 0
        for lease in reply.leases:
            made = (await asyncio.to_thread(make, [lease]))[0]
            verdict = await self.client.submit_group(submission(lease, self.worker_id, made))
            accepted += verdict is SubmitVerdict.ACCEPTED
        return accepted


async def enter(site: SecuredSite, house: House, name: str) -> Guest:
    flow = site.client(house.services)
    if not site.state_machine.state.snapshots:
        key = load_key(house.keys / "services", LEARNER_KEY)
        await flow.announce_snapshot(sign_manifest(light_manifest(0), key))
        await flow.open_step(3)
    client = site.client(house.worker(name))
    return Guest(client, (await client.register(hello(name))).worker_id)


async def until_audited(site: SecuredSite) -> None:
    async with asyncio.timeout(60.0):
        while site.trust.waiting:
            await site.state_machine.journal.grown.wait(0.2)


def run(
    tmp_path: Path, house: House, act: Callable[[SecuredSite], object], config: RunConfig = CONFIG
) -> None:
    async def serve() -> None:
        async with secured(config, tmp_path, house) as site, asyncio.timeout(200.0):
            await act(site)  # type: ignore[misc]

    asyncio.run(serve())
