"""Run log: one line per step and per evaluation, in the run's own directory.

`base.json` holds what version 0 was, `metrics.jsonl` what each step was made of and what it
measured; apart from its `timings` object a line depends on the configuration alone (in fixed
mode). It is written before any record leaves the process, so that whatever MLflow or the
ledger missed can be brought in from it later.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from antiphon.core.errors import UnavailableError
from antiphon.core.metrics import DRAFTING_METRICS, ORDER_METRICS, find_metric
from antiphon.core.records import BatchRef, StepCommit
from antiphon.core.status import EvaluationRecord
from antiphon.system.files import write_atomically

Plan = Mapping[str, float] | None
"""What the capacity model expected when a step was recorded, beside what was measured, by name."""
STEPS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
BASE_FILE = "base.json"


class RunLog:
    """The files of one run; appended by one process at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._steps_path = run_dir / STEPS_FILE
        self._evaluations_path = run_dir / EVALUATIONS_FILE
        self._base_path = run_dir / BASE_FILE
        self.base = read_base(run_dir)
        _drop_torn_line(self._steps_path)
        _drop_torn_line(self._evaluations_path)
        self.steps = {int(line["step"]): line for line in read_steps(run_dir)}
        self.evaluations = {int(line["version"]): line for line in read_evaluations(run_dir)}

    @property
    def wall_s(self) -> float:
        """Return the seconds of work up to the last step (`core.run_clock`); 0 before the first."""
        return max((line["timings"].get("wall_s", 0.0) for line in self.steps.values()), default=0.0)

    def add_base(self, weights_digest: str) -> dict[str, Any]:
        """Note once what version 0 was and return it.

        Raises:
            UnavailableError: when the file cannot be written.
        """
        if self.base is None:
            self.base = {"version": 0, "weights_digest": weights_digest}
            write_atomically(self._base_path, json.dumps(self.base, sort_keys=True).encode() + b"\n")
        return self.base

    def add_step(
        self,
        commit: StepCommit,
        batch: BatchRef | None,
        workers: Mapping[str, int] | None = None,
        plan: Plan = None,
    ) -> dict[str, Any]:
        """Append a step once and return its line.

        Args:
            commit: the step, as the coordinator has it.
            batch: what it trained on; None when that is not known any more.
            workers: worker id -> trajectories of the batch that it sampled.
            plan: what the capacity model expected at that time, and what was measured.

        Raises:
            UnavailableError: when the file cannot be written.
        """
        if commit.step not in self.steps:
            line = step_line(commit, batch)
            line["timings"] |= {"workers": dict(workers or {}), **(plan or {})}
            self.steps[commit.step] = line
            _append(self._steps_path, line)
        return self.steps[commit.step]

    def add_evaluation(self, evaluation: EvaluationRecord) -> dict[str, Any]:
        """Append an evaluation once and return its line.

        Raises:
            UnavailableError: when the file cannot be written.
        """
        if evaluation.version not in self.evaluations:
            line = {
                "version": evaluation.version,
                "prompts": evaluation.prompts,
                "reward_mean": evaluation.reward_mean,
                "completion_tokens_mean": evaluation.completion_tokens_mean,
                **kept_samples(evaluation),
                "timings": {"at": now()},
            }
            self.evaluations[evaluation.version] = line
            _append(self._evaluations_path, line)
        return self.evaluations[evaluation.version]


def step_line(commit: StepCommit, batch: BatchRef | None) -> dict[str, Any]:
    """Describe a step in plain values, clocks apart from the rest."""
    timings = {name: value for name, value in commit.metrics.items() if is_timing(name)}
    line: dict[str, Any] = {
        "step": commit.step,
        "version": commit.version,
        "weights_digest": commit.weights_digest,
        "batch_digest": commit.batch_digest,
        "published": commit.published,
        "metrics": {name: value for name, value in commit.metrics.items() if name not in timings},
        "batch": None,
        "timings": {**timings, "at": now()},
    }
    if commit.times is not None:
        line["timings"] |= dataclasses.asdict(commit.times)
    if batch is not None:
        line["batch"] = {
            "trajectories": batch.trajectories,
            "groups": batch.groups,
            "trajectories_failed": batch.trajectories_failed,
            "groups_filtered": batch.groups_filtered,
            "groups_dropped_stale": batch.groups_dropped_stale,
            "tokens": batch.tokens,
            "tokens_dropped_stale": batch.tokens_dropped_stale,
            "reward_mean": batch.reward_mean,
            "completion_tokens_mean": batch.completion_tokens_mean,
            "staleness_histogram": {str(k): v for k, v in sorted(batch.staleness_histogram.items())},
        }
        line["batch"] |= replaced_batches(batch) | kept_samples(batch)
        line["timings"]["timings_digest"] = batch.timings_digest
        if batch.drafting is not None:
            line["timings"]["drafting"] = dataclasses.asdict(batch.drafting)
    return line


def replaced_batches(batch: BatchRef) -> dict[str, Any]:
    """Return what records say of the voided batches that a batch replaced; empty where there was none."""
    found = [dataclasses.asdict(voided) for voided in batch.replaced]
    return {"replaced": found} if found else {}


def kept_samples(record: BatchRef | EvaluationRecord) -> dict[str, str]:
    """Return what records say of the file of kept completions; empty where there is none."""
    return {"samples_digest": record.samples_digest} if record.samples_digest else {}


def is_timing(name: str) -> bool:
    """Tell whether a metric measures the clock or the machine rather than the learning.

    What drafting and the order of leasing did are of these: they depend on which completion finished first.

    >>> is_timing("train_s"), is_timing("loss"), is_timing("drafting_gain"), is_timing("order_by_length")
    (True, False, True, True)
    """
    known = find_metric(name.rpartition("/")[2])
    if known in DRAFTING_METRICS or known in ORDER_METRICS:
        return True
    unit = known.unit if known else ""
    return unit in {"s", "MiB", "bytes"} or unit.endswith("/s") or name.endswith(("_s", "_mib", "_gib"))


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, by step; a torn last line is left out."""
    return sorted(_read(run_dir / STEPS_FILE), key=lambda line: int(line["step"]))


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `evaluations.jsonl`, by version; a torn last line is left out."""
    return sorted(_read(run_dir / EVALUATIONS_FILE), key=lambda line: int(line["version"]))


def read_base(run_dir: Path) -> dict[str, Any] | None:
    """Return what version 0 of a run was, or None where it was not noted."""
    path = run_dir / BASE_FILE
    if not path.is_file():
        return None
    base: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return base


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _append(path: Path, line: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
    except OSError as error:
        raise UnavailableError(
            f"cannot write {path}: {error.strerror or error}; free space or check the folder"
        ) from error


def _drop_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    body = path.read_bytes()
    whole = body.rfind(b"\n") + 1
    if whole != len(body):
        os.truncate(path, whole)


def now() -> float:
    """Return Unix seconds, as the lines carry them."""
    return datetime.now(UTC).timestamp()
