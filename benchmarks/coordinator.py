"""Coordinator: how many lease+submit pairs per second it acknowledges, each of them on the disk.

A real coordinator process serves real gRPC on loopback with durable commits. The clients share
one other process; each leases a group, hands it in while it asks for the next, as a worker does, and
in a tenth of the cases hands it in again, which must hear `already_accepted`. The time of a lease is
that from asking to holding it, on the disk. Beside it the same pairs on a PostgreSQL server started for
the purpose; the share of a core that idle workers cost, each with heartbeats and a request for leases
that is held open; the same for a fleet in many processes, two thirds of it at work; and a run of a million
events: its restart, and the memory that its end and its report take. Drafting's history, rewards, sealing,
tokens and TLS are off. The exit status is 1 when an answer was not the one there is.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from antiphon.api.coordinator import LeaseRequest, WorkerHello
from antiphon.benchmarks.parts import fleets
from antiphon.benchmarks.parts.long_runs import reading
from antiphon.benchmarks.parts.long_runs.journals import long_config, write_journal
from antiphon.benchmarks.parts.measure import end_on_sigterm, tail
from antiphon.benchmarks.parts.postgres import find_initdb, postgres_server
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.config import RunConfig, build_config, dump_config, load_config
from antiphon.core.records import (
    PROTOCOL_VERSION,
    FinishReason,
    GroupSubmission,
    Lease,
    Prompt,
    SnapshotManifest,
    SubmitVerdict,
    Trajectory,
    VersionSpan,
)
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.system.processes import PARENT_VARIABLE, run_service, write_ready_file

RUN_ID = "load-1"
GROUP_SIZE = 8
TOKENS = 90
"""Of one completion; a group's payload is then about 4 KiB."""
START_S = 120.0
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


class LoadPrompts:
    """Prompts without an environment."""

    def prompt(self, split: str, index: int) -> Prompt:
        """Return prompt `index` of `split`."""
        return Prompt(f"{split}-0-{index}", (1, 2 + index % 50))


@dataclass(slots=True)
class Counts:
    """What the clients measured."""

    pairs: int = 0
    wrong: int = 0
    """Answers that are not the one there is."""
    lease_s: list[float] = field(default_factory=list)
    submit_s: list[float] = field(default_factory=list)
    counting: bool = False


def make_config(groups: int, store: str | None) -> RunConfig:
    """Return a run that has `groups` groups to give at once.

    Args:
        groups: more than will be leased.
        store: URL of the journal's database, or None.
    """
    return build_config(
        {
            "run": {"steps": 1, "seed": 1},
            "environment": {"train_size": groups, "heldout_size": 1},
            "evaluation": {"prompts": 1, "interval": 0},
            "loop": {"mode": "elastic", "prompts_per_step": groups, "group_size": GROUP_SIZE},
            "sampling": {"max_tokens": TOKENS},
            "coordinator": {"lease_s": 60.0, "heartbeat_s": 2.0, "journal_url": store},
            "drafting": {"enabled": False},
        }
    )


def serve(folder: Path) -> int:
    """Be the coordinator's process."""
    from antiphon.services.coordinator.server import serve_coordinator

    config = load_config(folder / "config.yaml")
    return run_service(
        lambda stop: serve_coordinator(
            config,
            RUN_ID,
            folder,
            folder / "store",
            "127.0.0.1",
            0,
            lambda port: write_ready_file(folder / "ready", port),
            LoadPrompts(),
            stop=stop,
        )
    )


