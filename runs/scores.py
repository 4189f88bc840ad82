"""Scores: the held-out scores of a run's versions; a running one measures one that is missing."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.core.status import EvaluationRecord
from antiphon.runs.attach import attached
from antiphon.runs.finding import find_run
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.system.files import write_atomically

POLL_S = 5.0
"""Longest single wait for an evaluation."""


def held_out_scores(
    home: Path, run: str | None, version: int | None, timeout_s: float
) -> tuple[str, list[EvaluationRecord]]:
    """Return a run's id and its held-out scores, oldest version first.

    Without an id it is the newest run; without a version, every one that was evaluated.

    Raises:
        ConfigError: when there is no such run, or `version` was not evaluated and cannot be.
        UnavailableError: when the evaluation took longer than `timeout_s`.
    """
    directory = find_run(home, run)

    async def ask() -> list[EvaluationRecord]:
        async with attached(directory) as (coordinator, running):
            if version is None:
                return (await coordinator.status()).scores
            return [await _score(coordinator, directory.name, version, running, timeout_s)]

    return directory.name, asyncio.run(ask())


def write_scores(run_id: str, scores: Sequence[EvaluationRecord], path: Path) -> None:
    """Write scores as JSON, whole or not at all."""
    content = {"run": run_id, "evaluations": plain_scores(scores)}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def plain_scores(scores: Sequence[EvaluationRecord]) -> list[dict[str, Any]]:
    """Return scores as plain values; pass@1 is in 0..1."""
    return [{"version": e.version, "pass_at_1": e.reward_mean, "prompts": e.prompts} for e in scores]


async def _score(
    coordinator: CoordinatorClient, run_id: str, version: int, running: bool, timeout_s: float
) -> EvaluationRecord:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    status = await coordinator.status()
    measured = ", ".join(str(e) for e in sorted(status.scored)) or "none"
    if version not in status.scored:
        if not running or status.finished:
            raise ConfigError(
                f"--version {version} of {run_id} was not evaluated and the run is not running; "
                f"evaluated versions: {measured}"
            )
        if status.newest_version is None or version > status.newest_version:
            raise ConfigError(
                f"--version {version} of {run_id} is not published; newest is {status.newest_version}"
            )
        await coordinator.open_evaluation(version)
    while True:
        left_s = max(0.0, deadline - loop.time())
        reply = await coordinator.await_stage("evaluate", version, min(POLL_S, left_s))
        if reply.evaluation is not None:
            return reply.evaluation
        if reply.halted or left_s <= POLL_S:
            reason = reply.halted or f"it took longer than {timeout_s:g} s; it waits for {reply.waiting_for}"
            raise UnavailableError(f"version {version} was not evaluated: {reason}")
