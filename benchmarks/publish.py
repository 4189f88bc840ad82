"""Publish: what a version costs from the learner's weights to an engine's, against what the hardware needs.

A synthetic bfloat16 policy (1 GB unless --bytes says otherwise) goes through production's own code. The
learner's side writes it as a payload file, in pairs with a raw write of the same bytes that ends with
fdatasync. The origin serves it from its own process over gRPC; a receiver on the same machine, kept from
linking the file, takes it chunk by chunk, verifies it and maps it. An engine's thread then takes the mapped
tensors into its own memory, in pairs with a plain copy of the same bytes. Hashed bytes, by thread, and syncs
are counted by shims around blake3 and os.fsync, os.fdatasync; memory is what the process adds to its
anonymous pages. Finally a synthetic training step is timed alone and while another process fetches over a
link of --link-mbit, in pairs: the origin needs a share of the machine, which a faster link makes larger.

The engine here only copies; what vLLM does with the tensors besides is not measured here.

The last line is one JSON object. The exit status is 1 when a figure misses its bound.

    .venv/bin/python benchmarks/publish.py
"""

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from blake3 import blake3

from antiphon.api import manifest as manifest_module
from antiphon.api.manifest import full_payload
from antiphon.api.snapshots import Place
from antiphon.benchmarks.parts.measure import PROJECT, end_on_sigterm, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.records import SnapshotManifest
from antiphon.services.learner.publish import SnapshotPublisher
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.weights import payload_store, snapshot
from antiphon.weights.client import BroadcastClient
from antiphon.weights.origin import OriginOrder, serving_origin
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.transport import RelayTransport
from antiphon.weights.verified_weights import VerifiedWeights, open_snapshot

LOOK_S = 0.002
"""Between two looks at the memory."""


class Counts:
    """Bytes hashed and syncs, by who caused them, while `of` is open."""

    def __init__(self) -> None:
        self.hashed: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Count what is hashed and synced inside the block as a side's, but for an engine's thread."""
        real = blake3
        counts = self

        class Counting:
            AUTO = real.AUTO

            def __init__(self, data: Any = b"", **options: Any) -> None:
                self._real = real(data, **options)
                self._note(data)

            def update(self, data: Any) -> None:
                self._real.update(data)
                self._note(data)

            def hexdigest(self) -> str:
                return str(self._real.hexdigest())

            def _note(self, data: Any) -> None:
                who = "engine" if threading.current_thread().name == "engine" else side
                with counts._lock:
                    counts.hashed[who] += memoryview(data).nbytes

        def noted(flush: Callable[[int], None]) -> Callable[[int], None]:
            def call(descriptor: int) -> None:
                with counts._lock:
                    counts.syncs[side] += 1
                flush(descriptor)

            return call

        flushes = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
        modules: tuple[Any, ...] = (payload_store, snapshot, manifest_module)
        try:
            for module in modules:
                module.blake3 = Counting
            for name, flush in flushes.items():
                setattr(os, name, noted(flush))
            yield
        finally:
            for module in modules:
                module.blake3 = real
            for name, flush in flushes.items():
                setattr(os, name, flush)


@contextmanager
def anonymous_growth() -> Iterator[list[int]]:
    """Give a list that holds, after the block, the most bytes that the process's own memory grew by."""
    before, most, ended = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            most[0] = max(most[0], anonymous_bytes() - before)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def anonymous_bytes() -> int:
    """Return the bytes of the process's memory that no file holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise SystemExit("this kernel does not tell RssAnon; use Linux 4.5 or later")


PIECE_BYTES = 64 << 20
"""Of a raw write at once, as many as a buffer of the publisher's has."""
STALL_S = 600.0


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--bytes", type=int, default=1_000_000_000, help="of the policy")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="training steps of one measurement (default 6)")
    parser.add_argument("--link-mbit", type=float, default=1000.0, help="uplink while a step is timed")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        return receive(*arguments.receive.split(" "))
    end_on_sigterm()
    torch.set_num_threads(1)
    with scratch_home() as home:
        store = PayloadStore(home / "origin")
        counts = Counts()
        weights = synthetic(arguments.bytes)
        written = write_pairs(store, weights, arguments.pairs, home / "raw", counts)
        memory = [written.pop("memory")]
        manifest = store.manifest(store.versions()[-1])
        taken = asyncio.run(fetch_and_swap(home, store, manifest, arguments.pairs, counts))
        memory += taken.pop("memory")
        steps = asyncio.run(train_pairs(store, manifest, arguments))
    size = full_payload(manifest).payload_bytes
    publisher, worker = counts.hashed["publisher"], counts.hashed["worker"]
    stalls, copies = taken["stall_s"], taken["memcpy_s"]
    result = {
        "payload_bytes": size,
        "over_raw_write": round(median(written["over_raw_write"]), 3),
        "hashed_share_publisher": round(publisher / size, 3),
        "hashed_share_worker": round(worker / size, 3),
        "hashed_share_engine_thread": round(counts.hashed["engine"] / size, 3),
        "syncs": max(counts.syncs["publisher"], counts.syncs["worker"]),
        "syncs_publisher": counts.syncs["publisher"],
        "syncs_worker": counts.syncs["worker"],
        "extra_memory_share": round(max(memory) / size, 4),
        "buffers_share": round(2 * snapshot.BUFFER_BYTES / size, 4),
        "swap_over_memcpy": round(median(s / c for s, c in zip(stalls, copies, strict=True)), 3),
        "swap_stall_s": round(median(stalls), 4),
        "step_during_fetch": round(median(steps), 3),
        "link_mbit": arguments.link_mbit,
    }
    bounds = {
        "over_raw_write": 1.5,
        "hashed_share_publisher": 2.001,
        "hashed_share_worker": 2.001,
        "hashed_share_engine_thread": 0.0,
        "syncs": 4,
        "extra_memory_share": result["buffers_share"] + 0.05,
        "swap_stall_s": 1.5 * median(copies) + 0.05,
        "step_during_fetch": 1.05,
    }
    broken = {
        name: f"{name} is {result[name]}, above {bound:g}"
        for name, bound in bounds.items()
        if result[name] > bound
    }
    timed = {"over_raw_write", "extra_memory_share", "swap_stall_s", "step_during_fetch"}
    violated = [sentence for name, sentence in broken.items() if name not in timed]
    at_size = [sentence for name, sentence in broken.items() if name in timed]
    samples = {
        "write_s": written["write_s"],
        "raw_write_s": written["raw_write_s"],
        "fetch_s": taken["fetch_s"],
        "verify_s": taken["verify_s"],
    }
    return finish(result, record=arguments.record, samples=samples, violated=violated, at_size=at_size)


