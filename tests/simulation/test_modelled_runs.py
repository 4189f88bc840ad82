"""Modelled runs: they decide as runs that send messages, and a journal gives what is calibrated."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.benchmarks.parts.run_figures import measured_figures, predicted_figures
from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.errors import ConfigError, InfeasibleError
from antiphon.core.loop import events as e
from antiphon.core.loop.events import load_event
from antiphon.simulator.campaign import mute_logs
from antiphon.simulator.modelled.calibration import (
    Calibration,
    SeenGroup,
    TimedEvent,
    calibrate,
    load_calibration,
    save_calibration,
)
from antiphon.simulator.modelled.run import ModelledRun, Recorded, calibrate_machine
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.virtual.disk import RUN_ID, FileDisk, JournalDisk
from antiphon.simulator.world import World


def scenario(max_staleness: int, workers: int, steps: int = 20, **loop: Any) -> Scenario:
    return Scenario(
        run={
            "run": {"steps": steps},
            "environment": {"train_size": 24, "heldout_size": 2},
            "evaluation": {"prompts": 1, "interval": 0},
            "loop": {"max_staleness": max_staleness, "prompts_per_step": 6, "filter": "none", **loop},
            "sampling": {"max_tokens": 24},
            "rollout": {"concurrent_groups": 2},
            "drafting": {"enabled": False},
            "coordinator": {"speculation": 0.0},
        },
        workers=workers,
        engine_step_s=(0.5, 0.5),
        worker_slowness=(1.0, 1.0),
        learner_step_s=(8.0, 8.0),
        limit_s=20_000.0,
    )


def by_message(
    of: Scenario, journal: JournalDisk | None = None, seed: int = 0
) -> tuple[RunConfig, list[TimedEvent]]:
    mute_logs()
    world = World(of, seed, [], journal)
    assert not world.run().violations
    rows = world.shared.journal.written()
    return world.config, [(row.at, load_event(row.kind, row.body)) for row in rows]


def held_versions(events: list[TimedEvent]) -> dict[str, int]:
    granted = [event for _, event in events if isinstance(event, e.LeaseGranted)]
    return {event.group_id: event.held_version for event in granted if event.group_id.startswith("g")}


def batches(events: list[TimedEvent]) -> list[tuple[int, tuple[str, ...]]]:
    return [(event.step, event.group_ids) for _, event in events if isinstance(event, e.BatchSealed)]


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(*by_message(scenario(1, 2)))


@pytest.mark.parametrize(("max_staleness", "workers"), [(0, 2), (1, 2), (2, 3)])
def test_a_modelled_run_decides_as_one_that_sends_messages(
    calibration: Calibration, max_staleness: int, workers: int
) -> None:
    config, events = by_message(scenario(max_staleness, workers))
    run = ModelledRun(config, calibration, workers, keep=True)
    predicted, measured = predicted_figures(run.run()), measured_figures(config, events)
    assert run.events is not None
    assert batches(run.events) == batches(events)
    # A lease that falls into the moment of a broadcast may go either way.
    ours, theirs = held_versions(run.events), held_versions(events)
    assert ours.keys() == theirs.keys()
    assert sum(ours[group] == theirs[group] for group in ours) >= 0.95 * len(ours)
    assert predicted.staleness_distance(measured) <= 0.05
    # When messages arrive differs with the seed, and with it a run's pace by some hundredths.
    others = [measured_figures(*by_message(scenario(max_staleness, workers), seed=seed)) for seed in (1, 2)]
    pace = fmean(figures.seconds_per_step for figures in (measured, *others))
    assert predicted.seconds_per_step == pytest.approx(pace, rel=0.1)


def test_a_learner_whose_steps_take_the_same_time_is_calibrated_so(calibration: Calibration) -> None:
    assert calibration.learner_fixed_share == pytest.approx(1.0, abs=0.05)


def test_what_is_planned_while_it_runs_is_the_same_too(calibration: Calibration) -> None:
    config, events = by_message(scenario(3, 3, run_ahead="measured"))
    run = ModelledRun(config, calibration, 3, keep=True)
    predicted, measured = predicted_figures(run.run()), measured_figures(config, events)
    assert run.events is not None and batches(run.events) == batches(events)
    means = [sum(age * share for age, share in found.staleness.items()) for found in (predicted, measured)]
    assert abs(means[0] - means[1]) < 0.5


def modelled_config(max_staleness: int, interval: int, filter_: str) -> RunConfig:
    loop = {"max_staleness": max_staleness, "publish_interval": interval, "prompts_per_step": 4}
    return build_config(
        {
            "run": {"steps": 12},
            "environment": {"train_size": 20, "heldout_size": 1},
            "evaluation": {"prompts": 1, "interval": 0},
            "loop": {**loop, "group_size": 2, "filter": filter_},
        }
    )


GROUPS = tuple(
    SeenGroup(prompt=n, tokens=(10 + 7 * n, 5 + n), reward_s=1.0, varied=n % 3 > 0) for n in range(20)
)
PACE = Calibration(
    alpha_s=0.05,
    beta_s=0.01,
    concurrent_groups=2,
    learner_s=6.0,
    step_tokens=500.0,
    broadcast_s=2.0,
    replaced_s=30.0,
    worker_usd_per_hour=1.0,
    learner_usd_per_hour=10.0,
    groups=GROUPS,
)


@settings(max_examples=25)
@given(
    bound=st.integers(0, 4),
    interval=st.integers(1, 3),
    workers=st.integers(1, 40),
    losses=st.sampled_from([0.0, 20.0, 120.0]),
    filter_=st.sampled_from(["none", "drop", "refill"]),
    cores=st.sampled_from([None, 2.0]),
    between_s=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 9),
)
def test_the_bound_holds_and_seconds_balance(
    bound: int,
    interval: int,
    workers: int,
    losses: float,
    filter_: str,
    cores: float | None,
    between_s: float,
    seed: int,
) -> None:
    config = modelled_config(max(bound, interval - 1), interval, filter_)
    found = {"losses_per_hour": losses, "shared_cores": cores, "between_s": between_s}
    known = PACE.model_copy(update=found)
    run = ModelledRun(config, known, workers, seed, keep=True)
    done = run.run()
    assert len(done.commits_s) == config.run.steps
    assert not done.staleness or max(done.staleness) <= config.loop.max_staleness
    joined = {f"worker-{number:04d}": 0.0 for number in range(workers)}
    there_s, now = 0.0, (run.events or [])[-1][0]
    for at, event in run.events or []:
        if isinstance(event, e.WorkerRegistered):
            joined[event.worker_id] = at
        elif isinstance(event, e.WorkerLost):
            there_s += at - joined.pop(event.worker_id)
    there_s += sum(now - at for at in joined.values())
    assert done.account.total_s == pytest.approx(there_s, abs=1e-6 + 1e-9 * there_s)
    assert ModelledRun(config, known, workers, seed).run().digest == done.digest


def test_two_runs_say_what_no_lease_shows() -> None:
    """How long a place is empty between two groups, and how many cores workers and learner have."""
    known = PACE.model_copy(update={"shared_cores": 1.5, "between_s": 3.0})
    recorded = []
    for workers, bound in ((1, 0), (3, 1)):
        config = modelled_config(bound, 1, "none")
        run = ModelledRun(config, known, workers, keep=True)
        run.run()
        recorded.append(Recorded(config, run.events or [], workers))
    found = calibrate_machine(*recorded)
    assert found.shared_cores == pytest.approx(1.5, rel=0.15)
    assert found.between_s == pytest.approx(3.0, rel=0.3)
    with pytest.raises(InfeasibleError, match="two steps at least"):
        calibrate_machine(recorded[0], Recorded(config, recorded[1].events[:3], 3))
    other = modelled_config(2, 1, "none")
    assert predicted_figures(ModelledRun(other, found, 2).run()).seconds_per_step == pytest.approx(
        predicted_figures(ModelledRun(other, known, 2).run()).seconds_per_step, rel=0.05
    )


def test_a_calibration_is_a_file(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    save_calibration(calibration, path)
    assert load_calibration(path) == calibration
    path.write_text(path.read_text().replace("learner_s:", "learner_seconds:"))
    with pytest.raises(ConfigError, match="learner_seconds"):
        load_calibration(path)


def test_what_cannot_be_modelled_is_said() -> None:
    fixed = build_config({"loop": {"mode": "fixed"}})
    with pytest.raises(ConfigError, match=r"loop\.mode=elastic"):
        ModelledRun(fixed, PACE, 1)
    with pytest.raises(ConfigError, match=r"loop\.group_size"):
        ModelledRun(build_config({"loop": {"group_size": 4}}), PACE, 1)
    with pytest.raises(InfeasibleError, match="trained on no batch"):
        calibrate(modelled_config(1, 1, "none"), [(0.0, e.RunOpened("run", {}, 0.0))])


def test_the_command_predicts_from_a_recorded_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    directory = tmp_path / "runs" / RUN_ID
    directory.mkdir(parents=True)
    disk = FileDisk(directory / "journal.db")
    config, _ = by_message(scenario(1, 2, 8), disk)
    disk.close()
    (directory / "config.yaml").write_text(dump_config(config))
    kept = tmp_path / "kept.yaml"
    words = ["simulate", "--from-run", RUN_ID, "--workers", "3", "--keep", str(kept)]
    assert execute([*words, "loop.max_staleness=2"]) == 0
    said = capsys.readouterr().out
    assert "a step" in said and "staleness        0:" in said and load_calibration(kept).source == RUN_ID
    kept_words = ["simulate", str(directory / "config.yaml"), "--workers", "3", "--calibration", str(kept)]
    assert execute([*kept_words, "loop.max_staleness=2"]) == 0
    assert capsys.readouterr().out == said  # the run itself is not needed any more
    assert execute([*words, "--crowded-run", RUN_ID]) == 0
    assert load_calibration(kept).shared_cores and load_calibration(kept).source == f"{RUN_ID} {RUN_ID}"
    for wrong, sentence in (
        (["simulate", "--crowded-run", RUN_ID], "--from-run"),
        (["simulate", "examples/none.yaml", "loop.max_staleness=2"], "--from-run"),
        ([*kept_words, "--from-run", RUN_ID], "leave out --from-run"),
        (["simulate", "--calibration", str(kept)], "name its configuration"),
    ):
        assert execute(wrong) != 0
        assert sentence in capsys.readouterr().err