@contextmanager
def coordinator(folder: Path, config: RunConfig) -> Iterator[tuple[str, psutil.Process]]:
    """Run a coordinator process and yield its address and itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    log = folder / "log"
    with log.open("wb") as out:
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "ANTIPHON_LOG": "warning"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "antiphon.benchmarks.coordinator", "--serve", str(folder)],
            stdout=out,
            stderr=out,
            env=environment,
        )
    try:
        deadline = time.monotonic() + START_S
        while not (folder / "ready").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the coordinator did not start ({process.poll()})\n{tail(log)}")
            time.sleep(0.02)
        port = json.loads((folder / "ready").read_text())["port"]
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30.0)


def manifest() -> SnapshotManifest:
    """Return the announcement of version 0."""
    return SnapshotManifest(RUN_ID, 0, "0" * 64, (), 0, (), "127.0.0.1:1")


def sampled(lease: Lease, worker_id: str) -> GroupSubmission:
    """Return a group as a worker would hand it in."""
    tokens = np.arange(1, TOKENS + 1, dtype=np.int32)
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


async def client_loop(client: CoordinatorClient, number: int, share: float, counts: Counts) -> None:
    """Lease, hand in and ask for the next at once, as a worker does; sometimes hand in twice."""
    rng = np.random.default_rng(number)
    hello = WorkerHello(f"w{number}", PROTOCOL_VERSION, RUN_ID, 4)
    worker_id = (await client.register(hello)).worker_id
    submission: GroupSubmission | None = None
    while True:
        asking = _timed(client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0)))
        if submission is None:
            reply, leased_s = await asking
        else:
            (reply, leased_s), (verdict, took_s) = await asyncio.gather(
                asking, _timed(client.submit_group(submission))
            )
            counts.wrong += verdict is not SubmitVerdict.ACCEPTED
            if counts.counting:
                counts.pairs += 1
                counts.submit_s.append(took_s)
            if rng.random() < share:
                again = await client.submit_group(submission)
                counts.wrong += again is not SubmitVerdict.ALREADY_ACCEPTED
        submission = None
        for lease in reply.leases:
            submission = sampled(lease, worker_id)
            if counts.counting:
                counts.lease_s.append(leased_s)


async def _timed(call: Awaitable[_T]) -> tuple[_T, float]:
    """Return the answer of a call and the seconds until it came."""
    begun = time.perf_counter()
    return await call, time.perf_counter() - begun


async def load(address: str, clients: int, seconds: float, duplicates: float) -> Counts:
    """Put a coordinator under load and return what the clients measured."""
    crew = [CoordinatorClient(address, timeout_s=60.0) for _ in range(clients)]
    counts = Counts()
    await open_run(address)
    tasks = [
        asyncio.ensure_future(client_loop(client, number, duplicates, counts))
        for number, client in enumerate(crew)
    ]
    try:
        await asyncio.sleep(WARM_UP_S)
        counts.counting = True
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        counts.counting = False
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in crew:
            await client.close()
    return counts


def measure_pairs(home: Path, name: str, store: str | None, options: argparse.Namespace) -> dict[str, float]:
    """Return pairs per second and what belongs to them."""
    groups = min(int(options.seconds + WARM_UP_S) * MOST_PAIRS_PER_S, MOST_GROUPS)
    with coordinator(home / name, make_config(groups, store)) as (address, process):
        before, begun = fleets.cpu_s(process), time.perf_counter()
        counts = asyncio.run(load(address, options.clients, options.seconds, options.duplicates))
        server_cores = (fleets.cpu_s(process) - before) / (time.perf_counter() - begun)
    lease_ms = np.array(counts.lease_s or [0.0]) * 1000
    return {
        "pairs_per_s": round(counts.pairs / options.seconds, 1),
        "p50_ms": round(float(np.percentile(lease_ms, 50)), 1),
        "p99_ms": round(float(np.percentile(lease_ms, 99)), 1),
        "submit_p99_ms": round(float(np.percentile(np.array(counts.submit_s or [0.0]) * 1000, 99)), 1),
        "wrong": counts.wrong,
        "server_cores": round(server_cores, 2),
    }


def measure_fleet(folder: Path, workers: int, processes: int, seconds: float) -> dict[str, float]:
    """Return what a fleet in many processes costs the coordinator, and how fast it is answered."""
    working = workers * 2 // 3
    groups = round(working * fleets.CONCURRENT * (2 + (seconds + START_S) / GROUP_S))
    with coordinator(folder, make_config(groups, None)) as (address, process):
        asyncio.run(open_run(address))
        plan = fleets.FleetPlan(address, RUN_ID, processes, workers, working, GROUP_S, seconds)
        command = ["-P", "-m", "antiphon.benchmarks.coordinator", "--plan", json.dumps(asdict(plan))]
        with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()  # all of it is under way
            before, begun = fleets.cpu_s(process), time.perf_counter()
            line = child.stdout.readline()
            share = (fleets.cpu_s(process) - before) / (time.perf_counter() - begun)
    if not line:
        raise SystemExit(f"the fleet ended with {child.returncode}")
    found = {"core_share": share, **json.loads(line)}
    return {f"workers_{workers}_{name}": round(value, 3) for name, value in found.items()}


async def open_run(address: str) -> None:
    """Announce the first version and open the one step of a run."""
    client = CoordinatorClient(address, timeout_s=60.0)
    await client.announce_snapshot(manifest())
    await client.open_step(0)
    await client.close()


def be_fleet(plan: dict[str, Any]) -> int:
    """Be the fleet's processes: say when all are at work, and then what they measured."""
    found = fleets.working_fleet(fleets.FleetPlan(**plan), sampled, lambda: print("begun", flush=True))
    print(json.dumps(found), flush=True)
    return 0


