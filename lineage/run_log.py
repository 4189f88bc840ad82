"""Run log: one line per step and per evaluation, in the run's own directory.

`base.json` holds what version 0 was, `metrics.jsonl` what each step was made of and what it
measured; apart from its `timings` object a line depends on the configuration alone (in fixed
mode). It follows the journal closer than any other sink, so that nobody reads of a step elsewhere first.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from antiphon.api.sink import LogRecord, RunEnd
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.core.loop.events import EvaluationFinished, StepCommitted
from antiphon.core.messages import UNIT_RANGE
from antiphon.core.metrics import DRAFTING_METRICS, ORDER_METRICS, find_metric
from antiphon.core.records import BatchRef
from antiphon.core.run_clock import RunTimes
from antiphon.system.files import write_atomically

STEPS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
BASE_FILE = "base.json"


class RunLog:
    """The files of one run, a sink; appended by one process at a time."""

    name = "log"

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files = {
            "step.committed": _Lines(run_dir / STEPS_FILE, "step"),
            "evaluation.finished": _Lines(run_dir / EVALUATIONS_FILE, "version"),
        }
        with suppress(IntegrityError):  # `open` says it, to the follower
            self.open()

    @property
    def place(self) -> str:
        """The files that have lines: one that is gone is written again."""
        return ", ".join(lines.path.name for lines in self._files.values() if lines.places)

    def open(self) -> None:
        """Look where the lines are.

        Raises:
            IntegrityError: for one that cannot be read.
        """
        for lines in self._files.values():
            lines.load()

    def write(self, records: Sequence[LogRecord]) -> None:
        """Append the lines that are not there yet; they are on the disk then.

        Raises:
            UnavailableError: when a file cannot be written.
            IntegrityError: when a line says that a step led to other weights.
        """
        base = self._run_dir / BASE_FILE
        for record in records:
            if record.kind == "snapshot.announced" and record.number == 0 and not base.exists():
                write_atomically(base, json.dumps(record.line, sort_keys=True).encode() + b"\n")
            known = self.line(record.kind, record.number) if record.kind == "step.committed" else None
            if known is not None and known["weights_digest"] != record.line["weights_digest"]:
                raise IntegrityError(
                    f"{self._run_dir / STEPS_FILE} has other weights of step {record.number} than the "
                    "journal: was that restored from a copy? remove the file to have it written again"
                )
        for kind, lines in self._files.items():
            lines.append({record.number: record.line for record in records if record.kind == kind})

    def close(self, end: RunEnd) -> None:
        """Do nothing: every line is on the disk."""

    def line(self, kind: str, number: int) -> dict[str, Any] | None:
        """Return the line of a record, by its kind and number, or None; from any thread."""
        return self._files[kind].line(number)


class _Lines:
    """One file and where its lines are, by their number."""

    def __init__(self, path: Path, number: str) -> None:
        """Begin without any; `number` is the field with a line's number."""
        self.path, self._number = path, number
        self.places: dict[int, int] = {}
        """Number -> first byte."""
        self._bytes = 0
        """Length of the lines that were written whole."""

    def load(self) -> None:
        """Look which lines are there, once.

        Raises:
            IntegrityError: for one that cannot be read.
        """
        if self.places:
            return
        places, end = dict[int, int](), 0
        for line, size in _read(self.path):
            places[int(line[self._number])] = end
            end += size
        self.places, self._bytes = places, end

    def line(self, number: int) -> dict[str, Any] | None:
        """Return a line, or None; from any thread."""
        place = self.places.get(number)
        if place is None:
            return None
        with self.path.open("rb") as file:
            file.seek(place)
            line: dict[str, Any] = json.loads(file.readline())
            return line

    def append(self, lines: Mapping[int, Mapping[str, Any]]) -> None:
        """Append the lines that are not there yet, by number; what an earlier attempt tore is removed.

        Raises:
            UnavailableError: when the file cannot be written.
        """
        new = {
            number: json.dumps(line, sort_keys=True).encode() + b"\n"
            for number, line in lines.items()
            if number not in self.places
        }
        if not new:
            return
        try:
            with self.path.open("ab") as file:
                if file.tell() > self._bytes:
                    file.truncate(self._bytes)
                file.write(b"".join(new.values()))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UnavailableError(
                f"cannot write {self.path}: {error.strerror or error}; free space or check the folder"
            ) from error
        for number, body in new.items():
            self.places[number] = self._bytes
            self._bytes += len(body)


