"""Weights & Biases sink: a run's curves there, offline unless WANDB_MODE says otherwise.

Switched on by `record.sinks: [wandb]`; needs the extra `antiphon[wandb]`. `wandb sync` sends what was
written offline.
"""

import os
from collections.abc import Sequence
from typing import Any

from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.core.errors import ConfigError


class WandbSink:
    """One run in Weights & Biases; a run that goes on continues the same one."""

    name = "wandb"

    def __init__(self, run: SinkRun) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "record.sinks names wandb, which is not installed; `pip install antiphon[wandb]`"
            ) from error
        self._init, self._of = wandb.init, run
        self._run: Any = None

    def open(self) -> None:
        """Open the run by our id."""
        of = self._of
        mode = os.environ.get("WANDB_MODE", "offline")
        settings = of.config.model_dump(mode="json")
        known: dict[str, Any] = {"project": of.config.run.name, "id": of.run_id, "name": of.run_id}
        self._run = self._init(**known, dir=str(of.run_dir), config=settings, resume="allow", mode=mode)
        self._run.define_metric("step", hidden=True)  # scores come later than steps: no order of their own
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[LogRecord]) -> None:
        """Log the metrics of records, each at its own step."""
        for record in records:
            if record.metrics:
                # Its own step is the record's number in the log: what is logged twice is there once.
                self._run.log({**record.metrics, "step": record.number}, step=record.seq)

    def close(self, end: RunEnd) -> None:
        """End the run there; it goes on with the next start."""
        self._run.finish()
