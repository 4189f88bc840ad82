"""Script: run a benchmark script so that nothing of it outlives the flow that started it.

A script starts whole runs, and those start services. A guard process stands between: the kernel
ends it with the flow, and it takes the script's process group with it, politely first.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.system.processes import PARENT_VARIABLE, tie_to_parent

GRACE_S = 30.0
"""Seconds a script gets between SIGTERM and SIGKILL, enough for a run to stop its services."""

TAIL_LINES = 8
"""Last lines of a failed script that the error quotes."""


def run_script(command: str, project: Path, timeout_s: float, log: Path) -> dict[str, Any]:
    """Run a script of the project and return the JSON object that its last line holds.

    Args:
        command: path relative to the project, with arguments, as a shell would split it.
        project: working directory.
        timeout_s: longest time it may take, seconds.
        log: file that gets its output.

    Raises:
        ConfigError: when there is no such script.
        UnavailableError: when it took longer than `timeout_s`; nothing of it is left then.
        AntiphonError: when it failed, or its last line is no JSON object; its last lines are quoted.
    """
    words = shlex.split(command)
    if not words or not (project / words[0]).is_file():
        name = words[0] if words else "without a name"
        raise ConfigError(f"there is no script {name} under {project}; give its path from there")
    arguments = [sys.executable, "-P", "-m", "antiphon.runs.script", str(project / words[0]), *words[1:]]
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        guard = subprocess.Popen(
            arguments,
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"{command} took longer than {timeout_s:g} s; see {log}") from None
        finally:
            _end(guard)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if status != 0:
        raise AntiphonError(f"{command} ended with status {status}: {' | '.join(lines[-TAIL_LINES:])}")
    return _last_object(command, lines)


def _last_object(command: str, lines: Sequence[str]) -> dict[str, Any]:
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = None
    if not isinstance(found, dict):
        said = lines[-1][:200] if lines else "nothing"
        raise AntiphonError(f"{command} must end with one JSON object on a line of its own, but said {said}")
    return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(GRACE_S)


def guard(arguments: Sequence[str]) -> int:
    """Run a script as a child and end its whole process group when this process is asked to end."""
    leave = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, leave)
    tie_to_parent(signal.SIGTERM)  # asked, not killed, so that it can end the group
    environment = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
    script = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, leave),
    )
    while script.poll() is None:
        if signal.sigwait(leave) != signal.SIGCHLD:
            _end_group(script)
            return 1
    _end_group(script)  # what it may have left behind
    return int(script.returncode)


def _end_group(script: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(script.pid, number)
        except ProcessLookupError:
            return
        try:
            script.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