def evaluation_line(finished: EvaluationFinished, prompts: int, at: float) -> dict[str, Any]:
    """Describe an evaluation of `prompts` held-out prompts in plain values; it ended at `at` Unix seconds."""
    return {
        "version": finished.version,
        "prompts": prompts,
        "reward_mean": finished.reward_mean,
        "completion_tokens_mean": finished.completion_tokens_mean,
        **({"samples": finished.samples, "best_of_k": finished.best_of_k} if finished.samples > 1 else {}),
        **({"reward_range": list(finished.reward_range)} if finished.reward_range != UNIT_RANGE else {}),
        **kept_samples(finished),
        "timings": {"at": at},
    }


def step_line(
    commit: StepCommitted,
    batch: BatchRef | None,
    at: float,
    times: RunTimes | None,
    workers: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Describe a step in plain values, clocks apart from the rest.

    Args:
        commit: the step, as the journal has it.
        batch: what it trained on; None when that is not known.
        at: Unix seconds of the commit.
        times: of the run, up to the commit; None when they are not known.
        workers: worker id -> trajectories of the batch that it sampled.
    """
    timings = {name: value for name, value in commit.metrics.items() if is_timing(name)}
    line: dict[str, Any] = {
        "step": commit.step,
        "version": commit.version,
        "weights_digest": commit.weights_digest,
        "batch_digest": commit.batch_digest,
        "published": commit.published,
        "metrics": {name: value for name, value in commit.metrics.items() if name not in timings},
        "batch": None,
        "timings": {**timings, "at": at, "workers": dict(workers or {}), **(commit.plan or {})},
    }
    if commit.exactness:
        line["exactness"] = commit.exactness
    if times is not None:
        line["timings"] |= dataclasses.asdict(times)
    if batch is not None:
        line["batch"] = {
            **{name: getattr(batch, name) for name in _OF_BATCH},
            "staleness_histogram": {str(k): v for k, v in sorted(batch.staleness_histogram.items())},
            **({"replaced": list(map(dataclasses.asdict, batch.replaced))} if batch.replaced else {}),
            **kept_samples(batch),
            **({"reward_parts": batch.reward_parts} if batch.reward_parts else {}),
        }
        line["timings"]["timings_digest"] = batch.timings_digest
        if batch.drafting is not None:
            line["timings"]["drafting"] = dataclasses.asdict(batch.drafting)
    return line


_OF_BATCH = (
    *("trajectories", "groups", "trajectories_failed", "groups_filtered", "groups_dropped_stale"),
    *("tokens", "tokens_dropped_stale", "reward_mean", "completion_tokens_mean"),
)


def kept_samples(record: BatchRef | EvaluationFinished) -> dict[str, str]:
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
    """Return the lines of `metrics.jsonl`, by step; a torn last line is left out.

    Raises:
        IntegrityError: for a line that cannot be read.
    """
    return sorted((line for line, _ in _read(run_dir / STEPS_FILE)), key=lambda line: int(line["step"]))


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `evaluations.jsonl`, by version; a torn last line is left out.

    Raises:
        IntegrityError: for a line that cannot be read.
    """
    held = (line for line, _ in _read(run_dir / EVALUATIONS_FILE))
    return sorted(held, key=lambda line: int(line["version"]))


def read_base(run_dir: Path) -> dict[str, Any] | None:
    """Return what version 0 of a run was, or None where it was not noted."""
    path = run_dir / BASE_FILE
    if not path.is_file():
        return None
    base: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return base


def _read(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole line, and its bytes."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, body in enumerate(file, start=1):
            if not body.endswith(b"\n"):
                return
            try:
                yield dict(json.loads(body)), len(body)
            except (ValueError, TypeError) as error:
                raise IntegrityError(
                    f"line {number} of {path} cannot be read: {error}; restore the file from a copy, or "
                    "remove it to have it written again from the journal"
                ) from error
