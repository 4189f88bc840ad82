"""Records of a run whose sinks change, stop or lose what they had between two starts."""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.cli.app import execute
from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.lineage.cursors import FOLDER, recorded_version
from antiphon.lineage.ledger import pins
from antiphon.lineage.ledger.sink import LedgerSink
from antiphon.lineage.log_fold import LogFold
from antiphon.lineage.records import Records
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.tracking.mlflow_client import client_at, tracking_uri
from antiphon.services.coordinator.journal.journal import journal_place
from antiphon.services.coordinator.journal.reading import JournalLog
from tests.support.artifacts import RecordedRun
from tests.support.tracked_runs import TrackedRunFixture


def recording(run: RecordedRun, **record: Any) -> None:
    """Change what the next start records."""
    run.config = run.config.model_copy(update={"record": run.config.record.model_copy(update=record)})


def complete(run: RecordedRun | TrackedRunFixture) -> None:
    report = run.records().close(60.0)
    assert report.complete, report


def test_a_ledger_that_was_removed_is_made_again(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.complete()
    before = sorted(path.name for path in (run.ledger / run.run_id / "batches").glob("*"))
    shutil.rmtree(run.ledger)
    complete(run)
    assert sorted(path.name for path in (run.ledger / run.run_id / "batches").glob("*")) == before


@pytest.mark.parametrize("lost", ["database", "server"])
def test_another_mlflow_gets_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    run = TrackedRunFixture(tmp_path, lost)
    run.tell_all()
    if (first := os.fork()) == 0:  # a process of its own: an engine keeps a removed file open
        os._exit(0 if run.records().close(60.0).complete else 1)
    assert os.waitpid(first, 0)[1] == 0
    if lost == "database":
        shutil.rmtree(tmp_path / "mlflow")
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    complete(run)
    history = client_at(tracking_uri(run.home)[0]).get_metric_history(run.mlflow_run_id(), "learning/loss")
    assert [point.step for point in history] == [0, 1, 2, 3]


@pytest.mark.parametrize("ledger_first", [True, False])
def test_a_sink_of_weights_that_was_left_off_holds_no_versions(tmp_path: Path, ledger_first: bool) -> None:
    run = RecordedRun(tmp_path)
    recording(run, dvc=ledger_first)
    run.tell(range(2))
    complete(run)
    recording(run, dvc=not ledger_first)
    run.tell(range(2, 4))
    complete(run)
    assert recorded_version(run.run_dir) == 4


def test_a_ledger_that_stopped_for_a_while_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it was stopped, versions left the payload store."""
    run = RecordedRun(tmp_path)
    run.tell(range(1))

    def stop(self: LedgerSink, records: Sequence[LogRecord]) -> None:
        raise ConfigError("another process is writing the ledger")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerSink, "write", stop)
        assert not run.records().close(60.0).complete
    assert recorded_version(run.run_dir) is None  # so the learner drops old versions
    run.tell(range(1, 4))
    gone = {payload.digest for version in range(3) for payload in run._made[version].payloads}
    for path in run._payloads.root.glob("*"):
        if path.name.partition(".")[0] in gone:
            path.unlink()
    complete(run)
    assert recorded_version(run.run_dir) == 4


def test_an_outage_while_the_ledger_opens_is_a_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path)
    run.tell(range(1))
    real, left = pins.Ledger.append, [2]

    def full(self: pins.Ledger, *given: Any) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise UnavailableError("no space left")
        return real(self, *given)

    monkeypatch.setattr(pins.Ledger, "append", full)
    complete(run)


def test_a_ledger_whose_end_did_not_come_in_time_can_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path)
    run.tell(range(1))

    def away(self: LedgerSink, records: Sequence[LogRecord]) -> None:
        raise UnavailableError("the disk of the ledger is full")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerSink, "write", away)
        first = run.records()
        first.flush(0.5)
        assert not first.close(0.1).complete
        for follower in first.followers:
            follower._thread.join(30.0)
    complete(run)


def test_weights_without_a_ledger_survive_an_outage(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    recording(run, dvc=False)
    run.tell(range(1))
    failures: Iterator[OSError] = iter([OSError(5, "Input/output error")])

    def weights(version: int) -> Path:
        if (error := next(failures, None)) is not None:
            raise error
        return run._payloads.checked(run._made[version])

    place = run.run_id, run.config, run.run_dir, run.home, run.store.root, run.log
    assert Records(*place, weights_file=weights, first_pause_s=0.01).close(60.0).complete
    assert (run.run_dir / "versions" / "v000000.safetensors").exists()


def test_a_store_that_is_away_for_a_moment_leaves_no_gap_in_the_run_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path)
    recording(run, dvc=False)
    run.tell(range(2))
    real, failures = ArtifactStore.get, iter([UnavailableError("Input/output error")])

    def get(self: ArtifactStore, digest: str) -> bytes:
        if (error := next(failures, None)) is not None:
            raise error
        return real(self, digest)

    monkeypatch.setattr(ArtifactStore, "get", get)
    complete(run)
    assert [line["timings"]["workers"] for line in read_steps(run.run_dir)] == [{"w0": 1}, {"w0": 1}]


class Mine:
    """A sink of one's own that keeps the lines of records, in memory."""

    name = "mine"
    lines: ClassVar[dict[tuple[str, int], Any]] = {}

    def __init__(self, run: SinkRun) -> None:
        self.run = run

    def open(self) -> None:
        """Nothing is needed."""

    def write(self, records: Sequence[LogRecord]) -> None:
        for record in records:
            self.lines[record.kind, record.number] = json.loads(json.dumps(record.line))

    def close(self, end: RunEnd) -> None:
        """Nothing is left to do."""


class Refuses(Mine):
    """Takes nothing."""

    name = "refuses"

    def write(self, records: Sequence[LogRecord]) -> None:
        raise ContractError("no")


class Ledger(Mine):
    """Of a name that is built in."""

    name = "ledger"


class Elsewhere(Mine):
    """Its cursor would lie elsewhere."""

    name = "../elsewhere"


@pytest.mark.parametrize("sinks", [("Mine", "Mine"), ("Ledger",), ("Elsewhere",)])
def test_two_sinks_may_not_share_a_cursor(tmp_path: Path, sinks: tuple[str, ...]) -> None:
    run = RecordedRun(tmp_path)
    recording(run, sinks=tuple(f"{__name__}:{name}" for name in sinks))
    before = {*threading.enumerate()}
    with pytest.raises(ConfigError, match="give it one of a-z, 0-9"):
        run.records()
    assert not any(thread.name.startswith("antiphon-") for thread in {*threading.enumerate()} - before)


def test_a_sink_that_refuses_is_named_while_the_run_goes_on(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.tell(range(2))
    recording(run, dvc=False, sinks=(f"{__name__}:Refuses",))
    records = run.records()
    assert records.flush(30.0).writers[-1].failed
    (said,) = records.standing()
    assert said.startswith(
        "refuses refused records, snapshot.announced 2: no; the next start hands them over"
    )
    records.close(10.0)


def test_all_sinks_say_what_the_run_log_of_an_older_version_says(old_run: Path) -> None:
    home = old_run.parent.parent
    config = load_config(old_run / "config.yaml")
    source = JournalLog(journal_place(config, old_run), old_run.name)
    steps, held = read_steps(old_run), read_evaluations(old_run)
    for sinks in ((), (f"{__name__}:Mine",)):  # the second is added by a later start
        record = config.record.model_copy(update={"mlflow": False, "dvc": False, "sinks": sinks})
        changed = config.model_copy(update={"record": record})
        Mine.lines.clear()
        assert Records(old_run.name, changed, old_run, home, home / "store", source).close(60.0).complete
    said = Mine.lines
    assert [said["step.committed", line["step"]] for line in steps] == steps
    assert [said["evaluation.finished", line["version"]] for line in held] == held
    assert (read_steps(old_run), read_evaluations(old_run)) == (steps, held)


def test_status_names_a_sink_that_takes_nothing_more(
    old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cursor = {"seq": 0, "at": 0.0, "fold": LogFold().state(), "stopped": "the experiment was deleted"}
    (old_run / FOLDER).mkdir()
    (old_run / FOLDER / "mlflow.json").write_text(json.dumps(cursor))
    assert execute(["status", old_run.name]) == 0
    assert "alarm records_late: mlflow: the experiment was deleted" in capsys.readouterr().out
