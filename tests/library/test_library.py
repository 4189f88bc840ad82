"""The library: cheap to import, and usable where an event loop runs already, as in a notebook."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

import antiphon
from antiphon import child_run
from antiphon.child_run import RecordedEvents
from antiphon.core.errors import ConfigError
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import heldout_group_id
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.models.codec import decoder
from antiphon.runs.directory import RunPlace
from antiphon.runs.samples import version_of
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal
from antiphon.system.processes import ChildProcess, tied_command
from tests.support.processes import command_of
from tests.support.recorded_folders import record_run

HEAVY = ("numpy", "pandas", "pydantic", "torch", "mlflow", "prefect", "grpc", "vllm")


def test_importing_it_imports_nothing_heavy() -> None:
    code = f"import sys, antiphon; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_it_names_its_version_and_its_types() -> None:
    assert antiphon.__version__ == version("antiphon")
    assert (Path(antiphon.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = antiphon.nothing


def test_metrics_and_evaluations_are_tables(tmp_path: Path) -> None:
    record_run(tmp_path, "small-a", 4, record__worker_usd_per_hour=3600.0)
    run = antiphon.load_run(home=tmp_path)
    assert (run.id, run.finished, run.config.run.steps) == ("small-a", True, 4)
    metrics, scores = run.metrics, run.evaluations
    assert list(metrics.index) == [0, 1, 2, 3]
    assert list(metrics["reward_mean"]) == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert list(metrics["tokens_trained"]) == [80, 160, 240, 320]
    assert metrics["wall_s"].is_monotonic_increasing and metrics["dollars"].iloc[-1] > 0
    assert list(scores.index) == [0, 4] and scores.loc[4, "tokens_trained"] == 320
    assert run.figures.reward_last == pytest.approx(0.9)


def test_a_run_without_a_step_has_empty_tables(tmp_path: Path) -> None:
    record_run(tmp_path, "small-a", 0)
    run = antiphon.load_run("small-a", home=tmp_path)
    assert len(run.metrics) == 0 and run.metrics.index.name == "step"


def test_a_batch_is_a_table_checked_against_its_digest(tmp_path: Path) -> None:
    import numpy as np

    row = BatchRow(
        np.array([1, 2], np.int32),
        np.array([-0.5, -1.0], np.float32),
        (VersionSpan(0, 0, 2),),
        FinishReason.STOP,
        group_id="g",
        prompt_key="train-0-0",
        sample_index=0,
        prompt_token_ids=np.array([3], np.int32),
        reward=1.0,
        advantage=0.5,
    )
    folder = record_run(tmp_path, "small-a", 1)
    digest = ArtifactStore(tmp_path / "store").put(encode_batch([row]))
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace("0" * 64, digest, 1))
    run = antiphon.load_run("small-a", home=tmp_path)
    table = run.batch(0)
    assert list(table["token_ids"][0]) == [1, 2] and list(table["reward"]) == [1.0]
    model = Path("examples/models/chain-sum").absolute()
    (folder / "config.yaml").write_text(f"model: {{path: {model}}}\n")
    texts, text = antiphon.load_run("small-a", home=tmp_path).batch(0, texts=True), decoder(str(model))
    assert list(texts["answer"]) == [text([1, 2])] and list(texts["prompt"]) == [text([3])]
    with pytest.raises(ConfigError, match="no step 7"):
        run.batch(7)


def test_an_unknown_run_and_an_impossible_configuration_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuchrun"):
        antiphon.load_run("nosuchrun", home=tmp_path)
    with pytest.raises(ConfigError, match=r"run\.steps"):
        antiphon.run({"run": {"steps": 0}}, home=tmp_path)
    with pytest.raises(ConfigError, match="overrides need the path"):
        antiphon.run({}, "run.steps=3", home=tmp_path)
    assert not list(tmp_path.iterdir())


def test_within_a_running_event_loop_a_refusal_is_the_runs_own_sentence(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tree = {"model": {"path": str(model)}, "record": {"dvc": False, "mlflow": False}}

    async def cell() -> None:
        antiphon.run(tree, home=tmp_path / "home", say=None)

    with pytest.raises(ConfigError, match=str(model)):
        asyncio.run(cell())


def test_an_interrupt_ends_the_run_and_is_raised_again(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    tree = {"record": {"dvc": False, "mlflow": False}, "model": {"path": "examples/models/chain-sum"}}
    before = {*psutil.Process().children(recursive=True)}  # what other tests share
    with pytest.raises(KeyboardInterrupt):
        antiphon.run(tree, home=tmp_path / "home", say=interrupt)
    left = {*psutil.Process().children(recursive=True)} - before
    assert not [process for process in left if "antiphon" in str(command_of(process))]


def test_an_argument_that_is_a_field_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'steps=3 is no argument of antiphon\.run; .*: "run\.steps=3"'):
        antiphon.run("examples/quickstart.yaml", steps=3, home=tmp_path)
    with pytest.raises(ConfigError, match=r'"SECTION\.no_such=1"'):
        antiphon.run("examples/quickstart.yaml", no_such=1, home=tmp_path)


def test_events_are_handed_on_once_each_and_one_may_stop_the_run(tmp_path: Path) -> None:
    folder = record_run(tmp_path, "small-a", 2, run__steps=4)
    heard: list[Mapping[str, Any]] = []

    def until_scored(event: Mapping[str, Any]) -> object:
        heard.append(event)
        return antiphon.STOP if event["kind"] == "evaluation" else None

    events = RecordedEvents(folder, until_scored)
    assert not events.hand_on() and not heard  # what was there before is none
    more = record_run(tmp_path / "other", "small-a", 3, run__steps=4)
    step = (more / "metrics.jsonl").read_text().splitlines(keepends=True)[2]
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(step[:20])  # a line is being written
        log.flush()
        assert not events.hand_on() and not heard
        log.write(step[20:])
    assert not events.hand_on()
    assert [(event["kind"], event["step"]) for event in heard] == [("step", 2)]
    assert heard[0]["reward_mean"] == pytest.approx(0.7)
    with (folder / "evaluations.jsonl").open("a") as log:
        log.write((more / "evaluations.jsonl").read_text().splitlines(keepends=True)[1])
    assert events.hand_on()
    assert (heard[1]["kind"], heard[1]["version"]) == ("evaluation", 3) and len(heard) == 2


def test_a_run_that_an_event_stops_is_returned_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record_run(tmp_path, "small-a", 1, run__steps=4)
    run_as = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for whatever a shell starts in the background
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
open(sys.argv[1], "a").write(open(sys.argv[1]).read())
threading.Event().wait()
"""

    class Child(ChildProcess):
        def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
            words = [sys.executable, "-c", run_as, str(folder / "metrics.jsonl")]
            super().__init__(tied_command(words), log, environment)

    monkeypatch.setattr(child_run, "ChildProcess", Child)
    monkeypatch.setattr(child_run, "choose_run", lambda *_: RunPlace("small-a", folder, True))
    run = antiphon.run({}, home=tmp_path, say=None, on_event=lambda event: antiphon.STOP)
    assert (run.id, run.finished) == ("small-a", False)


