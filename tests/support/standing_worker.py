"""A worker that serves one run after another, so that vLLM, which takes most of a start, is loaded once.

    python -m antiphon.system.collecting tests.support.standing_worker

Each line of its input names a run: {"coordinator": HOST:PORT, "run": its id, "run_dir": its folder}. What it
serves then ends. Worker and engine are the product's; an engine is built anew only where a run wants another
one. The log is where a run's own worker would write it.
"""

import asyncio
import contextlib
import gc
import json
import os
import sys
import traceback
from pathlib import Path

from antiphon.core.config import RunConfig
from antiphon.models.codec import resolve_model_path
from antiphon.net.security.local_run import local_credentials
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.services.rollout.process import check_engine, engine_settings, serve_worker
from antiphon.system.logs import configure_logs

NAME = "worker-0"


class LastingEngine(VllmEngine):
    """An engine that outlives the worker that used it."""

    def close(self) -> None:
        self.abort(list(self._internal_ids))

    def begin_again(self) -> None:
        """Hold nothing of the run before."""
        self.version = self.weights_digest = self._tensors = None

    def end(self) -> None:
        super().close()


class Engines:
    """Builds the engine that a run wants, or returns the one that is there."""

    def __init__(self) -> None:
        self._held: LastingEngine | None = None

    def __call__(self, config: RunConfig) -> LastingEngine:
        settings = engine_settings(config, resolve_model_path(config.model.path))
        if self._held is not None and self._held.settings == settings:
            self._held.begin_again()
            return self._held
        if self._held is not None:
            self._held.end()
            self._held = None
            gc.collect()
        engine = LastingEngine(settings)
        check_engine(engine, config)
        self._held = engine
        return engine


async def serve(engines: Engines, coordinator: str, run: str, run_dir: str) -> None:
    folder = Path(run_dir)
    log = os.open(folder / "logs" / f"{NAME}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    work_dir = folder / "workers" / NAME
    work_dir.mkdir(parents=True)
    try:
        await serve_worker(
            coordinator,
            NAME,
            run,
            work_dir,
            lambda: None,
            make_engine=engines,
            credentials=local_credentials(folder),
        )
    except Exception:  # noqa: BLE001 - the next run is served all the same
        traceback.print_exc()


async def serve_in_turn() -> None:
    engines, orders = Engines(), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    serving: asyncio.Task[None] | None = None
    while line := await orders.readline():
        if serving is not None:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        serving = asyncio.create_task(serve(engines, **json.loads(line)))
    if serving is not None:
        serving.cancel()


if __name__ == "__main__":
    configure_logs()
    asyncio.run(serve_in_turn())
