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

from antiphon import STOP
from antiphon.core.config import RunConfig, build_config, dump_config, load_config
from antiphon.core.config_errors import places_of
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.environments.registry import with_sizes
from antiphon.lineage.run_log import EVALUATIONS_FILE, STEPS_FILE
from antiphon.runs.directory import choose_run
from antiphon.system.processes import ChildProcess, tied_command

LOOK_S = 0.1
"""Pause between two looks at what the run said."""
INTERRUPT_S = 60.0
"""Longest wait for an interrupted run to end in order."""


def resolve(
    config: RunConfig | Mapping[str, Any] | str | Path,
    overrides: Sequence[str],
    misplaced: Mapping[str, object],
) -> RunConfig:
    """Return the configuration that a caller means.

    Raises:
        ConfigError: when it is not possible, overrides come with something else than a path, or with
            `misplaced` arguments.
    """
    for name, value in misplaced.items():
        places = [*places_of(name, RunConfig), f"SECTION.{name}"]
        raise ConfigError(
            f"{name}={value!r} is no argument of antiphon.run; overrides are texts after the path, as on the "
            f'command line: "{places[0]}={value}"'
        )
    if isinstance(config, str | Path):
        return with_sizes(load_config(Path(config), list(overrides)))
    if overrides:
        raise ConfigError("overrides need the path of a YAML file; change the configuration instead")
    return with_sizes(config if isinstance(config, RunConfig) else build_config(dict(config)))


def run_as_process(
    config: RunConfig,
    home: Path,
    fresh: bool,
    say: Callable[[str], object] | None,
    on_event: Callable[[Mapping[str, Any]], object] | None = None,
) -> str:
    """Run a configuration in a process of its own and return the run's id.

    Args:
        config: the run's configuration.
        home: the home directory.
        fresh: begin a new run even if an unfinished one exists.
        say: gets each line that the run prints.
        on_event: gets what is recorded, see `antiphon.run`.

    Raises:
        AntiphonError: with the run's own sentence, when it did not complete; ConfigError for what is
            invalid.
    """
    place = choose_run(config, None, home, fresh)
    events = RecordedEvents(place.directory, on_event)
    with tempfile.TemporaryDirectory(prefix="antiphon-run-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        words = ["run", str(folder / "config.yaml"), "--results", str(folder)]
        arguments = [sys.executable, "-P", "-m", "antiphon.cli.app", *words, *(["--fresh"] if fresh else [])]
        variables = os.environ | {"ANTIPHON_HOME": str(home)}
        child = ChildProcess(tied_command(arguments), folder / "log", variables)
        try:
            stopped = _follow(child, folder / "log", say, events)
        except BaseException:  # also on Ctrl-C and on an interrupted cell
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(INTERRUPT_S)
            child.stop(0.0)
            raise
        if child.returncode != 0 and not stopped:
            raise (ConfigError if child.returncode == 2 else AntiphonError)(child.last_words())
        return place.run_id


class RecordedEvents:
    """The steps and evaluations of a run that are recorded from now on."""

    def __init__(self, folder: Path, heard: Callable[[Mapping[str, Any]], object] | None) -> None:
        self._heard = heard
        self._files = {folder / STEPS_FILE: "step", folder / EVALUATIONS_FILE: "evaluation"}
        self._places = {path: path.stat().st_size if path.exists() else 0 for path in self._files}

    def hand_on(self) -> bool:
        """Hand on what is new; return whether the run is to end."""
        found = []
        for path, kind in self._files.items():
            if self._heard is None or not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._places[path])
                for line in file:
                    if line.endswith(b"\n"):
                        self._places[path] += len(line)
                        tree = json.loads(line)
                        found.append({"kind": kind, **tree, **tree.get("metrics", {})})
        answers = [self._heard(event) for event in found] if self._heard is not None else []
        return STOP in answers


def _follow(
    child: ChildProcess, log: Path, say: Callable[[str], object] | None, events: RecordedEvents
) -> bool:
    """Hand on lines and events until the process has ended; return whether `on_event` had it end."""
    stopped = False
    with log.open(encoding="utf-8", errors="replace") as lines:
        rest = ""
        while True:
            over = not child.alive()
            *whole, rest = (rest + lines.read()).split("\n")
            for line in whole:
                if say is not None:
                    say(line)
            if events.hand_on() and not stopped and not over:
                stopped = True
                child.send_signal(signal.SIGTERM)  # what began in the background ignores SIGINT
            if over:
                return stopped
            time.sleep(LOOK_S)
