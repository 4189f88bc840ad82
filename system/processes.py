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
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from antiphon.system.logs import configure_logs

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


def write_ready_file(path: Path | None, port: int) -> None:
    """Say that the service can work: JSON {pid, port}, whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"pid": os.getpid(), "port": port}), encoding="utf-8")
    temporary.replace(path)


class StopRequest:
    """Tells a service that it is asked to stop; the process's signals are handled nowhere else."""

    def __init__(self) -> None:
        self._told: list[Callable[[], None]] = []

    def tell(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the event loop each time the process is asked to stop."""
        self._told.append(callback)

    def ask(self) -> bool:
        """Ask the service to stop; False when it gave nothing to call yet."""
        for callback in self._told:
            callback()
        return bool(self._told)


def run_service(start: Callable[[StopRequest], Coroutine[Any, Any, None]]) -> int:
    """Run a service until it ends by itself or SIGTERM or SIGINT asks it to.

    Args:
        start: begins the service; one that does not use the `StopRequest` is cancelled instead.

    Returns:
        The exit code: 0 when it ended by itself or on SIGTERM, 130 on SIGINT.
    """
    tie_to_parent()
    configure_logs()
    return asyncio.run(_until_signalled(start))


async def _until_signalled(start: Callable[[StopRequest], Coroutine[Any, Any, None]]) -> int:
    loop = asyncio.get_running_loop()
    stop = StopRequest()
    task = asyncio.ensure_future(start(stop))
    received: list[signal.Signals] = []

    def leave(number: signal.Signals) -> None:
        received.append(number)
        if not stop.ask():
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, number)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return 130 if received and received[0] == signal.SIGINT else 0
