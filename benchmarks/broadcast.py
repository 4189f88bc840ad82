"""Broadcast: seconds until the last worker has a payload, over links as slow as real ones.

An origin and workers, each a process in a network namespace of its own, run the product's planner, receiver
and server over gRPC with mutual TLS. What a host sends passes a token bucket (tbf). `over_ideal` is the time
divided by M / B, the time of one copy over one link; headers alone make that 1.05 at an MTU of 1500.

- `star`, `chain`: 7 workers, uplinks of 100 Mbit/s, 32 MB.
- `chain_by_n`: the chain with 2, 4, 8 and 15 workers.
- `slow_peer`: one of the 7 has 10 Mbit/s; the time is that of the last of the others.
- `relay_killed`: the middle one of the 7 is killed halfway. It comes back and takes part in a
  broadcast before it is killed again: a connection that was refused a second ago would be a second fault.
- `wan_loss`: a chain of 4 workers, uplinks of 20 Mbit/s, 40 ms one way, 1% of packets lost, 8 MB; ideal is
  M / B + hops x delay. Connections stay open between broadcasts, as a worker's do between versions;
  `first_over_ideal` is of the broadcast that opened them. Packets pass a router of our own over TUN devices,
  because the kernel may lack netem.
- `small`: 1.8 MB to 2 workers over uplinks of 64 Mbit/s and 2 connections, connections open: a message
  for each small chunk, as a far network wants them, would cost more here than it brings.
- `loopback_mb_per_s`: what one hop brings in a second over this machine's loopback, without any shaping.
- `source_copies`: bytes that left the origin in a chain, over the payload's.

Needs root and iproute2, and is skipped with a reason where something is missing.

    .venv/bin/python benchmarks/broadcast.py
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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.api.manifest import auto_chunk_bytes
from antiphon.benchmarks.parts.network.namespaces import Host, missing, network_of
from antiphon.benchmarks.parts.network.router import MTU
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.dissemination.plan import ORIGIN, Link, Plan, Size, plan_tree
from antiphon.net.security.access_tokens import write_services_token
from antiphon.net.security.certificates import ensure_authority, issue
from antiphon.net.security.keys import TOKEN_KEY, ensure_key
from antiphon.system.logs import configure_logs

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
        process = self._processes.pop(name)
        if process.returncode is None:
            process.kill()
        await process.wait()

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
            killed: worker that is killed this many seconds after the beginning; it is started again at the
            end.
        """
        self._seed += 1
        made = {"payload_bytes": payload_bytes, "chunk_bytes": chunk_bytes, "seed": self._seed}
        payload = await self._ask(ORIGIN, {"do": "make", **made})
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
        return Broadcasted(seconds, sent)

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
    """Start an origin and workers on the hosts of a network, the origin on the first."""
    with network_of(uplinks, delay_s, loss) as (hosts, congestion):
        async with _started(hosts, congestion) as found:
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


def _make_bundle(folder: Path, hosts: Sequence[str]) -> None:
    authority, bundle = folder / "authority", folder / "bundle"
    now = datetime.now(UTC)
    ensure_authority(authority, now)
    issue(authority, bundle, "services", hosts, 1, now)
    write_services_token(bundle, ensure_key(authority, TOKEN_KEY), now, 1)


UPLINK = 100e6 / 8
"""Bytes per second."""
SLOW_UPLINK = 10e6 / 8
WORKERS, BY_N = 7, (2, 4, 8, 15)
PAYLOAD_BYTES = 32_000_000
WAN_UPLINK, WAN_DELAY_S, WAN_LOSS, WAN_WORKERS, WAN_BYTES = 20e6 / 8, 0.040, 0.01, 4, 8_000_000
SMALL_UPLINK, SMALL_WORKERS, SMALL_BYTES, SMALL_STREAMS = 64e6 / 8, 2, 1_800_000, 2
WAN_STREAMS = 24
"""Connections of each hop of the far network."""
LOOPBACK_BYTES = 512_000_000
DOWNLINK = 1e9 / 8
MOST_OVER = {"chain": 1.15, "slow_peer": 1.15, "relay_killed": 1.3, "wan_loss": 1.5, "small": 1.3}
MOST_SPREAD_BY_N, MOST_COPIES, LEAST_LOOPBACK = 1.15, 1.2, 300.0


