"""Further sinks: TensorBoard, Weights & Biases and one's own follow a run as the built-in ones do."""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from antiphon.api.sink import LogRecord, SinkRun
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.lineage.records import KNOWN, make_sink
from antiphon.lineage.run_log import read_steps
from antiphon.lineage.tracking.charts import STEP_METRIC
from tests.support.artifacts import RecordedRun

STEPS = [0, 1, 2, 3]


class Points:
    """What both libraries were given, beyond the life of one writer."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int, float]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.opened: list[dict[str, Any]] = []
        self.closed = 0
        self.full_at = -1
        """The point for which there is no space, once."""


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Points:
    """Stand in for the interfaces that the sinks write to."""
    found = Points()

    class Writer:
        def __init__(self, folder: str) -> None:
            found.opened.append({"folder": folder})

        def add_scalar(self, name: str, value: float, *, step: int, wall_time: float) -> None:
            if len(found.scalars) == found.full_at:
                found.full_at = -1
                raise OSError(28, "No space left on device")
            found.scalars.append((name, value, step, wall_time))

        def flush(self) -> None:
            """Do nothing."""

        def close(self) -> None:
            found.closed += 1

    class EventAccumulator:
        def __init__(self, folder: str, size_guidance: dict[str, int]) -> None:
            assert size_guidance == {"tensors": 0}  # all points, not a sample of them

        def Reload(self) -> "EventAccumulator":
            return self

        def Tags(self) -> dict[str, list[str]]:
            return {"tensors": sorted({name for name, *_ in found.scalars})}

        def Tensors(self, tag: str) -> list[SimpleNamespace]:
            return [SimpleNamespace(step=step) for name, _, step, _ in found.scalars if name == tag]

    class Run:
        def define_metric(self, name: str, **how: Any) -> None:
            """Do nothing."""

        def log(self, values: dict[str, Any], step: int) -> None:
            found.logged.append((step, values))

        def finish(self) -> None:
            found.closed += 1

    def init(**how: Any) -> Run:
        found.opened.append(how)
        return Run()

    parts = ["tensorboard", "backend", "event_processing", "event_accumulator"]
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    accumulator: Any = sys.modules[".".join(parts)]
    accumulator.EventAccumulator = EventAccumulator
    for name, member, value in (("tensorboard.summary", "Writer", Writer), ("wandb", "init", init)):
        module = ModuleType(name)
        setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def recorded(folder: Path, sink: str) -> RecordedRun:
    """Record a run with a sink, by two processes the second of which is given all of it again."""
    run = RecordedRun(folder, record={"mlflow": False, "dvc": False, "sinks": [sink]})
    run.complete()
    (run.run_dir / "followers" / f"{sink.rpartition(':')[2].lower()}.json").unlink()
    assert run.records().close(60.0).complete
    return run


def test_tensorboard_draws_what_mlflow_draws_once(tmp_path: Path, points: Points) -> None:
    run = recorded(tmp_path, "tensorboard")
    losses = [(step, value) for name, value, step, _ in points.scalars if name == "learning/loss"]
    assert losses == [(step, 0.5) for step in STEPS]
    held = [(step, value) for name, value, step, _ in points.scalars if name == "heldout/pass_at_1"]
    assert held == [(0, 0.25), (4, 0.75)]
    assert {call["folder"] for call in points.opened} == {str(run.run_dir / "tensorboard")}
    assert points.closed == 2 and all(wall_time > 0 for *_, wall_time in points.scalars)


def test_wandb_gets_each_record_at_its_own_place_in_the_log(tmp_path: Path, points: Points) -> None:
    run = recorded(tmp_path, "wandb")
    assert {(call["id"], call["resume"], call["mode"]) for call in points.opened} == {
        (run.run_id, "allow", "offline")
    }
    steps = dict(points.logged)  # a place that is logged twice is one row there
    assert [values["step"] for values in steps.values() if "learning/loss" in values] == STEPS
    assert [values["step"] for values in steps.values() if "heldout/pass_at_1" in values] == [0, 4]
    assert len(points.logged) == 2 * len(steps) and points.closed == 2


def test_neither_a_full_disk_nor_a_kill_within_a_step_doubles_or_loses_a_point(
    tmp_path: Path, points: Points
) -> None:
    metrics = {"learning/entropy": 1.0, STEP_METRIC: 2.0, "learning/zeal": 3.0}
    records = [LogRecord(1 + step, 1.0, "step.committed", step, {}, metrics) for step in range(2)]
    for wanted in (records[:1], records):
        sink = make_sink("tensorboard", SinkRun("r-1", tmp_path, RunConfig()))
        sink.open()
        points.full_at = len(points.scalars) + 1
        with pytest.raises(OSError, match="No space left"):
            sink.write(wanted)
        sink.write(wanted)  # as the follower does
        drawn = [(name, step) for name, _, step, _ in points.scalars]
        assert sorted(drawn) == sorted((name, record.number) for record in wanted for name in metrics)
        del points.scalars[-1]  # what a killed process had not drawn


def test_an_outage_of_wandb_is_tried_again_and_a_stranger_is_not(
    tmp_path: Path, points: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, wanted in (("CommError", UnavailableError), ("UsageError", ConfigError)):

        def fail(error: str = name, **how: Any) -> None:
            raise type(error, (Exception,), {})("no")

        monkeypatch.setattr(sys.modules["wandb"], "init", fail)
        with pytest.raises(wanted, match="Weights & Biases"):
            make_sink("wandb", SinkRun("r-1", tmp_path, RunConfig())).open()


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_library_that_is_absent_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"not installed; `pip install antiphon\[{name}\]`"):
        make_sink(name, SinkRun("r-1", tmp_path, RunConfig()))


class Lines:
    """A user's own sink: a line a record, in a file of the run."""

    name = "lines"

    def __init__(self, run: SinkRun) -> None:
        self.path = run.run_dir / "lines.txt"

    def open(self) -> None:
        self.path.touch()

    def write(self, records: Any) -> None:
        known = self.path.read_text().splitlines()
        new = [f"{record.kind} {record.number}" for record in records]
        self.path.write_text("".join(f"{line}\n" for line in [*known, *(n for n in new if n not in known)]))

    def close(self, end: Any) -> None:
        """Nothing is left to do."""


