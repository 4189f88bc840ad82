"""Command: an engine's own command as a subprocess, with a deadline and its own words where it fails."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence

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
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    )
    try:
        out, said = await asyncio.wait_for(process.communicate(stdin), limit_s)
    except TimeoutError:
        raise UnavailableError(f"{words[0]} did not end within {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        words_of = "; ".join(lines[-SHOWN_LINES:]) or f"status {process.returncode}"
        raise UnavailableError(f"{words[0]}: {words_of}")
    return out.decode(errors="replace")
