"""A worker whose engine gives no log-probabilities: our own, without what it says of them.

    python -m antiphon.benchmarks.parts.mute_worker HOME

It serves the first run of a home, from the moment its coordinator is there, and needs `rollout.workers=0` and
`rollout.logprobs=learner` there. Worker and sampling are the product's.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.api.engine import EngineAbilities, EngineOutput, EngineProgress, EngineRequest
from antiphon.core.config import RunConfig
from antiphon.net.security.local_run import local_credentials
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.services.rollout.process import build_engine, serve_worker
from antiphon.system.logs import configure_logs
from antiphon.system.processes import POLL_S, tie_to_parent

NAME = "mute-0"
BEGIN_S = 120.0


class MuteEngine:
    """An engine that samples as `engine` does and gives zeros for log-probabilities."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def abilities(self) -> EngineAbilities:
        """All but the log-probabilities."""
        return replace(self._engine.abilities, logprobs=False)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Pass on."""
        self._engine.load_weights(version, tensors, weights_digest)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Pass on."""
        self._engine.add(requests)

    def step(self) -> list[EngineOutput]:
        """Advance, and say nothing of log-probabilities."""
        return [replace(one, logprobs=np.zeros_like(one.logprobs)) for one in self._engine.step()]

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        """Say what was sampled, and nothing of log-probabilities."""
        found = self._engine.progress(since)
        return [replace(one, logprobs=np.zeros_like(one.logprobs)) for one in found]


def make_mute(config: RunConfig) -> Any:
    """Build the run's engine and shut its mouth."""
    return MuteEngine(build_engine(config))  # type: ignore[arg-type]  # rollout.engine is vllm


async def serve(home: Path) -> None:
    """Wait for the run of a home, and sample for it until it ends."""
    deadline = time.monotonic() + BEGIN_S
    while not (found := list((home / "runs").glob("*/services/coordinator.json"))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no run began in {home} within {BEGIN_S:g} s")
        await asyncio.sleep(POLL_S)
    run_dir = found[0].parents[1]
    work_dir = run_dir / "workers" / NAME
    work_dir.mkdir(parents=True, exist_ok=True)
    port = json.loads(found[0].read_text())["port"]
    await serve_worker(
        f"127.0.0.1:{port}",
        NAME,
        run_dir.name,
        work_dir,
        lambda: None,
        make_engine=make_mute,
        credentials=local_credentials(run_dir),
    )


if __name__ == "__main__":
    tie_to_parent()
    configure_logs("info")
    asyncio.run(serve(Path(sys.argv[1])))
