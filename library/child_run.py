"""Child run: one run as a process of its own, for programs that are something else themselves.

Prefect reads its settings once in a process and an engine owns its signals, so that a notebook could
have one run at most. A process for each has neither limit, and dies with the program that started it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig, build_config, dump_config, load_config
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.system.processes import ChildProcess, quote, tied_command

LOOK_S = 0.1
"""Pause between two looks at what the run said."""
INTERRUPT_S = 60.0
"""Longest wait for an interrupted run to end in order."""
_COMPLAINT = "antiphon: "


def resolve(config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration that a caller means.

    Raises:
        ConfigError: when it is not possible, or overrides come with something else than a path.
    """
    if isinstance(config, str | Path):
        return load_config(Path(config), list(overrides))
    if overrides:
        raise ConfigError("overrides need the path of a YAML file; change the configuration instead")
    return config if isinstance(config, RunConfig) else build_config(dict(config))


def run_as_process(config: RunConfig, home: Path, fresh: bool, say: Callable[[str], object] | None) -> str:
    """Run a configuration in a process of its own and return the run's id.

    Args:
        config: the run's configuration.
        home: the home directory.
        fresh: begin a new run even if an unfinished one exists.
        say: gets each line that the run prints.

    Raises:
        AntiphonError: with the run's own sentence, when it did not complete; ConfigError for what is
            invalid.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-run-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        words = ["run", str(folder / "config.yaml"), "--results", str(folder)]
        arguments = [sys.executable, "-P", "-m", "antiphon.cli.app", *words, *(["--fresh"] if fresh else [])]
        variables = os.environ | {"ANTIPHON_HOME": str(home)}
        child = ChildProcess(tied_command(arguments), folder / "log", variables)
        try:
            _follow(child, folder / "log", say)
        except BaseException:  # also on Ctrl-C and on an interrupted cell
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(INTERRUPT_S)
            child.stop(0.0)
            raise
        if child.returncode != 0:
            raise _failure(child)
        return str(json.loads((folder / "timings.json").read_text(encoding="utf-8"))["run_id"])


def _follow(child: ChildProcess, log: Path, say: Callable[[str], object] | None) -> None:
    """Hand on each line of the log until the process has ended."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        rest = ""
        while True:
            over = not child.alive()
            *whole, rest = (rest + lines.read()).split("\n")
            for line in whole:
                if say is not None:
                    say(line)
            if over:
                return
            time.sleep(LOOK_S)


def _failure(child: ChildProcess) -> AntiphonError:
    said = [line for line in child.lines() if line.startswith(_COMPLAINT)]
    sentence = said[-1].removeprefix(_COMPLAINT) if said else quote(child.lines())
    return (ConfigError if child.returncode == 2 else AntiphonError)(sentence)
