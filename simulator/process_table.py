"""Process table: the processes of a simulated run by the names that last."""

from dataclasses import dataclass, field

from antiphon.services.rollout.worker import RolloutWorker
from antiphon.simulator.virtual.chunks import MemoryPayloads
from antiphon.simulator.virtual.loop import Process

RESTART_S = 1.0
"""Pause of the supervisor before it starts a process again that ended by itself."""


@dataclass(slots=True)
class ProcessEntry:
    """A process by name: the one that runs now, and what its successor must know."""

    name: str
    process: Process | None = None
    starts: int = 0
    worker: RolloutWorker | None = None
    payloads: MemoryPayloads = field(default_factory=MemoryPayloads)
    alias: str = ""
    held: int | None = None
    away_s: float = RESTART_S
    """Pause after it ended by itself; longer once after a retirement."""
