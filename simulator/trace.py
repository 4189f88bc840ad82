"""Trace: the journal of a simulated run as text, one event a line with its virtual second."""

from antiphon.services.coordinator.journal import StoredEvent
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.world import Outcome, World


class Tracer:
    """Simulates runs and remembers the journal of the last disturbed one."""

    def __init__(self) -> None:
        """Begin without a journal."""
        self._events: list[StoredEvent] = []

    def simulate(self, scenario: Scenario, seed: int) -> Outcome:
        """Simulate one run; see `world.simulate`."""
        world = World(scenario, seed)
        outcome = world.run()
        if world.faults or not self._events:
            self._events = world.site.journal.events
        return outcome

    def text(self) -> str:
        """Return the journal as lines of second, number, kind and fields."""
        return "".join(f"{row.at:10.3f} {row.seq:5d} {row.kind} {row.body}\n" for row in self._events)
