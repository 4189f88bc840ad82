"""Coordinator: how many lease+submit pairs per second it acknowledges, each of them on the disk.

A real coordinator process serves real gRPC on loopback with durable commits. The clients share
one other process; each leases a group, hands it in while it asks for the next, as a worker does, and
in a tenth of the cases hands it in again, which must hear `already_accepted`. The time of a lease is
that from asking to holding it, on the disk. Beside it the same pairs on a PostgreSQL server started for
the purpose; the share of a core that idle workers cost, each with heartbeats and a request for leases
that is held open, in many processes; the same for a fleet, two thirds of it at work; and a run of a million
events: its restart, and the memory that its end and its report take. Drafting's history, rewards, sealing,
tokens and TLS are off. The exit status is 1 when an answer was not the one there is.
"""

import argparse
import asyncio
import copy
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import psutil

from antiphon.benchmarks.parts.measure import started
from antiphon.benchmarks.parts.postgres import find_initdb, postgres_server
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.config import RunConfig, build_config, dump_config, load_config
from antiphon.core.loop import events as e
from antiphon.core.loop.leases import heartbeat_pause_s
from antiphon.core.loop.run_state import new_state
from antiphon.core.records import (
    PROTOCOL_VERSION,
    FinishReason,
    GroupSubmission,
    Lease,
    SnapshotManifest,
    SubmitVerdict,
    Trajectory,
    VersionSpan,
)
from antiphon.core.reporting.run_view import RunView
from antiphon.core.requests import LeaseReply, LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.report.page import build_report
from antiphon.runs.attach import read_events
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal, StateSnapshots, TrainedRow
from antiphon.services.coordinator.journal.pinned import pinned_values
from antiphon.services.coordinator.run_state_machine import RunStateMachine

REPORT_S = 1200.0
"""Longest that finishing may take before the benchmark gives up."""
PROGRAM = (sys.executable, "-P", "-m", "antiphon.benchmarks.coordinator")


async def restart(folder: Path) -> dict[str, float]:
    """Open a journal as a coordinator does, return how long that took, and let go of it.

    A process of its own should do it: the libraries are loaded, and nothing else is.
    """
    from antiphon.simulator.standins.engines import ArithmeticPrompts

    config, clock = load_config(folder / "config.yaml"), asyncio.get_running_loop().time
    begun = time.perf_counter()
    journal, store = Journal(folder / JOURNAL_NAME, RUN_ID), open_store(folder / "store", config.record)
    machine = RunStateMachine(config, RUN_ID, journal, store, ArithmeticPrompts(), clock)
    await machine.start()
    took_s = time.perf_counter() - begun
    await machine.close()
    return {"restart_s": took_s}


def report(folder: Path, address: str) -> dict[str, float]:
    """Read commits, events and status of a run and write its report, as the end of a run does."""
    begun, before = time.perf_counter(), psutil.Process().memory_info().rss

    async def read() -> tuple[Any, ...]:
        client = CoordinatorClient(address, timeout_s=60.0)
        try:
            status, commits = await client.status(), await client.commits(-1)
            return status, commits, await read_events(client, RunView())
        finally:
            await client.close()

    status, commits, view = asyncio.run(read())
    read_s = time.perf_counter() - begun
    build_report(folder, ArtifactStore(folder / "store"), view, status, folder / "report.html")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "commits": len(commits),
        "events": sum(view.counts.values()),
        "read_s": read_s,
        "report_s": time.perf_counter() - begun,
        "growth_mb": (peak - before) / 1e6,
        "page_mb": (folder / "report.html").stat().st_size / 1e6,
    }


