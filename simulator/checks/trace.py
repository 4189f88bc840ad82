"""Trace: the journal of a simulated run as text, one event a line with its virtual second."""

from pathlib import Path

from antiphon.services.coordinator.journal.journal import StoredEvent
from antiphon.simulator.outcome import Outcome
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.virtual.disk import JournalDisk
from antiphon.simulator.virtual.file_disk import FileDisk
from antiphon.simulator.world import World


class Tracer:
    """Simulates runs and remembers the journal of the last disturbed one."""

    def __init__(self, folder: Path | None = None) -> None:
        """Keep the journal of each run as a file in `folder`; None keeps it in memory."""
        self._folder = folder
        self._runs = 0
        self._events: list[StoredEvent] = []

    def simulate(self, scenario: Scenario, seed: int) -> Outcome:
        """Simulate one run; see `world.simulate`."""
        disk = self._disk(seed)
        world = World(scenario, seed, journal=disk)
        try:
            outcome = world.run()
            if world.faults or not self._events:
                self._events = disk.written()
        finally:
            disk.close()
        return outcome

    def _disk(self, seed: int) -> JournalDisk:
        if self._folder is None:
            return JournalDisk()
        self._runs += 1
        return FileDisk(self._folder / f"journal-{self._runs:05d}-seed-{seed}.db")

    def text(self) -> str:
        """Return the journal as lines of second, number, kind and fields."""
        return "".join(f"{row.at:10.3f} {row.seq:5d} {row.kind} {row.body}\n" for row in self._events)
