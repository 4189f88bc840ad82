"""Fleets: many registered workers at one coordinator, idle ones and such as hand groups in.

They do what real workers do between their tokens: heartbeats at the pace that they are told, and a
request for leases that is held open whenever there is room.
"""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from antiphon.api.coordinator import LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.core.loop.leases import heartbeat_pause_s
from antiphon.core.records import PROTOCOL_VERSION, GroupSubmission, Lease, SubmitVerdict
from antiphon.services.coordinator.client import CoordinatorClient

START_S = 120.0
"""Longest until a fleet is up, or a coordinator that has just started does nothing any more."""
LEASE_WAIT_S = 5.0
"""As long as a worker has a request for leases held open."""
IDLE_PAUSE_S = 0.5
"""As long as a worker waits at most before it asks again."""
HEARTBEAT_S = 2.0
CALM_S = 2.0
CALM_SHARE = 0.01
"""Of a core: a coordinator that takes more for `CALM_S` without being called is still starting."""
CONCURRENT = 2
"""Groups that each working worker samples at a time."""
Sampler = Callable[[Lease, str], GroupSubmission]


@dataclass(slots=True)
class FleetCounts:
    """What the workers of one process measured."""

    beats_s: list[float] = field(default_factory=list)
    """Seconds until each heartbeat was answered."""
    pairs: int = 0
    wrong: int = 0


class FleetWorker:
    """One registered worker."""

    def __init__(self, client: CoordinatorClient, run_id: str, number: int, counts: FleetCounts) -> None:
        self._client, self._run_id, self._number, self._counts = client, run_id, number, counts
        self._held: set[str] = set()
        self._worker_id = ""
        self._heartbeat_s = HEARTBEAT_S

    async def register(self) -> None:
        welcome = await self._client.register(
            WorkerHello(f"fleet-{self._number}", PROTOCOL_VERSION, self._run_id, 4)
        )
        self._worker_id, self._heartbeat_s = welcome.worker_id, welcome.heartbeat_s

    async def idle(self) -> None:
        """Beat, and hold a request for leases open, that brings nothing: there is no room in it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._ask_in_vain())

    async def work(self, group_s: float, sampler: Sampler) -> None:
        """Beat, and take and hand in groups that take `group_s` seconds each."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            for slot in range(CONCURRENT):
                tasks.create_task(self._sample(group_s, slot, sampler))

    async def _beat(self) -> None:
        await asyncio.sleep(self._heartbeat_s * (self._number % 97) / 97)
        while True:
            beat = WorkerHeartbeat(self._worker_id, 0, None, tuple(self._held), 0, 0.0, 1.0)
            begun = time.perf_counter()
            reply = await self._client.heartbeat(beat)
            self._counts.beats_s.append(time.perf_counter() - begun)
            self._counts.wrong += not reply.known
            await asyncio.sleep(self._heartbeat_s if self._held else max(self._heartbeat_s, reply.next_s))

    async def _ask_in_vain(self) -> None:
        while True:
            reply = await self._client.lease_group(LeaseRequest(self._worker_id, 0, 0, LEASE_WAIT_S))
            self._counts.wrong += bool(reply.leases)
            await asyncio.sleep(IDLE_PAUSE_S)

    async def _sample(self, group_s: float, slot: int, sampler: Sampler) -> None:
        await asyncio.sleep(group_s * ((self._number * CONCURRENT + slot) % 89) / 89)
        while True:
            reply = await self._client.lease_group(LeaseRequest(self._worker_id, 0, 1, LEASE_WAIT_S))
            for lease in reply.leases:
                self._held.add(lease.lease_id)
                await asyncio.sleep(group_s)
                verdict = await self._client.submit_group(sampler(lease, self._worker_id))
                self._held.discard(lease.lease_id)
                self._counts.wrong += verdict is not SubmitVerdict.ACCEPTED
                self._counts.pairs += 1


