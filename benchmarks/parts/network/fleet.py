"""Fleet: an origin and workers, each a process on a host of its own, which broadcast payloads."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.network.namespaces import Host, network_of
from antiphon.core.dissemination.plan import ORIGIN, Plan
from antiphon.net.security.access_tokens import write_services_token
from antiphon.net.security.certificates import ensure_authority, issue
from antiphon.net.security.keys import TOKEN_KEY, ensure_key

PORT = 7701
ANSWER_S = 120.0
"""Longest time that a broadcast may take."""
STALL_S = 3.0
START_S = 60.0
"""Longest time until a process serves."""


@dataclass(frozen=True, slots=True)
class Broadcasted:
    """What one broadcast took."""

    seconds: dict[str, float]
    """Worker -> from the announcement until its payload was complete, verified and on its disk."""
    source_bytes: int
    """Sent by the origin's link."""
    deliveries: dict[str, dict[str, Any]]

    @property
    def last_s(self) -> float:
        return max(self.seconds.values())


class Fleet:
    """Processes on hosts; made by `fleet`."""

    def __init__(self, hosts: Sequence[Host], folder: Path, congestion: str) -> None:
        self.congestion = congestion
        """Congestion control of every host."""
        self._hosts = {name_of(number): host for number, host in enumerate(hosts)}
        self._folder = folder
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._seed = 0

    async def start(self, name: str) -> None:
        """Start the process of one host, and wait until it serves."""
        host = self._hosts[name]
        folder = self._folder / (name or "origin")
        words = [sys.executable, "-m", "antiphon.benchmarks.parts.network.peer"]
        arguments = [str(folder), str(self._folder / "bundle"), f"{host.address}:{PORT}"]
        self._processes[name] = await asyncio.create_subprocess_exec(
            *host.command(*words, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=64 << 20,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        await self._read(name)

    async def kill(self, name: str) -> None:
        """Kill the process of one host at once."""
        await _end(self._processes.pop(name))

    async def close(self) -> None:
        for name in list(self._processes):
            await self.kill(name)

    async def broadcast(
        self,
        plan: Plan,
        payload_bytes: int,
        chunk_bytes: int,
        streams: int = 1,
        killed: tuple[str, float] | None = None,
    ) -> Broadcasted:
        """Make a payload at the origin and bring it to every worker of a plan.

        Args:
            plan: whom each worker fetches from.
            payload_bytes: size of the payload, of new random bytes.
            chunk_bytes: of its chunks.
            streams: connections to each source.
            killed: worker that is killed so many seconds after the beginning; it is started anew at the end.
        """
        self._seed += 1
        payload = await self._ask(
            ORIGIN,
            {"do": "make", "payload_bytes": payload_bytes, "chunk_bytes": chunk_bytes, "seed": self._seed},
        )
        common = {
            "do": "fetch",
            "payload": payload,
            "addresses": {name: f"{host.address}:{PORT}" for name, host in self._hosts.items()},
            "streams": streams,
            "stall_s": STALL_S,
        }
        before, begun_s = self._hosts[ORIGIN].sent_bytes(), time.monotonic()
        asked = {
            name: asyncio.create_task(self._ask(name, {**common, "assignment": asdict(assignment)}))
            for name, assignment in plan.assignments.items()
        }
        if killed is not None:
            await asyncio.sleep(killed[1])
            asked.pop(killed[0]).cancel()
            await self.kill(killed[0])
        deliveries = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        sent = self._hosts[ORIGIN].sent_bytes() - before
        if killed is not None:
            shutil.rmtree(self._folder / killed[0], ignore_errors=True)
            await self.start(killed[0])
        for name in self._processes:
            await self._ask(name, {"do": "drop", "digest": payload["digest"]})
        seconds = {name: delivery["ended_s"] - begun_s for name, delivery in deliveries.items()}
        return Broadcasted(seconds, sent, deliveries)

    async def broadcast_blocks(self, payload_bytes: int, chunk_bytes: int) -> Broadcasted:
        """Make a payload at the origin and bring it to every worker over a Lattica network, as blocks.

        Args:
            payload_bytes: size of the payload, of new random bytes.
            chunk_bytes: of its chunks, each of which is a block.
        """
        self._seed += 1
        made = {"payload_bytes": payload_bytes, "chunk_bytes": chunk_bytes, "seed": self._seed}
        payload = await self._ask(ORIGIN, {"do": "make", **made})
        await self._ask(ORIGIN, {"do": "put_blocks", "payload": payload})
        workers = [name for name in self._processes if name != ORIGIN]
        origin = f"{self._hosts[ORIGIN].address}:{PORT}"
        before, begun_s = self._hosts[ORIGIN].sent_bytes(), time.monotonic()
        question = {"do": "fetch_blocks", "payload": payload, "origin": origin}
        asked = [self._ask(name, {**question, "seed": number}) for number, name in enumerate(workers)]
        deliveries = dict(zip(workers, await asyncio.gather(*asked), strict=True))
        sent = self._hosts[ORIGIN].sent_bytes() - before
        for name in self._processes:
            await self._ask(name, {"do": "drop", "digest": payload["digest"]})
        seconds = {name: delivery["ended_s"] - begun_s for name, delivery in deliveries.items()}
        return Broadcasted(seconds, sent, deliveries)

    async def _ask(self, name: str, question: Mapping[str, Any]) -> dict[str, Any]:
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.write(json.dumps(question).encode() + b"\n")
        await stdin.drain()
        return await self._read(name)

    async def _read(self, name: str) -> dict[str, Any]:
        stdout = self._processes[name].stdout
        assert stdout is not None
        line = await asyncio.wait_for(stdout.readline(), ANSWER_S)
        if not line:
            raise SystemExit(f"the process of {name or 'the origin'} ended; what it says stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def name_of(number: int) -> str:
    """Return the name of the party on a host: the origin is on host 0."""
    return f"worker{number:02}" if number else ORIGIN


@asynccontextmanager
async def fleet(uplinks: Sequence[float], delay_s: float = 0.0, loss: float = 0.0) -> AsyncIterator[Fleet]:
    """Start an origin and workers on hosts with these uplinks, bytes per second, the origin's first.

    Args:
        uplinks: of each host.
        delay_s: one way between any two hosts; 0 joins them by a bridge.
        loss: share of packets that are lost, where there is a delay.
    """
    async with AsyncExitStack() as stack:
        network = stack.enter_context(network_of(uplinks, delay_s, loss))
        yield await stack.enter_async_context(_started(network.hosts, network.congestion))


@asynccontextmanager
async def loopback_fleet(parties: int) -> AsyncIterator[Fleet]:
    """Start an origin and workers that reach each other over this machine's loopback, as fast as it is."""
    async with _started([Host(f"127.0.77.{number + 1}") for number in range(parties)], "") as found:
        yield found


@asynccontextmanager
async def _started(hosts: Sequence[Host], congestion: str) -> AsyncIterator[Fleet]:
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the disk is not what is measured
    with tempfile.TemporaryDirectory(prefix="antiphon-fleet-", dir=root) as folder:
        _make_bundle(Path(folder), [host.address for host in hosts])
        found = Fleet(hosts, Path(folder), congestion)
        try:
            for number in range(len(hosts)):
                await found.start(name_of(number))
            yield found
        finally:
            await found.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _make_bundle(folder: Path, hosts: Sequence[str]) -> None:
    authority, bundle = folder / "authority", folder / "bundle"
    now = datetime.now(UTC)
    ensure_authority(authority, now)
    issue(authority, bundle, "services", hosts, 1, now)
    write_services_token(bundle, ensure_key(authority, TOKEN_KEY), now, 1)
