"""TensorBoard sink: a run's curves as TensorBoard draws them, in `tensorboard/` of the run's folder.

Switched on by `record.sinks: [tensorboard]`; needs the extra `antiphon[tensorboard]`.
"""

from collections.abc import Sequence
from typing import Any

from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.core.errors import ConfigError
from antiphon.lineage.tracking.charts import HELDOUT, STEP_METRIC


class TensorBoardSink:
    """One run in TensorBoard."""

    name = "tensorboard"

    def __init__(self, run: SinkRun) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise ConfigError(
                "record.sinks names tensorboard, which is not installed; `pip install antiphon[tensorboard]`"
            ) from error
        self._make, self._folder = Writer, run.run_dir / "tensorboard"
        self._writer: Any = None
        self._known: set[tuple[str, int]] = set()
        """Records that are drawn whole, by kind and number."""
        self._points: set[tuple[str, int]] = set()
        """Points of records that may be drawn in part, by name and number."""

    @property
    def place(self) -> str:
        """The folder; empty while nothing is drawn in it."""
        return self._folder.name if self._known or self._points else ""

    def open(self) -> None:
        """Begin a file of events beside those of earlier processes, whose points are not drawn again."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        earlier = EventAccumulator(str(self._folder), size_guidance={"tensors": 0}).Reload()
        kinds = {STEP_METRIC: "step.committed", HELDOUT: "evaluation.finished"}
        for name in earlier.Tags().get("tensors", ()):
            steps = sorted({point.step for point in earlier.Tensors(name)})
            if name in kinds:
                self._known |= {(kinds[name], step) for step in steps[:-1]}
            self._points |= {(name, step) for step in steps[-2:]}  # one may be in part
        self._writer = self._make(str(self._folder))

    def write(self, records: Sequence[LogRecord]) -> None:
        """Add the points of records."""
        for record in records:
            if (record.kind, record.number) not in self._known:
                for name, value in record.metrics.items():
                    if (name, record.number) not in self._points:
                        self._writer.add_scalar(name, value, step=record.number, wall_time=record.at)
                        self._points.add((name, record.number))
        self._writer.flush()
        self._points -= {(name, record.number) for record in records for name in record.metrics}
        self._known |= {(record.kind, record.number) for record in records}

    def close(self, end: RunEnd) -> None:
        """Close the file."""
        self._writer.close()