async def idle_fleet(
    address: str, run_id: str, process: psutil.Process, workers: int, seconds: float
) -> tuple[float, float]:
    """Return the share of a core that idle workers cost, and how many heartbeats came per second."""
    counts = FleetCounts()
    calm = await _calm_share(process)
    crew = [CoordinatorClient(address, timeout_s=60.0) for _ in range(workers)]
    fleet = [FleetWorker(client, run_id, number, counts) for number, client in enumerate(crew)]
    for worker in fleet:
        await worker.register()
    tasks = [asyncio.ensure_future(worker.idle()) for worker in fleet]
    try:
        deadline = time.monotonic() + START_S
        while len(counts.beats_s) < 2 * workers:  # until everybody goes at the pace of the whole fleet
            await _until_ended(tasks, 0.1)
            if time.monotonic() > deadline:
                sent = len(counts.beats_s)
                raise SystemExit(f"after {START_S:g} s {workers} idle workers had sent {sent} heartbeats")
        before, begun = cpu_s(process), time.perf_counter()
        counts.beats_s.clear()
        # Each of them beats in it.
        await _until_ended(tasks, max(seconds, heartbeat_pause_s(HEARTBEAT_S, workers, busy=False)))
        passed_s = time.perf_counter() - begun
        share, rate = (cpu_s(process) - before) / passed_s, len(counts.beats_s) / passed_s
    finally:
        await _end(tasks, crew)
    if counts.wrong:
        raise SystemExit(f"{counts.wrong} answers to idle workers are not the ones there are")
    return share - calm, rate


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet of working and idle workers in many processes."""

    address: str
    run_id: str
    processes: int
    workers: int
    working: int
    """Of the workers; the others have no room."""
    group_s: float
    seconds: float


def working_fleet(plan: FleetPlan, sampler: Sampler, begin: Callable[[], Any]) -> dict[str, float]:
    """Let a fleet work and return what it measured; `begin` is called when all of it is under way.

    The processes are forked, so a process should call this that has no channel open.
    """
    context = multiprocessing.get_context("fork")
    pipes, crew = [], []
    for index in range(plan.processes):
        ours, theirs = context.Pipe()
        child = context.Process(target=_serve, args=(plan, index, sampler, theirs), daemon=True)
        child.start()
        pipes.append(ours)
        crew.append(child)
    try:
        for pipe in pipes:
            _receive(pipe)
        begin()
        for pipe in pipes:
            pipe.send("begin")
        found = [_receive(pipe) for pipe in pipes]
    finally:
        for child in crew:
            child.terminate()
            child.join(10.0)
    beats = np.array([seconds for part in found for seconds in part["beats_s"]] or [0.0])
    return {
        "pairs_per_s": sum(part["pairs"] for part in found) / plan.seconds,
        "heartbeats_per_s": len(beats) / plan.seconds,
        "heartbeat_p50_ms": float(np.percentile(beats, 50)) * 1000,
        "heartbeat_p99_ms": float(np.percentile(beats, 99)) * 1000,
        "wrong": sum(part["wrong"] for part in found),
    }


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(START_S):
        raise SystemExit(f"a process of the fleet said nothing for {START_S:g} s")
    try:
        return json.loads(pipe.recv())
    except EOFError:
        raise SystemExit("a process of the fleet ended early") from None


def _serve(plan: FleetPlan, index: int, sampler: Sampler, pipe: Connection) -> None:
    asyncio.run(_take_part(plan, index, sampler, pipe))


async def _take_part(plan: FleetPlan, index: int, sampler: Sampler, pipe: Connection) -> None:
    counts = FleetCounts()
    numbers = range(index, plan.workers, plan.processes)
    crew = [CoordinatorClient(plan.address, timeout_s=60.0) for _ in numbers]
    fleet = [
        FleetWorker(client, plan.run_id, number, counts) for client, number in zip(crew, numbers, strict=True)
    ]
    for worker in fleet:
        await worker.register()
    tasks = [
        asyncio.ensure_future(worker.work(plan.group_s, sampler) if number < plan.working else worker.idle())
        for number, worker in zip(numbers, fleet, strict=True)
    ]
    try:
        await _until_ended(tasks, plan.group_s + HEARTBEAT_S)  # until all slots are taken
        pipe.send("0")
        await asyncio.to_thread(pipe.poll, START_S)
        counts.beats_s.clear()
        counts.pairs = 0
        await _until_ended(tasks, plan.seconds)
        pipe.send(json.dumps({"beats_s": counts.beats_s, "pairs": counts.pairs, "wrong": counts.wrong}))
    finally:
        await _end(tasks, crew)


async def _until_ended(tasks: list[asyncio.Task[None]], timeout_s: float) -> None:
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _end(tasks: list[asyncio.Task[None]], crew: list[CoordinatorClient]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(client.close() for client in crew))


async def _calm_share(process: psutil.Process) -> float:
    """Return what a coordinator that no one calls takes of a core, once it has done with starting."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        before = cpu_s(process)
        await asyncio.sleep(CALM_S)
        if (share := (cpu_s(process) - before) / CALM_S) <= CALM_SHARE:
            return share
    raise SystemExit(f"the coordinator was not calm within {START_S:g} s")


def cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
