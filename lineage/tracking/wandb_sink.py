"""Weights & Biases sink: a run's curves there, offline unless WANDB_MODE says otherwise.

Switched on by `record.sinks: [wandb]`; needs the extra `antiphon[wandb]`. `wandb sync` sends what was
written offline.
"""

import os
from collections.abc import Sequence
from typing import Any

from antiphon.api.sink import LogRecord, RunEnd, SinkRun
from antiphon.core.errors import ConfigError, UnavailableError

_PERMANENT = frozenset({"AuthenticationError", "UsageError"})
"""Names of its errors that another attempt would only repeat."""


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
        """Open the run by our id.

        Raises:
            ConfigError: when the user is not known there.
            UnavailableError: when it does not answer.
        """
        of = self._of
        mode = os.environ.get("WANDB_MODE", "offline")
        settings = of.config.model_dump(mode="json")
        known: dict[str, Any] = {"project": of.config.run.name, "id": of.run_id, "name": of.run_id}
        try:
            self._run = self._init(**known, dir=str(of.run_dir), config=settings, resume="allow", mode=mode)
        except Exception as error:  # its errors have no base of their own in all versions
            if type(error).__name__ in _PERMANENT:
                raise ConfigError(f"Weights & Biases refused the run: {error}") from error
            raise UnavailableError(
                f"Weights & Biases cannot open the run: {error}; it is tried again"
            ) from error
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
