"""Process: what every long-running process of Antiphon does alike.

It dies with the process that started it, says when it is ready, ends in order when asked to,
and writes its log to standard error, from where its supervisor takes it.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from antiphon.core.errors import ConfigError
from antiphon.system.files import write_atomically

PARENT_VARIABLE = "ANTIPHON_PARENT_PID"
"""Names the process whose death ends this one; unset for services that people start."""

_PR_SET_PDEATHSIG = 1


def tie_to_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when the one named in ANTIPHON_PARENT_PID dies.

    The tie is to the parent's thread that started this process, so that thread must live as
    long as the parent. Killing is safe: whatever counts is in the journal before it is said.
    """
    named = os.environ.get(PARENT_VARIABLE, "")
    if not named:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if str(os.getppid()) != named:  # it died before the tie was made
        os.kill(os.getpid(), number)


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        # A cached logger would write to this very stream for ever, closed or not, and evade `capture_logs`.
        cache_logger_on_first_use=False,
    )


def _log_level(default: str) -> str:
    level = os.environ.get("ANTIPHON_LOG", default).lower()
    if level not in {"debug", "info", "warning", "error"}:
        raise ConfigError(f"ANTIPHON_LOG={level} is no log level; use debug, info, warning or error")
    return level


def write_ready_file(path: Path | None, port: int) -> None:
    """Say that the service can work: JSON {pid, port}, whole or not at all."""
    if path is None:
        return
    write_atomically(path, json.dumps({"pid": os.getpid(), "port": port}).encode())


def run_service(start: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service until it ends by itself or SIGTERM or SIGINT asks it to.

    Returns:
        The exit code: 0 when it ended by itself or on SIGTERM, 130 on SIGINT.
    """
    tie_to_parent()
    configure_logs()
    return asyncio.run(_until_signalled(start))


async def _until_signalled(start: Callable[[], Coroutine[Any, Any, None]]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(start())
    received: list[signal.Signals] = []

    def leave(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, number)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return 130 if received and received[0] == signal.SIGINT else 0
