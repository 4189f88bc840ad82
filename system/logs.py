"""Logs: structured lines on standard error, from where a supervisor takes them.

A line that finds no place, as on a full disk, is dropped: what a program does never depends on its log.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import structlog

from antiphon.core.errors import ConfigError
from antiphon.core.reporting.plain_text import plain

_OF_LINES = frozenset({"exception", "stack"})
"""Fields that have several lines; a value of others with a line end could pass for a line of its own."""


class LineWriter:
    """Writes lines to a stream, or to what is standard error at that moment; never raises."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        with suppress(OSError, ValueError):  # no space, a reader that is gone, or a stream that is closed
            print(line, file=self._stream or sys.stderr, flush=True)

    debug = info = warning = error = critical = msg


def configure_logs(level: str = "info", stream: TextIO | None = None) -> None:
    """Send structured logs to standard error, one line per event.

    Args:
        level: least severe level shown, unless ANTIPHON_LOG names another.
        stream: where lines go; None: what is standard error when a line is written.

    Raises:
        ConfigError: when ANTIPHON_LOG names none.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _in_plain_text,
            structlog.dev.ConsoleRenderer(colors=(stream or sys.stderr).isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_log_level(level)),
        logger_factory=lambda *_: LineWriter(stream),
        # A cached logger would write to this very stream for ever, closed or not, and evade `capture_logs`.
        cache_logger_on_first_use=False,
    )


@contextmanager
def without_native_output() -> Iterator[None]:
    """Drop what libraries in C print to this process's standard output meanwhile."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)


def _in_plain_text(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = plain(value, keep="\n\t" if name in _OF_LINES else "")
    return event


def _log_level(default: str) -> str:
    level = os.environ.get("ANTIPHON_LOG", default).lower()
    if level not in {"debug", "info", "warning", "error"}:
        raise ConfigError(f"ANTIPHON_LOG={level} is no log level; use debug, info, warning or error")
    return level