def synthetic(size: int) -> dict[str, torch.Tensor]:
    """Return a policy of `size` bytes: layers of bfloat16 matrices of 16 MiB, and norms between them."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    left = size // 2
    block = torch.randn(2048, 4096).to(torch.bfloat16)
    while left > 0:
        number, count = len(tensors) // 2, min(left, block.numel())
        tensors[f"layers.{number}.norm"] = block[0, : min(count, 4096)].clone()
        left -= tensors[f"layers.{number}.norm"].numel()
        tensors[f"layers.{number}.proj"] = block.reshape(-1)[: max(0, min(left, count))].clone()
        left -= tensors[f"layers.{number}.proj"].numel()
    return tensors


def write_pairs(
    store: PayloadStore, weights: Mapping[str, torch.Tensor], pairs: int, raw: Path, counts: Counts
) -> dict[str, Any]:
    """Write the policy as a learner does it, in pairs with a raw write of the same bytes."""
    publisher = SnapshotPublisher("run", store, None, 2)
    source = snapshot.weights_of(weights)
    size = sum(entry.length for entry in source.entries)
    piece = torch.cat([value.reshape(-1).view(torch.uint8) for value in list(weights.values())[:16]])
    piece = piece[:PIECE_BYTES].clone()
    found: dict[str, Any] = {"over_raw_write": [], "write_s": [], "raw_write_s": []}

    def write(version: int) -> float:
        begun = time.perf_counter()
        publisher.write(version, source, lambda length: None)
        return time.perf_counter() - begun

    # Once for the counters, whose shims would cost time; it also warms everything up.
    with counts.of("publisher"), anonymous_growth() as growth:
        write(0)
    found["memory"] = growth[0]
    for pair in range(pairs):
        publisher.manifest(pair, "")  # so that no more than two versions lie on the disk
        seconds = {}
        for turn in ("raw", "write") if pair % 2 else ("write", "raw"):
            seconds[turn] = write(pair + 1) if turn == "write" else raw_write(raw, piece, size)
        raw_s, write_s = seconds["raw"], seconds["write"]
        found["raw_write_s"].append(round(raw_s, 3))
        found["write_s"].append(round(write_s, 3))
        found["over_raw_write"].append(write_s / raw_s)
    return found


def raw_write(path: Path, piece: torch.Tensor, size: int) -> float:
    """Write `size` bytes from memory and flush them; return the seconds."""
    view = memoryview(piece.numpy())
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        done = 0
        while done < size:
            done += os.pwrite(descriptor, view[: size - done], done)
        os.fdatasync(descriptor)
        seconds = time.perf_counter() - begun
    finally:
        os.close(descriptor)
        path.unlink()
    return seconds


class FarClient(BroadcastClient):
    """A client on another machine, as far as it can tell."""

    async def where(self) -> Place:
        return Place(Path(), "")

    def only(self, address: str) -> list[BroadcastClient]:
        """Return itself, whatever the address."""
        return [self]


class CopyingEngine:
    """Takes tensors into memory of its own, as an engine does, and nothing more."""

    drafts, continues, numerics, vocabulary_size, unfinished = False, True, "", 1, 0

    def __init__(self, manifest: SnapshotManifest) -> None:
        self._mine = {
            entry.name: torch.ones(entry.shape, dtype=getattr(torch, entry.dtype))
            for entry in manifest.tensors
        }
        self.version: int | None = None
        self.weights_digest: str | None = None

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Copy the tensors that somebody verified."""
        assert isinstance(tensors, VerifiedWeights)
        for name, mine in self._mine.items():
            mine.copy_(tensors[name])
        self.version, self.weights_digest = version, tensors.digest

    def close(self) -> None:
        """There is nothing to free."""