def measure_long_run(folder: Path, events: int) -> dict[str, float]:
    """Return what a restart on a journal of so many events takes, and what finishing such a run does."""
    folder.mkdir()
    config = long_config(LONG_PLACES)
    steps = write_journal(folder, RUN_ID, config, events)
    (folder / "config.yaml").write_text(dump_config(config))
    restarts = sorted(
        asyncio.run(reading.in_child("--restart", str(folder)))["restart_s"] for _ in range(RESTARTS)
    )
    with coordinator(folder, config) as (address, process):
        work = partial(reading.in_child, "--report", str(folder), address)
        found, grown_mb = asyncio.run(reading.with_peak(process, work))
    name = "restart_1m_events_s" if events >= 1_000_000 else "restart_events_s"
    return {
        "long_run_events": events,
        "long_run_steps": steps,
        name: round(restarts[len(restarts) // 2], 2),
        "finish_read_s": round(found["read_s"], 1),
        "finish_s": round(found["report_s"], 1),
        "finish_rss_growth_mb": round(found["growth_mb"], 1),
        "finish_coordinator_growth_mb": round(grown_mb, 1),
        "finish_page_mb": round(found["page_mb"], 1),
        "finish_events_missing": max(0, events - int(found["events"])) + abs(steps - int(found["commits"])),
    }


def main() -> int:
    """Run the benchmark that the command line asks for."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients (default 64)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured seconds (default 10)")
    parser.add_argument("--duplicates", type=float, default=0.1, help="share handed in twice (default 0.1)")
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
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--restart", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--plan", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--report", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve)
    if options.restart is not None:
        print(json.dumps(reading.restart(options.restart, RUN_ID, LoadPrompts())))
        return 0
    if options.plan is not None:
        return be_fleet(json.loads(options.plan))
    if options.report is not None:
        print(json.dumps(reading.report(Path(options.report[0]), options.report[1])))
        return 0
    end_on_sigterm()
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
            with coordinator(home / "idle", make_config(64, None)) as (address, process):
                asyncio.run(open_run(address))
                share, rate = asyncio.run(
                    fleets.idle_fleet(address, RUN_ID, process, options.idle, options.seconds)
                )
            result |= {"idle_workers": options.idle, "heartbeats_core_share": round(share, 4)}
            result["heartbeats_per_s"] = round(rate, 1)
        if options.fleet:
            result |= measure_fleet(home / "fleet", options.fleet, options.processes, options.seconds)
        if options.events:
            result |= measure_long_run(home / "long", options.events)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    wrong = {
        name: result[name]
        for name in ("wrong", "postgres_wrong", f"workers_{options.fleet}_wrong")
        if result.get(name)
    }
    violated = [f"{count} answers are not the ones there are ({name})" for name, count in wrong.items()]
    if result.get("finish_events_missing"):
        violated.append(f"a report read {result['finish_events_missing']} events too few")
    return finish(result, record=options.record, violated=violated)


if __name__ == "__main__":
    sys.exit(main())
