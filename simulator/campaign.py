"""Campaign: many seeds, one after another; a seed that finds something says how to see it again.

A run of fixed mode must end with the batches and weights of its undisturbed twin, bit for bit; the
twin of each configuration is simulated once and remembered.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from antiphon.services.coordinator.journal.journal import StoredEvent
from antiphon.simulator.faults import FaultMix
from antiphon.simulator.report import Outcome
from antiphon.simulator.scenario import Scenario, drawn_scenario
from antiphon.simulator.virtual.disk import FileDisk, JournalDisk
from antiphon.simulator.world import World

_DECISIVE = ("run", "loop", "evaluation", "environment", "sampling")
"""Sections that the batches and weights of fixed mode depend on."""


def mute_logs() -> None:
    """Drop the logs of the simulated processes: thousands of them log too much to read."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))


class Campaign:
    """Simulates seeds of one scenario, or of the scenarios that seeds stand for."""

    def __init__(self, scenario: Scenario | None = None, folder: Path | None = None) -> None:
        """Simulate `scenario` with every seed; None: each seed draws its own.

        The journal of each run is a file in `folder`; None keeps it in memory.
        """
        self._scenario, self._folder = scenario, folder
        self._runs = 0
        self._twins: dict[str, Outcome] = {}
        self._events: list[StoredEvent] = []

    def seed(self, seed: int) -> Outcome:
        scenario = self._scenario or drawn_scenario(seed)
        outcome = self._run(scenario, seed)
        if scenario.run_config().loop.mode != "fixed":
            return outcome
        twin = self._twin(scenario)
        found = list(outcome.violations)
        for what, ours, theirs in (
            ("batches", outcome.batches, twin.batches),
            ("weights", outcome.weights, twin.weights),
        ):
            if ours != theirs:
                step = next(
                    (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1
                )
                where = f"from step {step} on" if step >= 0 else f"({len(ours)} steps, not {len(theirs)})"
                found.append(f"at the end: the {what} differ from those of the undisturbed run {where}")
        return dataclasses.replace(outcome, violations=tuple(found))

    def seeds(self, seeds: Iterable[int]) -> Iterator[Outcome]:
        for seed in seeds:
            yield self.seed(seed)

    def _twin(self, scenario: Scenario) -> Outcome:
        config = scenario.run_config()
        key = "\n".join(getattr(config, section).model_dump_json() for section in _DECISIVE)
        key = f"{key}\n{scenario.reward_rarity}\n{scenario.failure_rarity}\n{scenario.skips}"
        key = f"{key} {scenario.turns} {scenario.hosts}"
        if key not in self._twins:
            calm = scenario.model_copy(update={"faults": FaultMix(), "hostile": False})
            self._twins[key] = self._run(calm, 0)
        return self._twins[key]

    def _run(self, scenario: Scenario, seed: int) -> Outcome:
        self._runs += 1
        disk = JournalDisk()
        if self._folder is not None:
            disk = FileDisk(self._folder / f"journal-{self._runs:05d}-seed-{seed}.db")
        world = World(scenario, seed, journal=disk)
        try:
            outcome = world.run()
            if world.faults or not self._events:
                self._events = disk.written()
        finally:
            disk.close()
        return outcome

    def text(self) -> str:
        """Return the journal of the last disturbed run as lines of second, number, kind and fields."""
        return "".join(f"{row.at:10.3f} {row.seq:5d} {row.kind} {row.body}\n" for row in self._events)
