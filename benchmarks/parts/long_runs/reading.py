"""Reading: what a restart on a long journal takes, and what finishing and reporting such a run does."""

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from antiphon.core.config import load_config
from antiphon.core.reporting.run_view import RunView
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.report.page import build_report
from antiphon.runs.attach import read_events
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal
from antiphon.services.coordinator.prompts import PromptSource
from antiphon.services.coordinator.run_state_machine import RunStateMachine

REPORT_S = 1200.0
"""Longest that finishing may take before the benchmark gives up."""


def restart(folder: Path, run_id: str, prompts: PromptSource) -> dict[str, float]:
    """Open a journal as a coordinator does, print how long that took, and let go of it.

    A process of its own should do it: the libraries are loaded, and nothing else is.
    """
    config = load_config(folder / "config.yaml")

    async def start() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        begun = time.perf_counter()
        journal = Journal(folder / JOURNAL_NAME, run_id)
        store = open_store(folder / "store", config.record)
        machine = RunStateMachine(config, run_id, journal, store, prompts, loop.time)
        await machine.start()
        took_s, commits = time.perf_counter() - begun, len(machine.state.commits)
        await machine.close()
        return took_s, commits

    took_s, commits = asyncio.run(start())
    return {"restart_s": took_s, "commits": commits}


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


async def in_child(*arguments: str) -> dict[str, float]:
    """Run this program with other arguments and return the JSON object that it prints last."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "antiphon.benchmarks.coordinator",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ANTIPHON_LOG": "warning"},
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), REPORT_S)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {child.returncode}")
    found: dict[str, float] = json.loads(out.decode().splitlines()[-1])
    return found


async def with_peak(
    process: psutil.Process, work: Callable[[], Awaitable[dict[str, float]]]
) -> tuple[dict[str, float], float]:
    """Return what `work` returned and by how many MB the memory of a process grew meanwhile, at most."""
    before = peak = process.memory_info().rss
    doing = asyncio.ensure_future(work())
    while not doing.done():
        await asyncio.wait({doing}, timeout=0.05)
        peak = max(peak, process.memory_info().rss)
    return doing.result(), (peak - before) / 1e6
