"""Prepare: what a worker does between its registration and the start of its engine."""

from collections.abc import Awaitable, Callable

from antiphon.api.coordinator import WorkerWelcome
from antiphon.core.config import RunConfig

Prepare = Callable[[RunConfig, WorkerWelcome, Callable[[int], None]], Awaitable[RunConfig]]
"""Brings what the engine is built from to this machine, and returns the configuration that says where it is;
called with the run's, the welcome, and what takes the bytes that arrive."""


async def nothing_to_prepare(
    config: RunConfig, welcome: WorkerWelcome, arrived: Callable[[int], None]
) -> RunConfig:
    """Return the configuration as it is."""
    return config
