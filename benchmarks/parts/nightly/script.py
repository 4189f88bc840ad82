"""Script: run a benchmark script so that nothing of it outlives the flow that started it.

A script starts whole runs, and those start services. A guard process stands between: the kernel
ends it with the flow, and it takes the script's process group with it, politely first.
"""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.results import last_object
from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.system.processes import ChildProcess, tie_to_parent

GRACE_S = 30.0
"""Seconds a script gets between SIGTERM and SIGKILL, enough for a run to stop its services."""

LOOK_S = 0.1
"""Pause between two looks at a script that runs."""


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
    arguments = [sys.executable, "-P", "-m", "antiphon.benchmarks.parts.nightly.script", str(log.absolute())]
    arguments += [str(project / words[0]), *words[1:]]
    log.unlink(missing_ok=True)
    guard = ChildProcess(arguments, log, folder=project)
    try:
        status = guard.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command} took longer than {timeout_s:g} s; see {log}") from None
    finally:
        guard.stop(2 * GRACE_S)
    if status != 0:
        raise AntiphonError(f"{command} {guard.how_it_ended()}")
    lines = guard.lines()
    if (found := last_object(lines)) is None:
        said = lines[-1][:200] if lines else "nothing"
        raise AntiphonError(f"{command} must end with one JSON object on a line of its own, but said {said}")
    return found


def guard(log: Path, arguments: Sequence[str]) -> int:
    """Run a script as a child and end its whole process group when this process is asked to end."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    tie_to_parent(signal.SIGTERM)  # asked, not killed, so that it can end the group
    script = ChildProcess([sys.executable, "-P", *arguments], log, outlive=True)
    while script.alive() and not asked:
        time.sleep(LOOK_S)
    script.stop(GRACE_S)  # with what it may have left behind
    return 1 if asked else int(script.returncode)


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2:]))
