"""Folders of runs as a run log leaves them, without the engines that made them."""

from pathlib import Path
from typing import Any

from antiphon.api.sink import LogRecord
from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.loop.events import EvaluationFinished, StepCommitted
from antiphon.core.records import BatchRef
from antiphon.core.run_clock import RunTimes
from antiphon.lineage.run_log import RunLog, evaluation_line, step_line
from antiphon.runs.directory import write_outcome
from antiphon.system.clock import wall_clock


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
    log, made = RunLog(folder), list[LogRecord]()
    base = {"version": 0, "weights_digest": "0" * 64}
    made.append(LogRecord(1, 0.0, "snapshot.announced", 0, base))
    for step in range(steps):
        batch = BatchRef(step, f"{step:064x}", "f" * 64, 8, 2, 0, 0, 80, reward + step / 10, {0: 8}, 10.0)
        metrics = {"loss": 1.0 / (step + 1), "reward_mean": reward + step / 10, "train_s": 0.5}
        times = RunTimes(wall_s=step + 1.0, startup_s=2.0, break_s=0.0, breaks=0)
        commit = StepCommitted(step, step + 1, f"{step + 1:064x}", batch.digest, metrics, True)
        line = step_line(commit, batch, wall_clock(), times, {"worker-0": 8})
        made.append(LogRecord(2 + step, 0.0, "step.committed", step, line))
    for version in (0, steps):
        finished = EvaluationFinished(version, reward + version / 10, 8.0)
        line = evaluation_line(finished, 16, wall_clock())
        made.append(LogRecord(9999, 0.0, "evaluation.finished", version, line))
    log.write(made)
    if steps == config.run.steps:
        write_outcome(folder, {"run_id": run_id})
    return folder
