"""Dishonest workers that no audit concerns: their messages, their scorer's time, and what they hand on.

Each acts on the production code beside honest workers; the result is the sentence by which it is refused,
struck or named, "" for one that goes on.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from antiphon.api.coordinator import LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.api.snapshots import Broadcast
from antiphon.benchmarks.parts.fuzz.claims import sound_submission
from antiphon.benchmarks.parts.fuzz.targets import Prompts, house_config
from antiphon.core.dissemination.plan import ORIGIN, Assignment
from antiphon.core.errors import ContractError
from antiphon.core.records import PROTOCOL_VERSION, GroupRewards, SampleReward, SnapshotManifest
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.coordinator.worker_registry import check_claims
from antiphon.simulator.virtual.disk import RUN_ID, JournalDisk, MemoryJournal, MemoryStore
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.relay import fetch_payload
from antiphon.weights.relay_service import Arrivals
from antiphon.weights.service import BroadcastService
from antiphon.weights.snapshot import weights_of, write_snapshot

MOST_GROUPS = 64


def extreme_numbers() -> str:
    """Return why a heartbeat is refused whose numbers would be too large for every reply."""
    largest = 2**63 - 1
    try:
        check_claims(WorkerHeartbeat("w-1", 0, None, (), largest, 0.0, 0.0, bytes_fetched=largest), 1)
    except ContractError as error:
        return str(error)
    return ""


async def hangs_the_judge() -> tuple[str, int, int]:
    """Hand in groups none of whose answers can be scored, each beside a group of an honest worker.

    Returns why the worker is out, how many groups it handed in by then, and the strikes of the honest one.
    """
    clock = asyncio.get_running_loop().time
    journal = MemoryJournal(JournalDisk(), lambda: 0.0)
    machine = RunStateMachine(house_config(), RUN_ID, journal, MemoryStore(), Prompts(), clock)
    await machine.start()
    service = CoordinatorService(machine)
    await service.announce_snapshot(SnapshotManifest(RUN_ID, 0, "0" * 64, (), 0, (), ""))
    ids = {}
    for name in ("honest", "hanging"):
        ids[name] = (await service.register(WorkerHello(name, PROTOCOL_VERSION, RUN_ID, 1))).worker_id

    async def hand_in(name: str, failure: str) -> bool:
        reply = await service.lease_group(LeaseRequest(ids[name], 0, 1, 0.0))
        for lease in reply.leases:
            await service.submit_group(sound_submission(lease, ids[name], 0))
            rewards = tuple(SampleReward(index, 0.0, failure) for index in range(len(lease.seeds)))
            await service.submit_rewards([GroupRewards(lease.group_id, rewards)])
        return bool(reply.leases)

    groups = 0
    for step in range(MOST_GROUPS):
        await service.open_step(step)
        await hand_in("honest", "")
        if not await hand_in("hanging", "the scorer gave no reward within 5 s"):
            break
        groups += 1
    standings, reason = machine.state.standings, machine.state.barred("hanging")
    strikes = standings["honest"].strikes if "honest" in standings else 0
    if machine.state.paused_reason:
        reason = ""
    await machine.close()
    return reason, groups, strikes


class _Truncating(BroadcastService):
    """A relay that sends each chunk without its last byte, and one at a time."""

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int]
    ) -> AsyncIterator[tuple[int, bytes]]:
        async for index, piece in super().get_chunks(payload_digest, indices[:1]):
            yield index, piece[:-1]


async def lies_in_a_tree() -> str:
    """Fetch a snapshot from a liar that stands above in a tree, and return by what it is named."""
    with tempfile.TemporaryDirectory() as folder:
        origin, below = PayloadStore(Path(folder) / "origin"), PayloadStore(Path(folder) / "below")
        import torch

        tensors = {"w": torch.from_numpy(np.arange(1 << 16, dtype=np.int32))}
        manifest = write_snapshot(origin, RUN_ID, 0, weights_of(tensors), 1 << 14)
        (payload,) = manifest.payloads
        incoming, culprits = below.receive(payload), dict[str, str]()
        sources: dict[str, Sequence[Broadcast]] = {
            "liar-1": [_Truncating(origin)],
            ORIGIN: [BroadcastService(origin)],
        }
        planned = Assignment(("liar-1", ORIGIN), (), 2, 1e9)
        await fetch_payload(incoming, sources, planned, Arrivals(), culprits)
        assert incoming.held.all(), "the origin has everything"
    return culprits.get("liar-1", "")
