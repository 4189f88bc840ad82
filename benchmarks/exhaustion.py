"""Exhaustion: what parties that only want to cost something take from honest workers and from memory.

A real coordinator and the learner's chunk server, each a process of its own behind TLS, with honest workers
that lease, beat and hand in at a steady pace, and one that fetches weights. In turns there is quiet and
there are all attackers at once: connections with a certificate and no token that send messages of 8 MiB;
a worker with a valid token that opens all calls it can, sends the largest messages it may and registers
over and over; one that asks for leases under one id, a message full of requests at a time, and reports
progress that overlaps all it reported before; and requests for the same chunk ten thousand times.
Attackers have the lowest priority, since elsewhere they run on machines of their own.

`rss_growth_mb` is by how much coordinator and chunk server, whichever grew more, exceeded their largest
memory in the first quiet; `honest_rate_share` is the median over pairs of the groups handed in under attack
and in quiet, `fetch_rate_share` the same of chunks; `lost_workers` counts honest workers that were ever
held to be lost. The exit status is 1 when one was, when memory grew by more than 256 MB, or when no attack
was refused.

    .venv/bin/python benchmarks/exhaustion.py --pairs 3
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import psutil

from antiphon.api.manifest import full_payload
from antiphon.benchmarks.coordinator import LoadPrompts, make_config, manifest, sampled
from antiphon.benchmarks.parts.measure import end_on_sigterm, started
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.cli.invite import invite
from antiphon.core.config import dump_config, load_config
from antiphon.core.errors import AntiphonError
from antiphon.core.records import PROTOCOL_VERSION, LeaseProgress, PartialTrajectory, VersionSpan
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.core.status import WorkerState
from antiphon.core.trust.access_tokens import Scope, TokenClaims
from antiphon.net.rpc.serving import CHANNEL_OPTIONS, Security, start_server, stop_server
from antiphon.net.security.access_tokens import make_token, new_token_id
from antiphon.net.security.credentials import Credentials, load_credentials, needed_token_key
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import LEARNER_KEY, TOKEN_KEY, ensure_key, load_key, write_private
from antiphon.protos import broadcast_pb2, rollout_pb2
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.server import serve_coordinator
from antiphon.system.clock import wall_clock
from antiphon.system.processes import run_service, write_ready_file
from antiphon.weights.client import BroadcastClient
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.server import register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.signature import sign_manifest

RUN_ID = "load-1"
WORKERS = 8
CONCURRENT = 4
"""Groups that an honest worker has at a time."""
GROUP_S = 2.0
"""Seconds that it takes for one."""
BEAT_S = 1.0
CHUNK_BYTES, CHUNKS = 4 << 20, 16
CHUNK_S = 0.2
"""Seconds between two chunks of the honest receiver."""
HEAVY_BYTES = 8 << 20
STREAMS = 64
"""Calls that the hoarder tries to hold open at a time."""
ATTACKERS = ("strangers", "hoarder", "overlapper", "repeaters")
SAME_ID = 40_000
"""Requests under one id in a message."""
MOST_GROWTH_MB = 256.0
SETTLE_S = 3.0
REGISTER, WORK = "/antiphon.Coordinator/Register", "/antiphon.Coordinator/Work"
GET_CHUNKS = "/antiphon.Broadcast/GetChunks"


def main() -> int:
    """Run the benchmark, or be one of its parties."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="quiet and attack, in turns (default 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each (default 20)")
    parser.add_argument("--connections", type=int, default=200, help="without a token (default 200)")
    parser.add_argument("--requests", type=int, default=500, help="for one chunk at a time (default 500)")
    parser.add_argument("--party", choices=sorted(PARTIES), help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.party:
        return PARTIES[options.party](options.home, options)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="antiphon-exhaustion-") as folder:
        result = measure(Path(folder), options)
    violated = []
    if result["lost_workers"]:
        violated.append(f"{result['lost_workers']} honest workers were held to be lost")
    if result["rss_growth_mb"] > MOST_GROWTH_MB:
        violated.append(f"memory grew by {result['rss_growth_mb']} MB, more than {MOST_GROWTH_MB:g}")
    if not result["groups_per_s"]:
        violated.append("no group was handed in")
    if not result["refused_calls"]:
        violated.append("no call of the attackers was refused")
    return finish(result, record=options.record, violated=violated)


def measure(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all parties and compare the times under attack with the quiet ones."""
    prepare(home)
    groups = round(
        WORKERS * CONCURRENT * (4 + 2 * options.pairs * (options.seconds + 4 * SETTLE_S) / GROUP_S)
    )
    config = make_config(groups, None)
    audits = config.trust.model_copy(update={"audits": "off"})  # there is no learner here to make them
    (home / "config.yaml").write_text(dump_config(config.model_copy(update={"trust": audits})))
    quiet: list[tuple[float, float]] = []
    attacked: list[tuple[float, float]] = []
    with party("coordinator", home) as coordinator, party("chunks", home) as chunks:
        asyncio.run(open_run(home))
        with party("honest", home):
            time.sleep(SETTLE_S)
            watched = [psutil.Process(coordinator.pid), psutil.Process(chunks.pid)]
            held = [0.0, 0.0]
            growth = [0.0, 0.0]
            for turn in range(options.pairs):
                begun = time.monotonic()
                largest = peaks(watched, options.seconds)
                quiet.append((begun, time.monotonic()))
                held = largest if turn == 0 else held
                with contextlib.ExitStack() as attack:
                    for name in ATTACKERS:
                        attack.enter_context(party(name, home, options, nice=19))
                    begun = time.monotonic()
                    largest = peaks(watched, options.seconds)
                    attacked.append((begun, time.monotonic()))
                grown = [now - before for now, before in zip(largest, held, strict=True)]
                growth = [max(pair) for pair in zip(growth, grown, strict=True)]
                time.sleep(SETTLE_S)
                lost = asyncio.run(lost_workers(home))
    done = json.loads((home / "honest.json").read_text())
    refused = sum(int((home / f"{name}.refused").read_text()) for name in ATTACKERS)
    shares = {
        name: [
            rate(done[name], under) / max(rate(done[name], before), 1e-9)
            for before, under in zip(quiet, attacked, strict=True)
        ]
        for name in ("groups", "chunks")
    }
    return {
        "rss_growth_mb": round(max(growth) / 1e6, 1),
        "coordinator_growth_mb": round(growth[0] / 1e6, 1),
        "chunk_server_growth_mb": round(growth[1] / 1e6, 1),
        "honest_rate_share": round(median(shares["groups"]), 4),
        "honest_rate_shares": [round(share, 4) for share in shares["groups"]],
        "fetch_rate_share": round(median(shares["chunks"]), 4),
        "lost_workers": lost,
        "groups_per_s": round(median(rate(done["groups"], window) for window in quiet), 2),
        "refused_calls": refused,
        "refused_honest": done["refused"],
        "connections": options.connections,
        "pairs": options.pairs,
    }


def prepare(home: Path) -> None:
    """Make the keys, a token for each worker, and the chunks."""
    (home / "run").mkdir()
    names = [f"w{number}" for number in range(WORKERS)]
    keys = home / "keys"
    with contextlib.redirect_stdout(sys.stderr):
        invite(*names, "hoarder", "overlapper", "stranger", keys=keys)
    for name in (*names, "hoarder", "overlapper"):
        claims = TokenClaims(
            new_token_id(),
            RUN_ID,
            name,
            (Scope.LEASE, Scope.SUBMIT, Scope.PULL),
            int(datetime.now(UTC).timestamp()) + 86_400,
            CONCURRENT,
        )
        token = make_token(claims, ensure_key(keys, TOKEN_KEY))
        write_private(keys / "workers" / name / "token", token.encode())
    import torch

    from antiphon.weights.snapshot import weights_of, write_snapshot

    store = PayloadStore(home / PAYLOADS)
    tensors = {"w": torch.arange(CHUNKS * CHUNK_BYTES // 4, dtype=torch.int32)}
    store.put_manifest(write_snapshot(store, RUN_ID, 0, weights_of(tensors), CHUNK_BYTES))


def party(
    name: str, home: Path, options: argparse.Namespace | None = None, nice: int = 0
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run one party's process; it has begun its work when the block does, and ends with it."""
    script = ("-P", "-m", "antiphon.benchmarks.exhaustion")
    words = ["nice", "-n", str(nice), sys.executable, *script, "--party", name, "--home", str(home)]
    if options is not None:
        words += ["--connections", str(options.connections), "--requests", str(options.requests)]
    return started(words, home / f"{name}.ready", home / f"{name}.log", {"ANTIPHON_LOG": "error"})


def peaks(processes: Sequence[psutil.Process], seconds: float) -> list[float]:
    """Return the largest resident memory of each process over this many seconds, in bytes."""
    found = [0.0] * len(processes)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = [max(most, p.memory_info().rss) for most, p in zip(found, processes, strict=True)]
        time.sleep(0.1)
    return found


def rate(moments: Sequence[float], window: tuple[float, float]) -> float:
    """Return how many moments a second lie in a window."""
    begun, ended = window
    return sum(begun <= moment < ended for moment in moments) / (ended - begun)


def address_of(home: Path, name: str) -> str:
    """Return where a party that has begun listens."""
    return f"localhost:{json.loads((home / f'{name}.ready').read_text())['port']}"


def bundle(home: Path, name: str) -> Credentials:
    """Return what a party shows."""
    folder = home / "keys" / ("services" if name == "services" else f"workers/{name}")
    return load_credentials(folder)


async def open_run(home: Path) -> None:
    """Announce the first version and open the one step of the run."""
    flow = CoordinatorClient(address_of(home, "coordinator"), credentials=bundle(home, "services"))
    key = load_key(home / "keys" / "services", LEARNER_KEY)
    await flow.announce_snapshot(sign_manifest(manifest(), key))
    await flow.open_step(0)
    await flow.close()


async def lost_workers(home: Path) -> int:
    """Return how many honest workers the coordinator holds to be lost, or has registered twice."""
    flow = CoordinatorClient(address_of(home, "coordinator"), credentials=bundle(home, "services"))
    status = await flow.status()
    await flow.close()
    honest = [worker for worker in status.workers if worker.worker_id.startswith("w")]
    return sum(worker.state is WorkerState.LOST for worker in honest) + abs(len(honest) - WORKERS)


def be_coordinator(home: Path, options: argparse.Namespace) -> int:
    """Be the coordinator."""
    credentials = bundle(home, "services")
    return run_service(
        lambda stop: serve_coordinator(
            load_config(home / "config.yaml"),
            RUN_ID,
            home / "run",
            home / "store",
            "localhost",
            0,
            lambda port: write_ready_file(home / "coordinator.ready", port),
            LoadPrompts(),
            credentials=credentials,
            learner_key=credentials.learner_key,
            stop=stop,
        )
    )


def be_chunk_server(home: Path, options: argparse.Namespace) -> int:
    """Be the learner, as far as others fetch from it."""

    async def serve() -> None:
        credentials = bundle(home, "services")
        clock = asyncio.get_running_loop().time
        guard = Guard(needed_token_key(credentials), RUN_ID, wall_clock, clock)
        service = BroadcastService(PayloadStore(home / PAYLOADS))
        server, port = await start_server(
            "localhost",
            0,
            lambda server: register_broadcast(server, service),
            ["antiphon.Broadcast"],
            Security(credentials, guard),
        )
        write_ready_file(home / "chunks.ready", port)
        try:
            await until_terminated()
        finally:
            await stop_server(server)

    asyncio.run(serve())
    return 0


async def until_terminated() -> None:
    """Wait for SIGTERM."""
    import signal

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


def be_honest(home: Path, options: argparse.Namespace) -> int:
    """Be all honest workers, and say when each group and each chunk was done."""
    groups: list[float] = []
    chunks: list[float] = []
    refused = [0]
    begun = asyncio.Event()

    async def work(name: str) -> None:
        client = CoordinatorClient(address_of(home, "coordinator"), credentials=bundle(home, name))
        worker_id = (await client.register(WorkerHello(name, PROTOCOL_VERSION, RUN_ID, CONCURRENT))).worker_id

        async def beat() -> None:
            while True:
                await client.heartbeat(WorkerHeartbeat(worker_id, 0, None, (), 0, 0.0, 0.0))
                await asyncio.sleep(BEAT_S)

        async def sample() -> None:
            while True:
                reply = await client.lease_group(LeaseRequest(worker_id, 0, 1, 5.0))
                for lease in reply.leases:
                    await asyncio.sleep(GROUP_S)
                    await client.submit_group(sampled(lease, worker_id))
                    groups.append(time.monotonic())
                    begun.set()

        await asyncio.gather(*(patient(task, refused) for task in (beat, *[sample] * CONCURRENT)))

    async def fetch() -> None:
        payload = full_payload(PayloadStore(home / PAYLOADS).manifest(0))
        client = BroadcastClient(address_of(home, "chunks"), credentials=bundle(home, "w0"))
        while True:
            for index in range(len(payload.chunk_digests)):
                async for _ in client.get_chunks(payload.digest, [index]):
                    chunks.append(time.monotonic())
                await asyncio.sleep(CHUNK_S)

    async def act() -> None:
        tasks = [asyncio.create_task(work(f"w{number}")) for number in range(WORKERS)]
        tasks.append(asyncio.create_task(patient(fetch, refused)))
        await begun.wait()
        write_ready_file(home / "honest.ready", 0)
        await ending(tasks)
        found = {"groups": groups, "chunks": chunks, "refused": refused[0]}
        (home / "honest.json").write_text(json.dumps(found))

    asyncio.run(act())
    return 0


async def patient(task: Callable[[], Awaitable[None]], refused: list[int]) -> None:
    """Do a task without end; what the services refuse is counted, and tried again."""
    while True:
        try:
            await task()
        except AntiphonError as error:
            refused[0] += 1
            print(f"refused: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)


async def ending(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Wait for SIGTERM or the first task that ends, then end all.

    Raises:
        Exception: what ended a task.
    """
    stopped = asyncio.create_task(until_terminated())
    done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def attack(name: str, home: Path, make: Callable[[list[int]], list[Awaitable[None]]]) -> int:
    """Run attacks until the end, and add how many calls were refused to those of earlier times."""
    refused = [0]

    async def act() -> None:
        tasks = [asyncio.ensure_future(awaitable) for awaitable in make(refused)]
        write_ready_file(home / f"{name}.ready", 0)
        await ending(tasks)

    asyncio.run(act())
    tally = home / f"{name}.refused"
    tally.write_text(str(refused[0] + (int(tally.read_text()) if tally.exists() else 0)))
    return 0


def channel_to(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """Open a connection that is shared with nobody."""
    secret = grpc.ssl_channel_credentials(
        credentials.authority, credentials.private_key, credentials.certificate
    )
    if credentials.token_file is not None:
        token = credentials.token_file.read_text().strip()
        secret = grpc.composite_channel_credentials(secret, grpc.access_token_call_credentials(token))
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(address, secret, options=options)


async def repeat(call: Callable[[], Awaitable[Any]], refused: list[int]) -> None:
    """Make a call over and over."""
    while True:
        try:
            await call()
        except grpc.aio.AioRpcError:
            refused[0] += 1
        await asyncio.sleep(0)


def be_strangers(home: Path, options: argparse.Namespace) -> int:
    """Be connections with a certificate and no token; half of them ask each of the two servers."""
    heavy = rollout_pb2.WorkerHello(run_id="x" * HEAVY_BYTES).SerializeToString()

    def make(refused: list[int]) -> list[Awaitable[None]]:
        found: list[Awaitable[None]] = []
        for number in range(options.connections):
            server, method = (("coordinator", REGISTER), ("chunks", GET_CHUNKS))[number % 2]
            channel = channel_to(address_of(home, server), bundle(home, "stranger"))
            call = channel.unary_unary(method)
            found.append(repeat(partial(call, heavy, timeout=30.0), refused))
        return found

    return attack("strangers", home, make)


def be_hoarder(home: Path, options: argparse.Namespace) -> int:
    """Be one worker with a valid token: many streams, largest messages, registrations without end."""
    junk = rollout_pb2.WorkRequests(
        requests=[
            rollout_pb2.WorkRequest(submission={"worker_id": "hoarder-1", "group_id": "x" * HEAVY_BYTES})
        ]
    ).SerializeToString()
    hello = rollout_pb2.WorkerHello(
        worker_name="hoarder", protocol_version=PROTOCOL_VERSION, run_id=RUN_ID
    ).SerializeToString()

    def make(refused: list[int]) -> list[Awaitable[None]]:
        channel = channel_to(address_of(home, "coordinator"), bundle(home, "hoarder"))

        async def stream() -> None:
            call = channel.stream_stream(WORK)()
            with contextlib.suppress(asyncio.InvalidStateError):  # refused; the loop below hears why
                for _ in range(1000):
                    await call.write(junk)
                await call.done_writing()
            async for _ in call:
                pass

        register = channel.unary_unary(REGISTER)
        return [
            *(repeat(stream, refused) for _ in range(STREAMS)),
            repeat(partial(register, hello, timeout=30.0), refused),
        ]

    return attack("hoarder", home, make)


def be_overlapper(home: Path, options: argparse.Namespace) -> int:
    """Be one worker with a valid token: many requests under one id, and ever more of the same progress."""
    asking = rollout_pb2.WorkRequest(id=7, lease={"worker_id": "overlapper-1", "wait_s": 30.0})
    many = rollout_pb2.WorkRequests(requests=[asking] * SAME_ID).SerializeToString()

    def make(refused: list[int]) -> list[Awaitable[None]]:
        channel = channel_to(address_of(home, "coordinator"), bundle(home, "overlapper"))
        client = CoordinatorClient(address_of(home, "coordinator"), credentials=bundle(home, "overlapper"))

        async def ask() -> None:
            call = channel.stream_stream(WORK)()
            with contextlib.suppress(asyncio.InvalidStateError):
                for _ in range(4):
                    await call.write(many)
            async for _ in call:
                pass

        async def report() -> None:
            worker = (
                await client.register(WorkerHello("overlapper", PROTOCOL_VERSION, RUN_ID, CONCURRENT))
            ).worker_id
            await client.heartbeat(WorkerHeartbeat(worker, 0, None, (), 0, 0.0, 0.0))
            leases = (await client.lease_group(LeaseRequest(worker, 0, CONCURRENT, 5.0))).leases
            longest = min([lease.sampling.max_tokens for lease in leases] or [1]) - 1
            for stop in range(1, longest + 1):
                tokens, logprobs = np.ones(stop, np.int32), np.full(stop, -1.0, np.float32)
                spans = (VersionSpan(0, 0, stop),)
                told = tuple(
                    LeaseProgress(
                        lease.lease_id,
                        tuple(
                            PartialTrajectory(tokens, logprobs, spans, None, sample_index=index)
                            for index in range(len(lease.seeds))
                        ),
                    )
                    for lease in leases
                )
                ids = tuple(lease.lease_id for lease in leases)
                await client.heartbeat(WorkerHeartbeat(worker, 0, None, ids, stop, 0.0, 0.0, progress=told))

        return [repeat(ask, refused), patient(report, refused)]

    return attack("overlapper", home, make)


def be_repeaters(home: Path, options: argparse.Namespace) -> int:
    """Be a worker that asks for one chunk ten thousand times in a request, in many requests."""
    digest = full_payload(PayloadStore(home / PAYLOADS).manifest(0)).digest
    asked = broadcast_pb2.ChunksRequest(payload_digest=digest, indices=[0] * 10_000).SerializeToString()

    def make(refused: list[int]) -> list[Awaitable[None]]:
        channel = channel_to(address_of(home, "chunks"), bundle(home, "hoarder"))

        async def fetch() -> None:
            async for _ in channel.unary_stream(GET_CHUNKS)(asked, timeout=30.0):
                pass

        return [repeat(fetch, refused) for _ in range(options.requests)]

    return attack("repeaters", home, make)


PARTIES: dict[str, Callable[[Path, argparse.Namespace], int]] = {
    "coordinator": be_coordinator,
    "chunks": be_chunk_server,
    "honest": be_honest,
    "strangers": be_strangers,
    "hoarder": be_hoarder,
    "overlapper": be_overlapper,
    "repeaters": be_repeaters,
}

if __name__ == "__main__":
    sys.exit(main())