async def fetch_and_swap(
    home: Path, store: PayloadStore, manifest: SnapshotManifest, pairs: int, counts: Counts
) -> dict[str, Any]:
    """Fetch, verify and map the policy as a worker does it, and have an engine take it."""
    found: dict[str, Any] = {"fetch_s": [], "verify_s": [], "stall_s": [], "memcpy_s": []}
    mine = PayloadStore(home / "mine")
    async with origin_of(store, None) as address:
        client = FarClient(address)
        with counts.of("worker"), anonymous_growth() as growth:
            begun = time.perf_counter()
            transport = RelayTransport(mine, client.only, STALL_S)
            await transport.fetch(manifest, full_payload(manifest), lambda length: None)
            found["fetch_s"].append(round(time.perf_counter() - begun, 3))
            begun = time.perf_counter()
            tensors = await asyncio.to_thread(open_snapshot, manifest, mine)
            found["verify_s"].append(round(time.perf_counter() - begun, 3))
        await client.close()
    found["memory"] = [growth[0]]
    ours = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}

    def copy() -> float:
        begun = time.perf_counter()
        for name, tensor in ours.items():
            tensor.copy_(copies[name])
        return time.perf_counter() - begun

    engine = EngineThread(lambda: CopyingEngine(manifest), lambda outputs: None)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(engine.run())
    await engine.started(STALL_S)
    with counts.of("worker's engine"):
        for pair in range(pairs + 1):
            before = engine.busy_s
            begun = time.perf_counter()
            await engine.load(pair, tensors, manifest.weights_digest, STALL_S)
            stall_s = max(engine.busy_s - before, time.perf_counter() - begun)
            memcpy_s = await asyncio.to_thread(copy)
            if pair:  # the first one warms up
                found["stall_s"].append(stall_s)
                found["memcpy_s"].append(memcpy_s)
    engine.stop()
    await running
    return found


@asynccontextmanager
async def origin_of(store: PayloadStore, bytes_per_s: float | None) -> AsyncIterator[str]:
    """Serve a store as a learner has it served; gives the address."""
    order = OriginOrder(str(store.root), "run", "127.0.0.1", 0, bytes_per_s, 60.0)
    async with serving_origin(order, None) as port:
        yield f"127.0.0.1:{port}"


async def train_pairs(
    store: PayloadStore, manifest: SnapshotManifest, arguments: argparse.Namespace
) -> list[float]:
    """Return how much longer a training step takes while another process fetches; one ratio for each pair."""
    payload = full_payload(manifest)
    layer = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(layer.parameters())
    batch = torch.randn(256, 512)

    def step() -> float:
        begun = time.perf_counter()
        for _ in range(20):
            optimizer.zero_grad()
            layer(batch).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - begun

    async def several() -> float:
        return median([await asyncio.to_thread(step) for _ in range(arguments.steps)])

    ratios = []
    async with origin_of(store, arguments.link_mbit * 1e6 / 8) as address:
        await several()
        for _ in range(arguments.pairs):
            quiet = await several()
            words = f"{address} {payload.digest} {len(payload.chunk_digests)}"
            fetching = subprocess.Popen(
                [
                    "nice",
                    "-n",
                    "19",
                    sys.executable,
                    "-P",
                    "-m",
                    "antiphon.benchmarks.publish",
                    "--receive",
                    words,
                ],
                cwd=PROJECT,
                stdout=subprocess.PIPE,
            )
            try:
                assert fetching.stdout is not None
                await asyncio.to_thread(fetching.stdout.readline)  # chunks are coming
                ratios.append(await several() / quiet)
                assert fetching.poll() is None, "the fetch was over before the steps were"
            finally:
                fetching.kill()
                fetching.wait(30.0)
    return ratios


def receive(address: str, digest: str, chunks: str) -> int:
    """Be another machine that fetches a payload again and again, until killed; tell of the first chunk."""

    async def fetch() -> None:
        client = BroadcastClient(address)
        told = False
        while True:
            async for _ in client.get_chunks(digest, range(int(chunks))):
                if not told:
                    print("fetching", flush=True)
                    told = True

    asyncio.run(fetch())
    return 0


if __name__ == "__main__":
    sys.exit(main())
