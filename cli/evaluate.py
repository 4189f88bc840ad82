"""evaluate: the held-out score of a run's policy versions; a living run measures on request."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from antiphon.core.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from antiphon.services.coordinator.api import EvaluationRecord
    from antiphon.services.coordinator.client import CoordinatorClient

POLL_S = 1.0
"""Pause between two looks at an evaluation that is going on."""


def evaluate(
    run: str | None = None,
    /,
    *,
    version: Annotated[int | None, Parameter(name="--version")] = None,
    results: Annotated[Path | None, Parameter(name="--results")] = None,
    timeout_s: Annotated[float, Parameter(name="--timeout-s")] = 600.0,
) -> int:
    """Print held-out scores; one that a living run has not measured yet is measured by its workers.

    Args:
        run: the run's id; by default the newest.
        version: the policy version; by default every one that was evaluated.
        results: JSON file to write the scores to.
        timeout_s: longest wait for an evaluation, seconds.
    """
    from antiphon.cli.arguments import home_directory
    from antiphon.cli.attach import attached
    from antiphon.flows.run_directory import find_run, store_directory

    home = home_directory()
    directory = find_run(home, run)

    async def ask() -> "list[EvaluationRecord]":
        async with attached(directory, store_directory(home)) as (coordinator, living):
            if version is None:
                status = await coordinator.status()
                return sorted((e for e in status.evaluations if e.complete), key=lambda e: e.version)
            return [await _score(coordinator, directory.name, version, living, timeout_s)]

    scores = asyncio.run(ask())
    plain = [{"version": e.version, "pass_at_1": e.reward_mean, "prompts": e.prompts} for e in scores]
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        temporary = results.with_name(results.name + ".tmp")
        content = {"run": directory.name, "evaluations": plain}
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(results)
    for score in scores:
        print(
            f"version {score.version}: held-out pass@1 {score.reward_mean:.4f} over {score.prompts} prompts"
        )
    if not scores:
        print("nothing was evaluated yet")
    return 0


async def _score(
    coordinator: "CoordinatorClient", run_id: str, version: int, living: bool, timeout_s: float
) -> "EvaluationRecord":
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        status = await coordinator.status()
        found = next((e for e in status.evaluations if e.version == version and e.complete), None)
        if found is not None:
            return found
        measured = ", ".join(str(e.version) for e in status.evaluations if e.complete) or "none"
        if not living or status.finished:
            raise ConfigError(
                f"--version {version} of {run_id} was not evaluated and the run is not going on; "
                f"evaluated versions: {measured}"
            )
        if status.newest_version is None or version > status.newest_version:
            raise ConfigError(
                f"--version {version} of {run_id} is not published; newest is {status.newest_version}"
            )
        if loop.time() > deadline:
            raise UnavailableError(
                f"version {version} was not evaluated within {timeout_s:g} s: {status.waiting or 'no reason'}"
            )
        await coordinator.open_evaluation(version)
        await asyncio.sleep(POLL_S)
