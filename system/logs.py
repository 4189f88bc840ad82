"""Logs: structured lines on standard error, from where a supervisor takes them."""

import os
import sys

import structlog

from antiphon.core.errors import ConfigError


def configure_logs(level: str = "info") -> None:
    """Send structured logs to standard error, one line per event.

    Args:
        level: least severe level shown, unless ANTIPHON_LOG names another.

    Raises:
        ConfigError: when ANTIPHON_LOG names none.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_log_level(level)),
        # Looked up for each line: while a live picture is drawn, it takes what goes to standard error.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        # A cached logger would write to this very stream for ever, closed or not, and evade `capture_logs`.
        cache_logger_on_first_use=False,
    )


def _log_level(default: str) -> str:
    level = os.environ.get("ANTIPHON_LOG", default).lower()
    if level not in {"debug", "info", "warning", "error"}:
        raise ConfigError(f"ANTIPHON_LOG={level} is no log level; use debug, info, warning or error")
    return level