class Plans(Lines):
    """Keeps what the capacity model expected of each step."""

    name = "plans"

    def write(self, records: Any) -> None:
        plans = [str(record.line["timings"].get("plan_step_s")) for record in records if record.metrics]
        self.path.write_text(self.path.read_text() + "".join(f"{plan}\n" for plan in plans))


class NoSink:
    """Made like a sink, but it is none."""

    name = "none"

    def __init__(self, run: SinkRun) -> None:
        self.run = run


def test_a_sink_of_ones_own_is_named_in_the_configuration(tmp_path: Path) -> None:
    run = recorded(tmp_path, f"{__name__}:Lines")
    lines = (run.run_dir / "lines.txt").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 5 + 4 + 2
    assert [line for line in lines if "step" in line] == [f"step.committed {step}" for step in STEPS]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.at.all:Sink", "cannot be used"),
        (f"{__name__}:Absent", "cannot be used"),
        (f"{__name__}:NoSink", "has no open, write, close; see antiphon.api.sink.Sink"),
    ],
)
def test_what_is_no_sink_is_refused_before_anything_starts(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_sink(name, SinkRun("r-1", tmp_path, RunConfig()))


def test_what_an_older_version_wrote_into_the_run_log_is_taken_as_it_is(tmp_path: Path) -> None:
    """It asked the coordinator for the plan, which older journals do not have."""
    run = RecordedRun(tmp_path, record={"mlflow": False, "dvc": False, "sinks": [f"{__name__}:Plans"]})
    run.tell(range(2))
    assert run.records().close(60.0).complete
    path = run.run_dir / "metrics.jsonl"
    before = path.read_text().replace('"timings": {', '"timings": {"plan_step_s": 9.0, ')
    path.write_text(before)
    shutil.rmtree(run.run_dir / "followers")
    (run.run_dir / "lines.txt").unlink()
    run.tell(range(2, 3))
    assert run.records().close(60.0).complete
    steps = [plan for plan in (run.run_dir / "lines.txt").read_text().splitlines() if plan != "None"]
    assert steps == ["9.0", "9.0"]
    assert path.read_text().startswith(before) and len(read_steps(run.run_dir)) == 3
