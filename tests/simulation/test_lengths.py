"""Orders of leasing in virtual time: production's services and workers, only completion lengths are imposed.

What is random in a run does not depend on the order of leasing, so a run that leases as groups come is the
same whatever `loop.order` says, and ratios are those of the orders alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest

from antiphon.api.engine import EngineRequest
from antiphon.benchmarks.length_pipeline import (
    ALPHA_S,
    BETA_S,
    LEARNER_S,
    LENGTHS,
    RunShape,
    length_bias,
    seconds_per_step,
)
from antiphon.benchmarks.parts.imposed_worker import ImposedEngine, StepScoped, WorkerOrder, imposed_length
from antiphon.core.loop.events import BatchSealed, LeaseDuplicated, load_event
from antiphon.simulator import processes
from antiphon.simulator.processes import ProcessEntry
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.virtual.loop import Process
from antiphon.simulator.world import Witnessed, World

SHAPE = RunShape("arrival", max_staleness=1, counted=6, seed=1)
NO_LOSS = 0.98


@dataclass(frozen=True)
class Fleet:
    paces: tuple[float, ...] = (1.0, 1.0)
    """Factor of each worker's seconds per token."""
    equal: bool = False
    """All completions are of one length."""
    speculation: float = 0.0


@dataclass(frozen=True)
class Run:
    seconds: float
    order: str
    batches: tuple[tuple[str, ...], ...]
    bias: float
    duplicates: int


class StepScopedClient(StepScoped, Witnessed):
    """The benchmark's client in the simulated network."""


class LengthWorld(World):
    """A run without faults, with the benchmark's engine."""

    def __init__(self, shape: RunShape, fleet: Fleet) -> None:
        tree: dict[str, Any] = shape.config().model_dump()
        sections = (
            "run",
            "environment",
            "evaluation",
            "loop",
            "sampling",
            "rollout",
            "learner",
            "coordinator",
            "drafting",
        )
        tree["coordinator"]["speculation"] = fleet.speculation
        scenario = Scenario(
            run={name: tree[name] for name in sections},
            workers=len(fleet.paces),
            learner_step_s=(LEARNER_S, LEARNER_S),
            limit_s=100_000.0,
        )
        self._shape, self._fleet = shape, fleet
        self._engines: dict[str, ImposedEngine] = {}
        super().__init__(scenario, shape.seed, [])

    def _engine_step_s(self, name: str) -> float:
        engine = self._engines.get(name)
        load = engine.unfinished if engine else 0
        pace = self._fleet.paces[int(name.split("-")[1])]
        return pace * (ALPHA_S + BETA_S * load)

    def _routine(self, entry: ProcessEntry, process: Process) -> Any:
        if not entry.name.startswith("worker"):
            return super()._routine(entry, process)

        def engine() -> ImposedEngine:
            untimed = WorkerOrder("", 0.0, lengths=LENGTHS[self._shape.shuffled])
            made = self._engines[entry.name] = ImposedEngine(untimed)
            return made

        client = StepScopedClient if self._shape.step_scoped else Witnessed
        told = client(self.shared, self.witness, entry, entry.name)
        worker = processes.make_worker(self.shared, process, told, entry.name, entry.payloads, engine)
        entry.worker = worker
        return worker.run(lambda: None)


@contextmanager
def nobody_audits(equal: bool) -> Iterator[None]:
    """Imposed ends are no tokens of the simulated model, so audits would call every worker a liar."""

    def length(request: EngineRequest, lengths: str) -> int:
        return 60 if equal else imposed_length(request, lengths)

    with (
        patch.object(processes.AuditQueue, "choose", lambda *_: ()),
        patch("antiphon.benchmarks.parts.imposed_worker.imposed_length", length),
    ):
        yield


def run(shape: RunShape, fleet: Fleet = Fleet()) -> Run:
    world = LengthWorld(shape, fleet)
    with nobody_audits(fleet.equal):
        world.run()
    rows = list(world.shared.journal.written())
    events = [load_event(row.kind, row.body) for row in rows]
    assert sum(row.kind == "step.committed" for row in rows) == shape.steps
    return Run(
        seconds_per_step(shape, rows),
        world.shared.state_machines[-1].loop.planner.order.describe(),
        tuple(event.group_ids for event in events if isinstance(event, BatchSealed)),
        length_bias(rows),
        sum(isinstance(event, LeaseDuplicated) for event in events),
    )


def both_orders(shape: RunShape, fleet: Fleet = Fleet()) -> tuple[Run, Run]:
    return run(replace(shape, order="by_length"), fleet), run(shape, fleet)


@pytest.mark.long
def test_alternation_gains_where_workers_take_a_step_at_a_time_and_no_batch_changes() -> None:
    alternating, arrival = run(replace(SHAPE, order="by_length")), run(SHAPE)
    assert alternating.order.startswith("alternating (rank correlation of lengths 0.9")
    assert arrival.seconds / alternating.seconds > 1.1
    assert alternating.batches == arrival.batches and alternating.bias < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_production_workers_lose_nothing(max_staleness: int) -> None:
    by_length, arrival = both_orders(replace(SHAPE, max_staleness=max_staleness, step_scoped=False))
    assert arrival.seconds / by_length.seconds >= NO_LOSS
    assert by_length.batches == arrival.batches


@pytest.mark.long
@pytest.mark.parametrize("step_scoped", [False, True])
def test_with_shuffled_ranks_groups_are_leased_as_they_come(step_scoped: bool) -> None:
    by_length, arrival = both_orders(replace(SHAPE, shuffled=True, step_scoped=step_scoped))
    assert by_length.order.startswith("arrival (rank correlation of lengths")
    assert by_length.seconds == pytest.approx(arrival.seconds, rel=0.01)


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(Fleet(paces=(1.0,)), id="one-worker", marks=pytest.mark.long),
        pytest.param(Fleet(equal=True), id="equal-lengths"),
        pytest.param(Fleet(paces=(1.0, 10.0)), id="ten-times-slower", marks=pytest.mark.long),
    ],
)
def test_fleets_and_lengths_that_give_nothing_to_gain_lose_nothing(fleet: Fleet) -> None:
    shape = replace(SHAPE, counted=3, step_scoped=False)
    by_length, arrival = both_orders(shape, fleet)
    assert arrival.seconds / by_length.seconds >= NO_LOSS
    assert by_length.batches == arrival.batches
    if 10.0 in fleet.paces:
        assert arrival.seconds / by_length.seconds > 1.05
    if fleet.equal:
        assert by_length.order.startswith("arrival") and by_length.seconds == pytest.approx(
            arrival.seconds, rel=0.01
        )


@pytest.mark.long
def test_groups_move_off_a_worker_that_is_ten_times_slower() -> None:
    shape, paces = replace(SHAPE, counted=3, step_scoped=False), (1.0, 10.0)
    moved = run(shape, Fleet(paces, speculation=0.2))
    stayed = run(shape, Fleet(paces))
    assert moved.duplicates > 0 and stayed.duplicates == 0
    assert moved.batches == stayed.batches
    assert stayed.seconds / moved.seconds > 1.05  # few are in flight, so few wait for the slow worker
