"""Patience counts from the last progress: what takes long and moves ends no run, what stands still does.

Whole runs in virtual time on the production stages, all clocks scaled by 30: the stall timeout is 10
seconds, a learner step of 30 minutes takes 60, a restore of an hour 120, a first group of 20 minutes 40.
"""

import asyncio
import re
from typing import Any

import pytest

from antiphon.simulator.faults import Fault, FaultKind
from antiphon.simulator.processes import ProcessEntry
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.standins import training
from antiphon.simulator.virtual.loop import Process
from antiphon.simulator.world import World

STALL_S = 10.0


class Watched(World):
    """A world whose flow is not begun again after an error: the error is kept, with its time."""

    ended: tuple[float, str] | None = None

    def _ended(self, entry: ProcessEntry, process: Process, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if entry.name == "flow" and process.alive and error is not None and self.ended is None:
            self.ended = (self.loop.time(), str(error))
            self._over.set()
            process.kill()
            return
        super()._ended(entry, process, task)


def scenario(mode: str = "elastic", steps: int = 3, **more: Any) -> Scenario:
    run = {
        "run": {"steps": steps},
        "loop": {"mode": mode, "prompts_per_step": 3, "group_size": 2, "max_staleness": 1},
        "evaluation": {"prompts": 2, "interval": 0},
        "services": {"stall_timeout_s": STALL_S, "empty_fleet_timeout_s": 600.0},
        "learner": {"checkpoint_interval": 10},
    }
    return Scenario(run=run, **more)


def finished(world: Watched) -> bool:
    outcome = world.run()
    assert world.ended is None, world.ended
    assert not outcome.violations, outcome.violations
    return len(outcome.weights) == world.config.run.steps


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_steps_of_half_an_hour_end_no_run(mode: str) -> None:
    assert finished(Watched(scenario(mode, learner_step_s=(60.0, 60.0)), 1, []))


@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_a_learner_that_restores_for_an_hour_ends_no_run(mode: str) -> None:
    # Killed after its third step and without a checkpoint, it loads the weights and repeats three steps.
    world = Watched(
        scenario(mode, steps=4, learner_step_s=(30.0, 30.0)),
        1,
        [Fault(135.0, FaultKind.KILL, "learner", 1.0)],
    )
    assert finished(world)
    assert world.loop.time() > 135.0 + 120.0


def test_a_first_group_of_twenty_minutes_ends_no_run() -> None:
    # Two steps, one until a swap and one until the first token, take less than the patience of 15 s.
    slow = scenario(engine_step_s=(7.0, 7.0), worker_slowness=(1.0, 1.0))
    assert finished(Watched(slow, 1, []))


def test_a_fleet_that_is_away_for_ten_minutes_ends_no_run() -> None:
    faults = [Fault(4.0, FaultKind.KILL, name, 20.0) for name in ("worker-0", "worker-1", "worker-2")]
    assert finished(Watched(scenario(), 1, faults))


def test_a_learner_that_cannot_load_its_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "STEP_PARTS", 0)  # nothing of a step is ever done
    at_s, said = ended(Watched(scenario(learner_step_s=(60.0, 60.0)), 1, []))
    assert re.fullmatch(r"broadcast 0: no byte for 1\d s; the learner is restoring: loading weights", said), (
        said
    )
    assert at_s < 2 * STALL_S + 5.0  # its first answer may come a long poll after its start


def test_a_step_that_stands_still_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    train, begun = training.ArithmeticTrainer.train, []

    def hang(self: training.ArithmeticTrainer, step: int, payload: bytes) -> Any:
        trained = train(self, step, payload)
        if step == 1:
            self._loop.spend(1000.0)
            begun.append(self._loop.time())
        return trained

    monkeypatch.setattr(training.ArithmeticTrainer, "train", hang)
    at_s, said = ended(Watched(scenario(learner_step_s=(6.0, 6.0)), 1, []))
    assert re.fullmatch(r"step 1: no micro-batch for 1\d\.?\d* s; the learner is training step 1", said), said
    assert at_s < begun[0] + 6.0 + 2 * STALL_S


def test_engines_that_all_stand_still_are_named() -> None:
    world = Watched(scenario(), 1, [])
    world.shared.engine_step_s = lambda name: 0.3 if world.loop.time() < 5.0 else 1e5
    at_s, said = ended(world)
    words = (
        r"(collect|reward|evaluate) \d: no token, group or reward for 1\d\.?\d* s; it waits for .*worker-.*"
    )
    assert re.fullmatch(words, said), said
    assert at_s < 5.0 + 3 * STALL_S


def test_a_reward_service_that_is_gone_is_named() -> None:
    world = Watched(scenario(), 1, [Fault(5.0, FaultKind.KILL, "reward-0", 500.0)])
    _, said = ended(world)
    assert re.search(r"\w+ \d: no token, group or reward for 1.*(to reward|the evaluation of)", said), said


def test_workers_that_never_load_are_waited_for_like_an_empty_fleet() -> None:
    at_s, said = ended(Watched(scenario(engine_step_s=(5000.0, 5000.0)), 1, []))
    assert re.search(
        r"no worker or host for 6\d\d s; it waits for a worker to load its first version: none is act", said
    ), said
    assert at_s > 600.0


def ended(world: Watched) -> tuple[float, str]:
    """Return when and why a run ended before its last step."""
    world.run()
    assert world.ended is not None
    return world.ended