def main() -> int:
    """Measure what is asked for and check it against the bounds."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="broadcasts of each kind; the median counts")
    parser.add_argument(
        "--only", default="", help="comma-separated: equal, by_n, slow_peer, far, small, loopback"
    )
    args = parser.parse_args()
    configure_logs(level="error")
    if (reason := missing()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        print(json.dumps({"skipped": reason}))
        return 0
    report = asyncio.run(_measure(args))
    copies = report.get("source_copies", 0.0)
    many = [f"the origin sent {copies} copies in a chain; at most {MOST_COPIES}"]
    violated = many if copies > MOST_COPIES else []
    return finish(report, record=args.record, violated=violated, at_size=_slow(report))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {
        "streams": {"near": 1, "far": WAN_STREAMS},
        "mtu": MTU,
        "chunk_bytes": {
            name: auto_chunk_bytes(size)
            for name, size in (("near", PAYLOAD_BYTES), ("far", WAN_BYTES), ("small", SMALL_BYTES))
        },
    }
    parts: dict[str, Callable[[int], Coroutine[Any, Any, dict[str, Any]]]] = {
        "equal": _equal,
        "by_n": _by_n,
        "slow_peer": _slow_peer,
        "far": _far,
        "small": _small,
        "loopback": _loopback,
    }
    wanted = args.only.split(",") if args.only else list(parts)
    for name in wanted:
        report |= await parts[name](args.repeat)
    return report


async def _equal(repeat: int) -> dict[str, Any]:
    """Measure star and chain with equal links, and the death of a relay."""
    found: dict[str, Any] = {}
    uplinks = [UPLINK] * (1 + WORKERS)
    ideal_s = PAYLOAD_BYTES / UPLINK
    async with fleet(uplinks) as hosts:
        found["congestion"] = hosts.congestion
        for topology in ("star", "chain"):
            plan = _plan(uplinks, PAYLOAD_BYTES, reachable=topology == "chain")
            runs = await _repeated(hosts, plan, PAYLOAD_BYTES, repeat)
            found[topology] = _row(topology, [run.last_s for run in runs], ideal_s, plan.seconds)
            if topology == "chain":
                copies = [run.source_bytes / PAYLOAD_BYTES for run in runs]
                found["source_copies"] = round(median(copies), 3)
        plan = _plan(uplinks, PAYLOAD_BYTES)
        killed = (list(plan.assignments)[WORKERS // 2], ideal_s / 2)
        runs = []
        for _ in range(repeat):
            runs += await _repeated(hosts, plan, PAYLOAD_BYTES, 1, killed=killed)
            await _repeated(hosts, plan, PAYLOAD_BYTES, 1)
        found["relay_killed"] = _row("relay_killed", [run.last_s for run in runs], ideal_s, plan.seconds)
    return found


async def _chain(
    name: str, uplinks: Sequence[float], size: int, repeat: int, streams: int = 1, spared: str = ""
) -> dict[str, Any]:
    """Measure the chain of workers with these uplinks, until the last but `spared` has it."""
    async with fleet(uplinks) as hosts:
        plan = _plan(uplinks, size)
        if streams > 1:
            await _repeated(hosts, plan, size, 1, streams=streams)  # opens the connections
        runs = await _repeated(hosts, plan, size, repeat, streams=streams)
    seconds = [max(took for worker, took in run.seconds.items() if worker != spared) for run in runs]
    return _row(name, seconds, size / uplinks[0], plan.seconds)


async def _by_n(repeat: int) -> dict[str, Any]:
    """Measure the chain with few and many workers."""
    rows = [
        {"n": n, **await _chain(f"chain of {n}", [UPLINK] * (1 + n), PAYLOAD_BYTES, repeat)} for n in BY_N
    ]
    return {"chain_by_n": rows}


async def _slow_peer(repeat: int) -> dict[str, Any]:
    """Measure what one slow worker costs the others, when the planner knows of it."""
    uplinks = [UPLINK, UPLINK, SLOW_UPLINK, *[UPLINK] * (WORKERS - 2)]
    row = await _chain("slow_peer", uplinks, PAYLOAD_BYTES, repeat, spared=name_of(2))
    return {"slow_peer": row}


async def _far(repeat: int) -> dict[str, Any]:
    """Measure the chain over links with a delay and losses."""
    uplinks = [WAN_UPLINK] * (1 + WAN_WORKERS)
    ideal_s = WAN_BYTES / WAN_UPLINK + WAN_WORKERS * WAN_DELAY_S
    async with fleet(uplinks, WAN_DELAY_S, WAN_LOSS) as hosts:
        plan = _plan(uplinks, WAN_BYTES, 2 * WAN_DELAY_S)
        first, *runs = await _repeated(hosts, plan, WAN_BYTES, 1 + repeat, streams=WAN_STREAMS)
        congestion = hosts.congestion
    row = _row("wan_loss", [run.last_s for run in runs], ideal_s, plan.seconds)
    cold = round(first.last_s / ideal_s, 3)
    return {"wan_loss": {**row, "first_over_ideal": cold, "streams": WAN_STREAMS, "congestion": congestion}}


async def _small(repeat: int) -> dict[str, Any]:
    """Measure the chain with a payload of few chunks, connections open."""
    uplinks = [SMALL_UPLINK] * (1 + SMALL_WORKERS)
    return {"small": await _chain("small", uplinks, SMALL_BYTES, repeat, streams=SMALL_STREAMS)}


async def _loopback(repeat: int) -> dict[str, Any]:
    """Measure one hop that nothing slows, over this machine's loopback."""
    async with _started([Host(f"127.0.77.{number}") for number in (1, 2)], "") as hosts:
        plan = _plan([1e9] * 2, LOOPBACK_BYTES)
        runs = await _repeated(hosts, plan, LOOPBACK_BYTES, repeat)
    rates = [LOOPBACK_BYTES / run.last_s / 1e6 for run in runs]
    print(f"loopback: {median(rates):.0f} MB/s", flush=True)
    return {"loopback_mb_per_s": round(median(rates), 1)}