def in_child(*arguments: str, watched: psutil.Process | None = None) -> tuple[dict[str, float], float]:
    """Run a part of this program in a process of its own.

    Returns:
        what it prints last, a JSON object, and by how many MB the memory of `watched` grew meanwhile.
    """
    command = [*PROGRAM, *arguments]
    before = peak = watched.memory_info().rss if watched else 0
    deadline = time.monotonic() + REPORT_S
    environment = {**os.environ, "ANTIPHON_LOG": "warning"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        while child.poll() is None:
            if time.monotonic() > deadline:
                child.kill()
            time.sleep(0.05)
            peak = max(peak, watched.memory_info().rss if watched else 0)
        out, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {child.returncode}")
    return json.loads(out.splitlines()[-1]), (peak - before) / 1e6


GROUP_SIZE = 8
WORKERS = 8
METRICS = 45
HELD_OUT = 64
EVALUATED_EVERY = 10
STEPS_TOGETHER = 20
"""Steps in one transaction."""
DIGEST = "0" * 64


def long_config() -> RunConfig:
    """Return the configuration of a run that is far from its end."""
    return build_config(
        {
            "run": {"name": RUN_ID, "steps": 1_000_000, "seed": 1},
            "environment": {"train_size": 4096, "heldout_size": HELD_OUT},
            "evaluation": {"prompts": HELD_OUT, "interval": 0},
            "loop": {"mode": "elastic", "prompts_per_step": LONG_PLACES, "group_size": GROUP_SIZE},
            "drafting": {"enabled": False},
        }
    )


async def write_journal(folder: Path, config: RunConfig, events: int) -> int:
    """Write a journal of at least this many events into a folder and return how many steps it has."""
    journal, state = Journal(folder / JOURNAL_NAME, RUN_ID), new_state(config)
    snapshots, step = StateSnapshots(journal, state), 0
    for found, trained in _steps(config):
        for event in found:
            state.apply(event)
        written = journal.enqueue(found, trained=trained, dump=snapshots.due(len(found)))
        step += trained is not None
        if step % STEPS_TOGETHER == 0:
            await written
        if journal.last_seq >= events:
            break
    await journal.close()
    return step


def _steps(config: RunConfig) -> Iterator[tuple[list[e.JournalEvent], TrainedRow | None]]:
    """Yield the events of the beginning, and then of one step after another, without end."""
    opening: list[e.JournalEvent] = [e.RunOpened(RUN_ID, pinned_values(config))]
    opening += [e.WorkerRegistered(f"w{worker}-1", f"w{worker}", 16, 0.0) for worker in range(WORKERS)]
    yield [*opening, e.SnapshotAnnounced(0, DIGEST, "127.0.0.1:1")], None
    places, step = config.loop.prompts_per_step, 0
    while True:
        now, numbers = 10.0 * step, range(step * places, (step + 1) * places)
        ids = tuple(f"g{number:07d}" for number in numbers)
        found: list[e.JournalEvent] = [e.StepOpened(step)]
        for number, group_id in zip(numbers, ids, strict=True):
            found.append(e.GroupOpened(group_id, number, number % 4096, number // 4096, None, None, False))
            found += _sampled(group_id, number, step, GROUP_SIZE, now + number % 8)
        counts = (GROUP_SIZE * places, 0, 0, 800 * places)
        found.append(
            e.BatchSealed(step, ids, (), DIGEST, DIGEST, *counts, 0.5, 100.0, ((0, GROUP_SIZE * places),))
        )
        metrics = {f"train/figure_number_{index}": index * 1.2345678 + step for index in range(METRICS)}
        metrics |= {"train/loss": 0.1, "train/train_s": 5.0}
        found.append(e.StepCommitted(step, step + 1, DIGEST, DIGEST, metrics, True))
        found.append(e.SnapshotAnnounced(step + 1, DIGEST, "127.0.0.1:1"))
        if step % EVALUATED_EVERY == 0:
            found.append(e.EvaluationOpened(step + 1, HELD_OUT))
            for index in range(HELD_OUT):
                found += _sampled(f"v{step + 1:06d}-e{index:04d}", index, step + 1, 1, now + 5.0)
            found.append(e.EvaluationFinished(step + 1, 1.0, 100.0))
        yield found, TrainedRow(step, step + 1, DIGEST, DIGEST, ids)
        step += 1


def _sampled(group_id: str, number: int, version: int, samples: int, now: float) -> list[e.JournalEvent]:
    lease_id, worker_id = f"lease-of-{group_id}", f"w{number % WORKERS}-1"
    return [
        e.LeaseGranted(group_id, lease_id, worker_id, 1, version, now),
        e.GroupSubmitted(group_id, lease_id, worker_id, 1, DIGEST, version, (100,) * samples, 1.0, now + 2.0),
        e.GroupRewarded(group_id, tuple(float(index % 2) for index in range(samples)), "r", now + 2.5),
    ]


START_S = 120.0
"""Longest until a fleet is up."""
LEASE_WAIT_S = 5.0
"""As long as a worker has a request for leases held open."""
IDLE_PAUSE_S = 0.5
"""As long as a worker waits at most before it asks again."""
HEARTBEAT_S = 2.0
DUPLICATES = 0.1
"""Share of the groups that are handed in twice."""
CONCURRENT = 2
"""Groups that each working worker samples at a time."""
_together: Barrier
"""Of all processes of a fleet; set in each of them."""


@dataclass(slots=True)
class Counts:
    """What the workers of one process measured."""

    pairs: int = 0
    wrong: int = 0
    """Answers that are not the one there is."""
    beats_s: list[float] = field(default_factory=list)
    """Seconds until each heartbeat was answered."""
    lease_s: list[float] = field(default_factory=list)
    submit_s: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Forget all but wrong answers: what is measured begins now."""
        self.pairs = 0
        for seconds in (self.beats_s, self.lease_s, self.submit_s):
            seconds.clear()


class FleetWorker:
    """One registered worker."""

    def __init__(self, address: str, number: int, counts: Counts) -> None:
        self.client = CoordinatorClient(address, timeout_s=60.0)
        self._number, self._counts = number, counts
        self._held: set[str] = set()
        self._worker_id = ""
        self._heartbeat_s = HEARTBEAT_S

    async def register(self) -> None:
        hello = WorkerHello(f"fleet-{self._number}", PROTOCOL_VERSION, RUN_ID, 4)
        welcome = await self.client.register(hello)
        self._worker_id, self._heartbeat_s = welcome.worker_id, welcome.heartbeat_s

    async def idle(self) -> None:
        """Beat, and hold a request for leases open, that brings nothing: there is no room in it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            while True:
                self._counts.wrong += bool((await self._lease(0)).leases)
                await asyncio.sleep(IDLE_PAUSE_S)

    async def work(self, group_s: float) -> None:
        """Beat, and take and hand in groups that take `group_s` seconds each."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            for slot in range(CONCURRENT):
                tasks.create_task(self._sample(group_s, slot))

    async def hurry(self) -> None:
        """Hand in each group while the next is asked for, without a pause; a share of them twice."""
        rng, counts = np.random.default_rng(self._number), self._counts
        await self.register()
        submission: GroupSubmission | None = None
        while True:
            if submission is None:
                reply, leased_s = await _timed(self._lease(1))
            else:
                (reply, leased_s), (verdict, took_s) = await asyncio.gather(
                    _timed(self._lease(1)), _timed(self.client.submit_group(submission))
                )
                counts.wrong += verdict is not SubmitVerdict.ACCEPTED
                counts.pairs += 1
                counts.submit_s.append(took_s)
                if rng.random() < DUPLICATES:
                    again = await self.client.submit_group(submission)
                    counts.wrong += again is not SubmitVerdict.ALREADY_ACCEPTED
            submission = None
            for lease in reply.leases:
                submission = sampled(lease, self._worker_id)
                counts.lease_s.append(leased_s)

    async def _lease(self, groups: int) -> LeaseReply:
        return await self.client.lease_group(LeaseRequest(self._worker_id, 0, groups, LEASE_WAIT_S))

    async def _beat(self) -> None:
        await asyncio.sleep(self._heartbeat_s * (self._number % 97) / 97)
        while True:
            beat = WorkerHeartbeat(self._worker_id, 0, None, tuple(self._held), 0, 0.0, 1.0)
            reply, took_s = await _timed(self.client.heartbeat(beat))
            self._counts.beats_s.append(took_s)
            self._counts.wrong += not reply.known
            await asyncio.sleep(self._heartbeat_s if self._held else max(self._heartbeat_s, reply.next_s))

    async def _sample(self, group_s: float, slot: int) -> None:
        await asyncio.sleep(group_s * ((self._number * CONCURRENT + slot) % 89) / 89)
        while True:
            for lease in (await self._lease(1)).leases:
                self._held.add(lease.lease_id)
                await asyncio.sleep(group_s)
                verdict = await self.client.submit_group(sampled(lease, self._worker_id))
                self._held.discard(lease.lease_id)
                self._counts.wrong += verdict is not SubmitVerdict.ACCEPTED
                self._counts.pairs += 1


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet of working and idle workers in many processes."""

    address: str
    processes: int
    workers: int
    working: int
    """Of the workers; the others have no room."""
    group_s: float
    """What a group takes; measured is what comes after the first ones."""
    seconds: float


def be_fleet(plan: FleetPlan) -> dict[str, float]:
    """Let a fleet work and return what it measured; prints a line when all of it is under way.

    The processes are forked, so a process should call this that has no channel open.
    """
    context = multiprocessing.get_context("fork")
    together = context.Barrier(plan.processes, lambda: print("begun", flush=True))
    with ProcessPoolExecutor(plan.processes, context, _meet, (together,)) as pool:
        parts = list(pool.map(_take_part, [plan] * plan.processes, range(plan.processes)))
    beats = np.array([seconds for part in parts for seconds in part.beats_s] or [0.0])
    return {
        "pairs_per_s": sum(part.pairs for part in parts) / plan.seconds,
        "heartbeats_per_s": len(beats) / plan.seconds,
        "heartbeat_p50_ms": float(np.percentile(beats, 50)) * 1000,
        "heartbeat_p99_ms": float(np.percentile(beats, 99)) * 1000,
        "wrong": sum(part.wrong for part in parts),
    }


def _meet(together: Barrier) -> None:
    global _together
    _together = together


def _take_part(plan: FleetPlan, index: int) -> Counts:
    return asyncio.run(_work_together(plan, index))


async def _work_together(plan: FleetPlan, index: int) -> Counts:
    counts = Counts()
    numbers = range(index, plan.workers, plan.processes)
    fleet = [FleetWorker(plan.address, number, counts) for number in numbers]
    for worker in fleet:
        await worker.register()
    tasks = [
        asyncio.ensure_future(worker.work(plan.group_s) if number < plan.working else worker.idle())
        for number, worker in zip(numbers, fleet, strict=True)
    ]
    try:
        await _until_ended(tasks, plan.group_s + HEARTBEAT_S)  # until all slots are taken
        await asyncio.to_thread(_together.wait, START_S)
        counts.begin()
        await _until_ended(tasks, plan.seconds)
        return copy.deepcopy(counts)
    finally:
        await _end(tasks, fleet)


async def _until_ended(tasks: list[asyncio.Task[None]], timeout_s: float) -> None:
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _end(tasks: list[asyncio.Task[None]], fleet: list[FleetWorker]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(worker.client.close() for worker in fleet))


def cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


RUN_ID = "load-1"
TOKENS = 90
"""Of one completion; a group's payload is then about 4 KiB."""
WARM_UP_S = 5.0
"""A coordinator that has just started still loads its table library, beside the first requests."""
MOST_PAIRS_PER_S, MOST_GROUPS = 4000, 65_536
"""More than a coordinator answers, and the most prompts that one step may have."""
LONG_PLACES = 32
"""Groups of each step of the long run."""
RESTARTS = 3
GROUP_S = 5.0
"""Seconds that a worker of the fleet takes for a group."""
_T = TypeVar("_T")


def make_config(groups: int, store: str | None) -> RunConfig:
    """Return a run that has `groups` groups to give at once.

    Args:
        groups: more than will be leased.
        store: URL of the journal's database, or None.
    """
    return build_config(
        {
            "run": {"name": RUN_ID, "steps": 1, "seed": 1},
            "environment": {"train_size": groups, "heldout_size": 1},
            "evaluation": {"prompts": 1, "interval": 0},
            "loop": {"mode": "elastic", "prompts_per_step": groups, "group_size": GROUP_SIZE},
            "sampling": {"max_tokens": TOKENS},
            "coordinator": {"lease_s": 60.0, "heartbeat_s": 2.0, "journal_url": store},
            "drafting": {"enabled": False},
        }
    )


@contextmanager
def coordinator(folder: Path, config: RunConfig) -> Iterator[tuple[str, psutil.Process]]:
    """Run a coordinator process and yield its address and itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "ports.json").write_text(json.dumps({"coordinator": 0}))
    words = [sys.executable, "-P", "-m", "antiphon.benchmarks.parts.kills.roles", "coordinator", str(folder)]
    ready = folder / "coordinator.ready"
    with started(words, ready, folder / "coordinator.log", {"ANTIPHON_LOG": "warning"}) as process:
        port = json.loads(ready.read_text())["port"]
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)


def sampled(lease: Lease, worker_id: str) -> GroupSubmission:
    """Return a group as a worker would hand it in."""
    tokens = np.arange(TOKENS, dtype=np.int32) % 60 + 1  # none of them ends a completion
    logprobs = np.full(TOKENS, -1.5, dtype=np.float32)
    return GroupSubmission(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        worker_id=worker_id,
        trajectories=tuple(
            Trajectory(
                tokens,
                logprobs,
                (VersionSpan(0, 0, TOKENS),),
                FinishReason.LENGTH,
                sample_index=index,
                seed=seed,
            )
            for index, seed in enumerate(lease.seeds)
        ),
        generation_s=1.0,
    )


async def _timed(call: Awaitable[_T]) -> tuple[_T, float]:
    """Return the answer of a call and the seconds until it came."""
    begun = time.perf_counter()
    return await call, time.perf_counter() - begun


async def load(address: str, clients: int, seconds: float) -> Counts:
    """Put a coordinator under load and return what the clients measured."""
    counts = Counts()
    fleet = [FleetWorker(address, number, counts) for number in range(clients)]
    await open_run(address)
    tasks = [asyncio.ensure_future(worker.hurry()) for worker in fleet]
    try:
        await _until_ended(tasks, WARM_UP_S)
        counts.begin()
        await _until_ended(tasks, seconds)
        return copy.deepcopy(counts)
    finally:
        await _end(tasks, fleet)


def measure_pairs(home: Path, name: str, store: str | None, options: argparse.Namespace) -> dict[str, float]:
    """Return pairs per second and what belongs to them."""
    groups = min(int(options.seconds + WARM_UP_S) * MOST_PAIRS_PER_S, MOST_GROUPS)
    with coordinator(home / name, make_config(groups, store)) as (address, process):
        before, begun = cpu_s(process), time.perf_counter()
        counts = asyncio.run(load(address, options.clients, options.seconds))
        server_cores = (cpu_s(process) - before) / (time.perf_counter() - begun)
    lease_ms = np.array(counts.lease_s or [0.0]) * 1000
    return {
        "pairs_per_s": round(counts.pairs / options.seconds, 1),
        "p50_ms": round(float(np.percentile(lease_ms, 50)), 1),
        "p99_ms": round(float(np.percentile(lease_ms, 99)), 1),
        "submit_p99_ms": round(float(np.percentile(np.array(counts.submit_s or [0.0]) * 1000, 99)), 1),
        "wrong": counts.wrong,
        "server_cores": round(server_cores, 2),
    }


def measure_fleet(
    folder: Path, processes: int, workers: int, working: int, group_s: float, seconds: float
) -> dict[str, float]:
    """Return what a fleet in many processes costs the coordinator, and how fast it is answered."""
    groups = max(64, round(working * CONCURRENT * (2 + (seconds + START_S) / group_s)))
    with coordinator(folder, make_config(groups, None)) as (address, process):
        asyncio.run(open_run(address))
        plan = FleetPlan(address, processes, workers, working, group_s, seconds)
        command = [*PROGRAM, "--part", "fleet", json.dumps(asdict(plan))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()  # all of it is under way
            before, begun = cpu_s(process), time.perf_counter()
            line = child.stdout.readline()
            share = (cpu_s(process) - before) / (time.perf_counter() - begun)
    if not line:
        raise SystemExit(f"the fleet ended with {child.returncode}")
    found = {"core_share": share, **json.loads(line)}
    return {name: round(value, 3) for name, value in found.items()}


async def open_run(address: str) -> None:
    """Announce the first version and open the one step of a run."""
    client = CoordinatorClient(address, timeout_s=60.0)
    await client.announce_snapshot(SnapshotManifest(RUN_ID, 0, DIGEST, (), 0, (), "127.0.0.1:1"))
    await client.open_step(0)
    await client.close()


def measure_long_run(folder: Path, events: int) -> dict[str, float]:
    """Return what a restart on a journal of this many events takes, and what finishing such a run does."""
    folder.mkdir()
    config = long_config()
    steps = asyncio.run(write_journal(folder, config, events))
    (folder / "config.yaml").write_text(dump_config(config))
    restarts = [in_child("--part", "restart", str(folder))[0]["restart_s"] for _ in range(RESTARTS)]
    with coordinator(folder, config) as (address, process):
        found, grown_mb = in_child("--part", "report", str(folder), address, watched=process)
    name = "restart_1m_events_s" if events >= 1_000_000 else "restart_events_s"
    return {
        "long_run_events": events,
        "long_run_steps": steps,
        name: round(median(restarts), 2),
        "finish_read_s": round(found["read_s"], 1),
        "finish_s": round(found["report_s"], 1),
        "finish_rss_growth_mb": round(found["growth_mb"], 1),
        "finish_coordinator_growth_mb": round(grown_mb, 1),
        "finish_page_mb": round(found["page_mb"], 1),
        "finish_events_missing": max(0, events - int(found["events"])) + abs(steps - int(found["commits"])),
    }


def be_part(name: str, *arguments: str) -> int:
    """Be another process of the benchmark, which prints a JSON object last."""
    if name == "fleet":
        found = be_fleet(FleetPlan(**json.loads(arguments[0])))
    elif name == "restart":
        found = asyncio.run(restart(Path(arguments[0])))
    else:
        found = report(Path(arguments[0]), arguments[1])
    print(json.dumps(found), flush=True)
    return 0


def main() -> int:
    """Run the benchmark that the command line asks for."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients (default 64)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured seconds (default 10)")
    parser.add_argument("--idle", type=int, default=1000, help="idle workers (default 1000; 0 leaves it out)")
    parser.add_argument(
        "--no-postgres", action="store_true", help="leave PostgreSQL out, as without its package"
    )
    parser.add_argument(
        "--fleet", type=int, default=300, help="registered workers (default 300; 0 leaves it out)"
    )
    parser.add_argument("--processes", type=int, default=40, help="processes of these (default 40)")
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="of the long run (default 1,000,000; 0 leaves it out)"
    )
    parser.add_argument("--part", nargs="+", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        return be_part(*options.part)
    home = Path(tempfile.mkdtemp(prefix="antiphon-load-"))
    result: dict[str, object] = {"clients": options.clients, "seconds": options.seconds}
    try:
        result |= measure_pairs(home, "sqlite", None, options)
        initdb = None if options.no_postgres else find_initdb()
        if initdb is not None:
            with postgres_server(initdb) as server:
                found = measure_pairs(home, "postgres", server.url, options)
            result |= {f"postgres_{name}": value for name, value in found.items()}
        if options.idle:
            # Everybody beats once in this time, after a first one at the pace of a small fleet.
            pause_s = heartbeat_pause_s(HEARTBEAT_S, options.idle, busy=False)
            sizes = (options.processes, options.idle, 0, pause_s, max(options.seconds, pause_s))
            found = measure_fleet(home / "idle", *sizes)
            result |= {"idle_workers": options.idle, "idle_wrong": found["wrong"]}
            result["heartbeats_core_share"] = found["core_share"]
            result["heartbeats_per_s"] = found["heartbeats_per_s"]
        if options.fleet:
            sizes = (options.processes, options.fleet, options.fleet * 2 // 3, GROUP_S, options.seconds)
            found = measure_fleet(home / "fleet", *sizes)
            result |= {f"workers_{options.fleet}_{name}": value for name, value in found.items()}
        if options.events:
            result |= measure_long_run(home / "long", options.events)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    wrong = {
        name: result[name]
        for name in ("wrong", "postgres_wrong", "idle_wrong", f"workers_{options.fleet}_wrong")
        if result.get(name)
    }
    violated = [f"{count} answers are not the ones there are ({name})" for name, count in wrong.items()]
    if result.get("finish_events_missing"):
        violated.append(f"a report read {result['finish_events_missing']} events too few")
    return finish(result, record=options.record, violated=violated)


if __name__ == "__main__":
    execute(main)
