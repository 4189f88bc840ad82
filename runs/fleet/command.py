"""Command: an engine's own command as a subprocess, with a deadline and its own words where it fails."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile

from antiphon.core.errors import ConfigError, UnavailableError

SHOWN_LINES = 3
"""Last lines of an engine's error output that are quoted."""


async def run_command(
    words: Sequence[str], limit_s: float, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> str:
    """Return what a command prints.

    Args:
        words: the command and its arguments; nothing secret, since others on this machine see them.
        limit_s: seconds until it is killed.
        stdin: what it reads.
        environment: its variables in place of this process's own.

    Raises:
        ConfigError: when it is not installed.
        UnavailableError: when it fails, with the last lines it said, or takes longer.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is not installed here; install it, or give the class another launcher")
    # Files, not pipes: an engine may leave a server behind, which would hold a pipe open.
    with TemporaryFile() as read, TemporaryFile() as out, TemporaryFile() as said:
        read.write(stdin)
        read.seek(0)
        # Not by the event loop, which would fork this process with all that gRPC has in it.
        process = subprocess.Popen(
            words, stdin=read, stdout=out, stderr=said, env=environment, start_new_session=True
        )
        try:
            await asyncio.wait_for(_end_of(process.pid), limit_s)
        except TimeoutError:
            raise UnavailableError(f"{words[0]} did not end within {limit_s:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said.seek(0)
        out.seek(0)
        if process.returncode:
            lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
            last = "; ".join(lines[-SHOWN_LINES:]) or f"status {process.returncode}"
            raise UnavailableError(f"{words[0]}: {last}")
        return out.read().decode(errors="replace")


async def _end_of(pid: int) -> None:
    """Wait until a child has ended; it is not waited for in the system's sense."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
