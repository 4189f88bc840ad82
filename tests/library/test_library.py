"""The library: cheap to import, and usable where an event loop runs already, as in a notebook."""

import asyncio
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

import antiphon
from antiphon.core.errors import ConfigError
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
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
    with pytest.raises(KeyboardInterrupt):
        antiphon.run(tree, home=tmp_path / "home", say=interrupt)
    left = psutil.Process().children(recursive=True)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE and _is_ours(process)]


def _is_ours(process: psutil.Process) -> bool:
    try:
        return "antiphon" in str(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it has just ended
        return False
