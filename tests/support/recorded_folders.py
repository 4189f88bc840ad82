"""Folders of runs as a run log leaves them, without the engines that made them."""

from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.run_clock import RunTimes
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.run_log import RunLog
from antiphon.runs.directory import write_outcome


def record_run(home: Path, run_id: str, steps: int, reward: float = 0.5, **changes: Any) -> Path:
    """Write a run of `steps` recorded steps, evaluated before and after; changes are section__field=value.

    Its reward rises from `reward` by a tenth a step.
    """
    tree: dict[str, dict[str, Any]] = {"run": {"name": "small", "steps": 4}, "record": {"dvc": False}}
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    config: RunConfig = build_config(tree)
    folder = home / "runs" / run_id
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    log = RunLog(folder)
    log.add_base("0" * 64)
    for step in range(steps):
        batch = BatchRef(step, f"{step:064x}", "f" * 64, 8, 2, 0, 0, 80, reward + step / 10, {0: 8}, 10.0)
        metrics = {"loss": 1.0 / (step + 1), "reward_mean": reward + step / 10, "train_s": 0.5}
        times = RunTimes(wall_s=step + 1.0, startup_s=2.0, break_s=0.0, breaks=0)
        commit = StepCommit(step, step + 1, f"{step + 1:064x}", batch.digest, metrics, True, times)
        log.add_step(commit, batch, {"worker-0": 8})
    for version in (0, steps):
        log.add_evaluation(EvaluationRecord(version, 16, 16, reward + version / 10, 8.0))
    if steps == config.run.steps:
        write_outcome(folder, {"run_id": run_id})
    return folder
