"""Coordinator: how many lease+submit pairs per second it acknowledges, each of them on the disk.

A real coordinator process serves real gRPC on loopback with durable commits. The clients share
one other process; each leases a group, hands it in while it asks for the next, as a worker does, and
in a tenth of the cases hands it in again, which must hear `already_accepted`. The time of a lease is
that from asking to holding it, on the disk. Beside it the share of a core that the heartbeats of
idle workers cost, and the same pairs on a PostgreSQL server started for the purpose. Drafting's history,
rewards, sealing, tokens and TLS are off. The exit status is 1 when an answer was not the one there is.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from antiphon.benchmarks.parts.measure import end_on_sigterm, tail
from antiphon.benchmarks.parts.postgres import find_initdb, postgres_server
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.config import RunConfig, build_config, dump_config, load_config
from antiphon.core.loop.leases import heartbeat_pause_s
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
from antiphon.services.coordinator.api import LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.system.processes import PARENT_VARIABLE, run_service, write_ready_file

RUN_ID = "load-1"
GROUP_SIZE = 8
TOKENS = 90
"""Of one completion; a group's payload is then about 4 KiB."""
START_S = 120.0
WARM_UP_S = 5.0
"""A coordinator that has just started still loads its table library, beside the first requests."""
CALM_S = 2.0
CALM_SHARE = 0.01
"""Of a core: a coordinator that takes more for `CALM_S` without being called is still starting."""
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
    folder.mkdir(parents=True)
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
    return SnapshotManifest(RUN_ID, 0, "0" * 64, (), (), 0, "127.0.0.1:1")


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
    await crew[0].announce_snapshot(manifest())
    await crew[0].open_step(0)
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


async def idle_fleet(
    address: str, process: psutil.Process, workers: int, seconds: float
) -> tuple[float, float]:
    """Return the share of a core that the heartbeats of idle workers cost, and how many came per second."""
    crew = [CoordinatorClient(address, timeout_s=60.0) for _ in range(workers)]
    period_s = 2.0

    async def live(client: CoordinatorClient, number: int) -> None:
        hello = WorkerHello(f"idle-{number}", PROTOCOL_VERSION, RUN_ID, 4)
        welcome = await client.register(hello)
        await asyncio.sleep(period_s * number / workers)
        beat = WorkerHeartbeat(welcome.worker_id, None, None, (), 0, 0.0, 1.0)
        while True:
            reply = await client.heartbeat(beat)
            assert reply.known
            beats[0] += 1
            await asyncio.sleep(max(welcome.heartbeat_s, reply.next_s))

    beats = [0]
    calm = await _calm_share(process)
    tasks = [asyncio.ensure_future(live(client, number)) for number, client in enumerate(crew)]
    try:
        deadline = time.monotonic() + START_S
        while beats[0] < 2 * workers:  # until everybody goes at the pace of the whole fleet
            ended, _ = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
            if time.monotonic() > deadline:
                raise SystemExit(f"after {START_S:g} s {workers} idle workers had sent {beats[0]} heartbeats")
        before, begun, beats[0] = _cpu(process), time.perf_counter(), 0
        whole_s = max(seconds, heartbeat_pause_s(period_s, workers, busy=False))  # each of them beats in it
        done, _ = await asyncio.wait(tasks, timeout=whole_s, return_when=asyncio.FIRST_EXCEPTION)
        passed_s = time.perf_counter() - begun
        share, rate = (_cpu(process) - before) / passed_s, beats[0] / passed_s
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in crew))
    return share - calm, rate


async def _calm_share(process: psutil.Process) -> float:
    """Return what a coordinator that no one calls takes of a core, once it has done with starting."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        before = _cpu(process)
        await asyncio.sleep(CALM_S)
        if (share := (_cpu(process) - before) / CALM_S) <= CALM_SHARE:
            return share
    raise SystemExit(f"the coordinator was not calm within {START_S:g} s")


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_pairs(home: Path, name: str, store: str | None, options: argparse.Namespace) -> dict[str, float]:
    """Return pairs per second and what belongs to them."""
    groups = int(options.seconds + 2) * 6000
    with coordinator(home / name, make_config(groups, store)) as (address, process):
        before, begun = _cpu(process), time.perf_counter()
        counts = asyncio.run(load(address, options.clients, options.seconds, options.duplicates))
        server_cores = (_cpu(process) - before) / (time.perf_counter() - begun)
    lease_ms = np.array(counts.lease_s or [0.0]) * 1000
    return {
        "pairs_per_s": round(counts.pairs / options.seconds, 1),
        "p50_ms": round(float(np.percentile(lease_ms, 50)), 1),
        "p99_ms": round(float(np.percentile(lease_ms, 99)), 1),
        "submit_p99_ms": round(float(np.percentile(np.array(counts.submit_s or [0.0]) * 1000, 99)), 1),
        "wrong": counts.wrong,
        "server_cores": round(server_cores, 2),
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
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve)
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
                share, rate = asyncio.run(idle_fleet(address, process, options.idle, options.seconds))
            result |= {"idle_workers": options.idle, "heartbeats_core_share": round(share, 4)}
            result["heartbeats_per_s"] = round(rate, 1)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    wrong = {name: result[name] for name in ("wrong", "postgres_wrong") if result.get(name)}
    violated = [f"{count} answers are not the ones there are ({name})" for name, count in wrong.items()]
    return finish(result, record=options.record, violated=violated)


if __name__ == "__main__":
    sys.exit(main())