def test_versions_are_named_as_on_the_command_line(tmp_path: Path) -> None:
    folder = record_run(tmp_path, "small-a", 4)
    assert [version_of(folder, wanted) for wanted in (None, 3, "3", "v3", "best")] == [None, 3, 3, 3, 4]
    with pytest.raises(ConfigError, match="'newest' is no version; write v12, or best"):
        antiphon.load_run("small-a", home=tmp_path).samples("newest")


def test_held_out_rewards_by_prompt(tmp_path: Path) -> None:
    folder = record_run(tmp_path, "small-a", 4, evaluation__prompts=3)
    run = antiphon.load_run("small-a", home=tmp_path)

    async def write() -> None:
        journal = Journal(folder / JOURNAL_NAME, run.id)
        ids = [heldout_group_id(4, index) for index in (2, 0, 1)]
        rewards = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
        events = [e.GroupRewarded(*pair, "judge", 0.0) for pair in zip(ids, rewards, strict=True)]
        await journal.enqueue([*events, e.GroupRewarded(heldout_group_id(0, 0), (0.5,), "judge", 0.0)])
        await journal.close()

    asyncio.run(write())
    assert list(run.scores()["reward"]) == [1.0, 0.0, 0.5] and list(run.scores("v0").index) == [0]
    with pytest.raises(ConfigError, match="did not evaluate version 2"):
        run.scores(2)