def _plan(uplinks: Sequence[float], size: int, round_trip_s: float = 0.0, reachable: bool = True) -> Plan:
    """Return the plan of workers with these uplinks: a star of those that none reaches."""
    links = {
        name_of(number): Link(uplink, DOWNLINK, round_trip_s, reachable)
        for number, uplink in enumerate(uplinks)
        if number
    }
    return plan_tree(Size(size, auto_chunk_bytes(size)), Link(uplinks[0], DOWNLINK), links)


async def _repeated(
    hosts: Fleet,
    plan: Plan,
    size: int,
    repeat: int,
    streams: int = 1,
    killed: tuple[str, float] | None = None,
) -> list[Broadcasted]:
    return [await hosts.broadcast(plan, size, auto_chunk_bytes(size), streams, killed) for _ in range(repeat)]


def _row(name: str, seconds: Sequence[float], ideal_s: float, predicted_s: float) -> dict[str, Any]:
    """Return a row of the table, and print it."""
    took_s = median(seconds)
    over = took_s / ideal_s
    print(f"{name}: {took_s:.2f} s, {over:.2f} of {ideal_s:.2f} s; predicted {predicted_s:.2f} s", flush=True)
    return {
        "seconds": round(took_s, 3),
        "over_ideal": round(over, 3),
        "spread_s": [round(min(seconds), 3), round(max(seconds), 3)],
        "predicted_s": round(predicted_s, 3),
    }


def _slow(report: dict[str, Any]) -> list[str]:
    found = [
        f"{name} took {report[name]['over_ideal']:.2f} of the ideal time; at most {most}"
        for name, most in MOST_OVER.items()
        if name in report and report[name]["over_ideal"] > most
    ]
    times = [row["seconds"] for row in report.get("chain_by_n", [])]
    if times and max(times) > MOST_SPREAD_BY_N * min(times):
        found.append(f"chains of {BY_N} workers took {times} s, more than 15% apart")
    if report.get("loopback_mb_per_s", LEAST_LOOPBACK) < LEAST_LOOPBACK:
        found.append(
            f"a hop over loopback brought {report['loopback_mb_per_s']} MB/s; at least {LEAST_LOOPBACK:.0f}"
        )
    return found


if __name__ == "__main__":
    execute(main)
